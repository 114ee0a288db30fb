"""What each of REG's stages adds to the settings that its models share."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from empax.core.config import ConfigError, check_numbers
from empax.decoding.settings import LEAST_TEMPERATURE
from empax.evaluation.device_metrics import UtilityWeights
from empax.parts.exemplars.dense_retrieval import Negative
from empax.parts.exemplars.settings import RetrievalSettings
from empax.parts.generator.settings import ResponseTaskSettings


@dataclasses.dataclass(frozen=True)
class RegSettings(RetrievalSettings):
    """What all stages share: the section `reg`."""

    has_neighbours: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class DistillationSettings:
    """Where the retriever's lesson comes from.

    Attributes:
      signal: "metrics" (Eq. 3), "likelihood" (teacher-forced; the paper's G1+RAG row, Atlas' PDist) or "emdr2".
      utility: weights of F's parts; 0 leaves one out (the paper's w/o BLEU, w/o F1, w/o R-L).
      target_temperature: tau of Eq. 3; for the likelihood, of the mean log-likelihood per token. This and the next
        are at least LEAST_TEMPERATURE.
      score_temperature: divides the retriever's scores before the softmax.
      loss: "softmax", or Eq. 4 to the letter.
      replace_probability: k of Eq. 5; 0 is w/o RCA.
      emotion_weight: of the 32-way head over the retriever's encodings of contexts; ours.
      explore_tokens: how long G1's trial answers may get.
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


@dataclasses.dataclass(frozen=True)
class EmotionTaskSettings:
    """Before stage 2: the retriever learns to tell the emotions apart, on all training contexts; ours."""

    max_examples: int = 0
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "max_examples", "max_validation_examples", least=0)


@dataclasses.dataclass(frozen=True)
class DenseTaskSettings:
    """Before stage 2: contexts learn to find their own responses among those of their batch; ours, off in all recipes
    but the form "contrastive".

    Source: Karpukhin et al. 2020 (DPR), with one encoder for both sides as Contriever's (Izacard et al. 2022).

    Attributes:
      start_from: the stage whose retriever to go on from; empty = as pretrained.
      negatives: beside the responses of the batch, see `systems.lempex.retriever.RetrieverTaskSettings`.
      temperature: divides the scores; 0.05 is Contriever's, for unit vectors.
    """

    start_from: str = ""
    negatives: tuple[Negative, ...] = ()
    temperature: float = 0.05

    def __post_init__(self) -> None:
        check_numbers(self, "temperature", least=LEAST_TEMPERATURE)
        if len(set(self.negatives)) < len(self.negatives):
            raise ConfigError(f"negatives = {self.negatives} must name each kind once.")


@dataclasses.dataclass(frozen=True)
class RetrieverTaskSettings:
    """Stage 2.

    Attributes:
      generator: the stage that trained G1; one of the task "joint" counts by its G2.
      start_from: the stage whose retriever to go on from; empty = as pretrained.
      index: the index stage whose candidates are tried out.
      candidates: M, how many of those are re-scored with the current encoders, K being kept (0 = all that it found).
      passage_encoder: "trained" reads the candidates in every step, gradient and all; "frozen" takes their embeddings
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

    def __post_init__(self) -> None:
        check_numbers(self, "candidates", "max_examples", "max_validation_examples", least=0)


@dataclasses.dataclass(frozen=True)
class JointTaskSettings(ResponseTaskSettings):
    """Stage 3; with `retriever_weight` 0 the stage in which a generator learns to read exemplars.

    Attributes:
      generator: the stage that trained G1: it judges candidates, and G2 starts from it. One of this task counts by its
        G2.
      warm_up: False starts G2 from nothing (the paper's "scratch" row; the judge stays G1).
      retriever: the stage that trained the retriever; empty = as pretrained.
      index: the stage that searched the exemplars.
      retriever_weight: alpha of Eq. 7; 0 = the retriever learns nothing, and G2 reads what the index has found.
      exemplar_probability: how often a row of training shows its exemplars. Below 1 they stay unfamiliar input, which
        costs likelihood wherever they are shown; it keeps a generator that answers without exemplars too.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "retriever_weight", least=0, most=1)
        check_numbers(self, "exemplar_probability", least=0, most=1)
        check_numbers(self, "candidates", "max_examples", "max_validation_examples", least=0)
