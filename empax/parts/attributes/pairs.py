"""Code shared by all judges of the mechanisms: annotated pairs, labelled batches, the loss, and evaluation metrics."""

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
from empax.core.system import RunContext
from empax.core.types import LEVELS, MECHANISMS, Batch, Mean, Metrics
from empax.data.epitome import find_epitome, load_epitome, split_by_seeker
from empax.data.sample import load_annotated_pairs
from empax.evaluation.empathy import f1_of_confusion
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.encoder.stages import check_encoder

ClassWeights = tuple[tuple[float, ...], ...]
"""[mechanism][level]; empty = every level weighs the same."""

IF_THERE = "if_there"
"""A value of `JudgeTaskSettings.data`."""


@flax.struct.dataclass
class AttributeBatch(Batch):
    """Texts with one label per mechanism; `target` is the response if it is read separately, else empty."""

    labels: Int[Array, "B C"]


@dataclasses.dataclass(frozen=True)
class JudgeTaskSettings:
    """Settings of every stage that trains a judge.

    Attributes:
      data: "epitome"; the annotations of the built-in "sample"; or "if_there": EPITOME if it exists, else the run skips
        the stage and names the attributes that it lacks (`pipeline.absent`).
      mechanisms: mechanisms of this stage, which share an encoder; list one per stage for separate encoders.
      holdout: share of seeker posts kept for validation, in (0, 1).
      class_weights: weights each class by the inverse of its share.
    """

    encoder: EncoderSettings = dataclasses.field(default_factory=EncoderSettings)
    data: Literal["epitome", "if_there", "sample"] = "epitome"
    mechanisms: tuple[str, ...] = MECHANISMS
    holdout: float = 0.2
    class_weights: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "holdout", above=0, below=1)
        if not self.mechanisms or set(self.mechanisms) - set(MECHANISMS):
            raise ConfigError(f"mechanisms = {self.mechanisms} must be some of {', '.join(MECHANISMS)}.")
        if len(set(self.mechanisms)) < len(self.mechanisms):
            raise ConfigError(f"mechanisms = {self.mechanisms} names one twice.")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A text, its response, and the level of each mechanism."""

    context: tuple[str, ...]
    response: str
    levels: tuple[int, ...]


def load_pairs(stage: JudgeTaskSettings, run: RunContext) -> tuple[list[Pair], list[Pair]]:
    """Loads training and held-out pairs, split by seeker post, stratified; the split depends on the seed."""
    sample = stage.data == "sample"
    pairs = load_annotated_pairs() if sample else load_epitome(find_epitome(run.plan.data.dir))
    sides = split_by_seeker(pairs, holdout=stage.holdout, seed=run.seed)
    order = {name: i for i, name in enumerate(LEVELS)}
    train, holdout = (
        [Pair((p.seeker_post,), p.response_post, tuple(order[p.levels[m]] for m in stage.mechanisms)) for p in side]
        for side in sides
    )
    return train, holdout


def class_weights(stage: JudgeTaskSettings, pairs: Sequence[Pair]) -> ClassWeights:
    """Returns inverse shares of the levels among `pairs`, or none if the stage has no class weights."""
    if not stage.class_weights:
        return ()
    labels = np.array([p.levels for p in pairs])
    counts = np.stack([np.bincount(column, minlength=len(LEVELS)) for column in labels.T])
    weights = len(pairs) / (len(LEVELS) * np.maximum(counts, 1))
    return tuple(tuple(float(w) for w in row) for row in weights)


def check_judge(stage: JudgeTaskSettings, run: RunContext, **texts: int) -> None:
    """Raises ConfigError or DataError unless pairs and encoder exist, and texts of lengths `texts` fit the encoder."""
    if stage.data != "sample":
        load_epitome(find_epitome(run.plan.data.dir))
    check_encoder(stage.encoder, run, **texts)


def label_batch(
    pairs: Sequence[Pair],
    rows: Sequence[int],
    source: tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]],
    target: tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]] | None = None,
) -> AttributeBatch:
    """Builds a batch of numpy arrays: padded ids with their masks, and the levels of `pairs[rows]` (-1 = filler)."""
    if target is None:
        empty = np.zeros((len(rows), 1), np.int32)
        target = empty, empty.astype(bool)
    labels = np.array([pairs[max(i, 0)].levels for i in rows], np.int32)
    return AttributeBatch(*source, *target, np.array(rows) >= 0, labels)  # pyright: ignore


def levels_loss(
    logits: Float[Array, "B C 3"], batch: Any, mechanisms: Sequence[str], weights: ClassWeights, *, confusion: bool
) -> tuple[Mean, Metrics]:
    """Returns the sum over mechanisms of (weighted) cross-entropies, and accuracies.

    With `confusion`, also the share of every (label, prediction), from which `summarize_levels` computes F1 scores.
    """
    log_probs = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_probs, batch.labels[..., None], axis=-1)[..., 0]  # [B, C]
    by_class = jnp.asarray(weights)[jnp.arange(len(mechanisms))[None, :], batch.labels] if weights else 1.0
    guesses = logits.argmax(-1)
    hits = (guesses == batch.labels).astype(jnp.float32)
    metrics = {f"{name}_accuracy": Mean.of(hits[:, c], batch.valid) for c, name in enumerate(mechanisms)}
    metrics["accuracy"] = Mean.of(hits.mean(axis=1), batch.valid)
    if confusion:
        for c, name in enumerate(mechanisms):
            for cell, label, guess in _cells(name):
                found = (batch.labels[:, c] == label) & (guesses[:, c] == guess)
                metrics[cell] = Mean.of(found.astype(jnp.float32), batch.valid)
    return Mean.of((nll * by_class).sum(axis=1), batch.valid), metrics


def _cells(mechanism: str) -> list[tuple[str, int, int]]:
    """Returns name, label and prediction of each cell of a mechanism's confusion matrix."""
    numbered = list(enumerate(LEVELS))
    return [(f"{mechanism}_{label}_as_{guess}", i, j) for i, label in numbered for j, guess in numbered]


def summarize_levels(averages: dict[str, float], mechanisms: Sequence[str]) -> dict[str, float]:
    """Replaces the confusion of each mechanism in `averages` by its weighted F1, a share like the accuracies."""
    values, found = dict(averages), []
    for name in mechanisms:
        matrix = np.zeros((1, len(LEVELS), len(LEVELS)))
        for cell, label, guess in _cells(name):
            matrix[0, label, guess] = values.pop(cell)
        found.append(float(f1_of_confusion(matrix, "weighted")[0]) / 100.0)
        values[f"{name}_weighted_f1"] = found[-1]
    values["weighted_f1"] = sum(found) / len(found)
    return values
