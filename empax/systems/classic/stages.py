"""The stages of the classic systems: checks, training, plans, answers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.shapes import shapes_of
from empax.core.system import AnswerOptions, Assembly, RunContext, Sketch, TaskSpec
from empax.core.types import Instance, Params
from empax.data.batches import draw
from empax.data.knowledge import SOCIAL_RELATIONS, facts_of, told
from empax.data.store import PrepareSettings, check_prepared, has_emotions, load_instances, run_tokenizer
from empax.parts.generator.answerer import Answerer, AnswerExamples
from empax.parts.generator.checks import check_contexts
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.parts import MAX_REFERENCE_TOKENS
from empax.parts.generator.word_level import check_words, initial_words, log_frequencies, word_counts
from empax.parts.knowledge.finder import check_knowledge, find_finder, with_facts
from empax.systems.classic.adversary import LOSSES
from empax.systems.classic.concepts import ConceptPicker
from empax.systems.classic.examples import ClassicExamples
from empax.systems.classic.lexicons import check_lexicon, rated_words
from empax.systems.classic.model import Classic
from empax.systems.classic.readers import ClassicBatch
from empax.systems.classic.settings import ClassicSettings, ClassicTaskSettings
from empax.systems.classic.task import ClassicTask
from empax.training.checkpoint import load_params
from empax.training.settings import steps_on

_ANSWERS_AT_ONCE = 64
TOKEN_LOSSES = ("nll", "frequency")
"""Losses of every model."""


def check_system(run: RunContext) -> None:
    """Raises ConfigError unless the tokenizer splits into words, and the files that answers need, too, exist."""
    check_prepared(run)
    settings = run.shared_settings(ClassicSettings)
    if run.settings("prepare", PrepareSettings).tokenizer.kind != "words":
        raise ConfigError('config.prepare.tokenizer.kind must be "words" for the models of config.classic; change it.')
    if settings.reads_lexicon:
        check_lexicon("lexicon", settings.lexicon)
    if settings.reads_concepts:
        check_lexicon("concepts.intensity", settings.concepts.intensity)


def check_generator(stage: ClassicTaskSettings, run: RunContext) -> None:
    """Raises ConfigError if a loss has no weight, vectors, facts or a stage are missing, or contexts would be cut."""
    check_prepared(run)
    settings, where = run.shared_settings(ClassicSettings), f"config.{run.stage}.weights"
    check_words(settings.vectors, settings.d_model)
    check_contexts(run)
    losses = settings.losses
    readers = settings.fact_readers.items()
    check_knowledge(run, **{kind: f"{run.shared}.readers without {', '.join(names)}" for kind, names in readers})
    if (named := stage.weights.keys() - TOKEN_LOSSES) != set(losses):
        raise ConfigError(
            f"{where} names {', '.join(sorted(named)) or 'none'}, but must name the losses of {run.shared}.readers, "
            f"{', '.join(losses) or 'none'} (0 = it teaches nothing), and may name {' and '.join(TOKEN_LOSSES)}."
        )
    if stage.weights.get("nll") == 0:
        idle = [name for name in ("frequency", "attention", *LOSSES) if stage.weights.get(name)]
        if idle:
            raise ConfigError(
                f"{where}.nll = 0 decodes nothing, but {idle[0]} = {stage.weights[idle[0]]} learns from decoded text; "
                f"set {where}.nll above 0, or {idle[0]} to 0."
            )
    if stage.weights.get("nll") == 0 and stage.weights.get("emotion"):
        for split in ("train", "validation"):
            if not has_emotions(run.plan.data, split):
                raise ConfigError(
                    f"config.{run.stage} learns only emotions, but no dialogue of the split {split!r} has one; add "
                    "them, or take configs/classic.py:transformer."
                )
    if stage.start_from:
        run.earlier("start_from", stage.start_from, tasks=("classic.generator",))
    if stage.prepend:
        other = run.earlier("prepend", stage.prepend, tasks=("classic.generator",)).settings
        if not other.weights.get("emotion"):
            raise ConfigError(
                f"config.{run.stage}.prepend = {stage.prepend!r} learns no emotions; set its weights.emotion above 0, "
                'with "emotion" among the readers.'
            )


@dataclasses.dataclass(frozen=True)
class ClassicParts:
    """The parts shared by all stages."""

    settings: ClassicSettings
    tokenizer: Tokenizer

    @classmethod
    def of(cls, run: RunContext, *, planned: bool = False) -> ClassicParts:
        return cls(run.shared_settings(ClassicSettings), run_tokenizer(run, planned=planned))

    def task(self, stage: ClassicTaskSettings) -> ClassicTask:
        settings, tokenizer = self.settings, self.tokenizer
        config = settings.config(tokenizer.vocab_size, tokenizer.start_id)
        return ClassicTask(
            Classic(config, settings.reader_settings(), settings.adversary, settings.copies),
            Decoder.of(tokenizer, settings.decoding),
            stage.weights,
            label_smoothing=stage.label_smoothing,
            heads=("emotion",) if stage.weights.get("emotion") else (),
        )

    def examples(
        self, instances: Sequence[Instance], emotions: Sequence[str] | None, **options: Any
    ) -> ClassicExamples:
        """Builds the examples; `options` are those of `ClassicExamples`."""
        picker = self.picker if self.settings.reads_concepts else None
        given = instances, self.tokenizer, self.settings, self.lexicon
        return ClassicExamples(*given, emotions=emotions, picker=picker, **options)

    @functools.cached_property
    def picker(self) -> ConceptPicker:
        return ConceptPicker.of(self.settings.concepts, self.tokenizer)

    def word_weights(self, targets: Sequence[Sequence[int]]) -> Float[np.ndarray, " V"]:
        r"""Returns the weight of each word in the loss "frequency": lower for frequent words, 0 for the end token.

        .. math:: w_v \propto 1 - f_v / \max_u f_u

        with a mean of 1 over the vocabulary. Source: Sabour et al. 2022 (CEM), after Jiang et al. 2019. Departure: its
        code counts the words that the model generates, but no end tokens, which then have the highest weight.
        """
        size, end = self.tokenizer.vocab_size, self.tokenizer.eos_id
        counts = word_counts(targets, size)
        counts[end] = 0
        weights = 1.0 - counts / max(counts.max(), 1)
        weights *= size / weights.sum()
        weights[end] = 0.0
        return weights.astype(np.float32)

    @functools.cached_property
    def lexicon(self) -> Bool[np.ndarray, " V"]:
        """A mask of the ids that are emotion words; all False if no part reads the lexicon."""
        if not self.settings.reads_lexicon:
            return np.zeros(self.tokenizer.vocab_size, bool)
        return rated_words("lexicon", self.settings.lexicon, self.tokenizer) > 0

    def initial(self, params: Params, targets: Sequence[Sequence[int]], label_smoothing: float) -> Params:
        """Returns `params` with the frequencies of words as output bias, and with the word vectors, if any."""
        params = {**params, "output_bias": log_frequencies(targets, self.tokenizer.vocab_size, label_smoothing)}
        if not self.settings.vectors:
            return params
        table = initial_words(self.settings.vectors, self.tokenizer, self.settings.d_model)
        return {**params, "core": {**params["core"], "token_embedding": table}}


def build_generator(stage: ClassicTaskSettings, run: RunContext) -> Assembly:
    parts, emotions_of = ClassicParts.of(run), _prepended(stage, run)
    train, validation = load_instances(run, "train"), load_instances(run, "validation")
    validation = draw(validation, stage.max_validation_examples)
    learnt = parts.examples(train, emotions_of(train), train=True)
    held_out = parts.examples(validation, emotions_of(validation))
    frozen: Params = {"lexicon": parts.lexicon} if parts.settings.adversary is not None else {}
    if stage.weights.get("frequency"):
        frozen["frequency"] = parts.word_weights(learnt.targets)
    task = _with_shorter_teacher(parts, len(train), run).task(stage)
    return Assembly(task, learnt, held_out, frozen=frozen, initial=_initial(stage, parts, run, learnt.targets))


def _with_shorter_teacher(parts: ClassicParts, num_examples: int, run: RunContext) -> ClassicParts:
    """Scales the decay of the listeners' teacher to the stage's number of steps on this corpus."""
    loop, listeners = run.named(run.stage).loop, parts.settings.listeners
    decay = round(listeners.teacher_decay_steps * steps_on(run.plan.data, loop, num_examples) / loop.steps)
    listeners = dataclasses.replace(listeners, teacher_decay_steps=max(decay, 1))
    return dataclasses.replace(parts, settings=dataclasses.replace(parts.settings, listeners=listeners))


def _initial(
    stage: ClassicTaskSettings, parts: ClassicParts, run: RunContext, targets: Sequence[Sequence[int]]
) -> Callable[[Params], Params]:
    if stage.start_from:
        return lambda _: load_params(run.files.stage(stage.start_from))
    return lambda params: parts.initial(params, targets, stage.label_smoothing)


def _prepended(stage: ClassicTaskSettings, run: RunContext) -> Callable[[Sequence[Instance]], list[str] | None]:
    """Returns a function from instances to the emotions prepended to their contexts; it gives None if none are."""
    if not stage.prepend:
        return lambda instances: None
    other = run.settings(stage.prepend, ClassicTaskSettings)
    classifier = answer_generator(other, run, AnswerOptions(stage.prepend, "", run.named(stage.prepend).loop.buckets))

    def emotions_of(instances: Sequence[Instance]) -> list[str]:
        found = classifier.emotions(instances, batch_size=min(_ANSWERS_AT_ONCE, len(instances)))
        return [by_head["emotion"] for by_head in found]

    return emotions_of


def sketch_generator(stage: ClassicTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = ClassicParts.of(run, planned=True)
    settings, words = parts.settings, (parts.tokenizer.vocab_size,)
    sizes, frozen = {"B": batch_size, "S": length, "T": settings.max_target_tokens}, {}
    if settings.adversary is not None:
        sizes["F"] = settings.max_target_tokens
        frozen["lexicon"] = jax.ShapeDtypeStruct(words, np.bool_)
    if stage.weights.get("frequency"):
        frozen["frequency"] = jax.ShapeDtypeStruct(words, np.float32)
    if "refinement" in settings.readers:
        sizes |= {"M": len(SOCIAL_RELATIONS), "W": settings.facts_tokens}
    aligned, most = settings.alignment, settings.concepts.most
    there = {
        "step": False,
        "cognition": "alignment" in settings.readers,
        "intensity": settings.reads_concepts,
        "concepts": settings.reads_concepts and most,
    }
    sizes |= {"K": most, "U": 1 + aligned.clauses, "P": aligned.facts, "X": aligned.tokens, "Y": aligned.tail_tokens}
    batch = shapes_of(ClassicBatch, **sizes)
    absent = [name for name, wanted in there.items() if not wanted]
    return Sketch(parts.task(stage), dataclasses.replace(batch, **dict.fromkeys(absent)), frozen)


def answer_generator(stage: ClassicTaskSettings, run: RunContext, options: AnswerOptions) -> Answerer:
    """Builds the answerer of a finished stage."""
    parts, emotions_of = ClassicParts.of(run), _prepended(stage, run)
    reads, finder = bool(parts.settings.fact_readers), functools.cache(lambda: find_finder(run))

    def make(instances: Sequence[Instance]) -> AnswerExamples:
        emotions = emotions_of(instances)
        if reads:
            instances = with_facts(finder, instances)
        # References are not cut: the likelihood covers all of their words.
        made = parts.examples(instances, emotions, max_target_tokens=MAX_REFERENCE_TOKENS)
        notes: list[dict[str, Any]] = [{"prepended": e} for e in emotions] if emotions else [{} for _ in instances]
        if reads:
            notes = [{**note, "facts": told(facts_of(i))} for note, i in zip(notes, instances, strict=True)]
        return AnswerExamples(made, notes)

    return Answerer(
        parts.task(stage),
        load_params(run.files.stage(options.stage), options.params),
        make,
        parts.tokenizer,
        options.buckets or (parts.settings.max_context_tokens,),
        mesh=run.plan.options.mesh,
        single=not options.buckets,
    )


GENERATOR = TaskSpec(
    ClassicTaskSettings,
    check_generator,
    build_generator,
    sketch_generator,
    answer=answer_generator,
    check_evaluation=lambda _, run: check_contexts(run),
    unread=("decoding",),
)
"""Has no export: no other library has these models."""
