"""Reading passages without padding: those of a whole batch sorted by length, their states put side by side again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from empax.core.types import Params


class PassageReader:
    """Encodes the passages of batches for a Fusion-in-Decoder model, each about as wide as it is long.

    Padded arrays are as wide as the longest of all passages, which is half as long again as the mean in
    EmpatheticDialogues; padding costs as much as text, in the encoder as in every step of decoding after it. For what
    has no gradient and lies on one device.

    Args:
      model: whose `encode` reads [N, 1, S].
      rows: passages of one call.
      multiple: passages are padded to multiples of so many tokens, and to the longest of their call.
      states_multiple: the states of an example are padded to multiples of it, and to the longest of the batch.
    """

    def __init__(self, model: Any, *, rows: int = 16, multiple: int = 16, states_multiple: int = 128):
        self.rows, self.multiple, self.states_multiple = rows, multiple, states_multiple

        @jax.jit
        def encode(params: Params, ids: Any, mask: Any) -> Any:
            return model.apply({"params": params}, ids[:, None], mask[:, None], method="encode")

        self._encode = encode

    def __call__(
        self, params: Params, source: Int[np.ndarray, "B K S"], mask: Bool[np.ndarray, "B K S"]
    ) -> tuple[Float[np.ndarray, "B R D"], Bool[np.ndarray, "B R"]]:
        """States of each example's real tokens in their order, and which they are: R varies from batch to batch."""
        batch, passages, length = source.shape
        ids, real = source.reshape(-1, length), mask.reshape(-1, length)
        sizes = real.shape[1] - np.argmax(real[:, ::-1], axis=1)  # up to the last real token
        sizes[~real.any(axis=1)] = 0
        order = np.argsort(-sizes, kind="stable")[: max(int((sizes > 0).sum()), 1)]
        rows, read = min(self.rows, len(sizes)), []
        for start in range(0, len(order), rows):
            some = order[start : start + rows]
            width = min(_up_to(max(int(sizes[some[0]]), 1), self.multiple), length)
            filled = np.resize(some, rows)  # the last ones too, so that one shape is compiled once
            read.append((some, self._encode(params, ids[filled, :width], real[filled, :width])))
        totals = real.reshape(batch, -1).sum(axis=1)
        room = min(_up_to(max(int(totals.max(initial=0)), 1), self.states_multiple), passages * length)
        kept = np.arange(room) < totals[:, None]
        columns = real.reshape(batch, -1).cumsum(axis=1).reshape(-1, length) - 1  # where a token goes in its example
        size, dtype = read[0][1].shape[-1], read[0][1].dtype
        states = np.zeros((batch, room, size), dtype)
        for some, encoded in read:
            for row, passage in zip(np.asarray(encoded), some, strict=False):
                tokens = np.flatnonzero(real[passage])
                states[passage // passages, columns[passage, tokens]] = row[tokens]
        return states, kept


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
