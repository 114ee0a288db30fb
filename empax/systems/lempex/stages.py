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
from empax.data.store import PrepareSettings, check_candidates, check_prepared, load_instances, may_load, run_tokenizer
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
from empax.parts.generator.stages import answerer_of, overlaid, pretrained
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
    """Raises ConfigError unless earlier stages provide the exemplars, and judges and labels of weighted mechanisms.

    Judges must read the generator's tokens, and contexts must not be cut.
    """
    check_prepared(run)
    settings = run.shared_settings(LempexSettings)
    check_contexts(run)
    if stage.index:
        check_candidates(run, stage.index, settings.passages)
    if stage.losses == "none":
        return
    annotate = next((one for one in map(run.named, run.before()) if one.kind == "annotate"), None)
    if annotate is None:
        raise ConfigError(
            f"config.run has no stage of kind 'annotate' before {run.stage!r}, whose losses = {stage.losses!r} take "
            'its labels; add one, or set losses = "none".'
        )
    wanted = stage.weights.mechanisms()
    if lost := [name for name in wanted if name in annotate.settings.left_out]:
        raise ConfigError(
            f"config.{annotate.name}.left_out names {lost[0]}, so config.{run.stage}.weights.{lost[0]} = "
            f"{getattr(stage.weights, lost[0])} has no labels to learn from; name a classifier of it in "
            f"config.{annotate.name}.classifiers and take it out there, or set the weight to 0."
        )
    if stage.losses != "judges":
        return
    judges = [run.earlier("judges", name, tasks=("attributes.classifier",)).settings for name in stage.judges]
    covered = [mechanism for judge in judges for mechanism in judge.mechanisms]
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
    encoders = {name: run.named(name).settings.encoder for name in (*stage.judges, stage.sentiment) if name}
    prepared = run.settings("prepare", PrepareSettings).tokenizer
    models = (prepared, *encoders.values())
    if not all(may_load(run, model.pretrained) for model in models if model.pretrained):
        return
    tokenizer = run_tokenizer(run, planned=True)
    for name, encoder in encoders.items():
        # A preset has no vocabulary, only its size with padding.
        own = load_stage_encoder(encoder, run, with_params=False, planned=not encoder.pretrained).tokenizer
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
    if stage.losses == "none":
        return 0
    most = [run.settings(name, ClassifierTaskSettings).max_tokens for name in stage.judges]
    return min(most, default=2 * run.shared_settings(LempexSettings).layout.max_target_tokens)


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


def started(params: Params, loaded: Params, *, pretrained: bool) -> Params:
    """Returns the parameters with the weights `loaded` in the generator and in the encoder of exemplars.

    A pretrained model starts unchanged: its speaker embeddings are zeros.
    """
    found = overlaid(params, {"model": loaded, "fusion": {"encoder": loaded}})
    if pretrained and "speakers" in found:
        found = {**found, "speakers": np.zeros(found["speakers"].shape, np.float32)}
    return found


def build_generator(stage: LempexTaskSettings, run: RunContext) -> Assembly:
    parts = GeneratorParts.of(run, with_params=False)
    task = generator_task(parts, stage, run, empathy_losses(stage, run))
    form = TurnForm(parts.tokenizer, parts.settings.layout)
    corpus = Corpus.of(load_instances(run, "train"), form) if stage.index else None

    def examples(split: str, limit: int = 0, judged: int = 0) -> LempexExamples:
        if corpus is None:
            return LempexExamples(draw(load_instances(run, split), limit), form, judged=judged)
        instances, ids = searched_instances(run, stage.index, split, limit)  # only those that have been searched
        shown = ids[:, : parts.settings.passages]
        return LempexExamples(instances, form, corpus=corpus, candidates=shown, judged=judged)

    known = {"judges": load_judges(stage, run)} if stage.losses == "judges" else {}

    def initial(params: Params) -> Params:
        settings = parts.settings.generator
        loaded = pretrained(run) if settings.loads_weights else {}
        return overlaid(started(params, loaded, pretrained=bool(settings.pretrained)), known)

    return Assembly(
        task,
        examples("train", judged=judged_tokens(stage, run)),
        examples("validation", stage.max_validation_examples),
        frozen=known if stage.frozen_judges else {},
        initial=initial,
    )


def sketch_generator(stage: LempexTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts, layout = GeneratorParts.of(run, planned=True), run.shared_settings(LempexSettings).layout
    empathy = empathy_losses(stage, run, planned=True)
    task = generator_task(parts, stage, run, empathy)
    sizes = {"B": batch_size, "S": length, "T": layout.max_target_tokens}
    if stage.index:
        sizes |= {"K": parts.settings.passages, "P": layout.max_passage_tokens}
    if empathy is not None:
        sizes |= {"J": judged_length(length, sizes["T"], judged_tokens(stage, run)), "R": sizes["T"] + 1, "C": 3}
    absent = ("other", "other_mask", *(("judged_start", "compound") if empathy is None else ()))
    batch = dataclasses.replace(shapes_of(LempexBatch, **sizes), **dict.fromkeys(absent))
    if empathy is None or stage.losses != "judges" or not stage.frozen_judges:
        return Sketch(task, batch)
    return Sketch(task, batch, {"judges": jax.eval_shape(empathy.init_judges, jax.random.key(0), batch)})


class LempexSearch(ExemplarSearch):
    """Shows exemplars as the generator reads them, without cutting references."""

    def show(self, instances: Sequence[Instance], rows: np.ndarray, scores: np.ndarray) -> AnswerExamples:
        form = TurnForm(self.parts.tokenizer, self.parts.for_answers().settings.layout)
        examples = LempexExamples(instances, form, corpus=self.corpus, candidates=rows, others=len(instances) > 1)
        return AnswerExamples(examples, self.notes(rows, scores))


def answer_generator(stage: LempexTaskSettings, run: RunContext, options: AnswerOptions) -> Answerer:
    """Builds the answerer of a finished stage, with exemplars from the index that it was trained with."""
    parts = GeneratorParts.of(run, with_params=False)
    task = generator_task(parts, stage, run, None)
    saved = load_params(run.files.stage(options.stage), options.params)
    params = {name: leaf for name, leaf in saved.items() if name not in ("judges", "head")}
    form = TurnForm(parts.tokenizer, parts.for_answers().settings.layout)
    if stage.index:
        corpus = Corpus.of(load_instances(run, "train"), form)
        search = LempexSearch.of(run, parts, stage.index, buckets=options.buckets, corpus=corpus)
        return answerer_of(parts, task, params, search, options)

    def alone(instances: Sequence[Instance]) -> AnswerExamples:
        return AnswerExamples(LempexExamples(instances, form), [{} for _ in instances])

    return answerer_of(parts, task, params, alone, options)


GENERATOR = TaskSpec(
    LempexTaskSettings,
    check_generator,
    build_generator,
    sketch_generator,
    answer=answer_generator,
    check_evaluation=lambda _, run: check_contexts(run),
    reads_exemplars=lambda stage: bool(stage.index),
    unread=("decoding", "retriever", "key", "towers", "key_pretrained"),
)
