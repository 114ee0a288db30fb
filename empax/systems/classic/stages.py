"""From settings and files to the task: checks, training, plans, answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Bool

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.run import Assembly, RunContext, Sketch
from empax.core.shapes import shapes_of
from empax.core.system import AnswerOptions, TaskSpec
from empax.core.types import Instance, Params
from empax.data.store import PrepareSettings, check_prepared, load_instances, run_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.data.word_vectors import check_vectors, load_vectors
from empax.decoding.settings import without_unknown
from empax.systems.classic.examples import ClassicExamples, check_lexicon, emotional_words
from empax.systems.classic.model import Classic
from empax.systems.classic.readers import ClassicBatch
from empax.systems.classic.settings import ClassicSettings, ClassicTaskSettings
from empax.systems.classic.task import ClassicTask
from empax.systems.dialogue.answerer import Answerer, AnswerExamples, MakeExamples
from empax.systems.dialogue.generator import Decoder
from empax.systems.dialogue.parts import MAX_REFERENCE_TOKENS
from empax.training.checkpoint import load_params

_ANSWERS_AT_ONCE = 64


def check_system(run: RunContext) -> None:
    """Whether the tokenizer is one of words, and the word vectors and the lexicon are there.

    Raises:
      ConfigError: it is not so.
    """
    check_prepared(run)
    settings = run.shared_settings(ClassicSettings)
    if run.settings("prepare", PrepareSettings).tokenizer.kind != "words":
        raise ConfigError('config.prepare.tokenizer.kind must be "words" for the models of config.classic; set it so.')
    check_vectors(settings.vectors)
    if settings.reads_lexicon:
        check_lexicon(settings.lexicon)


def check_generator(stage: ClassicTaskSettings, run: RunContext) -> None:
    """Whether each loss has a weight, and the stage whose emotions are prepended comes before.

    Raises:
      ConfigError: it is not so.
    """
    check_prepared(run)
    losses, where = run.shared_settings(ClassicSettings).losses, f"config.{run.stage}.weights"
    for name in losses:
        if name not in stage.weights:
            raise ConfigError(f"{where} lacks {name}, a loss of {run.shared}.readers; set it (0 = it teaches nothing).")
    for name in stage.weights:
        if name not in ("nll", *losses):
            raise ConfigError(f"{where}.{name} is no loss of this model; it has {', '.join(('nll', *losses))}.")
    if stage.prepend:
        other = run.earlier("prepend", stage.prepend, tasks=("classic.generator",)).settings
        if not other.weights.get("emotion"):
            raise ConfigError(
                f"config.{run.stage}.prepend = {stage.prepend!r} learns no emotions; set its weights.emotion above 0, "
                'with "emotion" among the readers.'
            )


@dataclasses.dataclass(frozen=True)
class ClassicParts:
    """What every stage is put together from."""

    settings: ClassicSettings
    tokenizer: Tokenizer

    @classmethod
    def of(cls, run: RunContext, *, planned: bool = False) -> ClassicParts:
        return cls(run.shared_settings(ClassicSettings), run_tokenizer(run, planned=planned))

    def task(self, stage: ClassicTaskSettings) -> ClassicTask:
        settings, tokenizer = self.settings, self.tokenizer
        unknown = tokenizer.unk_id if isinstance(tokenizer, SubwordTokenizer) else None
        decoding = without_unknown(settings.decoding, unknown)
        return ClassicTask(
            Classic(
                settings.config(tokenizer.vocab_size, tokenizer.start_id),
                settings.reader_settings(),
                settings.adversary,
            ),
            Decoder(decoding, tokenizer.start_id, tokenizer.eos_id, tokenizer.pad_id),
            stage.weights,
            stage.label_smoothing,
            heads=("emotion",) if stage.weights.get("emotion") else (),
        )

    def examples(
        self,
        instances: Sequence[Instance],
        emotions: Sequence[str] | None,
        *,
        max_target_tokens: int = 0,
        train: bool = False,
    ) -> ClassicExamples:
        settings, tokenizer = self.settings, self.tokenizer
        assert isinstance(tokenizer, SubwordTokenizer)
        return ClassicExamples(
            instances,
            tokenizer,
            self.lexicon(),
            max_context_tokens=settings.max_context_tokens,
            max_target_tokens=max_target_tokens or settings.max_target_tokens,
            emotions=emotions,
            feedback_tokens=settings.max_target_tokens if train and settings.adversary is not None else 0,
        )

    def lexicon(self) -> Bool[np.ndarray, " V"]:
        """Which ids are words of emotion; none where nobody asks."""
        assert isinstance(self.tokenizer, SubwordTokenizer)
        if not self.settings.reads_lexicon:
            return np.zeros(self.tokenizer.vocab_size, bool)
        return emotional_words(self.settings.lexicon, self.tokenizer)

    def initial(self, params: Params) -> Params:
        """`params` with the word vectors in place of random ones."""
        assert isinstance(self.tokenizer, SubwordTokenizer)
        found = load_vectors(self.settings.vectors, self.tokenizer, self.settings.d_model)
        return {**params, "core": {**params["core"], "token_embedding": found.table}}


def build_generator(stage: ClassicTaskSettings, run: RunContext) -> Assembly:
    parts = ClassicParts.of(run)
    validation = load_instances(run, "validation")[: stage.max_validation_examples or None]
    emotions_of = _prepended(stage, run)
    train = load_instances(run, "train")
    examples = (
        parts.examples(train, emotions_of(train), train=True),
        parts.examples(validation, emotions_of(validation)),
    )
    initial = parts.initial if parts.settings.vectors else None
    frozen = {"lexicon": parts.lexicon()} if parts.settings.adversary is not None else {}
    return Assembly(parts.task(stage), *examples, frozen=frozen, initial=initial)


def _prepended(stage: ClassicTaskSettings, run: RunContext) -> Callable[[Sequence[Instance]], list[str] | None]:
    """What gives the emotions that stand before contexts: a list, or None where none do."""
    if not stage.prepend:
        return lambda instances: None
    other = run.settings(stage.prepend, ClassicTaskSettings)
    buckets = run.named(stage.prepend).loop.buckets
    classifier = answer_generator(other, run, AnswerOptions(stage.prepend, "", buckets))

    def emotions_of(instances: Sequence[Instance]) -> list[str]:
        found = classifier.emotions(instances, batch_size=min(_ANSWERS_AT_ONCE, len(instances)))
        return [by_head["emotion"] for by_head in found]

    return emotions_of


def sketch_generator(stage: ClassicTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = ClassicParts.of(run, planned=True)
    sizes, frozen = {"B": batch_size, "S": length, "T": parts.settings.max_target_tokens}, {}
    if parts.settings.adversary is not None:
        sizes["F"] = parts.settings.max_target_tokens
        frozen["lexicon"] = jax.ShapeDtypeStruct((parts.tokenizer.vocab_size,), np.bool_)
    return Sketch(parts.task(stage), dataclasses.replace(shapes_of(ClassicBatch, **sizes), step=None), frozen)


def answer_generator(stage: ClassicTaskSettings, run: RunContext, options: AnswerOptions) -> Answerer:
    """The model of a finished stage."""
    parts = ClassicParts.of(run)
    params = load_params(run.files.stage(options.stage))
    buckets = options.buckets or (parts.settings.max_context_tokens,)
    make, mesh = _make_examples(parts, stage, run), run.plan.options.mesh
    single = not options.buckets
    return Answerer(parts.task(stage), params, make, parts.tokenizer, buckets, mesh=mesh, single=single)


def _make_examples(parts: ClassicParts, stage: ClassicTaskSettings, run: RunContext) -> MakeExamples:
    emotions_of = _prepended(stage, run)

    def make(instances: Sequence[Instance]) -> AnswerExamples:
        emotions = emotions_of(instances)
        # No reference is cut: what is scored is the likelihood of all of its words.
        made = parts.examples(instances, emotions, max_target_tokens=MAX_REFERENCE_TOKENS)
        return AnswerExamples(made, [{"prepended": e} for e in emotions] if emotions else [{} for _ in instances])

    return make


GENERATOR = TaskSpec(
    ClassicTaskSettings,
    check_generator,
    build_generator,
    sketch_generator,
    answer=answer_generator,
    unread=("decoding",),
)
"""Nothing of it is exported: no other library has these models."""
