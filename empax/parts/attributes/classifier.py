"""The single-text classifier of the mechanisms: an encoder with a three-class head for each.

REG applies CLS to the context alone (Eq. 1) for a query, and to context and response for an exemplar; so training pairs
are shown in both forms, with the response hidden with `hide_response_probability`.
Source: Wang et al., Sec. 3.2.1 and A.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import check_numbers
from empax.core.protocols import Tokenizer
from empax.core.shapes import shapes_of
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.types import LEVELS, Mean, Metrics, Params
from empax.data import features
from empax.models.dual_encoder import pooled
from empax.models.heads import ClassificationHead
from empax.models.layers import apply
from empax.parts.attributes.pairs import (
    AttributeBatch,
    ClassWeights,
    JudgeTaskSettings,
    Pair,
    check_judge,
    class_weights,
    label_batch,
    levels_loss,
    load_pairs,
    summarize_levels,
)
from empax.parts.encoder.stages import assembled, check_buckets, load_stage_encoder
from empax.parts.encoder.task import EncoderTask, Predictor
from empax.retrieval.encode import BUCKETS


@dataclasses.dataclass(frozen=True)
class ClassifierTaskSettings(JudgeTaskSettings):
    """Settings of a classifier stage: those of every judge, and its own.

    Attributes:
      hide_response_probability: probability that a training pair is shown without its response.
      max_tokens: maximum tokens of both texts; the response keeps both ends, at most half of them, the context its end.
    """

    hide_response_probability: float = 0.5
    max_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "hide_response_probability", least=0, most=1)
        check_numbers(self, "max_tokens", least=8)  # to hold a context and a response


class PairExamples:
    """Random-access examples of pairs; validation shows each pair in full."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer, max_tokens: int, *, hide_probability: float):
        self.pairs, self.max_tokens, self.hide_probability = pairs, max_tokens, hide_probability
        self.pad_id = tokenizer.pad_id
        self.whole = encode(tokenizer, [p.context for p in pairs], [p.response for p in pairs], max_tokens)
        self.alone = encode(tokenizer, [p.context for p in pairs], [""] * len(pairs), max_tokens)
        self.lengths = np.array([len(ids) for ids in self.whole])

    def __len__(self) -> int:
        return len(self.pairs)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> AttributeBatch:
        rows = [int(i) for i in indices]
        hidden = rng.random(len(rows)) < self.hide_probability
        texts = [
            (self.alone if hide else self.whole)[i] if i >= 0 else [] for i, hide in zip(rows, hidden, strict=True)
        ]
        return label_batch(self.pairs, rows, features.pad(texts, length, self.pad_id))


def encode(
    tokenizer: Tokenizer, contexts: Sequence[Sequence[str]], responses: Sequence[str], max_tokens: int
) -> list[list[int]]:
    """Encodes [CLS] context [SEP] response [SEP], or [CLS] context [SEP] without a response.

    A long context keeps its newest tokens, a long response both ends: one in eight of EPITOME's emotional reactions
    begins behind the first 64 tokens.
    """
    asked = tokenizer.encode_batch([features.plain_context(context) for context in contexts])
    answered = tokenizer.encode_batch(list(responses))
    return [frame(tokenizer, *pair, max_tokens)[0] for pair in zip(asked, answered, strict=True)]


def frame(
    tokenizer: Tokenizer, context: Sequence[int], response: Sequence[int], max_tokens: int
) -> tuple[list[int], int]:
    """Returns the row of `encode` from the ids of both texts, and the position of the response in it."""
    first, last = tokenizer.cls_id, tokenizer.sep_id
    cut = max(len(response) - max_tokens // 2, 0)
    start = (len(response) - cut + 1) // 2
    tail = [*response[:start], *response[start + cut :], last] if response else []
    room = max_tokens - len(tail) - 2
    head = [first, *context[max(len(context) - room, 0) :], last]
    return [*head, *tail], len(head)


@dataclasses.dataclass(frozen=True)
class Classifier(EncoderTask):
    """Three-class heads over one encoder; the loss is the sum of their cross-entropies.

    Its outputs are three logits for each mechanism; predictions are log-probabilities, of the context alone if the
    response is empty.

    Attributes:
      sep_id: the token behind the context.
    """

    mechanisms: tuple[str, ...]
    class_weights: ClassWeights = ()
    _: dataclasses.KW_ONLY
    sep_id: int
    progress: ClassVar[tuple[str, int]] = ("attributes", 2)

    @property
    def heads(self) -> Mapping[str, ClassificationHead]:
        return {"head": ClassificationHead(num_classes=len(self.mechanisms) * len(LEVELS))}

    def vectors(
        self,
        params: Params,
        ids: Any,
        mask: Bool[Array, "N S"],
        *,
        rng: jax.Array | None,
        start: Int[Array, " N"] | None = None,
        **inputs: Any,
    ) -> Float[Array, "N D"]:
        """Pools the states of the response, which have read the context; without a response those of the context.

        In a mean over both texts, the speaker's feelings would count as the listener's. `start` is the position of the
        response; None = behind the first separator of `ids`.
        """
        states = apply(self.encoder.encoder, params["encoder"]["encoder"], ids, mask, rng=rng, **inputs)
        places = jnp.arange(mask.shape[1])[None]
        if start is None:
            start = jnp.argmax(mask & (ids == self.sep_id) & (places > 0), axis=1) + 1
        answered = mask & (places >= start[:, None])
        read = jnp.where(answered.any(axis=1, keepdims=True), answered, mask)
        return pooled(states, read, self.encoder.pooling)

    def said(self, *outputs: Float[Array, "N _"]) -> Float[Array, "N C 3"]:
        return outputs[0].reshape(-1, len(self.mechanisms), len(LEVELS))

    def losses(self, found: Float[Array, "N C 3"], batch: Any, *, train: bool) -> tuple[Mean, Metrics]:
        return levels_loss(found, batch, self.mechanisms, self.class_weights, confusion=not train)

    def summarize(self, averages: dict[str, float]) -> dict[str, float]:
        return summarize_levels(averages, self.mechanisms)

    def rows(self, tokenizer: Tokenizer, max_tokens: int, *given: Any) -> list[list[int]]:
        """Encodes contexts with their responses."""
        contexts, responses = given
        return encode(tokenizer, contexts, responses, max_tokens)

    def predicted(self, found: Float[Array, "N C 3"]) -> Float[Array, "N C 3"]:
        return jax.nn.log_softmax(found)


ClassifierJudge: TypeAlias = Predictor[Classifier]
"""`(contexts, responses) -> log_probs[N, C, 3]`."""


def check_classifier(stage: ClassifierTaskSettings, run: RunContext) -> None:
    """Checks as `pairs.check_judge` does, and that texts fit the buckets."""
    check_judge(stage, run, max_tokens=stage.max_tokens)
    check_buckets(run, most=BUCKETS[-1], max_tokens=stage.max_tokens)


def build_classifier(stage: ClassifierTaskSettings, run: RunContext) -> Assembly:
    encoder = load_stage_encoder(stage.encoder, run)
    train, holdout = load_pairs(stage, run)

    def examples(pairs: list[Pair], hide: float) -> PairExamples:
        return PairExamples(pairs, encoder.tokenizer, stage.max_tokens, hide_probability=hide)

    weights, sep_id = class_weights(stage, train), encoder.tokenizer.sep_id
    task = Classifier(encoder.model, stage.mechanisms, weights, sep_id=sep_id)
    return assembled(task, encoder, examples(train, stage.hide_response_probability), examples(holdout, 0.0))


def sketch_classifier(stage: ClassifierTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    batch = shapes_of(AttributeBatch, B=batch_size, S=length, T=1, C=len(stage.mechanisms))
    return Sketch(classifier_of(stage, run, planned=True), batch)


def classifier_of(stage: ClassifierTaskSettings, run: RunContext, *, planned: bool = False) -> Classifier:
    """Builds the task of a stage, without parameters; `planned`: from the config alone."""
    encoder = load_stage_encoder(stage.encoder, run, with_params=False, planned=planned)
    return Classifier(encoder.model, stage.mechanisms, sep_id=encoder.tokenizer.sep_id)


def load_classifier(stage: ClassifierTaskSettings, run: RunContext, params: Params, made_by: str) -> ClassifierJudge:
    """Builds the judge of trained parameters; `made_by` is its hash."""
    encoder = load_stage_encoder(stage.encoder, run, with_params=False)
    task = Classifier(encoder.model, stage.mechanisms, sep_id=encoder.tokenizer.sep_id)
    return Predictor(task, params, encoder.tokenizer, stage.max_tokens, made_by)
