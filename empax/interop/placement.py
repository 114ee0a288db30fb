"""Parameters from slices straight to the devices that hold them."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

_ALIGNMENT = 64  # bytes; the CPU backend takes memory that is aligned so as it is, and copies any other


class LeafBuilder:
    """One parameter that is put together slice by slice.

    Host memory is taken for the parts that this process's devices hold, once for parts that several hold, and handed
    over by `finish` (on the CPU without a copy).

    Args:
      shape: of the whole parameter.
      dtype: of its elements; what is put in is cast.
      sharding: where it shall lie; None = whole on the default device, free to be moved.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding | None = None):
        self._shape = shape
        self._sharding = sharding
        whole = tuple((0, size) for size in shape)
        self._bounds: dict[jax.Device, tuple[tuple[int, int], ...]] = {}
        if sharding is not None:
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                index = (slice(None),) * len(shape) if index is None else index
                self._bounds[device] = tuple(i.indices(n)[:2] for i, n in zip(index, shape, strict=True))
        self._parts = {
            bounds: _aligned(tuple(stop - start for start, stop in bounds), dtype)
            for bounds in set(self._bounds.values() if sharding is not None else [whole])
        }

    def put(self, array: np.ndarray, layer: int | None = None) -> None:
        """Writes the whole parameter, or index `layer` of its first axis."""
        for bounds, part in self._parts.items():
            target = part
            if layer is not None:
                (start, stop), *bounds = bounds
                if not start <= layer < stop:
                    continue
                target = part[layer - start]
            wanted = array[tuple(slice(start, stop) for start, stop in bounds)]
            # To turn the axes and the type in one go is slower than one after the other.
            target[...] = wanted if wanted.dtype == target.dtype else np.ascontiguousarray(wanted)

    def finish(self) -> jax.Array:
        """The parameter; the builder is empty afterwards."""
        parts, self._parts = self._parts, {}
        if self._sharding is None:
            return jax.device_put(next(iter(parts.values())))
        arrays = [jax.device_put(parts[bounds], device) for device, bounds in self._bounds.items()]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)


def _aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
