"""The single-text classifier of the mechanisms: an encoder with one three-class head for each.

REG applies CLS to the context alone (Eq. 1) for what is asked, and to context and response for an exemplar; so each
training pair is shown in both forms, the response hidden with `hide_response_probability`.
Source: Wang et al., Sec. 3.2.1 and A.2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from empax.core.config import ConfigError, check_numbers
from empax.core.protocols import Tokenizer
from empax.core.shapes import shapes_of
from empax.core.sharding import local_mesh
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.types import LEVELS, Batch, Mean, Metrics, Params
from empax.data import features
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import ClassificationHead
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
    load_stage_encoder,
    summarize_levels,
    unweighted,
)
from empax.retrieval.encode import BUCKETS, Encoder, embed


@dataclasses.dataclass(frozen=True)
class ClassifierTaskSettings(JudgeTaskSettings):
    """Settings of a classifier stage: those of every judge, and its own.

    Attributes:
      hide_response_probability: how often a training pair is shown without its response.
      max_tokens: of context and response together; the oldest are cut.
    """

    hide_response_probability: float = 0.5
    max_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "hide_response_probability", least=0, most=1)
        check_numbers(self, "max_tokens", least=8)  # to hold a context and a response


class PairExamples:
    """Pairs as random-access examples; validation shows each pair whole."""

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
    """[CLS] context [SEP] response [SEP]; without a response, [CLS] context [SEP]. The oldest tokens are cut."""
    asked = tokenizer.encode_batch([features.plain_context(context) for context in contexts])
    answered = tokenizer.encode_batch(list(responses))
    return [frame(tokenizer, *pair, max_tokens)[0] for pair in zip(asked, answered, strict=True)]


def frame(
    tokenizer: Tokenizer, context: Sequence[int], response: Sequence[int], max_tokens: int
) -> tuple[list[int], int]:
    """The row of `encode` from ids of both texts, and where in it the response begins."""
    first, last = tokenizer.cls_id, tokenizer.sep_id
    tail = [*response[: max_tokens // 2], last] if response else []
    room = max_tokens - len(tail) - 2
    head = [first, *context[max(len(context) - room, 0) :], last]
    return [*head, *tail], len(head)


@dataclasses.dataclass(frozen=True)
class Classifier:
    """Three-class heads over one encoder; the loss is the sum of their cross-entropies."""

    encoder: DualEncoder
    mechanisms: tuple[str, ...]
    class_weights: ClassWeights

    @property
    def head(self) -> ClassificationHead:
        return ClassificationHead(num_classes=len(self.mechanisms) * len(LEVELS))

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        first, second = jax.random.split(rng)
        encoder = self.encoder.init(first, batch.source, batch.source_mask)["params"]
        encoding = jnp.zeros((1, self.encoder.width))
        return {"encoder": encoder, "head": self.head.init(second, encoding)["params"]}

    def logits(
        self,
        params: Params,
        source: Int[Array, "B S"] | None,
        mask: Any,
        rng: jax.Array | None,
        *,
        embedded: Float[Array, "B S D"] | None = None,
    ) -> Float[Array, "B C 3"]:
        """One row of three logits per mechanism; `embedded` stands for the embeddings of `source`."""
        rngs = None if rng is None else {"dropout": rng}
        options: dict[str, Any] = {"rngs": rngs, "deterministic": rng is None}
        encoder = {"params": params["encoder"]}
        encoding = self.encoder.apply(encoder, source, mask, embedded=embedded, method="embed", **options)
        flat: Any = self.head.apply({"params": params["head"]}, encoding, **options)
        return flat.reshape(-1, len(self.mechanisms), len(LEVELS))

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        logits = self.logits(params, batch.source, batch.source_mask, rng if train else None)
        return levels_loss(logits, batch, self.mechanisms, self.class_weights, confusion=not train)

    def summarize(self, averages: dict[str, float]) -> dict[str, float]:
        return summarize_levels(averages, self.mechanisms)


def check_classifier(stage: ClassifierTaskSettings, run: RunContext) -> None:
    """See `pairs.check_judge`; texts must also fit the buckets."""
    check_judge(stage, run, max_tokens=stage.max_tokens)
    most = min(BUCKETS[-1], run.named(run.stage).loop.buckets[-1])
    if stage.max_tokens > most:
        raise ConfigError(
            f"config.{run.stage}.max_tokens = {stage.max_tokens} is more than the longest of buckets; set it to at "
            f"most {most}."
        )


def build_classifier(stage: ClassifierTaskSettings, run: RunContext) -> Assembly:
    encoder = load_stage_encoder(stage.encoder, run)
    train, holdout = load_pairs(stage, run)

    def initial(params: Params) -> Params:
        return params if encoder.params is None else {**params, "encoder": encoder.params}

    def examples(pairs: list[Pair], hide: float) -> PairExamples:
        return PairExamples(pairs, encoder.tokenizer, stage.max_tokens, hide_probability=hide)

    return Assembly(
        Classifier(encoder.model, stage.mechanisms, class_weights(stage, train)),
        examples(train, stage.hide_response_probability),
        examples(holdout, 0.0),
        initial=initial,
    )


def sketch_classifier(stage: ClassifierTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    batch = shapes_of(AttributeBatch, B=batch_size, S=length, T=1, C=len(stage.mechanisms))
    return Sketch(planned_classifier(stage, run), batch)


def planned_classifier(stage: ClassifierTaskSettings, run: RunContext) -> Classifier:
    """The task of `stage` from the config alone."""
    encoder = load_stage_encoder(stage.encoder, run, with_params=False, planned=True)
    return Classifier(encoder.model, stage.mechanisms, unweighted(stage))


@functools.lru_cache(maxsize=8)
def _flat_log_probs(task: Classifier) -> Encoder:
    """One function per classifier, so that its compiled code is found again."""

    def apply(params: Params, ids: Any, mask: Any) -> Any:
        return jax.nn.log_softmax(task.logits(params, ids, mask, None)).reshape(ids.shape[0], -1)

    return apply


@dataclasses.dataclass(frozen=True)
class ClassifierJudge:
    """A trained classifier, ready to label texts."""

    task: Classifier
    params: Params
    tokenizer: Tokenizer
    max_tokens: int
    hash: str
    buckets: tuple[int, ...] = BUCKETS

    def __call__(self, contexts: Sequence[Sequence[str]], responses: Sequence[str]) -> Float[np.ndarray, "N C 3"]:
        """Log-probabilities for every (context, response); an empty response judges the context alone."""
        rows = encode(self.tokenizer, contexts, responses, self.max_tokens)
        apply = _flat_log_probs(self.task)

        options = {"pad_id": self.tokenizer.pad_id, "buckets": self.buckets, "mesh": local_mesh()}
        flat = embed(apply, self.params, rows, progress="attributes" if len(rows) > 1 else None, **options)
        return flat.reshape(len(rows), len(self.task.mechanisms), len(LEVELS))


def load_classifier(stage: ClassifierTaskSettings, run: RunContext, params: Params, made_by: str) -> ClassifierJudge:
    """The judge that trained parameters make; `made_by` is its hash."""
    encoder = load_stage_encoder(stage.encoder, run, with_params=False)
    task = Classifier(encoder.model, stage.mechanisms, unweighted(stage))
    return ClassifierJudge(task, params, encoder.tokenizer, stage.max_tokens, made_by)
