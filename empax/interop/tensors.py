"""Foreign tensors that stay in a file until they are read."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np

from empax.core.files import DataError

_BYTES_AT_ONCE = 1 << 22
_MOST_AXES = 64  # NumPy's limit
_LARGEST = 1 << 58  # so that bytes fit in 64 bits too


class Tensor(Protocol):
    """Shape and type of a tensor that `np.asarray` reads. A NumPy array is one too."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray: ...


Tensors: TypeAlias = Mapping[str, Tensor]
"""A file or folder of weights: tensors by their foreign names. Each is read separately."""


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made each time it is read, so that not all are in memory at once."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.make().astype(self.dtype if dtype is None else dtype, copy=bool(copy))

    def turned(self) -> LazyTensor:
        """Returns its transpose."""
        return LazyTensor(self.shape[::-1], self.dtype, lambda: self.make().T)


def refuse_misfits(what: str, problems: Sequence[str]) -> None:
    """Raises DataError if there are `problems`: one message for all, which begins with `what`."""
    if problems:
        listing = "\n  ".join(problems)
        raise DataError(f"{what} ({len(problems)} problems):\n  {listing}")


def dtypes_of(text: str) -> dict[str, np.dtype]:
    """Parses NumPy types by a format's names: `text` has NAME=TYPE, or TYPE alone if both are the same."""
    pairs = (word.partition("=") for word in text.split())
    return {name: np.dtype(getattr(ml_dtypes, kind or name, kind or name)) for name, _, kind in pairs}


class Checksum:
    """A part of a file with its CRC-32 (0 = unknown), checked once, when the first tensor in it is read."""

    def __init__(self, file: Path, offset: int, num_bytes: int, crc: int):
        self.file, self.offset, self.num_bytes, self.crc = file, offset, num_bytes, crc
        self._checked = not crc

    def check(self) -> None:
        """Raises DataError if the bytes do not match the CRC-32."""
        if self._checked:
            return
        found, left = 0, self.num_bytes
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            while left and (piece := stream.read(min(left, _BYTES_AT_ONCE))):
                found, left = zlib.crc32(piece, found), left - len(piece)
        if left or found != self.crc:
            raise DataError(
                f"{self.file} is damaged: the bytes from {self.offset} on have another checksum; fetch it again."
            )
        self._checked = True


@dataclasses.dataclass(frozen=True)
class MappedTensor:
    """A tensor at a place in a file, mapped into memory when read and released with the array.

    Attributes:
      file: its file.
      offset: its first byte.
      dtype: stored type of its elements.
      shape: its shape.
      strides: elements from one entry of each axis to the next; None = C order without gaps.
      checksum: checksum of the bytes that hold it; None = unknown.

    Raises:
      ValueError: a negative size, stride or offset, a shape or offset beyond any file, not one stride per axis, more
        axes than NumPy supports, or elements that are Python objects.
    """

    file: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    checksum: Checksum | None = None

    def __post_init__(self) -> None:
        if len(self.shape) > _MOST_AXES:
            raise ValueError(f"not a tensor: {self.dtype} of {len(self.shape)} axes")
        strides = self.shape if self.strides is None else self.strides
        largest = max(self.offset, math.prod(size or 1 for size in self.shape))
        negative = min((self.offset, *self.shape, *strides)) < 0
        if negative or largest >= _LARGEST or len(strides) != len(self.shape) or self.dtype.hasobject:
            raise ValueError(f"not a tensor: {self.dtype} of shape {self.shape}, strides {strides}, at {self.offset}")

    @property
    def end(self) -> int:
        """The byte after its last element."""
        return self.offset + self._span() * self.dtype.itemsize

    def _span(self) -> int:
        """Number of elements from the first to the last, inclusive."""
        if 0 in self.shape:
            return 0
        if self.strides is None:
            return math.prod(self.shape)
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the tensor, read-only unless `dtype` or `copy` ask for another array.

        Raises:
          DataError: its bytes do not match the checksum, or the file has become too short.
        """
        span = self._span()
        if not span:
            return np.zeros(self.shape, self.dtype if dtype is None else dtype)
        if self.checksum is not None:
            self.checksum.check()
        if self.end > self.file.stat().st_size:
            raise DataError(f"{self.file} is cut short; fetch it again.")
        # One mapping per tensor: its pages are released with the array.
        size = (span * self.dtype.itemsize,)
        content = np.asarray(np.memmap(self.file, np.uint8, mode="r", offset=self.offset, shape=size))
        steps = None
        if self.strides is not None:
            # The stride of an axis of length one may be any number.
            pairs = zip(self.shape, self.strides, strict=True)
            steps = tuple(stride * self.dtype.itemsize if size > 1 else 0 for size, stride in pairs)
        if self.dtype == np.bool_:  # NumPy assumes that all bytes are 0 or 1
            content = content != 0
        # Unlike `as_strided`, this checks again that no element lies beyond the bytes.
        array = np.ndarray(self.shape, self.dtype, buffer=content, strides=steps)
        return array.astype(self.dtype if dtype is None else dtype, copy=bool(copy))
