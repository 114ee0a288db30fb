"""Which accelerator JAX will compute on, known before it starts, and what programs are made for."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from empax.core.config import ConfigError

T = TypeVar("T")

_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # those that JAX itself looks at


def has_gpu() -> bool:
    """Whether JAX will compute on an NVIDIA GPU, as far as files and the environment tell.

    JAX is not asked: its backend reads flags once, and several processes join before it starts.
    """
    if wanted := os.environ.get("JAX_PLATFORMS", ""):
        return wanted.split(",")[0] in ("cuda", "gpu")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    plugins = [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]
    return any(name.startswith("xla_cuda") for name in plugins) and any(Path(path).exists() for path in _DEVICES)


_PLANNED: contextvars.ContextVar[str | None] = contextvars.ContextVar("planned", default=None)


def backend() -> str:
    """What the programs that are traced now will run on: "cpu", "gpu" or "tpu"."""
    import jax  # `has_gpu` answers without

    return _PLANNED.get() or jax.default_backend()


@contextlib.contextmanager
def planned_for(device: str) -> Iterator[None]:
    """While it lasts, `backend()` is a device that need not be here."""
    before = _PLANNED.set(device)
    try:
        yield
    finally:
        _PLANNED.reset(before)


def fetched(asked: Iterable[tuple[T, Any]]) -> Iterator[tuple[T, Any]]:
    """Each pair with its second part on the host; it is waited for when the next one has been asked for.

    So the host makes the next batch while a device answers, unless it is that device.
    """
    import jax  # `has_gpu` answers without

    ahead = 0 if backend() == "cpu" else 1
    waiting: collections.deque[tuple[T, Any]] = collections.deque()
    for pair in asked:
        waiting.append(pair)
        if len(waiting) > ahead:
            note, arrays = waiting.popleft()
            yield note, jax.device_get(arrays)
    for note, arrays in waiting:
        yield note, jax.device_get(arrays)


def check_gpu(recipe: str) -> None:
    """Raises ConfigError if JAX has passed over the GPU that `recipe` was chosen for. Starts its backend."""
    import jax  # `has_gpu` answers without

    if (backend := jax.default_backend()) != "gpu":
        raise ConfigError(
            f"--config={recipe} was chosen for this machine's GPU, but JAX computes on {backend}; mend its plugin for "
            "CUDA, or write machine=cpu."
        )
