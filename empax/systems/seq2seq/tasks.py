"""The likelihood of a target behind its source."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array

from empax.core.types import Batch, Generated, Mean, Metrics, Params
from empax.losses.cross_entropy import cross_entropy
from empax.systems.dialogue.generator import Decoder, Reader, apply, row_nll


@dataclasses.dataclass(frozen=True)
class Seq2Seq:
    """Source in, target out, by maximum likelihood (`core.protocols.Task`).

    Parameters: the model's, under "model".

    Attributes:
      label_smoothing: see `losses.cross_entropy`.
    """

    model: Reader
    decoder: Decoder
    label_smoothing: float = 0.0
    whole: ClassVar[str] = ""  # with adapters, nothing else is trained

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        return {"model": self.model.init(rng, batch.source, batch.source_mask, batch.target)["params"]}

    def loss(self, params: Params, frozen: Params, batch: Batch, rng: jax.Array | None) -> tuple[Mean, Metrics]:
        first, second = (None, None) if rng is None else jax.random.split(rng)
        model = params["model"]
        states = apply(self.model, model, batch.source, batch.source_mask, method="encode", rng=first)
        logits = apply(self.model, model, batch.target, states, batch.source_mask, method="decode", rng=second)
        mask = batch.target_mask & batch.valid[:, None]
        smoothed = cross_entropy(logits, batch.target, mask, label_smoothing=self.label_smoothing)
        nll = cross_entropy(logits, batch.target, mask) if self.label_smoothing else smoothed
        return smoothed, {"nll": nll}

    def generate(self, params: Params, frozen: Params, batch: Batch, rng: jax.Array) -> Generated:
        return self.decoder(self.model, params["model"], batch.source, batch.source_mask, rng)

    def read(self, params: Params, batch: Batch) -> dict[str, Array]:
        """For each row `nll`, in nats, and `num_tokens` of its target."""
        model = params["model"]
        states = apply(self.model, model, batch.source, batch.source_mask, method="encode", rng=None)
        nll, num_tokens = row_nll(self.model, model, batch, states, batch.source_mask)
        return {"nll": nll, "num_tokens": num_tokens}
