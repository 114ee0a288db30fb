"""Settings of the systems of MoEL's lineage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from empax.core.config import ConfigError, check_numbers
from empax.decoding.settings import DecodeSettings
from empax.models.transformer_config import TransformerConfig
from empax.parts.generator.settings import check_no_exemplars
from empax.parts.generator.word_level import WordLevelSettings
from empax.systems.classic.adversary import LOSSES, AdversarySettings
from empax.systems.classic.alignment import AlignmentSettings
from empax.systems.classic.concepts import ConceptsSettings
from empax.systems.classic.mimicry import MimicrySettings
from empax.systems.classic.model import READERS
from empax.systems.classic.readers import EmotionSettings, ListenersSettings

_EITHER = {
    ("emotion", "mimicry", "alignment"): "each read the emotion on their own",
    ("concepts", "alignment"): "read the same graph",
    ("concepts", "refinement"): "each choose what the emotion is read from",
    ("concepts", "emotion_words"): "each choose what the emotion is read from",
}
"""Readers of which a model has at most one, and why."""


@dataclasses.dataclass(frozen=True)
class ClassicSettings(WordLevelSettings):
    """Settings shared by all stages: the section `config.classic`, with the sizes of the model.

    Attributes:
      readers: the parts that read a context, in this order: "concepts" (without the next two), "refinement",
        "emotion_words", "emotion", "listeners" (with "emotion"), "mimicry", "alignment".
      emotion, listeners, mimicry, concepts, alignment: settings of these readers; "alignment" reads concepts too.
      adversary: critics that see drawn words and the next turn (`systems.classic.adversary`); None = no critics.
      copies: whether responses may copy words of the attended source.
      lexicon: emotion words that "emotion_words" and the critics read: "vader", or a file with a word per line.
      facts_tokens: maximum tokens of a relation's facts, which "refinement" reads.
      max_context_tokens: maximum tokens of a context, including a prefix; the newest words are kept.
      max_target_tokens: maximum tokens of a response in training, including the end token.
    """

    readers: tuple[str, ...] = ()
    emotion: EmotionSettings = dataclasses.field(default_factory=EmotionSettings)
    listeners: ListenersSettings = dataclasses.field(default_factory=ListenersSettings)
    mimicry: MimicrySettings = dataclasses.field(default_factory=MimicrySettings)
    concepts: ConceptsSettings = dataclasses.field(default_factory=ConceptsSettings)
    alignment: AlignmentSettings = dataclasses.field(default_factory=AlignmentSettings)
    adversary: AdversarySettings | None = None
    copies: bool = False
    lexicon: str = "vader"
    max_context_tokens: int = 128
    max_target_tokens: int = 50
    facts_tokens: int = 24
    decoding: DecodeSettings = dataclasses.field(default_factory=DecodeSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "max_context_tokens", "max_target_tokens", "facts_tokens", least=2)
        self._check_readers(self.readers)
        check_no_exemplars(self.decoding)
        if self.decoding.rerank == "similarity":
            raise ConfigError(
                'decoding.rerank = "similarity" compares encodings, which nothing here learns; change it.'
            )

    def _check_readers(self, readers: tuple[str, ...]) -> None:
        if readers != tuple(name for name in READERS if name in readers):
            raise ConfigError(
                f"readers = {readers} must be some of {', '.join(READERS)}, in this order, each at most once."
            )
        for names, why in _EITHER.items():
            if len(found := [name for name in names if name in readers]) > 1:
                raise ConfigError(f"readers: {' and '.join(found)} {why}; leave one of them out.")
        if "alignment" in readers and not self.concepts.most:
            raise ConfigError('concepts.most = 0 leaves "alignment" no concepts; set it to at least 1.')
        if "listeners" in readers and "emotion" not in readers:
            raise ConfigError('readers: "listeners" are gated by the logits of "emotion"; put that before them.')

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the losses of readers and critics."""
        critics = LOSSES if self.adversary is not None else ()
        return (*(loss for name in self.readers for loss in READERS[name].losses), *critics)

    @property
    def reads_lexicon(self) -> bool:
        return "emotion_words" in self.readers or self.adversary is not None

    @property
    def reads_concepts(self) -> bool:
        return "concepts" in self.readers or "alignment" in self.readers

    @property
    def fact_readers(self) -> dict[str, list[str]]:
        """The readers of each kind of facts, "social" and "entity"."""
        concepts = ("concepts", "alignment") if self.concepts.most else ()
        able = {"social": ("refinement", "alignment"), "entity": concepts}
        found = {kind: [name for name in self.readers if name in names] for kind, names in able.items()}
        return {kind: names for kind, names in found.items() if names}

    def config(self, vocab_size: int, start_id: int, *, tie_embeddings: bool = True) -> TransformerConfig:
        """Builds the model's config, with the memories of its readers."""
        made = super().config(vocab_size, start_id, tie_embeddings=tie_embeddings)
        if "alignment" in self.readers:
            return dataclasses.replace(made, memories=("cognition", "affection"), memory_gate="none")
        single = "concepts" in self.readers and self.concepts.signal
        return dataclasses.replace(made, memories=("signal",) if single else (), single_memories=single)

    def reader_settings(self) -> tuple[tuple[str, Any], ...]:
        """Returns the names of the readers with their settings."""
        return tuple((name, getattr(self, name, None)) for name in self.readers)


@dataclasses.dataclass(frozen=True)
class ClassicTaskSettings:
    """Training settings of one of the systems.

    Attributes:
      weights: weight of each loss. "nll" is the mean over response tokens; default 1; 0 = responses are not read.
        "frequency" is the same with less weight on frequent words (CEM); default 0. All losses of the readers and
        critics must be named; each is a mean over rows, by their response tokens unless "nll" is 0. Released code
        sums where we average, so its weights differ: see `configs/classic.py`.
      label_smoothing: label smoothing of "nll".
      start_from: an earlier stage whose parameters initialize this one; empty = random.
      prepend: an earlier stage whose likeliest emotion is prepended to each context as a word; empty = none. Source:
        Rashkin et al. 2019 (prepending).
      max_validation_examples: maximum examples of validation; 0 = all.
    """

    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    label_smoothing: float = 0.0
    start_from: str = ""
    prepend: str = ""
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "max_validation_examples", least=0)
        check_numbers(self, "label_smoothing", least=0, below=1)
        for name, weight in self.weights.items():
            if not 0 <= weight <= 1e6:
                raise ConfigError(f"weights.{name} = {weight} must lie in [0, 1e6].")
