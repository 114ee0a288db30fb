"""Checks of a generator before a run starts: model, tokenizer, lengths, other stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from empax.core.config import ConfigError
from empax.core.shapes import shapes_of
from empax.core.sharding import MeshSettings
from empax.core.system import RunContext, Stage
from empax.core.text_functions import TWO_ROWS
from empax.data.exemplars import LabelledBatch
from empax.data.features import SPECIAL_TOKENS
from empax.data.sources import TaggedForm
from empax.data.store import PlannedTokenizer, PrepareSettings, check_prepared, may_load, run_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.settings import DecodeSettings
from empax.interop.pretrained import check_fits, check_weights, load_generator
from empax.models.decoder_only import DecoderOnly
from empax.parts.generator.own_losses import try_losses
from empax.parts.generator.parts import GeneratorParts, forced_token, with_own_decoding
from empax.parts.generator.settings import ContrastSettings, DialogueSettings, GeneratorTaskSettings, LossSettings

GENERATOR_TASKS = ("generator",)


def check_system(run: RunContext) -> None:
    """Checks that the generator of all stages exists and fits its tokenizer, without loading weights.

    Raises:
      ConfigError: the model does not exist, the tokenizer lacks tokens that it reads, texts are too long for it, or a
        setting does not suit it.
      DataError: files of a model are missing or broken.
    """
    parts = check_models(run)
    if parts is None or isinstance(parts.tokenizer, PlannedTokenizer):
        return
    tokenizer = parts.tokenizer
    assert isinstance(tokenizer, SubwordTokenizer)
    missing = [token for token in SPECIAL_TOKENS if tokenizer.backend.token_to_id(token) is None]
    if missing and parts.settings.form == "dialogue" and not isinstance(parts.generator.model, DecoderOnly):
        pretrained = run.settings("prepare", PrepareSettings).tokenizer.pretrained
        raise ConfigError(
            f"the tokenizer {pretrained!r} lacks {', '.join(missing)}, which an encoder-decoder reads; set "
            "config.prepare.tokenizer.tags = True."
        )
    parts.form().contexts(TWO_ROWS)
    parts.form().passages(TWO_ROWS)


def check_models(run: RunContext) -> GeneratorParts | None:
    """Runs the checks of `check_system` that do not concern the form of sources.

    Returns:
      The parts, without weights; None if a plan may not fetch them.
    """
    check_prepared(run)
    settings, where = run.shared_settings(DialogueSettings), run.shared
    generator = settings.generator
    if settings.lora is not None and not generator.pretrained:
        raise ConfigError(f"{where}.lora adapts a pretrained generator; set generator.pretrained, or lora to None.")
    prepared = run.settings("prepare", PrepareSettings).tokenizer
    models = (generator.pretrained, generator.embeddings)
    if not all(may_load(run, name) for name in (*models, prepared.pretrained) if name):
        return None
    for name in models:
        check_weights(name)
    tokenizer = run_tokenizer(run, planned=True)
    loaded = load_generator(generator, tokenizer, with_params=False)
    first_token = forced_token(settings, tokenizer, loaded.model)
    settings = with_own_decoding(settings, tokenizer, loaded.model)
    if settings.ask_first and (settings.form == "plain" or not isinstance(loaded.model, DecoderOnly)):
        raise ConfigError(
            f"{where}.ask_first asks {settings.ask_first[0].text!r}, but only a decoder-only model with form = "
            "'dialogue' can be asked; set ask_first = ()."
        )
    parts = GeneratorParts(settings, tokenizer, loaded, MeshSettings(), first_token)
    _check_lengths(run, parts)
    return parts


def _check_lengths(run: RunContext, parts: GeneratorParts) -> None:
    layout, decoding = parts.settings.layout, parts.settings.decoding
    reading = [stage for stage in run.plan.stages.values() if _reads_sources(stage)]
    answers = {"max_target_tokens": layout.max_target_tokens, "max_tokens": decoding.max_tokens}
    check_answers(run, parts, reading, **answers)


def check_answers(run: RunContext, parts: GeneratorParts, reading: Sequence[Stage], **answers: int) -> None:
    """Raises ConfigError if the sources of `reading`, with answers of these lengths, are too long for the model."""
    model = parts.generator.model
    if not isinstance(model, DecoderOnly):
        check_fits(model, **answers, **{f"{stage.name}.buckets": _buckets(stage)[-1] for stage in reading})
        return
    # Prompt, source and answer share the positions.
    answer, shown = max(answers.values()), getattr(parts.settings, "passages", 0)
    for stage in reading:
        passages = shown if _reads_exemplars(stage, run) else 0
        tokens = parts.positions_read(_buckets(stage)[-1], passages) + answer
        among = f" + {passages} exemplars" if passages else ""
        check_fits(model, **{f"prompt{among} + {stage.name}.buckets + answer": tokens})


def check_layout(run: RunContext, *, exemplars: bool | None = None) -> None:
    """Applies `check_contexts`, with the tokens that the generator's form has beside a context.

    `exemplars` is whether its sources have room for an exemplar; None = if the stage answers with exemplars.
    """
    if (parts := check_models(run)) is None:
        return
    form = parts.form(exemplars=_reads_exemplars(run.named(run.stage), run) if exemplars is None else exemplars)
    if isinstance(form, TaggedForm) and not any(stage.kind == "annotate" for stage in run.plan.stages.values()):
        form = dataclasses.replace(form, attributes=False)  # no text has attributes
    check_contexts(run, beside=form.beside)


def check_contexts(run: RunContext, *, beside: int = 0) -> None:
    """Raises ConfigError if the stage, a training or an evaluation, would cut contexts that the system's limit allows.

    The limit is in the system's section, or in its `layout` if it has one. `beside` are the other tokens of a source.
    """
    stage, shared = run.named(run.stage), run.plan.system_settings
    if not _reads_sources(stage):
        return
    where, layout = (f"{run.shared}.layout", shared.layout) if hasattr(shared, "layout") else (run.shared, shared)
    longest, most = _buckets(stage)[-1], layout.max_context_tokens
    if longest < (needed := most + beside):
        among = f", with {beside} tokens beside it," if beside else ""
        lower = f"set it to at most {longest - beside}, or " if longest - beside >= 2 else ""
        raise ConfigError(
            f"{where}.max_context_tokens = {most}{among} is more than the longest of config.{stage.name}.buckets, "
            f"{longest}, which cuts contexts; {lower}add {needed} to the buckets of each stage."
        )


def _reads_exemplars(stage: Stage, run: RunContext) -> bool:
    """Whether a stage reads exemplars, or evaluates a stage that does."""
    if stage.kind == "evaluate":
        return (trained := run.plan.stages.get(stage.settings.stage)) is not None and _reads_exemplars(trained, run)
    return stage.spec is not None and stage.spec.reads_exemplars(stage.settings)


def _reads_sources(stage: Stage) -> bool:
    """Whether a stage's buckets are lengths of the generator's sources; a stage without buckets has no such limit."""
    if stage.spec is not None:
        return stage.spec.reads_sources or stage.spec.answer is not None
    return stage.kind == "evaluate" and "buckets" in stage.reads.get(stage.name, ())


def _buckets(stage: Stage) -> tuple[int, ...]:
    return stage.settings.buckets if stage.loop is None else stage.loop.buckets


def decoding_of(run: RunContext) -> tuple[DecodeSettings, str]:
    """Returns the decoding settings of an evaluation with their section; `run` as in `TaskSpec.check_evaluation`."""
    parts = check_models(run)
    settings = run.shared_settings(DialogueSettings) if parts is None else parts.settings
    where = run.shared if run.named(run.stage).settings.decoding is None else f"config.{run.stage}"
    return settings.decoding, f"{where}.decoding"


def check_contrast(contrast: ContrastSettings | None, run: RunContext) -> None:
    """Raises ConfigError if a generator cannot learn a contrast: it has adapters, or is decoder-only."""
    if contrast is None:
        return
    parts = check_models(run)
    adapted = run.shared_settings(DialogueSettings).lora is not None
    if adapted or (parts is not None and isinstance(parts.generator.model, DecoderOnly)):
        raise ConfigError(
            f"config.{run.stage}.contrast needs an encoder-decoder without adapters; set it to None, or "
            f"{run.shared}.lora to None with an encoder-decoder as generator."
        )


def check_fusion(run: RunContext) -> None:
    """Raises ConfigError if the run's generator does not support the settings' form of exemplars."""
    if (parts := check_models(run)) is not None:
        _ = parts.fusion


def check_losses(
    losses: Sequence[LossSettings], run: RunContext, make_shapes: Callable[[int, int], LabelledBatch] | None = None
) -> None:
    """Raises ConfigError if a user's loss fails on the shapes of two rows.

    `make_shapes` maps rows and source length to the shapes of a batch; by default, its sources are contexts alone.
    """
    if not losses:
        return
    parts = check_models(run)
    if parts is not None:
        if make_shapes is None:
            batch = shapes_of(LabelledBatch, B=2, S=8, T=parts.settings.layout.max_target_tokens)
        else:
            batch = make_shapes(2, 8)
        try_losses(losses, batch, parts.generator.model.config.vocab_size)


def check_generator(stage: GeneratorTaskSettings, run: RunContext) -> None:
    """Raises ConfigError if a loss fails, contexts would be cut, or `start_from` is wrong."""
    check_prepared(run)
    check_contrast(stage.contrast, run)
    check_losses(stage.losses, run)
    check_layout(run)
    if stage.start_from:
        run.earlier("start_from", stage.start_from, tasks=GENERATOR_TASKS)


def check_evaluation(stage: GeneratorTaskSettings, run: RunContext) -> None:
    """Checks the evaluation of a generator that reads contexts alone.

    Raises:
      ConfigError: contexts would be cut, or decoding needs exemplars or begins answers as no target begins.
    """
    check_layout(run)
    settings, (decoding, where), parts = run.shared_settings(DialogueSettings), decoding_of(run), check_models(run)
    allowed = (None, None if parts is None else parts.first_token)
    plain = settings.form == "plain" and parts is not None and not isinstance(parts.generator.model, DecoderOnly)
    if plain and decoding.first_token not in allowed:
        raise ConfigError(
            f"{where}.first_token = {decoding.first_token} begins every answer, but no target of form = 'plain'; leave "
            f"it out, or give it as forced_bos_token_id in generation_config.json of {settings.generator.pretrained}."
        )
    copying = settings.neighbours.copy_weight
    reading = {f"{where}.rerank_exemplars": decoding.rerank_exemplars, f"{run.shared}.neighbours.copy_weight": copying}
    for name, value in reading.items():
        if value:
            raise ConfigError(
                f"{name} = {value} looks at exemplars, but config.{run.stage} answers with "
                f"config.{run.named(run.stage).settings.stage}, which reads none; set it to 0."
            )
