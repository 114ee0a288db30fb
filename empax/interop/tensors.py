"""Foreign tensors that lie in a file until they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np


class Tensor(Protocol):
    """What is known of a tensor without reading it; `np.asarray` reads it. A NumPy array is one too."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


Tensors: TypeAlias = Mapping[str, Tensor]
"""A file or folder of weights: tensors by their foreign names. To read one reads no other."""


@dataclasses.dataclass(frozen=True)
class MappedTensor:
    """A tensor at a place in a file, mapped into memory when read and let go with the array.

    Attributes:
      file: where it lies.
      offset: its first byte.
      dtype: of its elements as they are stored.
      shape: its axes.
      strides: elements from one entry of each axis to the next; None = in order, without gaps.
    """

    file: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        """The byte behind its last element."""
        return self.offset + self._span() * self.dtype.itemsize

    def _span(self) -> int:
        """Elements from the first to the last, both included."""
        if 0 in self.shape:
            return 0
        if self.strides is None:
            return int(np.prod(self.shape, dtype=np.int64))
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The tensor, read-only unless `dtype` or `copy` ask for another array."""
        span = self._span()
        if not span:
            return np.zeros(self.shape, self.dtype if dtype is None else dtype)
        # A mapping of its own: its pages are given back as soon as nobody holds the array.
        flat = np.asarray(np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=(span,)))
        if self.strides is None:
            array = flat.reshape(self.shape)
        else:
            steps = tuple(stride * self.dtype.itemsize for stride in self.strides)
            array = np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)
        return array.astype(self.dtype if dtype is None else dtype, copy=bool(copy))
