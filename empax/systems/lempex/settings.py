"""LEMPEx' settings: those shared by its stages, and those of the generator."""

from __future__ import annotations

import dataclasses
from typing import Literal

from empax.core.config import ConfigError, check_numbers
from empax.core.types import MECHANISMS
from empax.data.exemplars import Key
from empax.parts.exemplars.dense import DenseSettings
from empax.parts.exemplars.dense_retrieval import Negative
from empax.parts.exemplars.settings import RetrievalSettings
from empax.parts.generator.settings import ContrastSettings


@dataclasses.dataclass(frozen=True)
class LempexSettings(RetrievalSettings):
    """Settings shared by all stages: the section `config.lempex`.

    Attributes:
      attributes: LEMPEx prepends no attributes to its texts; must be False.
      key: "response" alone is the paper's.
      towers: "separate" encoders of contexts and responses, as in DPR, or one "shared" encoder.
      key_pretrained: pretrained weights of the encoder of responses, if towers are separate; empty = those of the other
        encoder. For the two folders of a DPR model.
      speakers: whether every token of the context gets an embedding of its speaker (Sec. 3.2).
    """

    attributes: bool = False
    key: Key = "response"
    towers: Literal["separate", "shared"] = "separate"
    key_pretrained: str = ""
    speakers: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_pretrained and (self.towers == "shared" or not self.retriever.pretrained):
            raise ConfigError(
                f"key_pretrained = {self.key_pretrained!r} is the second of two pretrained towers; set "
                "towers = 'separate' and retriever.pretrained, or leave it empty."
            )
        wrong = {"decoding.rerank_exemplars": self.decoding.rerank_exemplars}
        for name in ("attributes", "lora", "own_decoding", "form", "exemplars"):
            if (value := getattr(self, name)) != getattr(LempexSettings, name):
                wrong[name] = value
        for name, value in wrong.items():
            if value:
                raise ConfigError(f"{name} = {value!r} is not supported by LEMPEx; leave it out.")


@dataclasses.dataclass(frozen=True)
class RetrieverTaskSettings(DenseSettings):
    """Training settings of the retriever (Alg. 2).

    Attributes:
      dpr_data: "ed" = the run's training split; "ed_reddit" adds the authors' Reddit pairs, with their negatives.
    """

    negatives: tuple[Negative, ...] = ("other_emotion", "same_emotion")
    dpr_data: Literal["ed", "ed_reddit"] = "ed"


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Weights of the five parts of the loss. Source: Sec. 3.5.

    Attributes:
      generation: weight of the likelihood.
      emotional_reaction, interpretation, exploration: weight of the level that each identifier sees in the reply.
      sentiment: weight of the reply's sentiment.
    """

    generation: float = 1.0
    emotional_reaction: float = 0.1
    interpretation: float = 0.1
    exploration: float = 0.1
    sentiment: float = 0.1

    def __post_init__(self) -> None:
        check_numbers(self, "generation", *MECHANISMS, "sentiment", least=0)

    def mechanisms(self) -> tuple[str, ...]:
        """Returns the mechanisms with a weight above 0."""
        return tuple(name for name in MECHANISMS if getattr(self, name))


@dataclasses.dataclass(frozen=True)
class LempexTaskSettings:
    """Training settings of the generator.

    Attributes:
      index: the index stage whose candidates are the exemplars; empty = no exemplars ("w/o exemplars").
      losses: source of the four empathetic losses: "judges" (Alg. 4), which read the decoder's soft response;
        "first_state" (Eq. 10), the decoder's state before the first token, which does not depend on the response;
        "none" ("w/o emp. losses").
      judges: for "judges", the stages that trained classifiers; together they must cover each mechanism with a weight
        once.
      sentiment: for "judges", the stage that trained the regressor; empty = no sentiment loss.
      soft, softmax_axis, temperature: form of the soft tokens, see `losses.soft_tokens`; "time" is the error of the
        released code.
      frozen_judges: False trains the judges with the generator, as the released code does.
      binary: whether the levels mid and high are one class, as in the released code.
      contrast: a loss that ranks responses, in addition to the likelihood; ours. None = no such loss.
      max_validation_examples: maximum examples of validation; 0 = all.
    """

    index: str = ""
    losses: Literal["judges", "first_state", "none"] = "none"
    judges: tuple[str, ...] = ()
    sentiment: str = ""
    weights: LossWeights = LossWeights()
    soft: Literal["expected", "straight_through"] = "expected"
    softmax_axis: Literal["vocabulary", "time"] = "vocabulary"
    temperature: float = 1.0
    frozen_judges: bool = True
    binary: bool = False
    contrast: ContrastSettings | None = None
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "temperature", above=0)
        check_numbers(self, "max_validation_examples", least=0)
        named = bool(self.judges or self.sentiment)
        if named != (self.losses == "judges"):
            raise ConfigError(
                f"losses = {self.losses!r} with judges = {self.judges} and sentiment = {self.sentiment!r}: name stages "
                'if losses is "judges", and only then.'
            )
        for_judges, for_levels = ("soft", "softmax_axis", "temperature", "frozen_judges"), ("binary", "weights")
        for name in {"judges": (), "first_state": for_judges, "none": (*for_judges, *for_levels)}[self.losses]:
            if (value := getattr(self, name)) != getattr(LempexTaskSettings, name):
                raise ConfigError(f"{name} = {value!r} is not read with losses = {self.losses!r}; leave it out.")
