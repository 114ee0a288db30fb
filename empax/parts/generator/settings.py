"""Settings of generators, shared by the systems that have one."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from empax.core.config import ConfigError, check_numbers
from empax.data.sources import ExemplarLayout, LayoutSettings
from empax.decoding.settings import DecodeSettings
from empax.interop.pretrained import GeneratorSettings
from empax.models.lora import LoraSettings


def check_no_exemplars(decoding: DecodeSettings) -> None:
    """Raises ConfigError if `decoding`, of a system without exemplars, scores agreement with exemplars."""
    if decoding.rerank_exemplars:
        raise ConfigError(
            f"decoding.rerank_exemplars = {decoding.rerank_exemplars} counts exemplars, which this system does not "
            "retrieve; set it to 0."
        )


@dataclasses.dataclass(frozen=True)
class QuestionSettings:
    """A question that a model answers before it replies; the first words of its answer go into the reply's prompt.

    Attributes:
      name: name of the answer in the prompt: "emotion". Exemplars show their own emotion under that name.
      text: the question, after the last turn.
    """

    name: str
    text: str

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.text.strip():
            raise ConfigError(f"a question has name = {self.name!r} and text = {self.text!r}; give both.")


@dataclasses.dataclass(frozen=True)
class NeighbourSettings:
    """Mixing of a corpus into decoding and likelihoods, in addition to the generator's training and inputs.

    Attributes:
      knn_weight: weight of the tokens after the nearest generator states of training rows (kNN-LM); 0 = none.
      knn: number of nearest states.
      knn_temperature: temperature of their distances, mean squared differences; the lower, the more the nearest counts.
      knn_rows: number of training rows whose states are kept, drawn at random; 0 = all.
      copy_weight: weight of the tokens of the exemplars' responses, with their states after this source; 0 = none.
      copy_temperature: temperature of the distances of these states.
    """

    knn_weight: float = 0.0
    knn: int = 32
    knn_temperature: float = 0.1
    knn_rows: int = 10_000
    copy_weight: float = 0.0
    copy_temperature: float = 0.1

    def __post_init__(self) -> None:
        check_numbers(self, "knn_weight", "copy_weight", least=0, below=1)
        check_numbers(self, "knn", least=1)
        check_numbers(self, "knn_rows", least=0)
        check_numbers(self, "knn_temperature", "copy_temperature", above=0)
        if self.knn_weight + self.copy_weight >= 1.0:
            raise ConfigError(
                f"knn_weight = {self.knn_weight} and copy_weight = {self.copy_weight} leave the generator nothing; "
                "lower their sum below 1."
            )

    @property
    def on(self) -> bool:
        return bool(self.knn_weight or self.copy_weight)


@dataclasses.dataclass(frozen=True)
class DialogueSettings:
    """Settings shared by all stages: the section of the config that has the system's name.

    Attributes:
      form: form of the sources: "dialogue", with tags or an instruction, or "plain", as the generator's own
        tokenizer encodes a text.
      own_decoding: takes decoding options from `generation_config.json` of the pretrained generator; `decoding` gives
        the lengths alone. A first token that the folder forces is for form = "plain".
      lora: trains low-rank adapters of the (pretrained) generator instead of its weights; None = the weights.
      attributes: prepends emotion attributes to every text; False is part of REG's w/o EA (recipe argument
        `no_attributes`).
      passages: K, the number of exemplars per response, in a system that retrieves them.
      exemplars: layout of exemplars, see `data.sources.ExemplarLayout`; a decoder-only model reads them as shots before
        the context: "apart", "response" or "turns".
      ask_first: for a decoder-only model: questions that it answers itself before each reply, in this order; () = none.
      neighbours: mixing of a corpus into each token of an answer, in a system that supports it.
    """

    generator: GeneratorSettings = dataclasses.field(default_factory=GeneratorSettings)
    layout: LayoutSettings = dataclasses.field(default_factory=LayoutSettings)
    decoding: DecodeSettings = dataclasses.field(default_factory=DecodeSettings)
    form: Literal["dialogue", "plain"] = "dialogue"
    own_decoding: bool = False
    lora: LoraSettings | None = None
    attributes: bool = True
    passages: int = 6
    exemplars: ExemplarLayout = "apart"
    ask_first: tuple[QuestionSettings, ...] = ()
    neighbours: NeighbourSettings = dataclasses.field(default_factory=NeighbourSettings)
    has_neighbours: ClassVar[bool] = False
    has_exemplars: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.neighbours.on and not self.has_neighbours:
            name = "knn_weight" if self.neighbours.knn_weight else "copy_weight"
            raise ConfigError(
                f"neighbours.{name} = {getattr(self.neighbours, name)}: this system answers without neighbours; set "
                "it to 0."
            )
        if not self.has_exemplars:
            for name in ("passages", "exemplars"):
                if (value := getattr(self, name)) != getattr(DialogueSettings, name):
                    raise ConfigError(
                        f"{name} = {value!r} shows exemplars, which this system does not retrieve; leave it out."
                    )
            check_no_exemplars(self.decoding)
        check_numbers(self, "passages", least=1)
        if self.form == "plain" and not self.generator.pretrained:
            raise ConfigError(
                'form = "plain" needs a pretrained generator; set generator.pretrained, or form = "dialogue".'
            )
        if self.own_decoding and not self.generator.pretrained:
            raise ConfigError(
                "own_decoding needs a pretrained generator; set generator.pretrained, or own_decoding = False."
            )
        lengths = DecodeSettings(max_tokens=self.decoding.max_tokens, min_tokens=self.decoding.min_tokens)
        if self.own_decoding and self.decoding != lengths:
            name = next(
                field.name
                for field in dataclasses.fields(DecodeSettings)
                if getattr(self.decoding, field.name) != getattr(lengths, field.name)
            )
            raise ConfigError(
                f"decoding.{name} = {getattr(self.decoding, name)!r} has no effect: own_decoding takes the options of "
                "generation_config.json; set own_decoding to False."
            )

    @property
    def reads_responses(self) -> bool:
        """Whether decoding reads the responses of exemplars separately."""
        return bool(self.decoding.rerank_exemplars or self.neighbours.copy_weight)


@dataclasses.dataclass(frozen=True)
class ContrastSettings:
    """A loss in addition to the likelihood, which orders candidates by their similarity to the response.

    `decoding.rerank = "similarity"` compares its encodings. The candidates are the responses of a batch.
    Source: An et al. 2022 (CoNT), in the form of NEC (`parts.generator.contrast`).

    Attributes:
      weight: weight of the loss; that of the likelihood is 1.
      margin: gamma, the margin of the cosine per rank.
      max_candidates: maximum candidates besides the response; the worst are dropped.
    """

    weight: float = 1.0
    margin: float = 0.01
    max_candidates: int = 16

    def __post_init__(self) -> None:
        check_numbers(self, "weight", above=0)
        check_numbers(self, "margin", least=0)
        check_numbers(self, "max_candidates", least=1)


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """A user-defined loss in addition to the likelihood.

    Attributes:
      function: "module:name", importable; it is logged under this name. It is called as (logits[B, T, V], batch) ->
        [B, T], a number for each target token, or -> [B], one for each row, weighted by the row's number of target
        tokens. It is traced. The logits are float32 and teacher-forced; the batch has `source`, `source_mask`,
        `target`, `target_mask`, `valid` and `emotion` (`data.exemplars.LabelledBatch`); `source` is [B, S], with
        exemplars [B, F, S] (`data.exemplars.ExemplarBatch`).
      weight: weight of the loss; that of the likelihood is 1. Below 0 the values are maximized, at 0 only logged.
    """

    function: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "weight")


@dataclasses.dataclass(frozen=True)
class ResponseTaskSettings:
    """Losses of a generator.

    Attributes:
      emotion_weight: loss weight of the 32-way head on the pooled encoding; ours. 0 = the head is neither trained nor
        used.
      contrast: a loss that ranks responses, in addition to the likelihood; None = no such loss.
      losses: user-defined losses, added to the likelihood.
    """

    emotion_weight: float = 0.1
    label_smoothing: float = 0.0
    contrast: ContrastSettings | None = None
    losses: tuple[LossSettings, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self, "emotion_weight", least=0)
        check_numbers(self, "label_smoothing", least=0, below=1)

    @property
    def teaches_emotions(self) -> bool:
        return bool(self.emotion_weight)


@dataclasses.dataclass(frozen=True)
class GeneratorTaskSettings(ResponseTaskSettings):
    """Settings of a generator of responses to contexts: REG's stage 1, EmpRL's fine-tuning.

    Attributes:
      start_from: an earlier generator stage whose parameters initialize this one; empty = pretrained or random.
      max_validation_examples: maximum examples of validation; 0 = all.
    """

    start_from: str = ""
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "max_validation_examples", least=0)
