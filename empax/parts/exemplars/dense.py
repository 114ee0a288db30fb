"""A dense retriever of responses: embeds contexts and responses so that a context finds its own response.

Source: Karpukhin et al. 2020 (DPR); Majumder et al. 2022 (LEMPEx), Sec. 3.3 and 3.5.1, Eq. 11, Alg. 2; Izacard et al.
2022 (Contriever) for a shared encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from empax.core.config import ConfigError, check_numbers
from empax.core.shapes import shapes_of
from empax.core.system import RunContext
from empax.core.types import Instance, Mean, Metrics, Params
from empax.data.exemplars import dialogue_groups, emotion_ids
from empax.data.store import check_prepared, has_emotions
from empax.decoding.settings import LEAST_TEMPERATURE
from empax.losses.contrastive import dense_retrieval_nll
from empax.models.dual_encoder import Towers
from empax.parts.exemplars.dense_retrieval import GivenPair, Keys, Negative, RetrievalBatch, RetrievalExamples
from empax.parts.exemplars.parts import RetrievalParts
from empax.parts.exemplars.settings import RetrievalSettings


@dataclasses.dataclass(frozen=True)
class DenseSettings:
    """Training settings of a dense retriever (Alg. 2).

    Attributes:
      negatives: negatives of each context besides the other responses of its batch: a response from a dialogue of
        another emotion, and one from another dialogue of the same emotion. Both are Alg. 2; ("other_emotion",) is the
        text of Sec. 3.5.1; () = in-batch negatives alone.
      temperature: divides the scores; 1 is LEMPEx', for unnormalized vectors, 0.05 Contriever's, for unit vectors.
    """

    negatives: tuple[Negative, ...] = ()
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "temperature", least=LEAST_TEMPERATURE)
        if len(set(self.negatives)) < len(self.negatives):
            raise ConfigError(f"negatives = {self.negatives} must name each kind once.")


@dataclasses.dataclass(frozen=True)
class DenseRetriever:
    """Embeds contexts and responses so that a context's own response scores highest (Eq. 11).

    Departure: the printed Eq. 11 lacks exp in the denominator; Alg. 2 and DPR have it.
    """

    towers: Towers
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


def dense_examples(
    retrieval: RetrievalParts,
    stage: DenseSettings,
    instances: Sequence[Instance],
    pairs: Sequence[GivenPair] = (),
) -> RetrievalExamples:
    """Builds the examples of a split: its contexts, and further pairs that come with their own negatives.

    The dialogues and emotions of those negatives are unknown.
    """
    asked = [*instances, *(pair.instance for pair in pairs)]
    others = [Instance("", (), pair.negatives[kind], "") for kind in stage.negatives for pair in pairs]
    unknown = np.full(len(others), -1, np.int32)
    keys = Keys(
        retrieval.key_text([*asked, *others]),
        np.concatenate([dialogue_groups(asked), unknown]),
        np.concatenate([emotion_ids(asked), unknown]),
    )
    given = np.full((len(asked), len(stage.negatives)), -1)
    given[len(instances) :] = len(asked) + np.arange(len(others)).reshape(len(stage.negatives), len(pairs)).T
    return RetrievalExamples(
        retrieval.query_text(asked),
        keys,
        stage.negatives,
        given=given,
        pad_id=retrieval.encoder.tokenizer.pad_id,
        max_key_tokens=retrieval.settings.layout.max_key_tokens,
    )


def sketch_batch(retrieval: RetrievalParts, stage: DenseSettings, rows: int, length: int) -> RetrievalBatch:
    keys = retrieval.settings.layout.max_key_tokens
    return shapes_of(RetrievalBatch, B=rows, S=length, K=1 + len(stage.negatives), P=keys)


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
    """Checks that a stage that trains a dense retriever reads responses alone, whole contexts, and its negatives.

    Raises:
      ConfigError: keys are exchanges, contexts do not fit the buckets, or a split has too few emotions to draw from.
    """
    check_prepared(run)
    check_queries(run)
    if run.shared_settings(RetrievalSettings).key == "exchange":
        raise ConfigError(
            f"{run.shared}.key = 'exchange': an exchange holds the context that searches for it, so {run.stage!r} "
            "would learn nothing; set it to 'response'."
        )
    least = 2 if "other_emotion" in negatives else 1
    if negatives:
        for split in ("train", "validation"):
            if not has_emotions(run.plan.data, split, least):
                raise ConfigError(
                    f"config.{run.stage}.negatives = {negatives}, but the dialogues of the split {split!r} have "
                    f"{('no emotion', 'fewer than two emotions')[least - 1]}; give them emotions, or set negatives = "
                    "(), which leaves the other responses of a batch."
                )
