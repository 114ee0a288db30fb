"""Task "intents": predicts the intent of the listener's response from the context alone.

The gold response is unknown when the first intent is predicted, so a classifier that reads it would leak it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.shapes import shapes_of
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.types import Batch, Mean, Metrics
from empax.data.batches import SequenceExamples, draw
from empax.data.store import check_prepared, load_instances
from empax.losses.cross_entropy import label_losses
from empax.models.heads import ClassificationHead
from empax.parts.attributes.reasons import pieces_of
from empax.parts.encoder.stages import assembled, check_encoder, load_stage_encoder
from empax.parts.encoder.task import EncoderTask, Predictor
from empax.retrieval.encode import BUCKETS
from empax.systems.reflectdiffu.labels import INTENTS, intent_ids, load_intents
from empax.systems.reflectdiffu.settings import IntentTaskSettings, ReflectSettings
from empax.training.checkpoint import load_params


@dataclasses.dataclass(frozen=True)
class Intents(EncoderTask):
    """The classifier of intents, trained by cross-entropy; it predicts the distribution of the response's intent."""

    progress: ClassVar[tuple[str, int]] = ("intents", 2)
    kept: ClassVar[str] = "intents"

    @property
    def heads(self) -> Mapping[str, ClassificationHead]:
        return {"head": ClassificationHead(num_classes=len(INTENTS))}

    def keys(self, rng: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = jax.random.split(rng)
        return first, second

    def said(self, *outputs: Float[Array, "N I"]) -> Float[Array, "N I"]:
        return outputs[0]

    def losses(self, found: Float[Array, "N I"], batch: Any, *, train: bool) -> tuple[Mean, Metrics]:
        nll, hit = label_losses(jax.nn.log_softmax(found), batch.target[:, 0])
        return Mean.of(nll, batch.valid), {"accuracy": Mean.of(hit, batch.valid)}

    def rows(self, tokenizer: Tokenizer, max_tokens: int, *given: Any) -> list[list[int]]:
        (instances,) = given
        return [row.ids for row in pieces_of(tokenizer, [i.context for i in instances], max_tokens)]

    def predicted(self, found: Float[Array, "N I"]) -> Float[Array, "N I"]:
        return jax.nn.softmax(found)


def check_pieces(run: RunContext, stage: str) -> None:
    """Raises ConfigError unless the last bucket of a stage is as long as the contexts that its encoder reads."""
    longest, most = run.named(stage).loop.buckets[-1], run.shared_settings(ReflectSettings).max_piece_tokens
    if longest != most:
        raise ConfigError(
            f"config.{stage}.buckets end at {longest}, but {run.shared}.max_piece_tokens = {most}; make both equal."
        )


def check_intents(stage: IntentTaskSettings, run: RunContext) -> None:
    """Raises ConfigError or DataError if the labels or the encoder do not exist, or its lengths do not fit."""
    check_prepared(run)
    load_intents(run.plan.data)
    check_pieces(run, run.stage)
    most = run.shared_settings(ReflectSettings).max_piece_tokens
    check_encoder(stage.encoder, run, max_piece_tokens=most)
    if most > BUCKETS[-1]:
        raise ConfigError(f"{run.shared}.max_piece_tokens = {most} must be at most {BUCKETS[-1]} to classify contexts.")


def build_intents(stage: IntentTaskSettings, run: RunContext) -> Assembly:
    encoder = load_stage_encoder(stage.encoder, run)
    labels, tokenizer = load_intents(run.plan.data), encoder.tokenizer
    most = run.shared_settings(ReflectSettings).max_piece_tokens

    def examples(split: str, limit: int) -> SequenceExamples:
        instances = draw([i for i in load_instances(run, split) if i.id in labels], limit)
        rows = pieces_of(tokenizer, [i.context for i in instances], most)
        targets = [[int(number)] for number in intent_ids(labels[i.id] for i in instances)]
        return SequenceExamples([row.ids for row in rows], targets, pad_id=tokenizer.pad_id, max_target_tokens=1)

    sides = examples("train", 0), examples("validation", stage.max_validation_examples)
    return assembled(Intents(encoder.model), encoder, *sides)


def sketch_intents(stage: IntentTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    encoder = load_stage_encoder(stage.encoder, run, planned=True)
    return Sketch(Intents(encoder.model), shapes_of(Batch, B=batch_size, S=length, T=1))


def load_guesser(run: RunContext, stage: str) -> Predictor[Intents]:
    """Loads the classifier of a finished stage."""
    encoder = load_stage_encoder(run.settings(stage, IntentTaskSettings).encoder, run, with_params=False)
    most = run.shared_settings(ReflectSettings).max_piece_tokens
    return Predictor(Intents(encoder.model), load_params(run.files.stage(stage)), encoder.tokenizer, most)
