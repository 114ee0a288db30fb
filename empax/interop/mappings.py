"""Tables between foreign parameter names and layouts and ours, usable in both directions.

`{layer}` in a foreign name stands for the layers that we keep stacked, [L, ...]. The tables: `interop.model_mappings`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The relation between a foreign array and ours.

    Attributes:
      split: number of our input axes; PyTorch's Linear is [outputs, inputs], each flattened, so the foreign array is
        the transpose. None = no transpose, only flattening.
      flat: whether the untransposed foreign array has one axis (biases of heads).
      transpose: False = the foreign array is [inputs, outputs] too (GPT-2's "Conv1D"), each flattened.
      part: index of our part among the `parts` of the foreign array.
      parts: number of equal parts of the last foreign axis; rows that share it are in the order of the parts.
      row: whether the untransposed foreign array has a leading axis of length one.
    """

    split: int | None = None
    flat: bool = False
    transpose: bool = True
    part: int = 0
    parts: int = 1
    row: bool = False

    def foreign_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the foreign shape, of all parts together, for our `shape` (of one layer)."""
        *rest, last = self._part_shape(shape)
        return (*rest, last * self.parts)

    def _part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.split is None:
            return (int(np.prod(shape)),) if self.flat else (1, *shape) if self.row else shape
        inputs, outputs = int(np.prod(shape[: self.split])), int(np.prod(shape[self.split :]))
        return (outputs, inputs) if self.transpose else (inputs, outputs)

    def to_ours(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Converts a foreign array, or our part of it, to ours of `shape`."""
        size = array.shape[-1] // self.parts
        array = array[..., self.part * size : (self.part + 1) * size]
        return (array if self.split is None or not self.transpose else array.T).reshape(shape)

    def to_foreign(self, array: np.ndarray) -> np.ndarray:
        """Converts our array (of one layer) to the foreign one, or to our part of it."""
        foreign = self._part_shape(array.shape)
        if self.split is None or not self.transpose:
            return array.reshape(foreign)
        return np.ascontiguousarray(array.reshape(foreign[::-1]).T)


SAME = Layout()
FLAT = Layout(flat=True)
ROW = Layout(row=True)
LINEAR = Layout(split=1)  # [D, F] and [D, H, N]: one input axis
LINEAR_OUT = Layout(split=2)  # [H, N, D]: two input axes
CONV_OUT = Layout(split=2, transpose=False)


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter: our name, the foreign name, the layout; `optional`: zeros where a checkpoint lacks it."""

    ours: str
    foreign: str
    layout: Layout
    optional: bool = False

    def parts(self, shape: tuple[int, ...]) -> list[tuple[str, int | None, tuple[int, ...]]]:
        """Returns the parts of our parameter of `shape`: foreign name, layer (None = all), our shape of the part."""
        if "{layer}" not in self.foreign:
            return [(self.foreign, None, shape)]
        return [(self.foreign.format(layer=layer), layer, shape[1:]) for layer in range(shape[0])]


@dataclasses.dataclass(frozen=True)
class Mapping:
    """The table of one architecture.

    Attributes:
      rows: every parameter once.
      constants: constant arrays that a checkpoint may hold: foreign names, and functions that make them.
      copies: foreign names under which a copy of the token embedding is written.
      prefixes: prefixes of foreign names that are removed.
      base: prefix of all foreign names but the head's, added if a model was saved without its head.
      ignored: regular expressions of foreign names with no counterpart here (buffers, poolers, heads).
      tied: regular expressions of foreign names that are copies of the token embedding.
      spellings: ends of foreign names in older versions, and in the rows.
    """

    rows: tuple[Row, ...]
    constants: tuple[tuple[str, Callable[[], np.ndarray]], ...] = ()
    copies: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    base: str = ""
    ignored: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()

    def embedding(self) -> str:
        """Returns the foreign name of the token embedding."""
        return next(row.foreign for row in self.rows if row.ours == "token_embedding")

    def canonical(self, name: str) -> str:
        """Returns the foreign `name` in the spelling of the rows."""
        for old, new in self.spellings:
            if name.endswith(old):
                name = name.removesuffix(old) + new
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return name if name.startswith((self.base, "lm_head.", "final_logits_bias")) else self.base + name

    def ignores(self, name: str) -> bool:
        """Whether the foreign `name` has no counterpart here."""
        return any(re.fullmatch(pattern, name) for pattern in (*self.ignored, *self.tied))

    def ties(self, name: str) -> bool:
        """Whether the foreign `name` is a copy of our token embedding."""
        found = (any(re.fullmatch(pattern, name) for pattern in patterns) for patterns in (self.tied, self.ignored))
        return tuple(found) == (True, False)

    def without(self, tensors: dict[str, T], layers: range) -> dict[str, T]:
        """Returns `tensors`, by a file's foreign names, without those of `layers`."""
        names = {row.foreign.format(layer=layer) for row in self.rows for layer in layers if "{layer}" in row.foreign}
        return {name: tensor for name, tensor in tensors.items() if self.canonical(name) not in names}
