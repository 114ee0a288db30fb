"""What NEC adds to the settings of every system that answers."""

from __future__ import annotations

import dataclasses
from typing import Literal

from empax.core.config import ConfigError, check_numbers
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.generator.settings import ContrastSettings, DialogueSettings, check_no_exemplars
from empax.parts.knowledge.settings import MINILM

SOCIAL = "social"
"""The name of the decoder's memory."""


@dataclasses.dataclass(frozen=True)
class NecSettings(DialogueSettings):
    """The section "nec", which all stages share.

    Attributes:
      entity: whether the encoder reads facts about things behind the context; False is w/o Entity.
      social: whether the decoder attends to facts about people; False is w/o Social.
      entity_facts: m, how many facts about things are read; 3 at test, Sec. 3.2.
      facts_as: facts about things as "sentences" (the code) or "triples" (Eq. 3).
      social_tokens: the most tokens of a fact about people.
      ranker: the stage that ranks facts about things; empty = by their cosine with the context, as those about people.
      selector: compares facts with the context (Eq. 6 and 7).
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
                "attributes = True would stand where facts about things do (entity = True); set one of them to False."
            )
        if self.ranker and not self.entity:
            raise ConfigError(
                f"ranker = {self.ranker!r} ranks facts about things, which entity = False leaves out; set ranker = '' "
                "and take its stage out of config.run, or set entity = True."
            )
        if self.exemplars != DialogueSettings.exemplars:
            raise ConfigError(
                f"exemplars = {self.exemplars!r} shows exemplars, which NEC does not retrieve; leave it out."
            )
        check_no_exemplars(self.decoding)

    @property
    def kinds_of_facts(self) -> tuple[str, ...]:
        """The facts that are read, "social" and "entity"."""
        return tuple(kind for kind in ("social", "entity") if getattr(self, kind))


@dataclasses.dataclass(frozen=True)
class NecTaskSettings:
    """Training by likelihood: the baseline without contrast, and what contrastive training begins with.

    Attributes:
      start_from: an earlier stage whose parameters to go on from; empty = initialise.
      max_validation_examples: 0 = all.
    """

    start_from: str = ""
    label_smoothing: float = 0.0
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "max_validation_examples", least=0)
        check_numbers(self, "label_smoothing", least=0, below=1)


@dataclasses.dataclass(frozen=True)
class CandidateSettings(ContrastSettings):
    """The second half of the loss, with candidates of four kinds (Eq. 9).

    Attributes:
      in_batch: whether the other responses of a batch are candidates (B).
      different: how many responses to dialogues of other emotions are (D); 0 is w/o DiffEmo.
      frequent: how many of the most frequent clauses of the training responses are (H); 0 is w/o HighFreq.
      own: how many beams of the current model are (y'); 0 is w/o SelfGen.
      own_tokens: how long those may get.
      diversity_penalty: above 0, each of the `own` beams searches for itself and shuns what the earlier ones say
        (CoNT); 0 = plain beams (NEC).
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
                f"contrast.diversity_penalty = {self.diversity_penalty} is between beams, and own = {self.own}; set "
                "own to 2 or more, or diversity_penalty to 0."
            )


@dataclasses.dataclass(frozen=True)
class ContrastiveTaskSettings(NecTaskSettings):
    """Training by likelihood and contrast together.

    Attributes:
      start_from: the stage that trained by likelihood before: CoNT and NEC begin there.
    """

    start_from: str = "generator"
    contrast: CandidateSettings = dataclasses.field(default_factory=CandidateSettings)


@dataclasses.dataclass(frozen=True)
class RankerTaskSettings:
    """What ranks facts about things: an encoder that reads a context and a fact.

    Attributes:
      margin: by how much the score of a fact that the response takes up must exceed that of another.
      max_tokens: of context and fact together; the oldest are cut.
      max_validation_examples: 0 = all.
    """

    encoder: EncoderSettings = MINILM
    margin: float = 0.3
    max_tokens: int = 128
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "margin", least=0, most=1)
        check_numbers(self, "max_tokens", least=16)
        check_numbers(self, "max_validation_examples", least=0)
