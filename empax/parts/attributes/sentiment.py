"""The regressor of a response's sentiment: an encoder, one output, tanh; its targets are VADER's compound scores.

VADER reads text on the host. A network that learnt its scores can be used inside a loss, and is differentiable.
Source: Majumder et al. ("Exemplars-guided Empathetic Response Generation Controlled by the Elements of Human
Communication", LEMPEx), Sec. 3.4 and Alg. 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from empax.core.config import check_numbers
from empax.core.protocols import Tokenizer
from empax.core.shapes import shapes_of
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.types import Batch, Mean, Metrics
from empax.data import features
from empax.data.batches import draw
from empax.data.epitome import find_epitome, load_epitome, split_by_seeker
from empax.data.exemplars import padded
from empax.data.store import check_prepared, load_instances, note_corpus
from empax.evaluation.empathy import sentiment
from empax.interop.pretrained_encoders import EncoderSettings
from empax.models.heads import ClassificationHead
from empax.parts.encoder.stages import assembled, check_buckets, check_encoder, load_stage_encoder
from empax.parts.encoder.task import EncoderTask


@dataclasses.dataclass(frozen=True)
class SentimentTaskSettings:
    """Settings of a sentiment stage.

    Attributes:
      data: source of the texts: the "responses" of the run's own corpus (LEMPEx' code), or "epitome" (its Alg. 1).
      holdout: for "epitome": share of seeker posts kept for validation, in (0, 1).
      max_tokens: maximum tokens of a text with its frame; its end is cut.
      max_examples: maximum training texts; 0 = all.
      max_validation_examples: maximum examples of validation; 0 = all.
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
    """Random-access examples of texts with their scores."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int):
        self.pad_id = tokenizer.pad_id
        self.rows = features.encode_for_bert(tokenizer, texts, max_tokens, keep="left")
        self.compounds = np.array([sentiment(text) for text in texts], np.float32)
        self.lengths = np.array([len(row) for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> SentimentBatch:
        """Collates the rows `indices` (-1 = filler); does not use `rng`."""
        del rng
        source, empty = padded(self.rows, indices, length, self.pad_id), np.zeros((len(indices), 1), np.int32)
        compounds = self.compounds[np.maximum(indices, 0)]
        return SentimentBatch(*source, empty, empty.astype(bool), indices >= 0, compounds)  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class SentimentRegressor(EncoderTask):
    """Trains tanh(Linear(encoding)), in (-1, 1), by the mean squared error against VADER's compound score."""

    @property
    def heads(self) -> Mapping[str, ClassificationHead]:
        return {"head": ClassificationHead(num_classes=1)}

    def said(self, *outputs: Float[Array, "N _"]) -> Float[Array, " N"]:
        return jnp.tanh(outputs[0][:, 0])

    def losses(self, found: Float[Array, " N"], batch: Any, *, train: bool) -> tuple[Mean, Metrics]:
        wrong = found - batch.compound
        return Mean.of(wrong**2, batch.valid), {"mae": Mean.of(jnp.abs(wrong), batch.valid)}


def check_sentiment(stage: SentimentTaskSettings, run: RunContext) -> None:
    """Raises ConfigError or DataError unless texts and encoder exist, and texts fit the encoder and the buckets."""
    if stage.data == "epitome":
        load_epitome(find_epitome(run.plan.data.dir))
    else:
        check_prepared(run)
        note_corpus(run.plan.data)
    check_encoder(stage.encoder, run, max_tokens=stage.max_tokens)
    check_buckets(run, max_tokens=stage.max_tokens)


def build_sentiment(stage: SentimentTaskSettings, run: RunContext) -> Assembly:
    encoder = load_stage_encoder(stage.encoder, run)
    if stage.data == "epitome":
        sides = split_by_seeker(load_epitome(find_epitome(run.plan.data.dir)), holdout=stage.holdout, seed=run.seed)
        train, validation = ([pair.response_post for pair in side] for side in sides)
    else:
        train, validation = ([i.response for i in load_instances(run, split)] for split in ("train", "validation"))

    def examples(texts: list[str], most: int) -> SentimentExamples:
        return SentimentExamples(draw(texts, most), encoder.tokenizer, stage.max_tokens)

    sides = examples(train, stage.max_examples), examples(validation, stage.max_validation_examples)
    return assembled(SentimentRegressor(encoder.model), encoder, *sides)


def sketch_sentiment(stage: SentimentTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    return Sketch(regressor_of(stage, run, planned=True), shapes_of(SentimentBatch, B=batch_size, S=length, T=1))


def regressor_of(stage: SentimentTaskSettings, run: RunContext, *, planned: bool = False) -> SentimentRegressor:
    """Builds the task of a stage, without parameters; `planned`: from the config alone."""
    return SentimentRegressor(load_stage_encoder(stage.encoder, run, with_params=False, planned=planned).model)
