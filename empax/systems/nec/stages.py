"""NEC's stages: build its tasks from settings and files, and the answerers of trained stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from empax.core.config import ConfigError
from empax.core.shapes import shapes_of
from empax.core.system import AnswerOptions, Assembly, RunContext, Sketch
from empax.core.types import Instance, Params
from empax.data.batches import draw
from empax.data.knowledge import SOCIAL_RELATIONS, told
from empax.data.sources import TaggedForm
from empax.data.store import check_prepared, has_emotions, load_instances
from empax.decoding.settings import DecodeSettings
from empax.models.decoder_only import DecoderOnly
from empax.models.transformer import EncoderDecoder
from empax.parts.encoder.stages import check_encoder
from empax.parts.generator import checks
from empax.parts.generator.answerer import Answerer, AnswerExamples
from empax.parts.generator.parts import GeneratorParts
from empax.parts.generator.stages import answerer_of, overlaid, pretrained
from empax.parts.generator.trained import Trained, check_adapters, generator_to_export
from empax.parts.knowledge.finder import check_knowledge, find_finder, with_facts
from empax.systems.nec.examples import QUERY, FactForm, NecBatch, NecExamples, Negatives, facts_read
from empax.systems.nec.facts import Chooser
from empax.systems.nec.settings import (
    SOCIAL,
    CandidateSettings,
    ContrastiveTaskSettings,
    NecSettings,
    NecTaskSettings,
)
from empax.systems.nec.tasks import Contrastive, Nec
from empax.training.checkpoint import load_params

TRAINED = ("generator", "contrastive")


@dataclasses.dataclass(frozen=True)
class NecParts:
    """The parts of NEC's stages."""

    settings: NecSettings
    dialogue: GeneratorParts

    @classmethod
    def of(cls, run: RunContext, *, planned: bool = False) -> NecParts:
        """Returns the parts of `run`, without weights."""
        parts = GeneratorParts.of(run, with_params=False, planned=planned)
        settings, model = run.shared_settings(NecSettings), parts.generator.model
        assert isinstance(model, EncoderDecoder)
        if settings.social:
            model = EncoderDecoder(dataclasses.replace(model.config, memories=(SOCIAL,)))
        return cls(settings, dataclasses.replace(parts, generator=dataclasses.replace(parts.generator, model=model)))

    def form(self, parts: GeneratorParts) -> TaggedForm:
        """Returns the form of the sources; without facts about things, the form of other systems."""
        form = parts.form()
        assert isinstance(form, TaggedForm)
        return _with_facts(form, self.settings) if self.settings.entity else form

    def examples(
        self, instances: Sequence[Instance], form: TaggedForm, negatives: Negatives | None = None
    ) -> NecExamples:
        """Builds the examples of instances with their chosen facts."""
        tokens = self.settings.social_tokens if self.settings.social else 0
        return NecExamples(instances, form, social_tokens=tokens, negatives=negatives)

    def task(self, stage: NecTaskSettings) -> Nec:
        """Builds the task: likelihood alone, or with contrast if the stage has it."""
        model, decoding = self.dialogue.generator.model, self.dialogue.settings.decoding
        if not isinstance(stage, ContrastiveTaskSettings):
            decoder = self.dialogue.decoder(_in_search_order(decoding))
            return Nec(model, decoder, self.settings.social, label_smoothing=stage.label_smoothing)
        contrast = stage.contrast
        explorer = self.dialogue.decoder(exploring(contrast, decoding)) if contrast.own else None
        given = model, self.dialogue.decoder(decoding), self.settings.social, explorer
        return Contrastive(*given, label_smoothing=stage.label_smoothing, contrast=contrast)


def exploring(contrast: CandidateSettings, decoding: DecodeSettings) -> DecodeSettings:
    """Returns the beam search for the model's own candidates, one beam each; they start as answers do."""
    groups = contrast.own if contrast.diversity_penalty else 1
    return DecodeSettings(
        "beam",
        contrast.own_tokens,
        num_beams=contrast.own,
        num_beam_groups=groups,
        diversity_penalty=contrast.diversity_penalty,
        first_token=decoding.first_token,
    )


def check_system(run: RunContext) -> None:
    """Checks the generator as `checks.check_system` does, and that NEC supports it."""
    checks.check_system(run)
    settings, parts = run.shared_settings(NecSettings), checks.check_models(run)
    decoder_only = parts is not None and isinstance(parts.generator.model, DecoderOnly)
    if settings.lora is not None or settings.form != "dialogue" or decoder_only:
        raise ConfigError(
            "NEC adds layers to a decoder and facts to a source, so it does not work with adapters, form = 'plain' or "
            f"decoder-only models; set {run.shared}.lora = None, form = 'dialogue' and an encoder-decoder."
        )


def check_nec(stage: NecTaskSettings, run: RunContext) -> None:
    """Raises ConfigError unless facts, selector, ranker and the stage to start from exist, and sources fit buckets."""
    check_prepared(run)
    settings = run.shared_settings(NecSettings)
    check_lengths(stage, run)
    check_knowledge(run, **{kind: f"{run.shared}.{kind} to False" for kind in settings.kinds_of_facts})
    if settings.kinds_of_facts and settings.selector.pretrained:
        check_encoder(settings.selector, run)
    if settings.ranker:
        run.earlier(f"{run.shared}.ranker", settings.ranker, tasks=("ranker",))
    if stage.start_from:
        run.earlier("start_from", stage.start_from, tasks=TRAINED)


def check_lengths(stage: NecTaskSettings, run: RunContext) -> None:
    """Raises ConfigError if the buckets have no room for a whole context and its facts, or the facts have none."""
    settings = run.shared_settings(NecSettings)
    if not settings.entity:
        checks.check_layout(run)
        return
    form = None if (parts := checks.check_models(run)) is None else parts.form()
    if not isinstance(form, TaggedForm):
        return
    layout, form = settings.layout, _with_facts(form, settings)
    if layout.max_passage_tokens <= (taken := len(form.prompt)):
        raise ConfigError(
            f"{run.shared}.layout.max_passage_tokens = {layout.max_passage_tokens} has no room for a fact about "
            f"things, whose prompt takes about {taken}; raise it to {taken + 40}, or set {run.shared}.entity to False."
        )
    checks.check_contexts(run, beside=form.beside)


def _with_facts(form: TaggedForm, settings: NecSettings) -> FactForm:
    return FactForm(form.tokenizer, form.layout, form.attributes, framed=form.framed, facts_as=settings.facts_as)


def check_contrastive(stage: ContrastiveTaskSettings, run: RunContext) -> None:
    """Checks as `check_nec` does, and that there are candidates, on validation too, and of other emotions if asked."""
    check_nec(stage, run)
    contrast = stage.contrast
    given = contrast.in_batch or contrast.different or contrast.frequent
    if not given and not contrast.own:
        raise ConfigError(
            f"config.{run.stage}.contrast has no candidates; set in_batch to True, or different, frequent or own above "
            "0."
        )
    if not given and run.named(run.stage).loop.best_metric == "loss":
        raise ConfigError(
            f"config.{run.stage}.best_metric = 'loss': the only candidates are the model's own, which are not made on "
            "validation, where the contrast is 0; set it to 'nll', or contrast.in_batch to True."
        )
    if contrast.different and not has_emotions(run.plan.data, "train", least=2):
        raise ConfigError(
            f"config.{run.stage}.contrast.different = {contrast.different}: candidates have other emotions, but the "
            "dialogues of the split 'train' have fewer than two; add emotions, or set it to 0."
        )


def build_nec(stage: NecTaskSettings, run: RunContext) -> Assembly:
    parts = NecParts.of(run)
    form = parts.form(parts.dialogue)
    splits = {split: load_instances(run, split) for split in ("train", "validation")}
    splits["validation"] = draw(splits["validation"], stage.max_validation_examples)
    negatives = None
    if isinstance(stage, ContrastiveTaskSettings):
        counts = {"different": stage.contrast.different, "frequent": stage.contrast.frequent}
        longest = parts.settings.layout.max_target_tokens
        negatives = Negatives.of(splits["train"], parts.dialogue.tokenizer, longest, **counts)
    if parts.settings.kinds_of_facts:
        choose = Chooser.of(run)
        splits = {split: choose(instances) for split, instances in splits.items()}
    train, validation = (parts.examples(splits[split], form, negatives) for split in ("train", "validation"))
    return Assembly(parts.task(stage), train, validation, initial=_initial(stage, run))


def _initial(stage: NecTaskSettings, run: RunContext) -> Callable[[Params], Params] | None:
    settings = run.shared_settings(NecSettings)
    if stage.start_from:
        return lambda params: overlaid(params, load_params(run.files.stage(stage.start_from)))
    if not settings.generator.loads_weights:
        return None

    def initial(params: Params) -> Params:
        known = pretrained(run)
        # Departure: NEC's code intends to initialize the second encoder from the first, but never does.
        return overlaid(params, {"model": known, "social": known})

    return initial


def answer_nec(stage: NecTaskSettings, run: RunContext, options: AnswerOptions) -> Answerer:
    """Builds the answerer of a finished stage; the facts of new contexts are retrieved when they are answered."""
    parts = NecParts.of(run)
    params = load_params(run.files.stage(options.stage), options.params)
    form = parts.form(parts.dialogue.trained_at(run.at(options.stage)).for_answers())
    chooser = functools.cache(lambda: Chooser.of(run))
    finder = functools.cache(lambda: find_finder(run))

    def make_examples(instances: Sequence[Instance]) -> AnswerExamples:
        if not parts.settings.kinds_of_facts:
            return AnswerExamples(parts.examples(instances, form), [{} for _ in instances])
        chosen = chooser()(with_facts(finder, instances))
        return AnswerExamples(parts.examples(chosen, form), [{"facts": told(facts_read(form, i))} for i in chosen])

    return answerer_of(parts.dialogue, parts.task(stage), params, make_examples, options)


def trained_nec(stage: NecTaskSettings, run: RunContext, adapters: bool) -> Trained:
    """Returns the model without the parts that read facts about people: it answers as if there were no facts.

    `adapters` are refused, since it has none.
    """
    check_adapters(adapters, run, "generator")
    parts = GeneratorParts.of(run, with_params=False)
    params = _without_memory(load_params(run.directory)["model"])
    found = generator_to_export(parts, run.stage, params, passages=0)
    before = QUERY if run.shared_settings(NecSettings).entity else ""
    return dataclasses.replace(found, decoding=_in_search_order(found.decoding), before=before)


def _without_memory(params: Params) -> Params:
    if not isinstance(params, Mapping):
        return params
    return {name: _without_memory(leaf) for name, leaf in params.items() if name != SOCIAL}


def _in_search_order(decoding: DecodeSettings) -> DecodeSettings:
    """Returns `decoding` without reranking by similarity, for a stage that did not learn similarity."""
    return dataclasses.replace(decoding, rerank="") if decoding.rerank == "similarity" else decoding


def sketch_nec(stage: NecTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = NecParts.of(run, planned=True)
    settings, sizes = parts.settings, {"B": batch_size, "S": length, "T": parts.settings.layout.max_target_tokens}
    if settings.social:
        sizes |= {"M": len(SOCIAL_RELATIONS), "F": settings.social_tokens}
    if not isinstance(stage, ContrastiveTaskSettings):
        return Sketch(parts.task(stage), shapes_of(NecBatch, **sizes))
    contrast = stage.contrast
    sizes |= {letter: n for letter, n in (("N", contrast.different), ("J", contrast.frequent)) if n}
    given = shapes_of(NecBatch, **sizes)
    own = {"K": contrast.own, "U": contrast.own_tokens} if contrast.own else {}
    batch = shapes_of(NecBatch, **sizes, **own)
    return Sketch(parts.task(stage), batch, given=given, answer_tokens=contrast.own_tokens)
