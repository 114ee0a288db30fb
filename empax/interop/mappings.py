"""Foreign parameter names and layouts against ours: the form of a table, which is read in both directions.

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
    """How one array stands on either side.

    Attributes:
      split: how many of our axes are inputs; PyTorch's Linear is [outputs, inputs], each flattened, so the
        foreign array is the transpose. None = no transpose, only flattening.
      flat: whether the untransposed array is one axis there (biases of heads).
      transpose: False = [inputs, outputs] there too (GPT-2's "Conv1D"), each flattened.
      part: which of the `parts` of the foreign array ours is.
      parts: into how many equal parts the last foreign axis is cut; rows that share it stand in the order of the parts.
      row: whether the untransposed array has an axis of length one in front there.
    """

    split: int | None = None
    flat: bool = False
    transpose: bool = True
    part: int = 0
    parts: int = 1
    row: bool = False

    def foreign_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The foreign shape, of all parts together, for our `shape` (of one layer)."""
        *rest, last = self._part_shape(shape)
        return (*rest, last * self.parts)

    def _part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.split is None:
            return (int(np.prod(shape)),) if self.flat else (1, *shape) if self.row else shape
        inputs, outputs = int(np.prod(shape[: self.split])), int(np.prod(shape[self.split :]))
        return (outputs, inputs) if self.transpose else (inputs, outputs)

    def to_ours(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A foreign array, or our part of it, as ours of `shape`."""
        size = array.shape[-1] // self.parts
        array = array[..., self.part * size : (self.part + 1) * size]
        return (array if self.split is None or not self.transpose else array.T).reshape(shape)

    def to_foreign(self, array: np.ndarray) -> np.ndarray:
        """Our array (of one layer) as the foreign one, or as our part of it."""
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
        """What makes up our parameter of `shape`: foreign name, layer (None = all of it), our shape of the part."""
        if "{layer}" not in self.foreign:
            return [(self.foreign, None, shape)]
        return [(self.foreign.format(layer=layer), layer, shape[1:]) for layer in range(shape[0])]


@dataclasses.dataclass(frozen=True)
class Mapping:
    """The table of one architecture.

    Attributes:
      rows: every parameter once.
      constants: arrays that a checkpoint may hold and that no model learns: foreign names, and what makes them.
      copies: foreign names under which the token embedding is written once more.
      prefixes: what foreign names may begin with, to be taken off.
      base: what foreign names of all but the head begin with, to be put on where a model was saved without its head.
      ignored: regular expressions of foreign names that carry nothing of ours (buffers, poolers, heads).
      tied: regular expressions of foreign names under which the token embedding is there once more.
      spellings: ends of foreign names as older versions wrote them, and as the rows do.
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
        """The foreign name of the token embedding."""
        return next(row.foreign for row in self.rows if row.ours == "token_embedding")

    def canonical(self, name: str) -> str:
        """The foreign `name` as the rows spell it."""
        for old, new in self.spellings:
            if name.endswith(old):
                name = name.removesuffix(old) + new
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return name if name.startswith((self.base, "lm_head.", "final_logits_bias")) else self.base + name

    def ignores(self, name: str) -> bool:
        """Whether the foreign `name` carries nothing of ours."""
        return any(re.fullmatch(pattern, name) for pattern in (*self.ignored, *self.tied))

    def ties(self, name: str) -> bool:
        """Whether the foreign `name` stands for our token embedding once more."""
        found = (any(re.fullmatch(pattern, name) for pattern in patterns) for patterns in (self.tied, self.ignored))
        return tuple(found) == (True, False)

    def layer_of(self, name: str) -> int | None:
        """The number of the layer that the foreign `name` belongs to; None = to no stack of layers."""
        for row in self.rows:
            before, _, behind = row.foreign.partition("{layer}")
            if behind and (found := re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(behind)}", name)):
                return int(found[1])
        return None

    def without(self, tensors: dict[str, T], layers: range) -> dict[str, T]:
        """`tensors`, by foreign names as a file has them, without those of `layers`."""
        if not layers:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if self.layer_of(self.canonical(name)) not in layers}
