"""Bitwise reproducible runs, on a GPU too."""

from __future__ import annotations

import os

import jax
from jax._src import xla_bridge  # no public function says whether a backend has started

from empax.core.config import ConfigError

FLAG = "--xla_gpu_deterministic_ops=true"


def make_deterministic() -> None:
    """Makes XLA sum in a fixed order on a GPU. Other devices always do, so this has no effect on them.

    Call it before JAX computes anything or queries its devices: XLA reads its flags once.

    Raises:
      ConfigError: JAX already uses the GPU.
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
