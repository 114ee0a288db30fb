"""The task of all systems of MoEL's lineage: likelihood of the response, and the losses of the readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from empax.core.types import Generated, Mean, Metrics, Params
from empax.losses.cross_entropy import cross_entropy, token_log_probs
from empax.parts.generator.task import Decoder, combine, target_weights
from empax.systems.classic.adversary import adversarial_losses
from empax.systems.classic.frequency import weighted_cross_entropy
from empax.systems.classic.model import Classic
from empax.systems.classic.readers import ClassicBatch, Read

_CRITICS_STREAM = 2


@dataclasses.dataclass(frozen=True)
class ClassicTask:
    """Context in, response out.

    Attributes:
      weights: see `ClassicTaskSettings`.
      heads: ("emotion",) where the model learns the emotion.
    """

    model: Classic
    decoder: Decoder
    weights: Mapping[str, float]
    label_smoothing: float = 0.0
    heads: tuple[str, ...] = ()

    @property
    def nll_weight(self) -> float:
        return dict(self.weights).get("nll", 1.0)

    def init(self, rng: jax.Array, batch: ClassicBatch) -> Params:
        return self.model.init(rng, batch)["params"]

    def loss(
        self, params: Params, frozen: Params, batch: ClassicBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        """An evaluation has no dropout, latents at their means and no gold emotions."""
        keys = jax.random.split(rng) if train else (None, None)
        read: Read = self._apply(params, batch, method="read", rng=keys[0])
        parts, metrics = self._row_losses(batch, read.losses)
        if read.emotion is not None:
            hit = (read.emotion.argmax(axis=-1) == batch.emotion).astype(jnp.float32)
            metrics["emotion_accuracy"] = Mean.of(hit, batch.valid & (batch.emotion >= 0))
        if self.nll_weight:
            mask = batch.target_mask & batch.valid[:, None]
            logits = self._apply(params, batch.target, read, method="decode", rng=keys[1])
            if train and self.model.adversary is not None:
                drawn = jax.random.fold_in(rng, _CRITICS_STREAM)
                found = adversarial_losses(self.model, params, frozen["lexicon"], batch, read, logits, drawn)
                more, logged = self._row_losses(batch, found)
                parts, metrics = [*parts, *more], {**metrics, **logged}
            smoothed = cross_entropy(logits, batch.target, mask, label_smoothing=self.label_smoothing)
            if weight := self.weights.get("frequency", 0.0):
                metrics["frequency_loss"] = weighted_cross_entropy(logits, batch.target, mask, frozen["frequency"])
                parts.append((weight, metrics["frequency_loss"]))
            metrics["nll"] = cross_entropy(logits, batch.target, mask) if self.label_smoothing else smoothed
            parts.append((self.nll_weight, smoothed))
        return combine(parts, target_weights(batch), batch.valid), metrics

    def _row_losses(
        self, batch: ClassicBatch, losses: Mapping[str, tuple[Any, Any]]
    ) -> tuple[list[tuple[float, Mean]], Metrics]:
        parts, metrics = [], {}
        for name, (values, known) in losses.items():
            known = known & batch.valid
            metrics[f"{name}_loss"] = Mean.of(values, known)
            parts.append((self.weights[name], Mean.of(values, known, target_weights(batch))))
        return parts, metrics

    def generate(self, params: Params, frozen: Params, batch: ClassicBatch, rng: jax.Array) -> Generated:
        read = self._apply(params, batch, method="read", rng=None)
        return self.decoder.from_states(
            self.model, params, read, read.mask, rng, source=(batch.source, batch.source_mask)
        )

    def read(self, params: Params, batch: ClassicBatch) -> dict[str, Float[Array, " B"]]:
        """For each row: `nll`, `num_tokens`, and the likeliest emotion (index into EMOTIONS)."""
        read = self._apply(params, batch, method="read", rng=None)
        logits = self._apply(params, batch.target, read, method="decode", rng=None)
        log_probs = jnp.where(batch.target_mask, token_log_probs(logits, batch.target), 0.0)
        found = {"nll": -log_probs.sum(axis=1), "num_tokens": batch.target_mask.sum(axis=1).astype(jnp.float32)}
        return found if read.emotion is None else {**found, "emotion": read.emotion.argmax(axis=-1)}

    def _apply(self, params: Params, *args: Any, method: str, rng: jax.Array | None) -> Any:
        rngs: dict[str, jax.Array] = {}
        if rng is not None:
            rngs["dropout"], rngs["draws"] = jax.random.split(rng)
        return self.model.apply({"params": params}, *args, train=rng is not None, method=method, rngs=rngs)
