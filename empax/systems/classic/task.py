"""The task of all systems of MoEL's lineage: likelihood of the response, and the losses of the readers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from empax.core.types import Generated, Mean, Params
from empax.losses.cross_entropy import cross_entropy
from empax.parts.generator.contrast import Read
from empax.parts.generator.task import Decoder, Keys, Losses, ResponseTask, target_weights
from empax.systems.classic.adversary import adversarial_losses
from empax.systems.classic.frequency import weighted_cross_entropy
from empax.systems.classic.model import Classic
from empax.systems.classic.readers import ClassicBatch


@dataclasses.dataclass(frozen=True)
class ClassicTask(ResponseTask):
    """Context in, response out; parameters are the model's.

    Attributes:
      weights: see `ClassicTaskSettings`.
      heads: ("emotion",) where the model learns the emotion.
    """

    model: Classic
    weights: Mapping[str, float]

    @property
    def nll_weight(self) -> float:
        return self.weights.get("nll", 1.0)

    def init(self, rng: jax.Array, batch: ClassicBatch) -> Params:
        return self.model.init(rng, batch)["params"]

    def encode(self, params: Params, batch: ClassicBatch, rng: jax.Array | None) -> Read:
        """Its states are a `readers.Read`; without an `rng`, latents are at their means and no emotion is gold."""
        found = self._apply(params, batch, method="read", rng=rng)
        return Read(found, found.mask)

    def logits(self, params: Params, batch: ClassicBatch, read: Read, rng: jax.Array | None) -> Float[Array, "B T V"]:
        return self._apply(params, batch.target, read.states, method="decode", rng=rng)

    def losses(self, params: Params, frozen: Params, batch: ClassicBatch, read: Read, rngs: Keys) -> Losses:
        found = read.states
        parts, metrics = self._row_losses(batch, found.losses)
        if found.emotion is not None:
            hit = (found.emotion.argmax(axis=-1) == batch.emotion).astype(jnp.float32)
            metrics["emotion_accuracy"] = Mean.of(hit, batch.valid & (batch.emotion >= 0))
        if not self.nll_weight:
            return parts, metrics
        logits = self.logits(params, batch, read, rngs[0])
        if rngs[1] is not None and self.model.adversary is not None:
            judged = adversarial_losses(self.model, params, frozen["lexicon"], batch, found, logits, rngs[1])
            more, logged = self._row_losses(batch, judged)
            parts, metrics = [*parts, *more], {**metrics, **logged}
        if weight := self.weights.get("frequency", 0.0):
            mask = batch.target_mask & batch.valid[:, None]
            metrics["frequency_loss"] = weighted_cross_entropy(logits, batch.target, mask, frozen["frequency"])
            parts.append((weight, metrics["frequency_loss"]))
        metrics["nll"], smoothed = self.likelihood(functools.partial(cross_entropy, logits), batch)
        return [*parts, (self.nll_weight, smoothed)], metrics

    def _row_losses(self, batch: ClassicBatch, losses: Mapping[str, tuple[Any, Any]]) -> Losses:
        parts, metrics = [], {}
        for name, (values, known) in losses.items():
            known = known & batch.valid
            metrics[f"{name}_loss"] = Mean.of(values, known)
            parts.append((self.weights[name], Mean.of(values, known, target_weights(batch))))
        return parts, metrics

    def search(
        self, decoder: Decoder, params: Params, batch: ClassicBatch, read: Read, rng: jax.Array, **more: Any
    ) -> Generated:
        return super().search(decoder, {"model": params}, batch, read, rng, **more)

    def labels(self, params: Params, batch: ClassicBatch, read: Read) -> dict[str, Array]:
        emotion = read.states.emotion
        return {} if emotion is None else {"emotion": emotion.argmax(axis=-1)}

    def _apply(self, params: Params, *args: Any, method: str, rng: jax.Array | None) -> Any:
        rngs: dict[str, jax.Array] = {}
        if rng is not None:
            rngs["dropout"], rngs["draws"] = jax.random.split(rng)
        return self.model.apply({"params": params}, *args, train=rng is not None, method=method, rngs=rngs)
