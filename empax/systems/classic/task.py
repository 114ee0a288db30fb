"""The task of all systems of MoEL's lineage: the likelihood of the response, and the losses of the readers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Generated, Mean, Metrics, Params
from empax.decoding.sampling import Randomness
from empax.losses.cross_entropy import token_log_probs
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.gains import with_gains
from empax.parts.generator.task import Keys, Losses, ResponseTask, emotion_loss, over_words, real_tokens
from empax.systems.classic.adversary import adversarial_losses
from empax.systems.classic.graphs import attention_loss
from empax.systems.classic.model import Classic
from empax.systems.classic.readers import ClassicBatch, Read, next_rows

_EXCHANGED = "nll_exchanged_"
READ_BY = {"refinement": ("facts",), "concepts": ("concepts",), "alignment": ("concepts", "cognition")}
"""By reader: the fields of a batch that it reads besides the context."""


@dataclasses.dataclass(frozen=True)
class ClassicTask(ResponseTask):
    """Generates a response to a context; the parameters are the model's.

    Attributes:
      weights: see `ClassicTaskSettings`.
      heads: ("emotion",) if the model learns the emotion.
    """

    model: Classic
    weights: Mapping[str, float]

    @property
    def splits_batches(self) -> bool:
        """False where the rows of a batch are each other's negatives."""
        return "alignment" not in dict(self.model.readers)

    def row_weights(self, batch: ClassicBatch) -> Float[Array, " B"]:
        """Returns the number of target tokens; 1 if responses are not read."""
        return super().row_weights(batch) if self.weights.get("nll", 1.0) else batch.valid.astype(jnp.float32)

    def init(self, rng: jax.Array, batch: ClassicBatch) -> Params:
        return self.model.init(rng, batch)["params"]

    def encode(self, params: Params, batch: ClassicBatch, rng: jax.Array | None) -> Read:
        """Encodes the context; without an `rng`, latents are at their means and no gold emotion is used."""
        return self._apply(params, batch, method="read", rng=rng)

    def logits(self, params: Params, batch: ClassicBatch, read: Any, rng: jax.Array | None) -> Float[Array, "B T V"]:
        return self._apply(params, batch.target, read, method="decode", rng=rng)

    def losses(self, params: Params, frozen: Params, batch: ClassicBatch, read: Read, rngs: Keys) -> Losses:
        losses = {**read.losses}
        if not self.weights.get("nll", 1.0):
            return self._row_losses(batch, read, losses)
        hidden, weights = self._apply(params, batch.target, read, method="decode_with_weights", rng=rngs[0])
        if read.intensity is not None:
            losses["attention"] = attention_loss(weights, batch.target_mask, read.intensity, read.mask)

        def logits_from(*given: Any) -> Any:
            return self.model.apply({"params": params}, *given, method="logits_from")

        word_losses = functools.partial(self._word_losses, frozen)
        if rngs[1] is not None and self.model.adversary is not None:  # it reads logits of padding too
            logits = logits_from(hidden, weights, read.words)
            losses |= adversarial_losses(self.model, params, frozen["lexicon"], batch, read, logits, rngs[1])
            spoken, told = word_losses(logits, batch.target, real_tokens(batch))
        elif self.model.copies:
            spoken, told = over_words(logits_from, word_losses, batch, [hidden, weights], read.words)
        else:
            spoken, told = over_words(logits_from, word_losses, batch, [hidden])
        parts, metrics = self._row_losses(batch, read, losses)
        if rngs[0] is None:
            metrics |= self._exchanged(params, batch, read)
        return [*parts, (1.0, spoken)], metrics | told

    def _word_losses(
        self, frozen: Params, logits: Float[Array, "B T V"], target: Int[Array, "B T"], mask: Bool[Array, "B T"]
    ) -> tuple[Mean, Metrics]:
        """Returns the weighted sum of the likelihood and the loss "frequency", and both."""
        nll, smoothed = self._token_losses(logits, target, mask)
        loss, metrics = smoothed.scale(self.weights.get("nll", 1.0)), {"nll": nll}
        if weight := self.weights.get("frequency", 0.0):
            weighted = Mean.of(-token_log_probs(logits, target) * frozen["frequency"][target], mask)
            loss, metrics["frequency_loss"] = loss + weighted.scale(weight), weighted
        return loss, metrics

    def _exchanged(self, params: Params, batch: ClassicBatch, read: Read) -> Metrics:
        """Returns the likelihood given another row's concepts, facts, or decoder memories."""
        giver = next_rows(batch.valid)

        def given(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf[giver], tree)

        changed = {}
        for name in (name for reader, _ in self.model.readers for name in READ_BY.get(reader, ())):
            own = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name.startswith(name)}
            if own[name] is not None:
                other = dataclasses.replace(batch, **given(own))
                changed[name] = self.encode(params, other, None)
        # The decoder's memories alone: the effect of CASE's graphs on context and emotion stays.
        suffix = "_memory" if changed.keys() & read.memories.keys() else ""
        for name, memory in read.memories.items():
            memories = {**read.memories, name: given(memory)}
            changed[f"{name}{suffix}"] = read.replace(memories=memories)  # type: ignore[attr-defined]
        metrics = {}
        for name, found in changed.items():
            metrics[f"{_EXCHANGED}{name}"], _ = self.likelihood(self.logits(params, batch, found, None), batch)
        return metrics

    def summarize(self, averages: dict[str, float]) -> dict[str, float]:
        """Adds the gain of each part over that of another row."""
        return with_gains(averages, _EXCHANGED, "that of another context")

    def _row_losses(self, batch: ClassicBatch, read: Read, losses: Mapping[str, tuple[Any, Any]]) -> Losses:
        """Returns the loss of the emotion, and `losses`: values of rows and the mask of the known ones."""
        parts, metrics, weights = [], {}, self.row_weights(batch)
        if read.emotion is not None:
            emotion, metrics = emotion_loss(read.emotion, jnp.where(batch.valid, batch.emotion, -1), weights)
            parts.append((self.weights["emotion"], emotion))
        for name, (values, known) in losses.items():
            known = known & batch.valid
            metrics[f"{name}_loss"] = Mean.of(values, known)
            parts.append((self.weights[name], Mean.of(values, known, weights)))
        return parts, metrics

    def search(
        self, decoder: Decoder, params: Params, batch: ClassicBatch, read: Any, rng: Randomness, **more: Any
    ) -> Generated:
        looked_at = decoder.looked_at(batch.source, batch.source_mask)
        return decoder.from_states(self.model, params, read, read.mask, rng, **looked_at, **more)

    def labels(self, params: Params, batch: ClassicBatch, read: Read) -> dict[str, Array]:
        return {} if read.emotion is None else {"emotion": read.emotion.argmax(axis=-1)}

    def _apply(self, params: Params, *args: Any, method: str, rng: jax.Array | None) -> Any:
        rngs: dict[str, jax.Array] = {}
        if rng is not None:
            rngs["dropout"], rngs["draws"] = jax.random.split(rng)
        return self.model.apply({"params": params}, *args, train=rng is not None, method=method, rngs=rngs)
