"""The stage "generator": builds the task, its examples and its answerer from the settings and the work directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from empax.core.config import ConfigError
from empax.core.files import DataError, read_json, write_json
from empax.core.manifest import remedy
from empax.core.protocols import Tokenizer
from empax.core.settings import cache_dir
from empax.core.shapes import shapes_of
from empax.core.system import AnswerOptions, Assembly, RunContext, Sketch
from empax.core.types import EMOTIONS, Instance, Params
from empax.data.batches import draw
from empax.data.store import PrepareSettings, check_prepared, load_instances, run_tokenizer
from empax.interop.pretrained_encoders import LoadedEncoder
from empax.models.transformer import EncoderDecoder
from empax.parts.attributes import check_identifiers, load_identifiers
from empax.parts.attributes.reasons import ReasonAnnotator, ReasonTaskSettings, load_finder
from empax.parts.encoder.stages import load_stage_encoder
from empax.parts.generator.answerer import Answerer, AnswerExamples
from empax.parts.generator.checks import check_contexts
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.parts import MAX_REFERENCE_TOKENS
from empax.parts.generator.word_level import check_words, initial_words, log_frequencies
from empax.systems.reflectdiffu.examples import NO_PRIOR, ReflectBatch, ReflectExamples
from empax.systems.reflectdiffu.intents import check_pieces, load_guesser
from empax.systems.reflectdiffu.labels import (
    INTENTS,
    IntentTable,
    intent_ids,
    intent_report,
    load_intents,
    majority_by_turn,
    references,
)
from empax.systems.reflectdiffu.pointer_generator import PointerGenerator
from empax.systems.reflectdiffu.reinforced import ReinforcedReflectDiffu, ReplyEmpathy
from empax.systems.reflectdiffu.settings import GeneratorTaskSettings, ReflectSettings
from empax.systems.reflectdiffu.tasks import ReflectDiffu
from empax.training.checkpoint import load_params

_INTENTS = "intents.json"


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of the stage.

    Attributes:
      pieces: the annotator's encoder; None = w/o ERA.
      intents: intents of the responses, by instance id.
      references: the reference intents of each emotion.
    """

    stage: GeneratorTaskSettings
    settings: ReflectSettings
    tokenizer: Tokenizer
    pieces: LoadedEncoder | None
    intents: Mapping[str, str]
    references: Mapping[str, Sequence[str]]

    @classmethod
    def of(
        cls,
        stage: GeneratorTaskSettings,
        run: RunContext,
        intents: Mapping[str, str],
        found: Mapping[str, Sequence[str]],
        *,
        planned: bool = False,
    ) -> Parts:
        """Returns the parts of a stage, with its intents and reference intents; `planned`: without any data."""
        pieces = None
        if stage.reasons:
            encoder = run.settings(stage.reasons, ReasonTaskSettings).encoder
            pieces = load_stage_encoder(encoder, run, with_params=False, planned=planned)
        settings, tokenizer = run.shared_settings(ReflectSettings), run_tokenizer(run, planned=planned)
        return cls(stage, settings, tokenizer, pieces, intents, found)

    def task(self) -> ReflectDiffu:
        t, settings, stage = self.tokenizer, self.settings, self.stage
        plain = EncoderDecoder(settings.model.config(t.vocab_size, t.start_id, tie_embeddings=False))
        actions = tuple(tuple(int(i) for i in intent_ids(self.references[emotion])) for emotion in EMOTIONS)
        make = ReinforcedReflectDiffu if stage.reinforced else ReflectDiffu
        return make(
            PointerGenerator(plain, self.slots, t.unk_id or 0) if stage.copying else plain,
            Decoder.of(t, settings.decoding),
            stage,
            None if self.pieces is None else ReasonAnnotator(self.pieces.model.encoder),
            actions,
            heads=("generator",) if stage.emotion_weight else (),
        )

    @property
    def slots(self) -> int:
        """The number of ids after the vocabulary; 0 if the vocabulary has no unknown word."""
        return self.stage.slots if self.stage.copying and self.tokenizer.unk_id is not None else 0

    def initial(self, params: Params, targets: Sequence[Sequence[int]]) -> Params:
        """Returns `params` with the frequencies of words as output bias, and with the word vectors, if any."""
        settings, tokenizer, model, copying = self.settings.model, self.tokenizer, params["model"], self.stage.copying
        inner = {**(model["model"] if copying else model)}
        inner["output_bias"] = log_frequencies(targets, tokenizer.vocab_size)
        if settings.vectors:
            inner["token_embedding"] = initial_words(settings.vectors, tokenizer, settings.d_model)
        return {**params, "model": {**model, "model": inner} if copying else inner}

    def examples(self, run: RunContext, max_target_tokens: int = 0) -> Callable[[Sequence[Instance]], ReflectExamples]:
        """Returns a function from instances to examples; without a classifier, the prior of intents is uniform."""
        stage = self.stage.intents
        guess = load_guesser(run, stage) if stage else lambda given: np.stack([NO_PRIOR] * len(given))
        options: Any = {
            "piece_tokenizer": None if self.pieces is None else self.pieces.tokenizer,
            "slots": self.slots,
            "max_target_tokens": max_target_tokens,
        }
        return lambda instances: ReflectExamples(
            instances, self.tokenizer, self.settings, guess(instances), self.intents, **options
        )


def _frozen(stage: GeneratorTaskSettings, run: RunContext) -> Params:
    return {"reasons": load_params(run.files.stage(stage.reasons))} if stage.reasons else {}


def check_generator(stage: GeneratorTaskSettings, run: RunContext) -> None:
    """Raises ConfigError if a stage that it reads, intents or word vectors are missing, or contexts would be cut."""
    check_prepared(run)
    model = run.shared_settings(ReflectSettings).model
    check_words(model.vectors, model.d_model)
    check_contexts(run)
    if stage.reasons:
        run.earlier("reasons", stage.reasons, tasks=("reflectdiffu.reasons", "attributes.reasons"))
        check_pieces(run, stage.reasons)
    if stage.reward == "empathy":
        check_identifiers(run, "judges", stage.judges)
    if stage.intents:
        run.earlier("intents", stage.intents, tasks=("reflectdiffu.intents",))
    if stage.reinforced and model.dropout:
        raise ConfigError(
            f"{run.shared}.model.dropout = {model.dropout}: answers are rated without dropout, so the policy cannot "
            f"learn with it; set it to 0, or config.{run.stage}.policy_weight to 0."
        )
    load_intents(run.plan.data)


def check_system(run: RunContext) -> None:
    """Checks that the tokenizer marks turns."""
    check_prepared(run)
    if not run.settings("prepare", PrepareSettings).tokenizer.tags:
        raise ConfigError("config.prepare.tokenizer.tags = False, but ReflectDiffu marks who speaks; set it to True.")


def build_generator(stage: GeneratorTaskSettings, run: RunContext) -> Assembly:
    instances, validation, asked = (load_instances(run, split) for split in ("train", "validation", "test"))
    intents = load_intents(run.plan.data)
    table = IntentTable.of(instances, intents)
    parts = Parts.of(stage, run, intents, references(stage.actions, table, stage.num_actions))
    examples = parts.examples(run)
    train, task = examples(instances), parts.task()

    found = intent_report(table, IntentTable.of(asked, intents))
    found["majority_by_turn"] = majority_by_turn(instances, asked, intents)
    write_json(run.directory / _INTENTS, {**found, "references": parts.references})
    if isinstance(task, ReinforcedReflectDiffu) and stage.reward == "empathy":
        judges = load_identifiers(run, stage.judges)
        levels = judges.gold(instances, cache_dir() / "levels")
        empathy = ReplyEmpathy(judges, parts.tokenizer, instances, train.words, levels)
        task = dataclasses.replace(task, empathy=empathy)
    return Assembly(
        task,
        train,
        examples(draw(validation, stage.max_validation_examples)),
        frozen=_frozen(stage, run),
        initial=lambda params: parts.initial(params, train.targets),
    )


def sketch_generator(stage: GeneratorTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    unknown = references(stage.actions, IntentTable.of((), {}), stage.num_actions)
    parts = Parts.of(stage, run, {}, unknown, planned=True)
    task, settings = parts.task(), parts.settings
    sizes = {"B": batch_size, "S": length, "T": settings.max_target_tokens, "I": len(INTENTS)}
    if parts.pieces is not None:
        encoder: Any = parts.pieces.model.encoder
        sizes |= {"P": settings.max_piece_tokens, "R": encoder.config.d_model}
    if stage.mimicry:
        sizes["D"] = settings.model.d_model
    absent = ("reply",) if stage.reasons else ("reply", "place", "reasons")
    whole = dataclasses.replace(shapes_of(ReflectBatch, **sizes), **dict.fromkeys(absent))
    later = ("reasoning", "reasons", "noise", "action", "log_prob", "reward", "advantage")
    given = dataclasses.replace(whole, **dict.fromkeys(later))
    frozen: Params = {}
    if task.annotator is not None:
        made = jax.eval_shape(task.annotator.init, jax.random.key(0), given.piece, given.piece_mask)
        frozen = {"reasons": made["params"]}
    return Sketch(task, whole if stage.reinforced else given, frozen, given=given)


def answer_generator(stage: GeneratorTaskSettings, run: RunContext, options: AnswerOptions) -> Answerer:
    """Builds the answerer, which reads contexts alone; predictions have its intents, and the reasons that it found.

    Raises:
      DataError: an older version trained the stage, and kept no reference intents.
    """
    path = run.files.stage(options.stage) / _INTENTS
    if (known := read_json(path).get("references")) is None:
        raise DataError(f"{path}, by an older version, has no references. {remedy(options.stage)}")
    # Chat and serving, which have no buckets, also work where the corpus is not.
    parts = Parts.of(stage, run, load_intents(run.plan.data) if options.buckets else {}, known)
    read = parts.examples(run, MAX_REFERENCE_TOKENS)
    finder = load_finder(run, stage.reasons) if stage.reasons else None

    def make(instances: Sequence[Instance]) -> AnswerExamples:
        notes: list[dict[str, Any]] = [{} for _ in instances]
        contexts = [i.context for i in instances]
        for note, found in zip(notes, [] if finder is None else finder(contexts), strict=False):
            note["reasons"] = [list(span) for span in found]  # positions: outputs must not contain words of a corpus
        for note, instance in zip(notes, instances, strict=True):
            if instance.id in parts.intents:
                note["intent"] = parts.intents[instance.id]
        examples = read(instances)
        return AnswerExamples(examples, notes, examples.words)

    params = {**load_params(run.files.stage(options.stage), options.params), **_frozen(stage, run)}
    second = stage.second_intent and not stage.constant_second
    named = (*(["intent_classifier"] if stage.intents else []), "intent_first",
             *(["intent_second"] if second else []), "intent_prediction")  # fmt: skip
    return Answerer(
        parts.task(),
        params,
        make,
        parts.tokenizer,
        options.buckets or (parts.settings.max_context_tokens,),
        labels=dict.fromkeys(named, INTENTS),
        mesh=run.plan.options.mesh,
        single=not options.buckets,
    )
