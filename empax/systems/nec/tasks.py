"""NEC: commonsense in encoder and decoder, and responses ranked by contrast (Huangfu et al. 2024).

The encoder reads the context with facts about things behind it (Eq. 3). A second encoder, which shares the embeddings,
makes a vector of each fact about people, and every decoder layer attends to these behind a gate (Eq. 8). The loss is
the likelihood, then together with a margin for every rank between candidate responses (Eq. 9 to 12).

Letters beside those of `core.types`: C candidates, M facts, F tokens of a fact, E features of the projection.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Generated, Mean, Metrics, Params
from empax.evaluation.device_metrics import ngram_precision
from empax.losses.contrastive import rank_margin
from empax.losses.cross_entropy import cross_entropy, token_log_probs
from empax.models.heads import masked_mean
from empax.models.memory_attention import Memory
from empax.models.transformer import EncoderDecoder
from empax.systems.dialogue.generator import Decoder, apply
from empax.systems.nec.settings import SOCIAL, ContrastSettings

_NEAR_GOLD = 0.99
"""A candidate that scores so high is the response itself, or as good as that. Source: CoNT's code."""


@dataclasses.dataclass(frozen=True)
class Read:
    """A source that has been read."""

    states: Float[Array, "B S D"]
    mask: Bool[Array, "B S"]
    memories: dict[str, Memory] | None


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
            return Read(states, batch.source_mask, None)
        rows, facts, width = batch.facts.shape
        flat, mask = batch.facts.reshape(-1, width), batch.facts_mask.reshape(-1, width)
        # Its own layers on the embeddings of the model: one table for both.
        own = {**params["model"], **params["social"]}
        read = apply(self.model, own, flat, mask, method="encode", rng=second)
        # Departure: the code takes the state at position 0, which BART's start token makes a summary. Other models have
        # none there.
        vectors = masked_mean(read, mask).astype(states.dtype).reshape(rows, facts, -1)
        memory = Memory(vectors, batch.facts_mask.any(axis=2))
        return Read(states, batch.source_mask, {SOCIAL: memory})

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
        return apply(self.model, params["model"], *given, memories=read.memories, method="decode", rng=rng)

    def generate(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Generated:
        return self.search(self.decoder, params, batch, self.encode(params, batch, None), rng)

    def search(
        self, decoder: Decoder, params: Params, batch: Any, read: Read, rng: jax.Array, **more: Any
    ) -> Generated:
        """Answers of `decoder` to what has been read."""
        source = (batch.source, batch.source_mask) if decoder.settings.reads_source else None
        beside = {"memories": read.memories}
        given = self.model, params["model"], read.states, read.mask, rng
        return decoder.from_states(*given, source=source, beside=beside, **more)

    def read(self, params: Params, batch: Any) -> dict[str, Array]:
        """For each row `nll` and `num_tokens`."""
        logits = self._logits(params, batch, self.encode(params, batch, None), None)
        log_probs = jnp.where(batch.target_mask, token_log_probs(logits, batch.target), 0.0)
        return {"nll": -log_probs.sum(axis=1), "num_tokens": batch.target_mask.sum(axis=1).astype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Candidate responses of each row, the row's own target first, with how good they are: its score is 1."""

    ids: Int[Array, "B C T"]
    mask: Bool[Array, "B C T"]
    scores: Float[Array, "B C"]
    present: Bool[Array, "B C"]


@dataclasses.dataclass(frozen=True)
class Contrastive(Nec):
    """NEC with likelihood and contrast together (Eq. 9); answers are the beams nearest to the context (Eq. 13 to 15).

    Attributes:
      settings: which candidates there are, and what a rank is worth.
      explorer: how the current model's own candidates are found; None = there are none.
    """

    settings: ContrastSettings = dataclasses.field(default_factory=ContrastSettings)
    explorer: Decoder | None = None

    @property
    def splits_batches(self) -> bool:
        """Not where the responses of a batch are each other's candidates."""
        return not self.settings.in_batch

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second = jax.random.split(rng)
        width = self.model.config.d_model
        kernel = jax.nn.initializers.xavier_uniform()(second, (width, width))  # CoNT's
        return {**super().init(first, batch), "projection": {"kernel": kernel, "bias": jnp.zeros(width)}}

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
        # Weighed by the tokens, so that the sum of both is what Eq. 9 says whatever a batch is cut into.
        total = smoothed.total + self.settings.weight * contrast.value() * smoothed.weight
        return Mean(total, smoothed.weight), {"nll": nll, "contrast": contrast}

    def contrast(self, params: Params, batch: Any, read: Read, rng: jax.Array | None) -> Mean:
        """L_CL (Eq. 11 and 12) over every two candidates of a row."""
        found = self.candidates(batch)
        cosines = self.similarities(params, read, found.ids, found.mask, rng)
        return rank_margin(cosines, found.scores, found.present & batch.valid[:, None], margin=self.settings.margin)

    def candidates(self, batch: Any) -> Candidates:
        """All candidates of a batch, scored against their row's target, the best `max_candidates` kept.

        Departure: NEC's code looks for the target at a place where another sample stands. Here the first row is the
        target's, and whatever equals it elsewhere is removed (there it scores 0 and stays).
        """
        groups = [(getattr(batch, name), getattr(batch, f"{name}_mask")) for name in ("own", "frequent", "different")]
        groups = [(ids, mask) for ids, mask in groups if ids is not None]
        rows = batch.target.shape[0]
        if self.settings.in_batch:  # the own target among them, which is removed with whatever equals it
            others = batch.target_mask & batch.valid[:, None]
            ids, mask = (jnp.broadcast_to(x[None], (rows, *x.shape)) for x in (batch.target, others))
            groups.append((ids, mask))
        width = max([batch.target.shape[1], *(ids.shape[2] for ids, _ in groups)])
        gold, gold_mask = (_widened(x[:, None], width) for x in (batch.target, batch.target_mask))
        if not groups:
            return Candidates(gold, gold_mask, jnp.ones((rows, 1)), jnp.ones((rows, 1), bool))
        ids, mask = (jnp.concatenate([_widened(x, width) for x in part], axis=1) for part in zip(*groups, strict=True))
        scores = self._scores(ids, mask, gold[:, 0], gold_mask[:, 0])
        present = mask.any(axis=2) & (scores < _NEAR_GOLD)
        most = min(self.settings.max_candidates, ids.shape[1])
        _, best = jax.lax.top_k(jnp.where(present, scores, -1.0), most)

        def kept(first: Array, rest: Array) -> Array:
            place = best.reshape(*best.shape, *(1,) * (rest.ndim - 2))
            return jnp.concatenate([first, jnp.take_along_axis(rest, place, axis=1)], axis=1)

        one = jnp.ones((rows, 1))
        return Candidates(kept(gold, ids), kept(gold_mask, mask), kept(one, scores), kept(one > 0, present))

    def _scores(
        self,
        ids: Int[Array, "B C T"],
        mask: Bool[Array, "B C T"],
        gold: Int[Array, "B T"],
        gold_mask: Bool[Array, "B T"],
    ) -> Float[Array, "B C"]:
        """Bigram precision with the start token in front: all sequences have one framing."""
        rows, count, width = ids.shape

        def framed(ids: Array, mask: Array) -> tuple[Array, Array]:
            front = jnp.full((len(ids), 1), self.model.config.start_id, ids.dtype)
            return jnp.concatenate([front, ids], 1), jnp.concatenate([jnp.ones((len(ids), 1), bool), mask], 1)

        said = framed(ids.reshape(-1, width), mask.reshape(-1, width))
        known = framed(*(jnp.repeat(x, count, axis=0) for x in (gold, gold_mask)))
        return ngram_precision(*said, *known).reshape(rows, count)

    def similarities(
        self, params: Params, read: Read, ids: Int[Array, "B C T"], mask: Bool[Array, "B C T"], rng: jax.Array | None
    ) -> Float[Array, "B C"]:
        """Cosines of each row's context and candidates (Eq. 12 and 13)."""
        said = self.encoded(params, read, ids, mask, rng)
        return jnp.einsum("BE,BCE->BC", _unit(self.encoding(params, read)), _unit(said))

    def encoding(self, params: Params, read: Read) -> Float[Array, "B E"]:
        """z of each context: of its states but the last."""
        behind = jnp.cumsum(read.mask[:, ::-1], axis=1)[:, ::-1]  # real tokens from here on
        return self._projected(params, read.states, read.mask & (behind > 1))

    def encoded(
        self, params: Params, read: Read, ids: Int[Array, "B C T"], mask: Bool[Array, "B C T"], rng: jax.Array | None
    ) -> Float[Array, "B C E"]:
        """z of each candidate, by one pass of the decoder and no logits.

        A state has read the tokens before its own, so the end token is never read: CoNT leaves the last state out.
        Candidates share their row's encoder states and, in training, its dropout.
        """

        def one(ids: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B E"]:
            given = ids, read.states, read.mask
            kept: dict[str, Any] = {"memories": read.memories, "method": "decode_hidden", "rng": rng}
            return self._projected(params, apply(self.model, params["model"], *given, **kept), mask)

        return jax.vmap(one, in_axes=1, out_axes=1)(ids, mask)

    def _projected(
        self, params: Params, states: Float[Array, "B T D"], mask: Bool[Array, "B T"]
    ) -> Float[Array, "B E"]:
        """The mean of the projected states; one layer for contexts and responses."""
        kernel, bias = params["projection"]["kernel"], params["projection"]["bias"]
        return masked_mean(jax.nn.relu(states.astype(jnp.float32) @ kernel + bias[None, None]), mask)

    def generate(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Generated:
        read = self.encode(params, batch, None)
        rows = batch.source.shape[0]

        def encode(ids: Int[Array, "N T"], mask: Bool[Array, "N T"]) -> Float[Array, "N E"]:
            width = ids.shape[1]
            whole = jnp.arange(width)[None] <= mask.sum(axis=1, keepdims=True)  # the end token too
            candidates, real = (x.reshape(rows, -1, width) for x in (ids, whole))
            return self.encoded(params, read, candidates, real, None).reshape(len(ids), -1)

        compared = (lambda: self.encoding(params, read)), encode
        return self.search(self.decoder, params, batch, read, rng, compared=compared)


def _widened(values: Array, width: int) -> Array:
    """Columns of zeros (False) behind."""
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])])


def _unit(vectors: Float[Array, "..."]) -> Float[Array, "..."]:
    # The square root of a sum, not a norm: its gradient at zero is 0 and not NaN.
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, axis=-1, keepdims=True), 1e-16))
