"""Stage "evaluate": answers to the test split, as predictions.jsonl."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

from empax.core.files import write_json, write_jsonl
from empax.core.run import RunContext
from empax.data.store import load_instances
from empax.systems.reg.responder import choose_head, with_head

log = logging.getLogger("empax")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the stage.

    Attributes:
      stage: the training stage to evaluate.
      index: the index stage to search.
      limit: at most this many instances (0 = all).
      head_examples: validation instances on which the better emotion head is chosen.
    """

    stage: str
    kind: str = "evaluate"
    index: str = "reindex"
    split: str = "test"
    batch_size: int = 32
    buckets: tuple[int, ...] = (64, 128, 256, 512)
    limit: int = 0
    head_examples: int = 500


def run(settings: Settings, context: RunContext, system: Any) -> None:
    responder = system.load_responder(context, stage=settings.stage, index=settings.index, buckets=settings.buckets)
    options = {"batch_size": settings.batch_size, "seed": context.seed}
    validation = load_instances(context, "validation")[: settings.head_examples]
    judged = responder.respond(validation, progress="emotion head", **options)
    head, accuracy = choose_head(judged, responder.heads)
    log.info("emotion head on validation: %s; taking %s", accuracy, head)
    instances = load_instances(context, settings.split)
    instances = instances[: settings.limit] if settings.limit else instances
    begin = time.perf_counter()
    predictions = responder.respond(instances, progress=settings.split, **options)
    seconds = time.perf_counter() - begin
    write_jsonl(context.files.predictions, with_head(predictions, head))
    write_json(
        context.directory / "evaluate.json",
        {
            "emotion_head": head,
            "emotion_head_validation_accuracy": accuracy,
            "responses_per_second": len(predictions) / seconds,
            "seconds": seconds,
        },
    )
