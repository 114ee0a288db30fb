"""Stage "evaluate": answers to the test split, as predictions.jsonl."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from empax.core.files import write_json, write_jsonl
from empax.core.run import RunContext
from empax.core.types import Prediction
from empax.data.store import load_instances
from empax.evaluation.scoring import INDEPENDENT
from empax.pipeline import judging

log = logging.getLogger("empax")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the stage.

    Attributes:
      stage: the training stage to evaluate.
      index: the index stage to search.
      limit: at most this many instances (0 = all).
      head_examples: validation instances on which the better emotion head is chosen.
      judge: who judges responses and references (for the F1s of the mechanisms): an annotate stage (its classifiers),
        a stage that trained identifiers, or a list of such stages; empty = nobody.
      second_judge: the same for variants "...:independent", by judges that nothing was trained to please.
    """

    stage: str
    kind: str = "evaluate"
    index: str = "reindex"
    split: str = "test"
    batch_size: int = 32
    buckets: tuple[int, ...] = (64, 128, 256, 512)
    limit: int = 0
    head_examples: int = 500
    judge: str | tuple[str, ...] = ""
    second_judge: str | tuple[str, ...] = ""


def run(settings: Settings, context: RunContext, system: Any) -> None:
    responder = system.load_responder(context, stage=settings.stage, index=settings.index, buckets=settings.buckets)
    options = {"batch_size": settings.batch_size, "seed": context.seed}
    validation = load_instances(context, "validation")[: settings.head_examples]
    accuracy = head_accuracies(responder.respond(validation, progress="emotion head", **options), responder.heads)
    head = max(accuracy, key=lambda name: accuracy[name])
    log.info("emotion heads on validation: %s; taking the %s's", accuracy, head)
    instances = load_instances(context, settings.split)
    instances = instances[: settings.limit] if settings.limit else instances
    begin = time.perf_counter()
    predictions = responder.respond(instances, progress=settings.split, **options)
    seconds = time.perf_counter() - begin
    predictions = [dataclasses.replace(p, emotion_prediction=p.notes["emotion_by_head"][head]) for p in predictions]
    for names, prefix in ((settings.judge, ""), (settings.second_judge, INDEPENDENT)):
        if names:
            predictions = judging.judged(predictions, *judging.load_judges(names, context), prefix=prefix)
    write_jsonl(context.files.predictions, predictions)
    write_json(
        context.directory / "evaluate.json",
        {
            "emotion_head": head,
            "emotion_head_validation_accuracy": accuracy,
            "responses_per_second": len(predictions) / seconds,
            "seconds": seconds,
        },
    )


def head_accuracies(predictions: Sequence[Prediction], heads: Sequence[str]) -> dict[str, float]:
    """Accuracy of each emotion head in percent, over rows whose emotion is known."""
    known = [p for p in predictions if p.emotion]
    hits = {head: [p.notes["emotion_by_head"][head] == p.emotion for p in known] for head in heads}
    return {head: 100.0 * float(np.mean(found)) if found else 0.0 for head, found in hits.items()}
