"""The stage that every system that answers has, and what its stages share: from settings and files to examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from empax.core.protocols import Task
from empax.core.run import Assembly, RunContext, Sketch, TaskSpec
from empax.core.types import Params
from empax.data.exemplars import ContextExamples, Corpus, ExemplarExamples, LabelledBatch
from empax.data.store import load_candidates, load_instances
from empax.retrieval.corpus import CorpusEncoder
from empax.systems.dialogue.checks import check_generator
from empax.systems.dialogue.parts import Parts, corpus_encoder_of
from empax.systems.dialogue.settings import GeneratorStage
from empax.training.checkpoint import load_params


def build_generator(stage: GeneratorStage, run: RunContext) -> Assembly:
    # Without their weights: what this holds stays in memory beside what training keeps.
    parts = Parts.of(run, with_params=False)
    if parts.settings.lora is not None:
        parts = Parts.of(run)
    splits = {split: load_instances(run, split) for split in ("train", "validation")}
    splits["validation"] = splits["validation"][: stage.max_validation_examples or None]
    options: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
    if stage.index:
        corpus = parts.corpus(splits["train"])
        positions, ids = load_candidates(run, stage.index, "train")
        candidates = np.full((len(splits["train"]), parts.settings.passages), -1)
        candidates[positions] = ids[:, : parts.settings.passages]
        options["train"] = {
            "corpus": corpus,
            "candidates": candidates,
            "exemplar_probability": stage.exemplar_probability,
        }

    def examples(split: str) -> ContextExamples:
        return ContextExamples(
            splits[split],
            parts.form(exemplars=bool(stage.index)),
            **options[split],
        )

    initial: Callable[[Params], Params] | None = None
    if parts.settings.lora is not None:
        task = parts.with_lora(parts.generator_task(stage))
        if stage.start_from:
            initial = lambda _: load_params(run.files.stage(stage.start_from))  # noqa: E731
        elif (kept := parts.generator.adapters) is not None:
            initial = lambda params: {**params, "adapters": {"model": kept}}  # noqa: E731
        frozen = task.freeze({"model": parts.generator.params}, {})
        return Assembly(task, examples("train"), examples("validation"), frozen=frozen, initial=initial)
    if stage.start_from:
        initial = lambda _: load_params(run.files.stage(stage.start_from))  # noqa: E731
    elif parts.settings.generator.pretrained or parts.settings.generator.embeddings:
        initial = lambda params: {**params, "model": {**params["model"], **pretrained(run)}}  # noqa: E731
    return Assembly(parts.generator_task(stage), examples("train"), examples("validation"), initial=initial)


def pretrained(run: RunContext) -> Params:
    """Of the run's generator, the parameters that it does not draw at random."""
    params = Parts.of(run).generator.params
    assert params is not None
    return params


def searched(
    parts: Parts, run: RunContext, index: str, split: str, corpus: Corpus, limit: int, **options: Any
) -> ExemplarExamples:
    """Examples of those instances of a split that have candidates, at most `limit` (0 = all)."""
    positions, ids = load_candidates(run, index, split)
    limit = limit or len(positions)
    instances = load_instances(run, split)
    return parts.exemplar_examples([instances[p] for p in positions[:limit]], corpus, ids[:limit], **options)


def corpus_encoder(run: RunContext, stage: str) -> CorpusEncoder:
    """The encoder that index stages embed with: of training stage `stage`, or as pretrained if that is empty."""
    parts = Parts.of(run)
    return corpus_encoder_of(parts, parts.retriever_params(run, stage), trained=bool(stage))


def sketch_generator(stage: GeneratorStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    return sketched(parts, parts.generator_task(stage), sketch_labelled(parts, batch_size, length), {})


def sketched(parts: Parts, task: Task, batch: Any, frozen: Params) -> Sketch:
    """`task`; with `lora` its adapters, and among what is frozen the weights that they sit on."""
    if parts.settings.lora is None:
        return Sketch(task, batch, frozen)
    adapted = parts.with_lora(task)
    return Sketch(adapted, batch, jax.eval_shape(adapted.freeze, _initial_shapes(task, batch), frozen))


def sketch_judge(parts: Parts, rows: int, length: int) -> Params:
    """The generator that a stage after its own holds beside what it trains."""
    task = parts.generator_task(GeneratorStage())
    shapes = _initial_shapes(task, sketch_labelled(parts, rows, length))
    return {"generator": jax.eval_shape(parts.lowered, shapes)}


def sketch_labelled(parts: Parts, rows: int, length: int) -> LabelledBatch:
    target = (rows, parts.settings.layout.max_target_tokens)
    return LabelledBatch(
        source=shape(rows, length),
        source_mask=shape(rows, length, kind=bool),
        target=shape(*target),
        target_mask=shape(*target, kind=bool),
        valid=shape(rows, kind=bool),
        emotion=shape(rows),
    )


def _initial_shapes(task: Task, batch: Any) -> Params:
    return jax.eval_shape(lambda batch: task.init(jax.random.key(0), batch), batch)


def shape(*sizes: int, kind: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(sizes, kind)


GENERATOR = TaskSpec(
    GeneratorStage,
    check_generator,
    build_generator,
    sketch_generator,
    unread=("decoding", "retriever", "emotion_share"),
)
"""Exemplars come from a stage before it, which is another one where the retriever is."""
