"""Judges that several systems share. Here: the classifiers of emotional reaction, interpretation and exploration.

An encoder with one three-class head per mechanism, trained on EPITOME (or on the built-in sample). REG applies
CLS to the context alone (Eq. 1) for what is asked, and to context and response for an exemplar; so each training pair
is shown in both forms, the response hidden with `hide_response_probability`. Source: Wang et al., Sec. 3.2.1 and A.2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from empax.core.config import ConfigError, to_settings
from empax.core.files import hash_json
from empax.core.protocols import Tokenizer
from empax.core.run import Assembly, RunContext, Sketch, TaskSpec
from empax.core.tree import hash_tree
from empax.core.types import LEVELS, MECHANISMS, Batch, Mean, Metrics, Params
from empax.data import features
from empax.data.epitome import find_epitome, load_epitome, split_by_seeker
from empax.data.sample import load_annotated_pairs
from empax.data.store import run_tokenizer
from empax.interop.pretrained import EncoderSettings, LoadedEncoder, load_encoder
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import ClassificationHead
from empax.retrieval.encode import BUCKETS, Encoder, embed
from empax.training.checkpoint import load_params


@flax.struct.dataclass
class AttributeBatch(Batch):
    """Texts with one label per mechanism; `target` stays empty."""

    labels: Int[Array, "B C"]


@dataclasses.dataclass(frozen=True)
class ClassifierStage:
    """Settings of a classifier stage.

    Attributes:
      data: "epitome", or the annotations of the built-in "sample".
      mechanisms: which heads; all three share one encoder, or list one per stage for separate encoders.
      holdout: share of seeker posts kept for validation.
      class_weights: weigh each class by the inverse of its share.
      max_tokens: of context and response together; the oldest are cut.
    """

    encoder: EncoderSettings = dataclasses.field(default_factory=EncoderSettings)
    data: Literal["epitome", "sample"] = "epitome"
    mechanisms: tuple[str, ...] = MECHANISMS
    holdout: float = 0.2
    class_weights: bool = False
    hide_response_probability: float = 0.5
    max_tokens: int = 128

    def __post_init__(self) -> None:
        if not self.mechanisms or set(self.mechanisms) - set(MECHANISMS):
            raise ConfigError(f"mechanisms = {self.mechanisms} must be some of {', '.join(MECHANISMS)}.")
        if self.max_tokens < 8:
            raise ConfigError(f"max_tokens = {self.max_tokens} must be at least 8, to hold a context and a response.")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A text, the answer to it, and the level of each mechanism."""

    context: tuple[str, ...]
    response: str
    levels: tuple[int, ...]


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
        source, mask = features.pad(texts, length, self.pad_id)
        empty = np.zeros((len(rows), 1), np.int32)
        labels = np.array([self.pairs[max(i, 0)].levels for i in rows], np.int32)
        arrays: dict[str, Any] = {
            "source": source,
            "source_mask": mask,
            "target": empty,
            "target_mask": empty.astype(bool),
            "valid": np.array(rows) >= 0,
            "labels": labels,
        }
        return AttributeBatch(**arrays)


def encode(
    tokenizer: Tokenizer, contexts: Sequence[Sequence[str]], responses: Sequence[str], max_tokens: int
) -> list[list[int]]:
    """[CLS] context [SEP] response [SEP]; without a response, [CLS] context [SEP]. The oldest tokens are cut."""
    asked = features.encode_for_bert(tokenizer, [features.plain_context(c) for c in contexts], max_tokens, keep="right")
    answered = tokenizer.encode_batch(list(responses))
    rows = []
    for context, response in zip(asked, answered, strict=True):
        if not response:
            rows.append(context)
            continue
        tail = [*response[: max_tokens // 2], context[-1]]
        room = max_tokens - len(tail) - 2
        rows.append([context[0], *context[1:-1][-room:], context[-1], *tail])
    return rows


@dataclasses.dataclass(frozen=True)
class Classifier:
    """Three-class heads over one encoder; the loss is the sum of their cross-entropies."""

    encoder: DualEncoder
    mechanisms: tuple[str, ...]
    class_weights: tuple[tuple[float, ...], ...]  # [mechanism][level]

    @property
    def head(self) -> ClassificationHead:
        return ClassificationHead(num_classes=len(self.mechanisms) * len(LEVELS))

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        first, second = jax.random.split(rng)
        encoder = self.encoder.init(first, batch.source, batch.source_mask)["params"]
        encoding = jnp.zeros((1, self.encoder.encoder.config.d_model))
        return {"encoder": encoder, "head": self.head.init(second, encoding)["params"]}

    def logits(
        self, params: Params, source: Int[Array, "B S"], mask: Any, rng: jax.Array | None
    ) -> Float[Array, "B C 3"]:
        """One row of three logits per mechanism."""
        rngs = None if rng is None else {"dropout": rng}
        options: dict[str, Any] = {"rngs": rngs, "deterministic": rng is None}
        encoding = self.encoder.apply({"params": params["encoder"]}, source, mask, method="embed", **options)
        flat: Any = self.head.apply({"params": params["head"]}, encoding, **options)
        return flat.reshape(-1, len(self.mechanisms), len(LEVELS))

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array | None) -> tuple[Mean, Metrics]:
        logits = self.logits(params, batch.source, batch.source_mask, rng)
        log_probs = jax.nn.log_softmax(logits)
        nll = -jnp.take_along_axis(log_probs, batch.labels[..., None], axis=-1)[..., 0]  # [B, C]
        weights = jnp.asarray(self.class_weights)[jnp.arange(len(self.mechanisms))[None, :], batch.labels]
        hits = (logits.argmax(-1) == batch.labels).astype(jnp.float32)
        metrics = {f"{name}_accuracy": Mean.of(hits[:, c], batch.valid) for c, name in enumerate(self.mechanisms)}
        metrics["accuracy"] = Mean.of(hits.mean(axis=1), batch.valid)
        return Mean.of((nll * weights).sum(axis=1), batch.valid), metrics


def load_pairs(stage: ClassifierStage, run: RunContext) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs, split by seeker post, stratified, by the run's seed."""
    sample = stage.data == "sample"
    pairs = load_annotated_pairs() if sample else load_epitome(find_epitome(run.config["data"]["dir"]))
    sides = split_by_seeker(pairs, holdout=stage.holdout, seed=run.seed)
    order = {name: i for i, name in enumerate(LEVELS)}
    train, holdout = (
        [Pair((p.seeker_post,), p.response_post, tuple(order[p.levels[m]] for m in stage.mechanisms)) for p in side]
        for side in sides
    )
    return train, holdout


def _weights(pairs: Sequence[Pair], stage: ClassifierStage) -> tuple[tuple[float, ...], ...]:
    if not stage.class_weights:
        return ((1.0,) * len(LEVELS),) * len(stage.mechanisms)
    labels = np.array([p.levels for p in pairs])
    counts = np.stack([np.bincount(column, minlength=len(LEVELS)) for column in labels.T])
    weights = len(pairs) / (len(LEVELS) * np.maximum(counts, 1))
    return tuple(tuple(float(w) for w in row) for row in weights)


def _load(stage: ClassifierStage, run: RunContext, *, planned: bool = False) -> LoadedEncoder:
    return load_encoder(stage.encoder, run_tokenizer(run, planned=planned), with_params=not planned)


def build_classifier(stage: ClassifierStage, run: RunContext) -> Assembly:
    encoder = _load(stage, run)
    train, holdout = load_pairs(stage, run)

    def initial(params: Params) -> Params:
        return params if encoder.params is None else {**params, "encoder": encoder.params}

    def examples(pairs: list[Pair], hide: float) -> PairExamples:
        return PairExamples(pairs, encoder.tokenizer, stage.max_tokens, hide_probability=hide)

    return Assembly(
        Classifier(encoder.model, stage.mechanisms, _weights(train, stage)),
        examples(train, stage.hide_response_probability),
        examples(holdout, 0.0),
        initial=initial,
    )


@functools.lru_cache(maxsize=8)
def _flat_logits(task: Classifier) -> Encoder:
    """One function per classifier, so that its compiled code is found again."""
    return lambda params, ids, mask: task.logits(params, ids, mask, None).reshape(ids.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class Judge:
    """A trained classifier, ready to label texts."""

    task: Classifier
    params: Params
    tokenizer: Tokenizer
    max_tokens: int
    hash: str
    buckets: tuple[int, ...] = BUCKETS

    def __call__(self, contexts: Sequence[Sequence[str]], responses: Sequence[str]) -> Float[np.ndarray, "N C 3"]:
        """Logits for every (context, response); an empty response judges the context alone."""
        rows = encode(self.tokenizer, contexts, responses, self.max_tokens)
        apply = _flat_logits(self.task)

        progress = "attributes" if len(rows) > 1 else None
        flat = embed(apply, self.params, rows, pad_id=self.tokenizer.pad_id, buckets=self.buckets, progress=progress)
        return flat.reshape(len(rows), len(self.task.mechanisms), len(LEVELS))


def _stage(run: RunContext, stage_name: str) -> ClassifierStage:
    section = {k: v for k, v in run.section(stage_name).items() if k in ClassifierStage.__dataclass_fields__}
    return to_settings(ClassifierStage, section, where=f"config.{stage_name}")


def load_holdout(run: RunContext, stage_name: str) -> list[Pair]:
    """The pairs that the classifier of `stage_name` was not trained on."""
    return load_pairs(_stage(run, stage_name), run)[1]


def load_judge(run: RunContext, stage_name: str) -> Judge:
    """The classifier of a finished stage."""
    stage = _stage(run, stage_name)
    encoder = _load(stage, run)
    params = load_params(run.files.stage(stage_name))
    unweighted = ((1.0,) * len(LEVELS),) * len(stage.mechanisms)
    return Judge(
        Classifier(encoder.model, stage.mechanisms, unweighted),
        params,
        encoder.tokenizer,
        stage.max_tokens,
        hash_json([hash_tree(params), dataclasses.asdict(stage)]),
    )


def sketch_classifier(stage: ClassifierStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    def shape(*sizes: int, kind: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, kind)

    batch = AttributeBatch(
        source=shape(batch_size, length),
        source_mask=shape(batch_size, length, kind=bool),
        target=shape(batch_size, 1),
        target_mask=shape(batch_size, 1, kind=bool),
        valid=shape(batch_size, kind=bool),
        labels=shape(batch_size, len(stage.mechanisms)),
    )
    unweighted = ((1.0,) * len(LEVELS),) * len(stage.mechanisms)
    return Sketch(Classifier(_load(stage, run, planned=True).model, stage.mechanisms, unweighted), batch)


TASKS = {"classifier": TaskSpec(ClassifierStage, build_classifier, sketch_classifier)}
