"""LEMPEx' stages: build the generator, its examples and its answerer from the settings and the work directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from empax.core.config import ConfigError
from empax.core.shapes import shapes_of
from empax.core.system import AnswerOptions, Assembly, RunContext, Sketch, TaskSpec
from empax.core.types import Instance, Params
from empax.data.batches import draw
from empax.data.exemplars import Corpus
from empax.data.store import (
    PrepareSettings,
    check_candidates,
    check_prepared,
    load_instances,
    may_load,
    run_tokenizer,
)
from empax.data.tokenizers import SubwordTokenizer
from empax.models.transformer import EncoderDecoder
from empax.parts.attributes import ClassifierTaskSettings
from empax.parts.attributes.classifier import classifier_of
from empax.parts.attributes.sentiment import SentimentTaskSettings, regressor_of
from empax.parts.encoder.stages import load_stage_encoder
from empax.parts.exemplars.parts import ExemplarSearch, searched_instances
from empax.parts.generator.answerer import Answerer, AnswerExamples
from empax.parts.generator.checks import check_contexts
from empax.parts.generator.parts import GeneratorParts
from empax.parts.generator.stages import answerer_of, pretrained
from empax.systems.lempex.examples import LempexBatch, LempexExamples, TurnForm, judged_length
from empax.systems.lempex.exemplar_fusion import ExemplarFusion
from empax.systems.lempex.losses import EmpathyLosses
from empax.systems.lempex.settings import LempexSettings, LempexTaskSettings
from empax.systems.lempex.tasks import LempexGenerator
from empax.training.checkpoint import load_params


def generator_task(
    parts: GeneratorParts, stage: LempexTaskSettings, run: RunContext, empathy: EmpathyLosses | None
) -> LempexGenerator:
    model = parts.generator.model
    assert isinstance(model, EncoderDecoder)  # see `check` of the system
    return LempexGenerator(
        model,
        parts.decoder(parts.settings.decoding),
        ExemplarFusion(model.config) if stage.index else None,
        speakers=run.shared_settings(LempexSettings).speakers,
        empathy=empathy,
        contrast=stage.contrast,
    )


def check_generator(stage: LempexTaskSettings, run: RunContext) -> None:
    """Checks that earlier stages provide the exemplars, judges and labels.

    Raises:
      ConfigError: one is missing; labels or judges omit a mechanism that has a weight; judges and generator have
        different vocabularies; or contexts would be cut.
    """
    check_prepared(run)
    settings = run.shared_settings(LempexSettings)
    check_contexts(stage, run)
    if stage.index:
        check_candidates(run, stage.index, ("train", "validation"), settings.passages)
    if stage.losses == "none":
        return
    annotating = [one for one in map(run.named, run.before()) if one.kind == "annotate"]
    if not annotating:
        raise ConfigError(
            f"config.run has no stage of kind 'annotate' before {run.stage!r}, whose losses = {stage.losses!r} take "
            'its labels; add one, or set losses = "none".'
        )
    wanted = stage.weights.mechanisms()
    for annotate in annotating:
        if lost := [name for name in wanted if name in annotate.settings.left_out]:
            raise ConfigError(
                f"config.{annotate.name}.left_out names {lost[0]}, so config.{run.stage}.weights.{lost[0]} = "
                f"{getattr(stage.weights, lost[0])} has no labels to learn from; name a classifier of it in "
                f"config.{annotate.name}.classifiers and take it out there, or set the weight to 0."
            )
    if stage.losses != "judges":
        return
    covered: list[str] = []
    for name in stage.judges:
        judge = run.earlier("judges", name, tasks=("attributes.classifier",)).settings
        covered += judge.mechanisms
    if missing := [name for name in wanted if covered.count(name) != 1]:
        raise ConfigError(
            f"config.{run.stage}.judges = {stage.judges} must judge {missing[0]} once; name one stage for it, or set "
            "its weight to 0."
        )
    if stage.sentiment:
        run.earlier("sentiment", stage.sentiment, tasks=("attributes.sentiment",))
    _check_vocabularies(stage, run)


def _check_vocabularies(stage: LempexTaskSettings, run: RunContext) -> None:
    """Raises ConfigError unless judges and generator share a vocabulary."""
    generator = run.shared_settings(LempexSettings).generator
    encoders = {name: run.named(name).settings.encoder for name in (*stage.judges, stage.sentiment) if name}
    prepared = run.settings("prepare", PrepareSettings).tokenizer
    models = (generator.pretrained, prepared.pretrained, *(encoder.pretrained for encoder in encoders.values()))
    if not all(may_load(run, name) for name in models if name):
        return
    tokenizer = run_tokenizer(run, planned=True)
    for name, encoder in encoders.items():
        own = load_stage_encoder(encoder, run, planned=True).tokenizer
        same = own.vocab_size == tokenizer.vocab_size
        if same and isinstance(own, SubwordTokenizer) and isinstance(tokenizer, SubwordTokenizer):
            same = own.extends(tokenizer)
        if not same:
            raise ConfigError(
                f"config.{name} reads other tokens ({own.vocab_size}) than the generator writes "
                f"({tokenizer.vocab_size}), but their losses need one vocabulary; use the tokenizer of the judge's "
                "encoder (config.prepare.tokenizer, tags = False), or an encoder from scratch."
            )


def judged_tokens(stage: LempexTaskSettings, run: RunContext) -> int:
    """Returns the maximum tokens of context and response that classifiers read; 0 = nothing is judged."""
    layout = run.shared_settings(LempexSettings).layout
    if stage.losses != "judges":
        return 2 * layout.max_target_tokens if stage.losses == "first_state" else 0
    most = [run.settings(name, ClassifierTaskSettings).max_tokens for name in stage.judges]
    return min(most, default=layout.max_context_tokens + layout.max_target_tokens)


def empathy_losses(stage: LempexTaskSettings, run: RunContext, *, planned: bool = False) -> EmpathyLosses | None:
    """Builds the empathetic losses with their judges, without parameters; `planned`: from the config alone."""
    if stage.losses == "none":
        return None
    judges = {name: run.settings(name, ClassifierTaskSettings) for name in stage.judges}
    classifiers = tuple((name, classifier_of(own, run, planned=planned)) for name, own in judges.items())
    regressor = None
    if stage.sentiment:
        regressor = regressor_of(run.settings(stage.sentiment, SentimentTaskSettings), run, planned=planned)
    return EmpathyLosses(stage, classifiers, regressor)


def load_judges(stage: LempexTaskSettings, run: RunContext) -> Params:
    """Loads the parameters of the trained judges that `stage` names."""
    params: Params = {"classifiers": {name: load_params(run.files.stage(name)) for name in stage.judges}}
    if stage.sentiment:
        params["sentiment"] = load_params(run.files.stage(stage.sentiment))
    return params


def build_generator(stage: LempexTaskSettings, run: RunContext) -> Assembly:
    parts = GeneratorParts.of(run, with_params=False)
    task = generator_task(parts, stage, run, empathy_losses(stage, run))
    form = TurnForm(parts.tokenizer, parts.settings.layout)
    corpus = Corpus.of(load_instances(run, "train"), form) if stage.index else None
    train = _examples(stage, run, "train", form, corpus, judged=judged_tokens(stage, run))
    validation = _examples(stage, run, "validation", form, corpus, limit=stage.max_validation_examples)

    known = {"judges": load_judges(stage, run)} if stage.losses == "judges" else {}

    def initial(params: Params) -> Params:
        return {**params, **first_params(stage, run, params), **({} if stage.frozen_judges else known)}

    frozen = known if stage.frozen_judges else {}
    return Assembly(task, train, validation, frozen=frozen, initial=initial)


def first_params(stage: LempexTaskSettings, run: RunContext, params: Params) -> Params:
    """Returns pretrained weights or word vectors, also for the encoder of exemplars."""
    if not run.shared_settings(LempexSettings).generator.loads_weights:
        return {}
    loaded = pretrained(run)
    found: Params = {"model": {**params["model"], **loaded}}
    if stage.index:
        own = params["fusion"]["encoder"]
        copied = {name: jax.tree.map(np.array, leaf) for name, leaf in loaded.items() if name in own}
        found["fusion"] = {**params["fusion"], "encoder": {**own, **copied}}
    return found


def _examples(
    stage: LempexTaskSettings,
    run: RunContext,
    split: str,
    form: TurnForm,
    corpus: Corpus | None,
    *,
    limit: int = 0,
    judged: int = 0,
) -> LempexExamples:
    """Builds the examples of a split; with exemplars, of the searched instances alone."""
    if not stage.index:
        return LempexExamples(draw(load_instances(run, split), limit), form, judged=judged)
    instances, ids = searched_instances(run, stage.index, split, limit)
    count = run.shared_settings(LempexSettings).passages
    return LempexExamples(instances, form, corpus=corpus, candidates=ids[:, :count], judged=judged)


def sketch_generator(stage: LempexTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts, layout = GeneratorParts.of(run, planned=True), run.shared_settings(LempexSettings).layout
    empathy = empathy_losses(stage, run, planned=True)
    task = generator_task(parts, stage, run, empathy)
    sizes = {"B": batch_size, "S": length, "T": layout.max_target_tokens}
    if stage.index:
        sizes |= {"K": parts.settings.passages, "P": layout.max_passage_tokens}
    judged = judged_length(length, sizes["T"], judged_tokens(stage, run))
    batch = shapes_of(LempexBatch, **sizes, J=judged, R=sizes["T"] + 1, C=3)
    batch = dataclasses.replace(batch, other=None, other_mask=None)
    if empathy is None:
        unread = ("judged", "judged_mask", "judged_start", "reply", "reply_mask", "levels", "compound")
        return Sketch(task, dataclasses.replace(batch, **dict.fromkeys(unread)))
    frozen = {}
    if stage.losses == "judges" and stage.frozen_judges:
        frozen = {"judges": jax.eval_shape(empathy.init_judges, jax.random.key(0), batch)}
    return Sketch(task, batch, frozen)


class LempexSearch(ExemplarSearch):
    """Shows exemplars as the generator reads them, without cutting references."""

    def show(self, instances: Sequence[Instance], rows: np.ndarray, scores: np.ndarray) -> AnswerExamples:
        form = TurnForm(self.parts.tokenizer, self.parts.for_answers().settings.layout)
        examples = LempexExamples(instances, form, corpus=self.corpus, candidates=rows, others=len(instances) > 1)
        return AnswerExamples(examples, self.notes(rows, scores))


def answer_generator(stage: LempexTaskSettings, run: RunContext, options: AnswerOptions) -> Answerer:
    """Builds the answerer of a finished stage, with exemplars from the index that it was trained with.

    Raises:
      StaleIndexError: the index was built with another encoder than that of the stage it names.
    """
    parts = GeneratorParts.of(run, with_params=False)
    task = generator_task(parts, stage, run, None)
    saved = load_params(run.files.stage(options.stage))
    params = {name: leaf for name, leaf in saved.items() if name not in ("judges", "heads")}
    if stage.index:
        corpus = Corpus.of(load_instances(run, "train"), TurnForm(parts.tokenizer, parts.settings.layout))
        search = LempexSearch.of(run, parts, stage.index, buckets=options.buckets, corpus=corpus)
        return answerer_of(parts, task, params, search, options)
    form = TurnForm(parts.tokenizer, parts.for_answers().settings.layout)

    def alone(instances: Sequence[Instance]) -> AnswerExamples:
        return AnswerExamples(LempexExamples(instances, form), [{} for _ in instances])

    return answerer_of(parts, task, params, alone, options)


GENERATOR = TaskSpec(
    LempexTaskSettings,
    check_generator,
    build_generator,
    sketch_generator,
    answer=answer_generator,
    check_evaluation=check_contexts,
    reads_exemplars=lambda stage: bool(stage.index),
    unread=("decoding", "retriever", "key", "towers", "key_pretrained"),
)
