"""Settings of the models that answer, shared by the systems that have them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from empax.core.config import ConfigError, check_numbers
from empax.data.sources import ExemplarLayout, LayoutSettings
from empax.decoding.settings import DecodeSettings
from empax.interop.pretrained import GeneratorSettings
from empax.models.lora import LoraSettings


def check_no_exemplars(decoding: DecodeSettings) -> None:
    """Raises ConfigError if `decoding`, of a system that retrieves none, counts agreement with exemplars."""
    if decoding.rerank_exemplars:
        raise ConfigError(
            f"decoding.rerank_exemplars = {decoding.rerank_exemplars} counts exemplars, which this system does not "
            "retrieve; set it to 0."
        )


@dataclasses.dataclass(frozen=True)
class QuestionSettings:
    """What a model is asked before it answers; the first words that it says stand in the prompt of the answer.

    Attributes:
      name: of what it tells, in the prompt: "emotion". Exemplars tell their own emotion under that name.
      text: the question, behind the last turn.
    """

    name: str
    text: str

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.text.strip():
            raise ConfigError(f"a question has name = {self.name!r} and text = {self.text!r}; give both.")


@dataclasses.dataclass(frozen=True)
class NeighbourSettings:
    """How a corpus speaks into decoding and likelihoods, beside what the generator was trained on and reads.

    Attributes:
      knn_weight: of what came in the nearest generator states of training rows (kNN-LM); 0 = nothing.
      knn: how many states.
      knn_temperature: of their distances, mean squared differences; the lower, the more the nearest counts.
      knn_rows: of how many training rows the states are kept, drawn at random; 0 = all.
      copy_weight: of the tokens of the exemplars' responses, each in the state that it would have here; 0 = nothing.
      copy_temperature: of their distances.
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
                "lower them to less than 1 together."
            )

    @property
    def on(self) -> bool:
        return bool(self.knn_weight or self.copy_weight)


@dataclasses.dataclass(frozen=True)
class DialogueSettings:
    """What all stages share: the section of the config that is named like the system.

    Attributes:
      form: how the generator is shown its sources: "dialogue", with the tags or the instruction of `data.sources`, or
        "plain", as its own tokenizer makes them of a text.
      own_decoding: decode as `generation_config.json` of the pretrained generator says; of `decoding` the lengths are
        left.
      lora: train low-rank adapters of the (pretrained) generator in place of its weights; None = the weights.
      attributes: emotion attributes in front of everything; False is part of REG's w/o EA (recipe argument
        `no_attributes`).
      passages: K, how many exemplars are there for a response, where a system retrieves some.
      exemplars: how the generator is shown them, see `data.sources.ExemplarLayout`; a decoder-only model reads them as
        shots in front of the context, "apart" or "response".
      ask_first: of a decoder-only model: questions that it answers itself before each reply, in the order in which they
        are asked; () = none.
      neighbours: what a corpus says of each token of an answer; of systems that retrieve.
      logits_at_once: for how many target tokens of every row of a batch the loss of training holds logits at a time
        (0 = all); changes memory, and no result beyond rounding. Not for models with a bias of their output (BART).
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
    logits_at_once: int = 0
    has_neighbours: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.neighbours.on and not self.has_neighbours:
            name = "knn_weight" if self.neighbours.knn_weight else "copy_weight"
            raise ConfigError(
                f"neighbours.{name} = {getattr(self.neighbours, name)}: this system answers without neighbours; set "
                "it to 0."
            )
        check_numbers(self, "passages", least=1)
        check_numbers(self, "logits_at_once", least=0)
        if self.form == "plain" and not self.generator.pretrained:
            raise ConfigError('form = "plain" is a pretrained generator\'s; set generator.pretrained, or "dialogue".')
        if self.own_decoding and not self.generator.pretrained:
            raise ConfigError("own_decoding is a pretrained generator's; set generator.pretrained, or it to False.")
        lengths = DecodeSettings(max_tokens=self.decoding.max_tokens, min_tokens=self.decoding.min_tokens)
        if self.own_decoding and self.decoding != lengths:
            name = next(
                field.name
                for field in dataclasses.fields(DecodeSettings)
                if getattr(self.decoding, field.name) != getattr(lengths, field.name)
            )
            raise ConfigError(
                f"decoding.{name} = {getattr(self.decoding, name)!r} has no effect, since with own_decoding "
                "generation_config.json says how to decode; set own_decoding to False."
            )

    @property
    def reads_responses(self) -> bool:
        """Whether an answer looks at the responses of exemplars by themselves."""
        return bool(self.decoding.rerank_exemplars or self.neighbours.copy_weight)


@dataclasses.dataclass(frozen=True)
class ContrastSettings:
    """A loss beside the likelihood, which has candidates lie in the order of how much they resemble the response.

    What it learns is what `decoding.rerank = "similarity"` compares. The candidates are the responses of a batch.
    Source: An et al. 2022 (CoNT), in the form of NEC (`parts.generator.contrast`).

    Attributes:
      weight: beside that of the likelihood, 1.
      margin: gamma, a rank's worth of cosine.
      max_candidates: the most candidates beside the response: the worst are left out.
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
    """A loss of your own beside the likelihood.

    Attributes:
      function: "module:name", importable; it is logged under that. It is called as (logits[B, T, V], batch) -> [B, T],
        a number for each target token, or -> [B], one for each row, which counts as often as the row has target
        tokens. It is traced. The logits are float32 and teacher-forced; the batch has `source`, `source_mask`,
        `target`, `target_mask`, `valid` and `emotion` (`data.exemplars.LabelledBatch`).
      weight: beside that of the likelihood, 1; below 0 the values are to rise, at 0 they are logged alone.
    """

    function: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "weight")
        if self.function.count(":") != 1:
            raise ConfigError(f"function = {self.function!r} must be 'module:name'.")


@dataclasses.dataclass(frozen=True)
class ResponseTaskSettings:
    """What a generator learns.

    Attributes:
      emotion_weight: of the 32-way head over the pooled encoding; ours. 0 = the head learns nothing, and is not asked.
      contrast: a loss that ranks responses beside the likelihood; None = there is none.
      losses: of your own, added to the likelihood.
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
    """Context in, response out: REG's stage 1, EmpRL's fine-tuning.

    Attributes:
      start_from: an earlier generator stage whose parameters to go on from; empty = initialise.
      max_validation_examples: 0 = all.
    """

    start_from: str = ""
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "max_validation_examples", least=0)
