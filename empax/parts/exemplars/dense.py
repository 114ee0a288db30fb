"""A dense retriever of responses: embeds contexts and responses so that a context finds its own response.

Source: Karpukhin et al. 2020 (DPR); Majumder et al. 2022 (LEMPEx), Sec. 3.3 and 3.5.1, Eq. 11, Alg. 2; Izacard et al.
2022 (Contriever) for a shared encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.system import RunContext
from empax.core.types import Mean, Metrics, Params
from empax.data.store import check_prepared, has_emotions
from empax.losses.contrastive import dense_retrieval_nll
from empax.parts.exemplars.dense_retrieval import Negative, RetrievalBatch
from empax.parts.exemplars.settings import RetrievalSettings


class Embeds(Protocol):
    """Embeds contexts and responses; an `rng` turns on dropout (`models.dual_encoder.Towers`)."""

    def init(self, rng: jax.Array, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Params: ...

    def embed_queries(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, rng: jax.Array | None = None
    ) -> Float[Array, "B D"]: ...

    def embed_keys(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, rng: jax.Array | None = None
    ) -> Float[Array, "B D"]: ...


@dataclasses.dataclass(frozen=True)
class DenseRetriever:
    """Embeds contexts and responses so that a context's own response scores highest (Eq. 11).

    Departure: the printed Eq. 11 lacks exp in the denominator; Alg. 2 and DPR have it.
    """

    towers: Embeds
    temperature: float
    splits_batches: ClassVar[bool] = False  # the responses of a batch are each other's negatives

    def init(self, rng: jax.Array, batch: RetrievalBatch) -> Params:
        return self.towers.init(rng, batch.source, batch.source_mask)

    def loss(
        self, params: Params, frozen: Params, batch: RetrievalBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        first, second = jax.random.split(rng) if train else (None, None)
        queries = self.towers.embed_queries(params, batch.source, batch.source_mask, rng=first)
        rows, per_row, width = batch.key.shape
        ids, mask = batch.key.reshape(-1, width), batch.key_mask.reshape(-1, width)
        keys = self.towers.embed_keys(params, ids, mask, rng=second)
        positives = jnp.arange(rows) * per_row
        return dense_retrieval_nll(
            queries, keys, positives, negatives_of(batch), batch.valid, temperature=self.temperature
        )


def negatives_of(batch: RetrievalBatch) -> Bool[Array, "B P"]:
    """Returns the mask of each context's negatives among the keys of the batch: other texts of other dialogues."""
    there = batch.key_mask.any(axis=-1).reshape(1, -1)
    other_text = batch.key_text.reshape(1, -1) != batch.key_text[:, :1]
    other_dialogue = batch.key_group.reshape(1, -1) != batch.key_group[:, :1]
    return there & other_text & other_dialogue


def check_queries(run: RunContext) -> None:
    """Raises ConfigError if contexts for the retriever may be longer than the stage's buckets."""
    longest = run.named(run.stage).loop.buckets[-1]
    most = run.shared_settings(RetrievalSettings).layout.max_query_tokens
    if longest < most:
        raise ConfigError(
            f"{run.shared}.layout.max_query_tokens = {most} is more than the longest of config.{run.stage}.buckets; "
            f"set it to at most {longest}, or add a bucket."
        )


def check_dense(negatives: Sequence[Negative], run: RunContext) -> None:
    """Checks that a stage that trains a dense retriever can read its contexts and draw its negatives.

    Raises:
      ConfigError: contexts do not fit the buckets, or a split has too few emotions to draw from.
    """
    check_prepared(run)
    check_queries(run)
    least = 2 if "other_emotion" in negatives else 1
    if negatives:
        for split in ("train", "validation"):
            if not has_emotions(run.plan.data, split, least):
                raise ConfigError(
                    f"config.{run.stage}.negatives = {negatives}, but the dialogues of the split {split!r} have "
                    f"{('no emotion', 'fewer than two emotions')[least - 1]}; give them emotions, or set negatives = "
                    "(), which leaves the other responses of a batch."
                )
