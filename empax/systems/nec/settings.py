"""NEC's settings."""

from __future__ import annotations

import dataclasses
from typing import Literal

from empax.core.config import ConfigError, check_numbers
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.generator.settings import ContrastSettings, DialogueSettings
from empax.parts.knowledge.settings import MINILM

SOCIAL = "social"
"""The name of the decoder's memory."""


@dataclasses.dataclass(frozen=True)
class NecSettings(DialogueSettings):
    """Settings shared by all stages: the section "nec".

    Attributes:
      entity: whether the encoder reads facts about things after the context; False is w/o Entity.
      social: whether the decoder attends to facts about people; False is w/o Social.
      entity_facts: m, the number of facts about things; 3 at test, Sec. 3.2.
      facts_as: form of facts about things, "sentences" (the code) or "triples" (Eq. 3).
      social_tokens: maximum tokens of a fact about people.
      ranker: the stage that trained the ranker of facts about things; empty = rank by cosine with the context, as facts
        about people.
      selector: encoder that compares facts with the context (Eq. 6 and 7).
    """

    attributes: bool = False
    entity: bool = True
    social: bool = True
    entity_facts: int = 3
    facts_as: Literal["sentences", "triples"] = "sentences"
    social_tokens: int = 24
    ranker: str = ""
    selector: EncoderSettings = MINILM

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "entity_facts", least=1)
        check_numbers(self, "social_tokens", least=2)
        if self.attributes and self.entity:
            raise ConfigError(
                "attributes = True would take the place of facts about things (entity = True); set one of them to "
                "False."
            )
        if self.ranker and not self.entity:
            raise ConfigError(
                f"ranker = {self.ranker!r} ranks facts about things, which entity = False leaves out; set ranker = '' "
                "and take its stage out of config.run, or set entity = True."
            )

    @property
    def kinds_of_facts(self) -> tuple[str, ...]:
        """The facts that are read, "social" and "entity"."""
        return tuple(kind for kind in ("social", "entity") if getattr(self, kind))


@dataclasses.dataclass(frozen=True)
class NecTaskSettings:
    """Training by likelihood: the baseline without contrast, and the start of contrastive training.

    Attributes:
      start_from: an earlier stage whose parameters initialize this one; empty = pretrained or random.
      max_validation_examples: maximum examples of validation; 0 = all.
    """

    start_from: str = ""
    label_smoothing: float = 0.0
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "max_validation_examples", least=0)
        check_numbers(self, "label_smoothing", least=0, below=1)


@dataclasses.dataclass(frozen=True)
class CandidateSettings(ContrastSettings):
    """The contrastive half of the loss, with candidates of four kinds (Eq. 9).

    Attributes:
      in_batch: whether the other responses of the batch are candidates (B).
      different: number of candidates that are responses to dialogues of other emotions (D); 0 is w/o DiffEmo.
      frequent: number of candidates among the most frequent clauses of the training responses (H); 0 is w/o HighFreq.
      own: number of candidates that are beams of the current model (y'); 0 is w/o SelfGen.
      own_tokens: maximum tokens of those beams.
      diversity_penalty: above 0, diverse beam search with `own` groups (CoNT); 0 = plain beam search (NEC).
    """

    in_batch: bool = True
    different: int = 3
    frequent: int = 3
    own: int = 5
    own_tokens: int = 20
    diversity_penalty: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "different", "frequent", "own", "diversity_penalty", least=0)
        check_numbers(self, "own_tokens", least=1)
        if self.diversity_penalty and self.own < 2:
            raise ConfigError(
                f"contrast.diversity_penalty = {self.diversity_penalty} acts between beams, but own = {self.own}; set "
                "own to 2 or more, or diversity_penalty to 0."
            )


@dataclasses.dataclass(frozen=True)
class ContrastiveTaskSettings(NecTaskSettings):
    """Training by likelihood and contrast together.

    Attributes:
      start_from: the earlier stage that trained by likelihood, from which CoNT and NEC start.
    """

    start_from: str = "generator"
    contrast: CandidateSettings = dataclasses.field(default_factory=CandidateSettings)


@dataclasses.dataclass(frozen=True)
class RankerTaskSettings:
    """Settings of the ranker of facts about things: an encoder that reads a context and a fact.

    Attributes:
      margin: margin between the score of a fact that the response repeats and that of another fact.
      max_tokens: maximum tokens of context and fact together; the oldest of the context are cut.
      max_validation_examples: maximum examples of validation; 0 = all.
    """

    encoder: EncoderSettings = MINILM
    margin: float = 0.3
    max_tokens: int = 128
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "margin", least=0, most=1)
        check_numbers(self, "max_tokens", least=16)
        check_numbers(self, "max_validation_examples", least=0)
