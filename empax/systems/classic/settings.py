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


@dataclasses.dataclass(frozen=True)
class ClassicSettings(WordLevelSettings):
    """What all stages share: the section `config.classic`, with the sizes of the model.

    Attributes:
      readers: which parts read a context, in order: "emotion", "emotion_words", "listeners" (behind "emotion"),
        "mimicry", "refinement" (before "emotion_words"), "concepts" (first, without these two), "alignment".
      emotion, listeners, mimicry, concepts, alignment: settings of these; "alignment" reads concepts, too.
      adversary: critics that see soft responses and the turn that follows (`systems.classic.adversary`); None = none.
      copies: whether a response may copy words of what the decoder attends to.
      lexicon: the words of emotion that "emotion_words" and critics read: "vader", or a file with a word on each line.
      facts_tokens: of the facts of a relation that "refinement" reads.
      max_context_tokens: of a context, with what stands before it; the newest words stay.
      max_target_tokens: of a response in training, its end included.
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
                'decoding.rerank = "similarity" compares encodings, which no part here learns; change it.'
            )

    def _check_readers(self, readers: tuple[str, ...]) -> None:
        def stands_before(first: str, second: str) -> bool:
            return second in readers and first in readers[: readers.index(second)]

        for name in readers:
            if name not in READERS:
                raise ConfigError(f"readers holds {name!r}; it takes {', '.join(READERS)}.")
        if len(set(readers)) < len(readers):
            raise ConfigError(f"readers = {readers} names one twice; a model has each at most once.")
        alone = " and ".join(name for name in readers if "emotion" in READERS[name].losses)
        if " and " in alone:
            raise ConfigError(f"readers: {alone} read the emotion, each by itself; leave one of them out.")
        if {"concepts", "alignment"} <= set(readers):
            raise ConfigError('readers: "concepts" and "alignment" read the same graph; leave one of them out.')
        if "alignment" in readers and not self.concepts.most:
            raise ConfigError('concepts.most = 0 leaves "alignment" no concepts; set it to at least 1.')
        if "listeners" in readers and not stands_before("emotion", "listeners"):
            raise ConfigError('readers: "listeners" are gated by the logits of "emotion"; put that before them.')
        for name in ("emotion_words", "refinement", "concepts"):
            if stands_before("emotion", name):
                raise ConfigError(f'readers: "emotion" reads what "{name}" makes of the context; put it behind that.')
        for name in ("emotion_words", "refinement"):
            if {"concepts", name} <= set(readers):
                raise ConfigError(
                    f'readers: "concepts" and "{name}" say from what the emotion is read, each in place of the other; '
                    "leave one of them out."
                )
        if "concepts" in readers[1:]:
            raise ConfigError('readers: "concepts" reads the context anew, as if nothing stood before; put it first.')
        if stands_before("emotion_words", "refinement"):
            raise ConfigError('readers: "refinement" replaces what "emotion_words" adds to; put it before that.')

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the losses that readers and critics have."""
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
        """By the kind of facts, "social" and "entity", the readers that want it."""
        concepts = ("concepts", "alignment") if self.concepts.most else ()
        able = {"social": ("refinement", "alignment"), "entity": concepts}
        found = {kind: [name for name in self.readers if name in names] for kind, names in able.items()}
        return {kind: names for kind, names in found.items() if names}

    def config(self, vocab_size: int, start_id: int, *, tie_embeddings: bool = True) -> TransformerConfig:
        """With the memories of its readers."""
        made = super().config(vocab_size, start_id, tie_embeddings=tie_embeddings)
        if "alignment" in self.readers:
            return dataclasses.replace(made, memories=("cognition", "affection"), memory_gate="none")
        single = "concepts" in self.readers and self.concepts.signal
        return dataclasses.replace(made, memories=("signal",) if single else (), single_memories=single)

    def reader_settings(self) -> tuple[tuple[str, Any], ...]:
        """The readers' names with their settings."""
        return tuple((name, getattr(self, name, None)) for name in self.readers)


@dataclasses.dataclass(frozen=True)
class ClassicTaskSettings:
    """Training of one of the systems.

    Attributes:
      weights: of each loss: "nll", 1 if it is left out, is the mean over the tokens of the responses (0: they are not
        read); "frequency", 0 if it is left out, is the same with less weight on frequent words (CEM); a reader's
        losses, each a mean over rows, must all be named. Released code sums where we average, so its weights are
        others: `configs/classic.py` says which.
      label_smoothing: of "nll".
      start_from: an earlier stage whose parameters to go on from; empty = initialise.
      prepend: an earlier stage whose likeliest emotion stands as a word before each context; empty = none. Source:
        Rashkin et al. 2019 (prepending).
      max_validation_examples: 0 = all.
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
