"""The accelerator that JAX will use, determined before JAX starts, and the target of compiled programs."""

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

_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # the devices that JAX itself checks


def has_gpu() -> bool:
    """Whether JAX will use an NVIDIA GPU, judging from files and the environment.

    This does not ask JAX: its backend reads flags once, and several processes join before it starts.
    """
    if wanted := os.environ.get("JAX_PLATFORMS", ""):
        return wanted.split(",")[0] in ("cuda", "gpu")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    plugins = [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]
    return any(name.startswith("xla_cuda") for name in plugins) and any(Path(path).exists() for path in _DEVICES)


_PLANNED: contextvars.ContextVar[str | None] = contextvars.ContextVar("planned", default=None)


def backend() -> str:
    """Returns the target of the programs traced now: "cpu", "gpu" or "tpu"."""
    import jax  # imported here: `has_gpu` must work without JAX

    return _PLANNED.get() or jax.default_backend()


@contextlib.contextmanager
def planned_for(device: str) -> Iterator[None]:
    """Makes `backend()` return a device that need not be present, within the context."""
    before = _PLANNED.set(device)
    try:
        yield
    finally:
        _PLANNED.reset(before)


def fetched(asked: Iterable[tuple[T, Any]]) -> Iterator[tuple[T, Any]]:
    """Yields each pair with its second part on the host; waits for a pair once the next one has been requested.

    Thus the host makes the next batch while the device computes, unless the host is the device.
    """
    import jax  # imported here: `has_gpu` must work without JAX

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
    """Raises ConfigError if JAX does not use the GPU that `recipe` was chosen for. Starts JAX's backend."""
    import jax  # imported here: `has_gpu` must work without JAX

    if (backend := jax.default_backend()) != "gpu":
        raise ConfigError(
            f"--config={recipe} was chosen for this machine's GPU, but JAX computes on {backend}; repair its CUDA "
            "plugin, or write machine=cpu."
        )
