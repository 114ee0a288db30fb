"""NEC: commonsense in encoder and decoder, and responses ranked by contrast (Huangfu et al. 2024).

The encoder reads the context with facts about things behind it (Eq. 3). A second encoder, which shares the embeddings,
makes a vector of each fact about people, and every decoder layer attends to these behind a gate (Eq. 8). The loss is
the likelihood, then together with a margin for every rank between candidate responses (Eq. 9 to 12).

Letters beside those of `core.types`: M facts, F tokens of a fact.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from empax.core.types import Generated, Mean, Metrics, Params
from empax.losses.cross_entropy import cross_entropy, token_log_probs
from empax.models.heads import masked_mean
from empax.models.memory_attention import Memory
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.contrast import Candidates, Contrast, Read, gather, in_batch
from empax.parts.generator.task import Decoder, apply, combine, target_weights
from empax.systems.nec.settings import SOCIAL, CandidateSettings


@dataclasses.dataclass(frozen=True)
class Nec:
    """Context and facts in, response out, by likelihood (Eq. 10).

    Attributes:
      model: its config names the memory SOCIAL where `social` is set.
      decoder: how it answers.
      social: whether it attends to facts about people.
      heads: it has no emotion head; that is its point.
    """

    model: EncoderDecoder
    decoder: Decoder
    social: bool
    label_smoothing: float = 0.0
    heads: ClassVar[tuple[str, ...]] = ()

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second = jax.random.split(rng)
        width = self.model.config.d_model
        rows = batch.source.shape[0]
        memories = {SOCIAL: Memory(jnp.zeros((rows, 1, width)), jnp.ones((rows, 1), bool))} if self.social else None
        source = batch.source, batch.source_mask, batch.target
        params: dict[str, Any] = {"model": self.model.init(first, *source, memories=memories)["params"]}
        if self.social:
            drawn = self.model.init(second, *source, memories=memories)["params"]
            params["social"] = {name: leaf for name, leaf in drawn.items() if name == "encoder"}
        return params

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        first, second = jax.random.split(rng) if train else (None, None)
        nll, smoothed = self.likelihood(params, batch, self.encode(params, batch, first), second)
        return smoothed, {"nll": nll}

    def encode(self, params: Params, batch: Any, rng: jax.Array | None) -> Read:
        """Reads source and facts; dropout where there is an `rng`."""
        first, second = (None, None) if rng is None else jax.random.split(rng)
        states = apply(self.model, params["model"], batch.source, batch.source_mask, method="encode", rng=first)
        if not self.social:
            return Read(states, batch.source_mask)
        rows, facts, width = batch.facts.shape
        flat, mask = batch.facts.reshape(-1, width), batch.facts_mask.reshape(-1, width)
        # Its own layers on the embeddings of the model: one table for both.
        own = {**params["model"], **params["social"]}
        read = apply(self.model, own, flat, mask, method="encode", rng=second)
        # Departure: the code takes the state at position 0, which BART's start token makes a summary. Other models have
        # none there.
        vectors = masked_mean(read, mask).astype(states.dtype).reshape(rows, facts, -1)
        memory = Memory(vectors, batch.facts_mask.any(axis=2))
        return Read(states, batch.source_mask, {"memories": {SOCIAL: memory}})

    def likelihood(self, params: Params, batch: Any, read: Read, rng: jax.Array | None) -> tuple[Mean, Mean]:
        """L_NLL per token, without and with smoothing; padding counts nothing."""
        logits = self._logits(params, batch, read, rng)
        mask = batch.target_mask & batch.valid[:, None]
        nll = cross_entropy(logits, batch.target, mask)
        if not self.label_smoothing:
            return nll, nll
        return nll, cross_entropy(logits, batch.target, mask, label_smoothing=self.label_smoothing)

    def _logits(self, params: Params, batch: Any, read: Read, rng: jax.Array | None) -> Float[Array, "B T V"]:
        given = batch.target, read.states, read.mask
        return apply(self.model, params["model"], *given, method="decode", rng=rng, **read.beside)

    def generate(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Generated:
        return self.search(self.decoder, params, batch, self.encode(params, batch, None), rng)

    def search(
        self, decoder: Decoder, params: Params, batch: Any, read: Read, rng: jax.Array, **more: Any
    ) -> Generated:
        """Answers of `decoder` to what has been read."""
        source = (batch.source, batch.source_mask) if decoder.settings.reads_source else None
        given = self.model, params["model"], read.states, read.mask, rng
        return decoder.from_states(*given, source=source, beside=read.beside, **more)

    def read(self, params: Params, batch: Any) -> dict[str, Array]:
        """For each row `nll` and `num_tokens`."""
        logits = self._logits(params, batch, self.encode(params, batch, None), None)
        log_probs = jnp.where(batch.target_mask, token_log_probs(logits, batch.target), 0.0)
        return {"nll": -log_probs.sum(axis=1), "num_tokens": batch.target_mask.sum(axis=1).astype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class Contrastive(Nec):
    """NEC with likelihood and contrast together (Eq. 9); answers are the beams nearest to the context (Eq. 13 to 15).

    Attributes:
      settings: which candidates there are, and what a rank is worth.
      explorer: how the current model's own candidates are found; None = there are none.
    """

    settings: CandidateSettings = dataclasses.field(default_factory=CandidateSettings)
    explorer: Decoder | None = None

    @property
    def splits_batches(self) -> bool:
        """Not where the responses of a batch are each other's candidates."""
        return not self.settings.in_batch

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second = jax.random.split(rng)
        return {**super().init(first, batch), "projection": self._contrast.init(second)}

    def explore(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Any:
        """The batch with the current model's beams among its candidates."""
        if self.explorer is None:
            return batch
        found = self.search(self.explorer, params, batch, self.encode(params, batch, None), rng).tokens
        made = (found != self.explorer.eos_id) & (found != self.explorer.pad_id)
        mask = jnp.arange(found.shape[2])[None, None] <= made.sum(axis=2, keepdims=True)  # the end token too
        return batch.replace(own=found, own_mask=mask)

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        first, second, third = jax.random.split(rng, 3) if train else (None,) * 3
        read = self.encode(params, batch, first)
        nll, smoothed = self.likelihood(params, batch, read, second)
        contrast = self.contrast(params, batch, read, third)
        weight, part = self._contrast.part(contrast, target_weights(batch), batch.valid)
        return combine([(1.0, smoothed), (weight, part)], target_weights(batch), batch.valid), {
            "nll": nll,
            "contrast": contrast,
        }

    @property
    def _contrast(self) -> Contrast:
        return Contrast(self.settings, self.model)

    def contrast(self, params: Params, batch: Any, read: Read, rng: jax.Array | None) -> Mean:
        """L_CL (Eq. 11 and 12) over every two candidates of a row."""
        found = self.candidates(batch)
        return self._contrast.ranked(params["model"], params["projection"], batch, read, found, rng)

    def candidates(self, batch: Any) -> Candidates:
        """Candidates of all kinds that there are; see `dialogue.contrast.gather`."""
        groups = [(getattr(batch, name), getattr(batch, f"{name}_mask")) for name in ("own", "frequent", "different")]
        groups = [(ids, mask) for ids, mask in groups if ids is not None]
        if self.settings.in_batch:
            groups.append(in_batch(batch))
        return gather(batch, groups, self.model.config.start_id, self.settings.max_candidates)

    def generate(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Generated:
        read = self.encode(params, batch, None)
        compared = self._contrast.compared(params["model"], params["projection"], read)
        return self.search(self.decoder, params, batch, read, rng, compared=compared)
