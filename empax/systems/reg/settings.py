"""Settings of REG: those shared by its stages, and those of each stage."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from empax.core.config import ConfigError, check_numbers
from empax.decoding.settings import LEAST_TEMPERATURE
from empax.evaluation.device_metrics import UtilityWeights
from empax.parts.exemplars.dense import DenseSettings
from empax.parts.exemplars.settings import RetrievalSettings
from empax.parts.generator.settings import ResponseTaskSettings


@dataclasses.dataclass(frozen=True)
class RegSettings(RetrievalSettings):
    """Settings shared by all stages: the section `reg`."""

    has_neighbours: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class DistillationSettings:
    """Settings of the retriever's distillation.

    Attributes:
      signal: "metrics" (Eq. 3), "likelihood" (teacher-forced; the paper's G1+RAG row, Atlas' PDist) or "emdr2".
      utility: for "metrics": weights of F's parts; 0 omits a part (the paper's w/o BLEU, w/o F1, w/o R-L).
      target_temperature: tau of Eq. 3; for "likelihood", it divides the mean log-likelihood per token. This and the
        next are at least LEAST_TEMPERATURE.
      score_temperature: divides the retriever's scores before the softmax.
      loss: "softmax", or "literal_sigmoid", which is Eq. 4 as printed.
      replace_probability: k of Eq. 5; 0 is w/o RCA.
      emotion_weight: loss weight of the 32-way head over the retriever's encodings of contexts; ours.
      explore_tokens: maximum tokens of G1's trial answers.
    """

    signal: Literal["metrics", "likelihood", "emdr2"] = "metrics"
    utility: UtilityWeights = dataclasses.field(default_factory=UtilityWeights)
    target_temperature: float = 0.1
    score_temperature: float = 1.0
    loss: Literal["softmax", "literal_sigmoid"] = "softmax"
    replace_probability: float = 0.2
    emotion_weight: float = 0.0
    explore_tokens: int = 30

    def __post_init__(self) -> None:
        check_numbers(self, "replace_probability", least=0, most=1)
        check_numbers(self, "target_temperature", "score_temperature", least=LEAST_TEMPERATURE)
        check_numbers(self, "emotion_weight", least=0)
        check_numbers(self, "explore_tokens", least=1)
        if self.signal == "emdr2" and self.loss != "softmax":
            raise ConfigError(f"loss = {self.loss!r} needs targets, which signal = 'emdr2' does not have.")
        # Weights are normalised, so all equal ones are the default.
        if self.signal != "metrics" and len(set(dataclasses.astuple(self.utility))) > 1:
            raise ConfigError(f"utility = {self.utility} goes with signal = 'metrics', not with {self.signal!r}.")


@dataclasses.dataclass(frozen=True)
class EmotionTaskSettings:
    """Before stage 2: the retriever learns to classify emotions, on all training contexts; ours."""

    max_examples: int = 0
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "max_examples", "max_validation_examples", least=0)


@dataclasses.dataclass(frozen=True)
class DenseTaskSettings(DenseSettings):
    """Before stage 2: the retriever learns to find each context's own response in its batch; ours, off in all recipes
    except the form "contrastive".

    Source: Karpukhin et al. 2020 (DPR), with one encoder for both sides as Contriever's (Izacard et al. 2022).

    Attributes:
      start_from: the stage whose retriever initializes this one; empty = the pretrained one.
    """

    start_from: str = ""
    temperature: float = 0.05


@dataclasses.dataclass(frozen=True)
class RetrieverTaskSettings:
    """Stage 2: the retriever learns from G1.

    It shares properties with `JointTaskSettings`: `ranks`, whether the retriever is trained by its candidates,
    `begins`, the setting that names the stage whose retriever it begins with, and `exemplar_probability`.

    Attributes:
      generator: the stage that trained G1; from a stage of the task "joint", G2 is taken.
      start_from: the stage whose retriever initializes this one; empty = the pretrained one.
      index: the index stage that supplies the candidates.
      candidates: M, how many candidates are re-scored with the current encoders to keep K (0 = all that were found).
      passage_encoder: "trained" encodes the candidates in every step, with gradients; "frozen" takes their embeddings
        from the index and trains the query side alone.
    """

    distillation: DistillationSettings = dataclasses.field(default_factory=DistillationSettings)
    generator: str = "generator"
    start_from: str = ""
    index: str = "index"
    candidates: int = 0
    passage_encoder: Literal["trained", "frozen"] = "trained"
    max_examples: int = 0
    max_validation_examples: int = 256
    ranks: ClassVar[bool] = True
    begins: ClassVar[str] = "start_from"
    exemplar_probability: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "candidates", "max_examples", "max_validation_examples", least=0)


@dataclasses.dataclass(frozen=True)
class JointTaskSettings(ResponseTaskSettings):
    """Stage 3: joint training; with `retriever_weight` 0, a generator learns to read exemplars.

    Attributes:
      generator: the stage that trained G1, which judges candidates and initializes G2. From a stage of this task, G2 is
        taken.
      warm_up: False trains G2 from the weights that G1 began with, random or pretrained (the paper's "scratch" row; the
        judge stays G1).
      retriever: the stage that trained the retriever; empty = the pretrained one.
      index: the stage that searched the exemplars.
      retriever_weight: alpha of Eq. 7; 0 = the retriever learns nothing, and G2 reads the exemplars from the index.
        Retriever and G2 share no parameters, and the optimizers' steps do not depend on a gradient's scale: in
        training, values between 0 and 1 differ by `clip_norm` alone. The balance is the `learning_rate_scale` of the
        group "^retriever/".
      exemplar_probability: probability that a training row shows its exemplars. Below 1, the generator can answer
        without exemplars too, but they stay less familiar, which costs likelihood wherever they are shown.
      candidates, passage_encoder: see RetrieverTaskSettings.
    """

    distillation: DistillationSettings = dataclasses.field(default_factory=DistillationSettings)
    generator: str = "generator"
    warm_up: bool = True
    retriever: str = "retriever"
    index: str = "reindex"
    retriever_weight: float = 0.2
    exemplar_probability: float = 1.0
    candidates: int = 0
    passage_encoder: Literal["trained", "frozen"] = "frozen"
    max_examples: int = 0
    max_validation_examples: int = 512
    begins: ClassVar[str] = "retriever"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "retriever_weight", "exemplar_probability", least=0, most=1)
        check_numbers(self, "candidates", "max_examples", "max_validation_examples", least=0)

    @property
    def ranks(self) -> bool:
        return self.retriever_weight > 0
