"""Settings of the models that answer with retrieved exemplars."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from empax.core.config import ConfigError, check_numbers
from empax.data.exemplars import Key, Query
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.generator.settings import DialogueSettings

INDEX_UNREAD = (
    "generator", "decoding", "form", "own_decoding", "lora", "attributes", "passages", "exemplars", "ask_first",
    "neighbours",
)  # fmt: skip
"""Settings that change no vector of an index: they concern the use of its results."""


@dataclasses.dataclass(frozen=True)
class RetrievalSettings(DialogueSettings):
    """Settings shared by all stages of a system that can retrieve exemplars.

    Attributes:
      retriever: the encoder that embeds contexts and exemplars.
      key: embedded part of an exemplar: "exchange", context and response, or "response" alone.
      query: embedded part of a context: "context", all of it, or "reasons", the words that the stage `reasons` of an
        annotate stage marked (all of it if none are marked); ours.
      emotion_share: weight, in a retrieval score, of the probability that the context has the exemplar's emotion, once
        emotions have been learnt (`systems.reg.encoder`); ours. 0 = none; attributes = False needs 0.
    """

    retriever: EncoderSettings = dataclasses.field(default_factory=EncoderSettings)
    key: Key = "exchange"
    query: Query = "context"
    emotion_share: float = 0.0
    has_exemplars: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "emotion_share", least=0, most=1)
        if not self.attributes and self.emotion_share:
            raise ConfigError(
                f"attributes = False with emotion_share = {self.emotion_share} still retrieves by emotion attributes; "
                "set emotion_share to 0."
            )
