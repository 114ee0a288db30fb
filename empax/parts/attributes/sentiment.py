"""The regressor of a response's sentiment: an encoder, one output, tanh; its targets are VADER's compound scores.

VADER reads text on the host. A network that has learnt its scores can be asked inside a loss, and passes gradients on.
Source: Majumder et al. ("Exemplars-guided Empathetic Response Generation Controlled by the Elements of Human
Communication", LEMPEx), Sec. 3.4 and Alg. 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError, check_numbers
from empax.core.protocols import Tokenizer
from empax.core.shapes import shapes_of
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.types import Batch, Mean, Metrics, Params
from empax.data import features
from empax.data.batches import draw
from empax.data.epitome import find_epitome, load_epitome, split_by_seeker
from empax.data.store import check_prepared, load_instances
from empax.evaluation.empathy import sentiment
from empax.interop.pretrained_encoders import EncoderSettings
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import ClassificationHead
from empax.parts.attributes.pairs import check_encoder, load_stage_encoder


@dataclasses.dataclass(frozen=True)
class SentimentTaskSettings:
    """Settings of a sentiment stage.

    Attributes:
      data: whose texts: the "responses" of the run's own corpus (LEMPEx' code), or those of "epitome" (its Alg. 1).
      holdout: of "epitome": share of seeker posts kept for validation, in (0, 1).
      max_tokens: of a text with its frame; what is behind is cut.
      max_examples: training texts at most; 0 = all.
      max_validation_examples: 0 = all.
    """

    encoder: EncoderSettings = dataclasses.field(default_factory=EncoderSettings)
    data: Literal["responses", "epitome"] = "responses"
    holdout: float = 0.2
    max_tokens: int = 64
    max_examples: int = 0
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "holdout", above=0, below=1)
        check_numbers(self, "max_tokens", least=4)
        check_numbers(self, "max_examples", "max_validation_examples", least=0)


@flax.struct.dataclass
class SentimentBatch(Batch):
    """Texts with VADER's scores; `target` is empty."""

    compound: Float[Array, " B"]


class SentimentExamples:
    """Texts as random-access examples, each with its score."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int):
        self.pad_id = tokenizer.pad_id
        self.rows = features.encode_for_bert(tokenizer, texts, max_tokens, keep="left")
        self.compounds = np.array([sentiment(text) for text in texts], np.float32)
        self.lengths = np.array([len(row) for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> SentimentBatch:
        """Rows of `indices` (-1 = filler); draws nothing from `rng`."""
        del rng
        source, source_mask = features.pad([self.rows[i] if i >= 0 else [] for i in indices], length, self.pad_id)
        empty = np.zeros((len(indices), 1), np.int32)
        arrays: dict[str, Any] = {
            "source": source,
            "source_mask": source_mask,
            "target": empty,
            "target_mask": empty.astype(bool),
            "valid": np.asarray(indices) >= 0,
            "compound": self.compounds[np.maximum(indices, 0)],
        }
        return SentimentBatch(**arrays)


@dataclasses.dataclass(frozen=True)
class SentimentRegressor:
    """The mean squared error of tanh(Linear(encoding)) against VADER's compound score."""

    encoder: DualEncoder

    @property
    def head(self) -> ClassificationHead:
        return ClassificationHead(num_classes=1)

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        first, second = jax.random.split(rng)
        encoder = self.encoder.init(first, batch.source, batch.source_mask)["params"]
        return {"encoder": encoder, "head": self.head.init(second, jnp.zeros((1, self.encoder.width)))["params"]}

    def predict(
        self,
        params: Params,
        ids: Int[Array, "B S"] | None,
        mask: Bool[Array, "B S"],
        rng: jax.Array | None,
        *,
        embedded: Float[Array, "B S D"] | None = None,
    ) -> Float[Array, " B"]:
        """Scores in (-1, 1); `embedded` stands for the embeddings of `ids`."""
        rngs = None if rng is None else {"dropout": rng}
        options: dict[str, Any] = {"rngs": rngs, "deterministic": rng is None}
        encoder = {"params": params["encoder"]}
        encoding = self.encoder.apply(encoder, ids, mask, embedded=embedded, method="embed", **options)
        score: Any = self.head.apply({"params": params["head"]}, encoding, **options)
        return jnp.tanh(score[:, 0])

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        found = self.predict(params, batch.source, batch.source_mask, rng if train else None)
        wrong = found - batch.compound
        return Mean.of(wrong**2, batch.valid), {"mae": Mean.of(jnp.abs(wrong), batch.valid)}


def check_sentiment(stage: SentimentTaskSettings, run: RunContext) -> None:
    """Whether the texts are there, and fit the encoder and the buckets.

    Raises:
      ConfigError: no EPITOME, no such encoder, or one that reads fewer tokens.
      DataError: EPITOME or the encoder's files cannot be read.
    """
    if stage.data == "epitome":
        load_epitome(find_epitome(run.plan.data.dir))
    else:
        check_prepared(run)
    check_encoder(stage.encoder, run, max_tokens=stage.max_tokens)
    longest = run.named(run.stage).loop.buckets[-1]
    if stage.max_tokens > longest:
        raise ConfigError(
            f"config.{run.stage}.max_tokens = {stage.max_tokens} is more than the longest of buckets; set it to at "
            f"most {longest}."
        )


def build_sentiment(stage: SentimentTaskSettings, run: RunContext) -> Assembly:
    encoder = load_stage_encoder(stage.encoder, run)
    if stage.data == "epitome":
        sides = split_by_seeker(load_epitome(find_epitome(run.plan.data.dir)), holdout=stage.holdout, seed=run.seed)
        train, validation = ([pair.response_post for pair in side] for side in sides)
    else:
        train, validation = ([i.response for i in load_instances(run, split)] for split in ("train", "validation"))

    def examples(texts: list[str], most: int) -> SentimentExamples:
        return SentimentExamples(draw(texts, most), encoder.tokenizer, stage.max_tokens)

    def initial(params: Params) -> Params:
        return params if encoder.params is None else {**params, "encoder": encoder.params}

    return Assembly(
        SentimentRegressor(encoder.model),
        examples(train, stage.max_examples),
        examples(validation, stage.max_validation_examples),
        initial=initial,
    )


def sketch_sentiment(stage: SentimentTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    return Sketch(planned_regressor(stage, run), shapes_of(SentimentBatch, B=batch_size, S=length, T=1))


def planned_regressor(stage: SentimentTaskSettings, run: RunContext) -> SentimentRegressor:
    """The task of `stage` from the config alone."""
    return SentimentRegressor(load_stage_encoder(stage.encoder, run, with_params=False, planned=True).model)


def load_regressor(stage: SentimentTaskSettings, run: RunContext) -> SentimentRegressor:
    """The task of a finished stage, without its parameters."""
    return SentimentRegressor(load_stage_encoder(stage.encoder, run, with_params=False).model)
