"""Settings of the models that answer with what they retrieve."""

from __future__ import annotations

import dataclasses

from empax.core.config import ConfigError, check_numbers
from empax.data.exemplars import Key, Query
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.generator.settings import DialogueSettings

INDEX_UNREAD = (
    "generator", "decoding", "form", "own_decoding", "lora", "attributes", "passages", "exemplars", "ask_first",
    "neighbours", "logits_at_once",
)  # fmt: skip
"""Settings that change no vector of an index: those of who reads what it finds."""


@dataclasses.dataclass(frozen=True)
class RetrievalSettings(DialogueSettings):
    """What all stages of a system share that retrieves exemplars, or may.

    Attributes:
      retriever: the encoder that embeds contexts and exemplars.
      key: what it reads of an exemplar: "exchange", context and response, or "response" alone.
      query: what it reads of a context: all of it, or with "reasons" the words that the stage `reasons` of an annotate
        stage has marked there, all of it where none are marked; ours.
      emotion_share: how much of a retrieval score is the probability that the context has the exemplar's emotion, once
        emotions have been learnt (`systems.reg.encoder`); ours, 0 = nothing. attributes = False takes 0.
    """

    retriever: EncoderSettings = dataclasses.field(default_factory=EncoderSettings)
    key: Key = "exchange"
    query: Query = "context"
    emotion_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "emotion_share", least=0, most=1)
        if not self.attributes and self.emotion_share:
            raise ConfigError(
                f"attributes = False with emotion_share = {self.emotion_share} still retrieves by emotion, which is no "
                "run without emotion attributes; set emotion_share to 0, or name the recipe with no_attributes."
            )
