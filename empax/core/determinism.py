"""The same numbers in every run, bit for bit, on a GPU too."""

from __future__ import annotations

import os

import jax
from jax._src import xla_bridge  # nothing public says whether a backend has started

from empax.core.config import ConfigError

FLAG = "--xla_gpu_deterministic_ops=true"


def make_deterministic() -> None:
    """Has XLA add up in one order on a GPU. On other devices it does so anyway, and this changes nothing.

    Call before JAX computes anything or looks at its devices: XLA reads its flags once.

    Raises:
      ConfigError: it is too late on this GPU.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAG in flags.split():
        return
    if not xla_bridge.backends_are_initialized():
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()
    elif jax.default_backend() == "gpu":
        raise ConfigError(
            f"config.deterministic = True comes too late: JAX has begun to use the GPU. Set XLA_FLAGS={FLAG} in the "
            "environment before Python starts, or leave it False."
        )
