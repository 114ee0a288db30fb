"""The generator stage of every system that answers, and code shared by its stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from empax.core.protocols import Task
from empax.core.shapes import shapes_of
from empax.core.system import AnswerOptions, Assembly, RunContext, Sketch, TaskSpec
from empax.core.types import Params
from empax.data.batches import draw
from empax.data.exemplars import ContextExamples, LabelledBatch
from empax.data.store import load_instances
from empax.parts.generator.answerer import Answerer, AnswerExamples, MakeExamples, ShowsExemplars
from empax.parts.generator.checks import check_evaluation, check_generator
from empax.parts.generator.parts import GeneratorParts
from empax.parts.generator.settings import DialogueSettings, GeneratorTaskSettings
from empax.parts.generator.task import Generator
from empax.parts.generator.trained import Trained, check_adapters, generator_to_export
from empax.training.checkpoint import load_params
from empax.training.lora import AdaptableTask, is_adapted


def build_generator(stage: GeneratorTaskSettings, run: RunContext) -> Assembly:
    # Weights only beside adapters: what this holds stays in memory beside the training state.
    adapted = run.shared_settings(DialogueSettings).lora is not None
    parts = GeneratorParts.of(run, with_params=adapted)
    form = parts.form(exemplars=False)
    splits = load_instances(run, "train"), draw(load_instances(run, "validation"), stage.max_validation_examples)
    train, validation = (ContextExamples(instances, form) for instances in splits)
    initial: Callable[[Params], Params] | None = None
    if stage.start_from:
        initial = lambda params: begun_with(params, load_params(run.files.stage(stage.start_from)))  # noqa: E731
    if adapted:
        task = parts.with_lora(_task(parts, stage, run))
        frozen = task.freeze({"model": parts.generator.params}, {})
        return Assembly(task, train, validation, frozen=frozen, initial=initial)
    if initial is None and parts.settings.generator.loads_weights:
        initial = lambda params: {**params, "model": {**params["model"], **pretrained(run)}}  # noqa: E731
    return Assembly(_task(parts, stage, run), train, validation, initial=initial)


def _task(parts: GeneratorParts, stage: GeneratorTaskSettings, run: RunContext) -> Generator:
    return dataclasses.replace(parts.generator_task(stage), heads=taught_heads(stage, run))


def taught_heads(stage: Any, run: RunContext) -> tuple[str, ...]:
    """Returns the generator's emotion head, if this stage or one that it started from trained it."""
    return ("generator",) if any(getattr(one, "emotion_weight", 0.0) for one in with_earlier(stage, run)) else ()


def with_earlier(stage: Any, run: RunContext, part: str = "generator") -> Iterator[Any]:
    """Yields the settings of a stage, and of the earlier stages whose "generator" or "retriever" (`part`) it took."""
    yield stage
    began = part != "generator" or getattr(stage, "warm_up", True)
    if began and (name := getattr(stage, part, "") or getattr(stage, "start_from", "")):
        yield from with_earlier(run.named(name).settings, run, part)


def generator_params(parts: GeneratorParts, run: RunContext, stage: str) -> Params:
    """Loads {"model", "emotion"} of a finished stage; of a joint stage, those of its generator."""
    params = parts.stage_params(run, stage)
    return params.get("generator", params)


def begun_with(params: Params, known: Params) -> Params:
    """Returns `known`, of an earlier stage; a missing contrast is from `params`, and one they lack is dropped."""
    if "contrast" in params:
        return {"contrast": params["contrast"], **known}
    return {name: leaf for name, leaf in known.items() if name != "contrast"}


def overlaid(params: Params, known: Params) -> Params:
    """Returns `params` with the leaves of `known`; other leaves keep their random initialization."""
    if not isinstance(params, Mapping):
        return known
    return {name: overlaid(leaf, known[name]) if name in known else leaf for name, leaf in params.items()}


def pretrained(run: RunContext) -> Params:
    """Returns the pretrained parameters of the run's generator, without those drawn at random."""
    params = GeneratorParts.of(run).generator.params
    assert params is not None
    return params


def answer_generator(stage: GeneratorTaskSettings, run: RunContext, options: AnswerOptions) -> Answerer:
    """Builds the answerer of a finished stage, whose generator reads the context alone."""
    parts = GeneratorParts.of(run, with_params=False).trained_at(run.at(options.stage))
    params = parts.lowered(parts.stage_params(run, options.stage, options.params))
    make = context_examples(parts, options.buckets)
    return answerer_of(parts, _task(parts, stage, run), params, make, options, run)


def answerer_of(
    parts: GeneratorParts,
    task: Any,
    params: Params,
    make_examples: MakeExamples,
    options: AnswerOptions,
    run: RunContext | None = None,
) -> Answerer:
    """Builds an answerer with `task` and `options`; its neighbours are training rows of `run`."""
    passages = parts.settings.passages * isinstance(make_examples, ShowsExemplars)
    buckets, single = options.buckets or (parts.longest_source(passages),), not options.buckets
    given = {"mesh": parts.mesh, "single": single, "questions": parts.settings.ask_first}
    made = Answerer(task, params, make_examples, parts.tokenizer, buckets, **given)
    if parts.settings.neighbours.knn_weight:
        assert run is not None  # a system without training rows refuses the setting
        made.remember(draw(load_instances(run, "train"), parts.settings.neighbours.knn_rows))
    return made


def context_examples(parts: GeneratorParts, buckets: Sequence[int]) -> MakeExamples:
    """Returns a maker of examples of contexts alone, padded to `buckets` (empty: to the longest)."""
    form = parts.for_answers(buckets).form(exemplars=False)
    return lambda instances: AnswerExamples(ContextExamples(instances, form), [{} for _ in instances])


def trained_generator(stage: Any, run: RunContext, adapters: bool, *, fused: bool = False) -> Trained:
    """Returns the generator of the current stage of `run`, without its emotion head; or its adapters alone.

    `fused`: it reads several passages, and the stage also trained something else.

    Raises:
      ConfigError: `adapters` is set, but the stage has none.
      CheckpointError: the stage has not been trained.
    """
    del stage
    saved = load_params(run.directory)  # before building a model, since it is most often missing
    check_adapters(adapters and not is_adapted(saved), run, "generator")
    parts = GeneratorParts.of(run, with_params=False)
    params = saved["adapters"] if adapters else parts.stage_params(run, run.stage)
    params = params["generator"] if fused else params
    passages = parts.settings.passages if fused else 0
    return generator_to_export(parts, run.stage, params["model"], passages=passages, adapters=adapters)


def sketch_generator(stage: GeneratorTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = GeneratorParts.of(run, planned=True)
    return sketched(parts, parts.generator_task(stage), sketch_labelled(parts, batch_size, length), {})


def sketched(parts: GeneratorParts, task: AdaptableTask, batch: Any, frozen: Params) -> Sketch:
    """Sketches `task`; with `lora` its adapters, with their base weights among the frozen parameters."""
    if parts.settings.lora is None:
        return Sketch(task, batch, frozen)
    adapted = parts.with_lora(task)
    return Sketch(adapted, batch, jax.eval_shape(adapted.freeze, _initial_shapes(task, batch), frozen))


def sketch_frozen_generator(parts: GeneratorParts, rows: int, length: int) -> Params:
    """Returns the shapes of the frozen generator that a later stage keeps."""
    task = parts.generator_task(GeneratorTaskSettings())
    shapes = _initial_shapes(task, sketch_labelled(parts, rows, length))
    return {"generator": jax.eval_shape(parts.lowered, shapes)}


def sketch_labelled(parts: GeneratorParts, rows: int, length: int) -> LabelledBatch:
    return shapes_of(LabelledBatch, B=rows, S=length, T=parts.settings.layout.max_target_tokens)


def _initial_shapes(task: Task, batch: Any) -> Params:
    return jax.eval_shape(lambda batch: task.init(jax.random.key(0), batch), batch)


GENERATOR = TaskSpec(
    GeneratorTaskSettings,
    check_generator,
    build_generator,
    sketch_generator,
    answer=answer_generator,
    check_evaluation=check_evaluation,
    models={"generator": trained_generator},
    unread=("decoding", "own_decoding", "retriever", "key", "query", "emotion_share", "passages", "exemplars",
            "ask_first", "neighbours"),
)  # fmt: skip
