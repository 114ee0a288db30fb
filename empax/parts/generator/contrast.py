"""Contrast: candidates that resemble the response more are nearer to the context; any generator can learn it.

Source: An et al. 2022 (CoNT), used by NEC (Eq. 11 to 13). Letters in addition to those of `core.types`: C candidates,
E features of the projection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Mean, Params
from empax.core.vectors import unit
from empax.evaluation.device_metrics import ngram_precision
from empax.losses.contrastive import rank_margin
from empax.models.heads import masked_mean
from empax.parts.generator.settings import ContrastSettings

_NEAR_GOLD = 0.99
"""Score from which a candidate counts as the response itself. Source: CoNT's code."""


@dataclasses.dataclass(frozen=True)
class Read:
    """An encoded source.

    Attributes:
      states: the states that the decoder attends to.
      mask: True at real states.
      beside: further inputs of the decoder, by name: `memories`.
    """

    states: Any
    mask: Bool[Array, "B S"]
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Candidate responses of each row with their scores; the row's own target is first and has score 1."""

    ids: Int[Array, "B C T"]
    mask: Bool[Array, "B C T"]
    scores: Float[Array, "B C"]
    present: Bool[Array, "B C"]


def gather(
    batch: Any, groups: list[tuple[Int[Array, "B C T"], Bool[Array, "B C T"]]], start_id: int, most: int
) -> Candidates:
    """Scores all candidates of a batch against their row's target, and keeps the best `most`.

    Departure: NEC's code looks for the target at the position of another sample. Ours puts the target first and removes
    candidates equal to it (in NEC's code they score 0 and stay).
    """
    rows = batch.target.shape[0]
    width = max([batch.target.shape[1], *(ids.shape[2] for ids, _ in groups)])
    gold, gold_mask = (_widened(x[:, None], width) for x in (batch.target, batch.target_mask))
    if not groups:
        return Candidates(gold, gold_mask, jnp.ones((rows, 1)), jnp.ones((rows, 1), bool))
    ids, mask = (jnp.concatenate([_widened(x, width) for x in part], axis=1) for part in zip(*groups, strict=True))
    scores = _scores(ids, mask, gold[:, 0], gold_mask[:, 0], start_id)
    present = mask.any(axis=2) & (scores < _NEAR_GOLD)
    _, best = jax.lax.top_k(jnp.where(present, scores, -1.0), min(most, ids.shape[1]))

    def kept(first: Array, rest: Array) -> Array:
        place = best.reshape(*best.shape, *(1,) * (rest.ndim - 2))
        return jnp.concatenate([first, jnp.take_along_axis(rest, place, axis=1)], axis=1)

    one = jnp.ones((rows, 1))
    return Candidates(kept(gold, ids), kept(gold_mask, mask), kept(one, scores), kept(one > 0, present))


def in_batch(batch: Any) -> tuple[Int[Array, "B C T"], Bool[Array, "B C T"]]:
    """Returns the batch's responses as candidates of each row, including its own, which `gather` removes."""
    rows, others = batch.target.shape[0], batch.target_mask & batch.valid[:, None]
    ids, mask = (jnp.broadcast_to(x[None], (rows, *x.shape)) for x in (batch.target, others))
    return ids, mask


@dataclasses.dataclass(frozen=True)
class Contrast:
    """The contrastive loss and its encodings.

    Attributes:
      settings: margin per rank, and number of candidates.
      model: computes the states of candidates, teacher-forced.
      params: parameters of the model.
      projection: parameters of the projection; see `draw_projection`.
    """

    settings: ContrastSettings
    model: Any
    params: Params
    projection: Params

    def loss(self, batch: Any, read: Read, rng: jax.Array | None) -> Mean:
        """Returns L_CL (Eq. 11 and 12) with candidates of the batch."""
        found = gather(batch, [in_batch(batch)], self.model.config.start_id, self.settings.max_candidates)
        return self.ranked(batch, read, found, rng)

    def ranked(self, batch: Any, read: Read, found: Candidates, rng: jax.Array | None) -> Mean:
        """Returns L_CL of given candidates, over all pairs of a row."""
        cosines = self.similarities(read, found.ids, found.mask, rng)
        return rank_margin(cosines, found.scores, found.present & batch.valid[:, None], margin=self.settings.margin)

    def part(self, value: Mean, weights: Float[Array, " B"], valid: Bool[Array, " B"]) -> tuple[float, Mean]:
        """Returns `value` with its weight, as an input of `task.combine`."""
        total = jnp.sum(jnp.where(valid, weights, 0.0))
        return self.settings.weight, Mean(value.value() * total, total)

    def similarities(
        self, read: Read, ids: Int[Array, "B C T"], mask: Bool[Array, "B C T"], rng: jax.Array | None
    ) -> Float[Array, "B C"]:
        """Returns the cosines of each row's context and candidates (Eq. 12 and 13)."""
        said = self.encoded(read, ids, mask, rng)
        return jnp.einsum("BE,BCE->BC", unit(self.encoding(read)), unit(said))

    def encoding(self, read: Read) -> Float[Array, "B E"]:
        """Returns z of each context, from all of its states but the last."""
        behind = jnp.cumsum(read.mask[:, ::-1], axis=1)[:, ::-1]  # real tokens from here on
        return self._projected(read.states, read.mask & (behind > 1))

    def encoded(
        self, read: Read, ids: Int[Array, "B C T"], mask: Bool[Array, "B C T"], rng: jax.Array | None
    ) -> Float[Array, "B C E"]:
        """Returns z of each candidate, by one pass of the decoder without logits.

        A state has read the tokens before its own, so the end token is never read: CoNT omits the last state.
        Candidates share their row's encoder states and, in training, its dropout.
        """
        module: nn.Module = self.model
        options: dict[str, Any] = {
            "rngs": None if rng is None else {"dropout": rng},
            "deterministic": rng is None,
            "method": "decode_hidden",
            **read.beside,
        }

        def one(ids: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B E"]:
            states: Any = module.apply({"params": self.params}, ids, read.states, read.mask, **options)
            return self._projected(states, mask)

        # A loop, not a vmapped axis: on a CPU, XLA has no bfloat16 products for its shapes.
        found = jax.lax.map(lambda given: one(*given), (ids.swapaxes(0, 1), mask.swapaxes(0, 1)))
        return found.swapaxes(0, 1)

    def compared(
        self, read: Read
    ) -> tuple[Callable[[], Float[Array, "B E"]], Callable[[Any, Any], Float[Array, "N E"]]]:
        """Returns the encodings for reranking by similarity: see `Decoder.from_states`."""
        rows = read.states.shape[0]

        def encode(ids: Int[Array, "N T"], mask: Bool[Array, "N T"]) -> Float[Array, "N E"]:
            width = ids.shape[1]
            whole = jnp.arange(width)[None] <= mask.sum(axis=1, keepdims=True)  # the end token too
            candidates, real = (x.reshape(rows, -1, width) for x in (ids, whole))
            return self.encoded(read, candidates, real, None).reshape(len(ids), -1)

        return (lambda: self.encoding(read)), encode

    def _projected(self, states: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> Float[Array, "B E"]:
        """Returns the mean of the projected states."""
        kernel, bias = self.projection["kernel"], self.projection["bias"]
        return masked_mean(jax.nn.relu(states.astype(jnp.float32) @ kernel + bias[None, None]), mask)


def draw_projection(rng: jax.Array, width: int) -> Params:
    """Draws the projection of states, shared by contexts and responses, as CoNT initializes it."""
    return {"kernel": jax.nn.initializers.xavier_uniform()(rng, (width, width)), "bias": jnp.zeros(width)}


def _scores(
    ids: Int[Array, "B C T"],
    mask: Bool[Array, "B C T"],
    gold: Int[Array, "B T"],
    gold_mask: Bool[Array, "B T"],
    start_id: int,
) -> Float[Array, "B C"]:
    """Returns bigram precision with the start token prepended, so that all sequences have the same framing."""
    rows, count, width = ids.shape

    def framed(ids: Array, mask: Array) -> tuple[Array, Array]:
        front = jnp.full((len(ids), 1), start_id, ids.dtype)
        return jnp.concatenate([front, ids], 1), jnp.concatenate([jnp.ones((len(ids), 1), bool), mask], 1)

    said = framed(ids.reshape(-1, width), mask.reshape(-1, width))
    known = framed(*(jnp.repeat(x, count, axis=0) for x in (gold, gold_mask)))
    return ngram_precision(*said, *known).reshape(rows, count)


def _widened(values: Array, width: int) -> Array:
    """Appends columns of zeros (False)."""
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])])
