"""EmpRL's empathy identifiers as a task, and as judges of texts.

Two encoders read context and response (`models.empathy_identifier`). One stage trains the mechanisms that it names on
shared encoders; one stage per mechanism gives the paper's three identifiers with their six encoders.
Source: Ma et al., "Empathy Level Alignment via Reinforcement Learning", Sec. III-D.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.cache import kept_array
from empax.core.config import ConfigError, check_numbers
from empax.core.files import hash_json
from empax.core.progress import Progress
from empax.core.protocols import Tokenizer
from empax.core.shapes import shapes_of
from empax.core.sharding import local_mesh, place_rows, replicated
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.types import LEVELS, MECHANISMS, Batch, Instance, Mean, Metrics, Params
from empax.data import features
from empax.data.batches import bucket_of, eval_batches
from empax.data.exemplars import padded
from empax.interop.pretrained_encoders import LoadedEncoder
from empax.models.empathy_identifier import EmpathyIdentifier
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
from empax.parts.encoder.stages import check_buckets, load_stage_encoder

_JUDGED_TOGETHER = 128  # pairs in one batch of a judge


@dataclasses.dataclass(frozen=True)
class IdentifierTaskSettings(JudgeTaskSettings):
    """Settings of an identifier stage: those of every judge, and its own.

    Attributes:
      pooling: pooling of the response after it attended to the context: "mean" (EmpRL's code) or "max" (its paper).
      head: "mlp" (EmpRL's code) or "linear" (its paper).
      dropout: dropout of attention and head; the encoders have their own.
      max_context_tokens: maximum tokens of a context, including both frame tokens; the oldest are cut.
      response_buckets: lengths in tokens to which responses are padded, ascending. The last is the maximum: longer
        responses keep both ends.
    """

    pooling: Literal["mean", "max"] = "mean"
    head: Literal["mlp", "linear"] = "mlp"
    dropout: float = 0.1
    max_context_tokens: int = 64
    response_buckets: tuple[int, ...] = (32, 64, 128)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "dropout", least=0, below=1)
        check_numbers(self, "max_context_tokens", least=4)
        ascending = sorted(set(self.response_buckets))
        if not ascending or list(self.response_buckets) != ascending or ascending[0] < 4:
            raise ConfigError(f"response_buckets = {self.response_buckets} must be ascending lengths of at least 4.")


def encode_contexts(tokenizer: Tokenizer, contexts: Sequence[Sequence[str]], max_tokens: int) -> list[list[int]]:
    """Encodes `[CLS] context [SEP]`, keeping the newest tokens."""
    plain = [features.plain_context(context) for context in contexts]
    return features.encode_for_bert(tokenizer, plain, max_tokens, keep="right")


def encode_responses(tokenizer: Tokenizer, responses: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Encodes `[CLS] response [SEP]`, keeping both ends: many start with feelings and end with a question."""
    return features.encode_for_bert(tokenizer, responses, max_tokens, keep="ends")


class ExchangeExamples:
    """Random-access examples of pairs: the context as source, the response as target."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer, stage: IdentifierTaskSettings):
        self.pairs, self.pad_id, self.response_buckets = pairs, tokenizer.pad_id, stage.response_buckets
        self.contexts = encode_contexts(tokenizer, [p.context for p in pairs], stage.max_context_tokens)
        self.responses = encode_responses(tokenizer, [p.response for p in pairs], stage.response_buckets[-1])
        rows = zip(self.contexts, self.responses, strict=True)
        self.lengths = np.array([[len(context), len(response)] for context, response in rows], np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.pairs)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> AttributeBatch:
        """Collates the rows `indices` (-1 = filler); does not use `rng`."""
        del rng
        rows = [int(i) for i in indices]
        responses = [self.responses[i] if i >= 0 else [] for i in rows]
        columns = bucket_of(max(map(len, responses)), self.response_buckets)
        source = padded(self.contexts, rows, length, self.pad_id)
        return label_batch(self.pairs, rows, source, features.pad(responses, columns, self.pad_id))


@dataclasses.dataclass(frozen=True)
class Identifier:
    """Identifiers of one or more mechanisms; the loss is the sum of their cross-entropies."""

    model: EmpathyIdentifier
    class_weights: ClassWeights = ()

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return self.model.mechanisms

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        return self.model.init(rng, batch.source, batch.source_mask, batch.target, batch.target_mask)["params"]

    def logits(
        self,
        params: Params,
        context: Int[Array, "B S"],
        context_mask: Bool[Array, "B S"],
        response: Int[Array, "B T"],
        response_mask: Bool[Array, "B T"],
        rng: jax.Array | None = None,
    ) -> Float[Array, "B C 3"]:
        """Returns three logits per mechanism; `rng` None = no dropout."""
        return apply(self.model, params, context, context_mask, response, response_mask, rng=rng)

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        texts = batch.source, batch.source_mask, batch.target, batch.target_mask
        logits = self.logits(params, *texts, rng if train else None)
        return levels_loss(logits, batch, self.mechanisms, self.class_weights, confusion=not train)

    def summarize(self, averages: dict[str, float]) -> dict[str, float]:
        return summarize_levels(averages, self.mechanisms)


def make_task(stage: IdentifierTaskSettings, loaded: LoadedEncoder, weights: ClassWeights = ()) -> Identifier:
    encoder = loaded.model.encoder
    model = EmpathyIdentifier(
        encoder,
        encoder.clone(),  # the same module under two names would be one encoder
        stage.mechanisms,
        pooling=stage.pooling,
        head=stage.head,
        dropout=stage.dropout,
        dtype=jnp.dtype(stage.encoder.dtype),
    )
    return Identifier(model, weights)


def check_identifier(stage: IdentifierTaskSettings, run: RunContext) -> None:
    """Checks as `pairs.check_judge` does, and that contexts fit the buckets."""
    check_judge(stage, run, max_context_tokens=stage.max_context_tokens, response_buckets=stage.response_buckets[-1])
    check_buckets(run, max_context_tokens=stage.max_context_tokens)


def build_identifier(stage: IdentifierTaskSettings, run: RunContext) -> Assembly:
    loaded = load_stage_encoder(stage.encoder, run)
    train, holdout = load_pairs(stage, run)

    def initial(params: Params) -> Params:
        if loaded.params is None:
            return params
        own = loaded.params["encoder"]
        # Two copies: every step donates the state, and one buffer cannot be donated twice.
        return {**params, "context_encoder": own, "response_encoder": jax.tree.map(np.copy, own)}

    return Assembly(
        make_task(stage, loaded, class_weights(stage, train)),
        ExchangeExamples(train, loaded.tokenizer, stage),
        ExchangeExamples(holdout, loaded.tokenizer, stage),
        initial=initial,
    )


def sketch_identifier(stage: IdentifierTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    loaded = load_stage_encoder(stage.encoder, run, planned=True)
    batch = shapes_of(AttributeBatch, B=batch_size, S=length, T=stage.response_buckets[-1], C=len(stage.mechanisms))
    return Sketch(make_task(stage, loaded), batch)


@functools.lru_cache(maxsize=8)
def _log_probs(task: Identifier) -> Callable[..., Float[Array, "B C 3"]]:
    """Returns one compiled function per task, so that its code is reused."""

    def apply(params: Params, batch: AttributeBatch) -> Float[Array, "B C 3"]:
        texts = batch.source, batch.source_mask, batch.target, batch.target_mask
        return jax.nn.log_softmax(task.logits(params, *texts))

    return jax.jit(apply)


@dataclasses.dataclass(frozen=True)
class IdentifierJudge:
    """Trained identifiers, ready to label responses in their contexts."""

    task: Identifier
    params: Params
    tokenizer: Tokenizer
    stage: IdentifierTaskSettings
    hash: str

    def __call__(
        self, contexts: Sequence[Sequence[str]], responses: Sequence[str], *, progress: bool = True
    ) -> Float[np.ndarray, "N C 3"]:
        """Returns log-probabilities for every (context, response)."""
        blank = (0,) * len(self.task.mechanisms)
        pairs = [Pair(tuple(c), r, blank) for c, r in zip(contexts, responses, strict=True)]
        found = np.empty((len(pairs), len(blank), len(LEVELS)), np.float32)
        if not pairs:
            return found
        examples = ExchangeExamples(pairs, self.tokenizer, self.stage)
        # Powers of two keep the shapes few; a single pair must not pay for a hundred filler rows.
        size = min(_JUDGED_TOGETHER, 1 << (len(pairs) - 1).bit_length())
        longest = self.stage.max_context_tokens
        batches = eval_batches(examples, batch_size=size, buckets=sorted({max(longest // 2, 1), longest}))
        apply, mesh = _log_probs(self.task), local_mesh()
        label = "identifiers" if progress and len(pairs) > 1 else None
        with Progress(label, total=len(pairs), unit="pairs") as shown:
            for indices, batch in batches:
                real = indices >= 0
                found[indices[real]] = np.asarray(apply(self._placed, place_rows(batch, mesh)))[real]
                shown.advance(int(real.sum()))
        return found

    @functools.cached_property
    def _placed(self) -> Params:
        """The parameters on this process's devices, for all calls."""
        mesh = local_mesh()
        return jax.device_put(self.params, None if mesh is None else replicated(mesh))


@dataclasses.dataclass(frozen=True)
class Identifiers:
    """Judges that together cover each mechanism once."""

    judges: tuple[IdentifierJudge, ...]

    def __call__(
        self, contexts: Sequence[Sequence[str]], responses: Sequence[str], *, progress: bool = True
    ) -> Float[np.ndarray, "N M 3"]:
        """Returns log-probabilities for every (context, response), in the order of MECHANISMS and LEVELS."""
        found = [judge(contexts, responses, progress=progress) for judge in self.judges]
        covered = [mechanism for judge in self.judges for mechanism in judge.task.mechanisms]
        return np.concatenate(found, axis=1)[:, [covered.index(mechanism) for mechanism in MECHANISMS]]

    def gold(self, instances: Sequence[Instance], cache: Path) -> Int[np.ndarray, "N M"]:
        """Returns the likeliest levels of the gold responses; the folder `cache` keeps them for later runs."""
        contexts, responses = [i.context for i in instances], [i.response for i in instances]
        path = cache / f"{hash_json([[judge.hash for judge in self.judges], contexts, responses])}.npy"
        return kept_array(path, lambda: self(contexts, responses).argmax(axis=2).astype(np.int32))


def empathy_reward(log_probs: Float[np.ndarray, "N M 3"], levels: Int[np.ndarray, "N M"]) -> Float[np.ndarray, " N"]:
    r"""Returns how likely each response has these levels, in (0, 1]; `log_probs` are those of `Identifiers`.

    .. math:: R_{emp} = \exp(-\sum_m CE(p_m, l_m))

    Source: EmpRL, Eq. 2 to 5.
    """
    return np.exp(np.take_along_axis(log_probs, levels[..., None], axis=2).sum(axis=(1, 2)))


def load_identifier(stage: IdentifierTaskSettings, run: RunContext, params: Params, made_by: str) -> IdentifierJudge:
    """Builds the judge of trained parameters; `made_by` is its hash."""
    loaded = load_stage_encoder(stage.encoder, run, with_params=False)
    return IdentifierJudge(make_task(stage, loaded), params, loaded.tokenizer, stage, made_by)


def check_mechanisms(covered: Sequence[str]) -> None:
    """Raises ConfigError unless the identifiers cover each mechanism once."""
    if sorted(covered) != sorted(MECHANISMS):
        raise ConfigError(
            f"the identifiers cover {', '.join(covered)}; they must cover each of {', '.join(MECHANISMS)} once."
        )
