"""Encoding passages with little padding: sorts the passages of a batch by length, then reassembles their states."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from empax.core.types import Params


class PassageReader:
    """Encodes the passages of batches for a Fusion-in-Decoder model, each padded to little more than its length.

    Padded arrays are as wide as the longest passage, which is half as long again as the mean in EmpatheticDialogues.
    Padding costs as much as text, in the encoder and in every decoding step. Supports no gradients and one device only.

    The model's `encode` reads [N, 1, S], `rows` passages per call, padded to the longest of them, rounded up to a
    `multiple` of tokens. States are padded to the longest example of the batch, rounded up to `states_multiple`.
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
        """Returns the states of each example's real tokens in order, and their mask; R varies between batches."""
        batch, passages, length = source.shape
        ids, real = source.reshape(-1, length), mask.reshape(-1, length)
        sizes = real.shape[1] - np.argmax(real[:, ::-1], axis=1)  # up to the last real token
        sizes[~real.any(axis=1)] = 0
        order = np.argsort(-sizes, kind="stable")[: max(int((sizes > 0).sum()), 1)]
        rows, read = min(self.rows, len(sizes)), []
        for start in range(0, len(order), rows):
            some = order[start : start + rows]
            width = min(_up_to(max(int(sizes[some[0]]), 1), self.multiple), length)
            filled = np.resize(some, rows)  # filled up, so that each width compiles once
            read.append((some, self._encode(params, ids[filled, :width], real[filled, :width])))
        totals = real.reshape(batch, -1).sum(axis=1)
        room = min(_up_to(max(int(totals.max(initial=0)), 1), self.states_multiple), passages * length)
        kept = np.arange(room) < totals[:, None]
        columns = real.reshape(batch, -1).cumsum(axis=1).reshape(-1, length) - 1  # position of a token in its example
        size, dtype = read[0][1].shape[-1], read[0][1].dtype
        states = np.zeros((batch, room, size), dtype)
        for some, encoded in read:
            for row, passage in zip(np.asarray(encoded), some, strict=False):
                tokens = np.flatnonzero(real[passage])
                states[passage // passages, columns[passage, tokens]] = row[tokens]
        return states, kept

    def read(self, params: Params, batch: Any) -> Any:
        """Replaces the passages of a newly collated batch (`data.exemplars.ExemplarBatch`) by their states."""
        states, mask = self(params, batch.source, batch.source_mask)
        nothing = {name: getattr(batch, name)[..., :0] for name in ("source", "source_mask")}
        own = None  # the context's passage comes first
        if batch.lead:
            tokens = batch.source_mask[:, : batch.lead].sum(axis=(1, 2))
            own = mask & (np.arange(mask.shape[1]) < tokens[:, None])
        return batch.replace(**nothing, states=states, states_mask=mask, context_states=own)


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
