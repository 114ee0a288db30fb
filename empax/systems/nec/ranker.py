"""What ranks facts about things: how likely the response takes one up (NEC, Sec. 3.2, after SAKDP).

Trained on pairs of facts about the same context, of which the gold response repeats one: its thing is in the context
and its tail in the response, or the other way round. To choose facts no response is looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.shapes import shapes_of
from empax.core.sharding import local_mesh
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.types import Batch, Instance, Mean, Metrics, Params
from empax.data import features
from empax.data.batches import draw
from empax.data.knowledge import Fact, facts_of
from empax.data.store import check_prepared, load_instances, may_load, run_tokenizer
from empax.data.tokenizers import SEPARATOR, SubwordTokenizer
from empax.data.wordnet import FUNCTION_WORDS
from empax.interop.pretrained import check_fits, check_weights
from empax.interop.pretrained_encoders import LoadedEncoder, load_encoder
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import ClassificationHead
from empax.parts.knowledge.finder import check_knowledge
from empax.retrieval.encode import BUCKETS, Encoder, embed
from empax.systems.nec.settings import WITHOUT, RankerTaskSettings
from empax.training.checkpoint import load_params

_MARKS = ("[unused0]", SEPARATOR)
"""What stands before a fact: a token that a BERT's vocabulary has and its training never saw, or the separator.

Departure: NEC's code adds a token [CSK] and then looks for the id of [unused0]. Here both are one token.
"""
_HIDDEN = 384  # of the heads; NEC's code
_LEAST_LETTERS = 3  # of a tail that a response repeats: "be" and "go" are in many


def repeats(fact: Fact, context: str, response: str) -> bool:
    """Whether the response takes the fact up: one end of it is in the context, the other in the response.

    Ends are looked for as whole words. The one in the response must have a word of three letters that is no function
    word: NEC's code looks for any text, so that "be" counts.
    """
    ends = ((fact.head, fact.tail), (fact.tail, fact.head))
    return any(_has(context, one) and _tells(other) and _has(response, other) for one, other in ends)


def _has(text: str, phrase: str) -> bool:
    return re.search(rf"\b{re.escape(phrase.lower())}\b", text.lower()) is not None


def _tells(phrase: str) -> bool:
    return any(len(word) >= _LEAST_LETTERS and word not in FUNCTION_WORDS for word in phrase.lower().split())


def render(
    tokenizer: Tokenizer, contexts: Sequence[Sequence[str]], facts: Sequence[Fact], max_tokens: int, mark: int
) -> list[list[int]]:
    """`[CLS] context [SEP] mark thing relation tail` for each; the context loses its oldest tokens."""
    written = tokenizer.encode_batch([f"{fact.head} {fact.relation} {fact.tail}" for fact in facts])
    texts = tokenizer.encode_batch([features.plain_context(context) for context in contexts])
    rows = []
    for context, fact in zip(texts, written, strict=True):
        behind = [tokenizer.sep_id, mark, *fact[: max_tokens // 2]]
        rows.append([tokenizer.cls_id, *features.keep_newest(context, max_tokens - 1 - len(behind)), *behind])
    return rows


def mark_of(tokenizer: Tokenizer) -> int:
    """The id of what stands before a fact."""
    assert isinstance(tokenizer, SubwordTokenizer)
    known = [name for name in _MARKS if tokenizer.backend.token_to_id(name) is not None]
    return tokenizer.token_id(known[0] if known else _MARKS[-1])


@dataclasses.dataclass(frozen=True)
class Pair:
    """A context with a fact that its response repeats, and one that it does not."""

    context: tuple[str, ...]
    repeated: Fact
    other: Fact


def make_pairs(instances: Sequence[Instance]) -> list[Pair]:
    """Every repeated fact beside every other one of the same instance."""
    pairs = []
    for instance in instances:
        things = [fact for fact in facts_of(instance) if not fact.social]
        context = features.plain_context(instance.context)
        taken = [repeats(fact, context, instance.response) for fact in things]
        good = [fact for fact, yes in zip(things, taken, strict=True) if yes]
        rest = [fact for fact, yes in zip(things, taken, strict=True) if not yes]
        pairs += [Pair(instance.context, one, other) for one in good for other in rest]
    return pairs


class PairExamples:
    """Pairs as random-access examples: `source` has the repeated fact, `target` the other one."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer, max_tokens: int):
        contexts, mark = [p.context for p in pairs], mark_of(tokenizer)
        self.good = render(tokenizer, contexts, [p.repeated for p in pairs], max_tokens, mark)
        self.rest = render(tokenizer, contexts, [p.other for p in pairs], max_tokens, mark)
        self.pad_id = tokenizer.pad_id
        self.lengths = np.array([max(map(len, both)) for both in zip(self.good, self.rest, strict=True)])

    def __len__(self) -> int:
        return len(self.good)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> Batch:
        del rng
        sides = [
            features.pad([rows[i] if i >= 0 else [] for i in indices], length, self.pad_id)
            for rows in (self.good, self.rest)
        ]
        return Batch(*sides[0], *sides[1], np.asarray(indices) >= 0)  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Ranker:
    r"""An encoder with two heads on the state of the mark: a score, and whether the fact is repeated.

    .. math:: L = \max(0, \delta - s^+ + s^-) + \tfrac{1}{2} (CE^+ + CE^-)

    with s a sigmoid of the normalised state. Source: NEC's code.
    """

    encoder: DualEncoder
    mark: int
    margin: float

    @property
    def heads(self) -> tuple[ClassificationHead, ClassificationHead]:
        """Of the score and of the class."""
        return ClassificationHead(1, hidden=_HIDDEN), ClassificationHead(2, hidden=_HIDDEN)

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        rngs = jax.random.split(rng, 3)
        encoder = self.encoder.init(rngs[0], batch.source, batch.source_mask)["params"]
        state = jnp.zeros((1, self.encoder.encoder.config.d_model))  # pyright: ignore[reportAttributeAccessIssue]
        score, kind = (head.init(r, state)["params"] for head, r in zip(self.heads, rngs[1:], strict=True))
        return {"encoder": encoder, "score": score, "class": kind}

    def read(
        self, params: Params, ids: Int[Array, "N S"], mask: Bool[Array, "N S"], rng: jax.Array | None
    ) -> tuple[Float[Array, " N"], Float[Array, "N 2"]]:
        """Scores in (0, 1), and logits of (not repeated, repeated)."""
        rngs = None if rng is None else {"dropout": rng}
        options: dict[str, Any] = {"rngs": rngs, "deterministic": rng is None}
        states: Any = self.encoder.encoder.apply({"params": params["encoder"]["encoder"]}, ids, mask, **options)
        state = jnp.take_along_axis(states, mark_places(ids, mask, self.mark)[:, None, None], axis=1)[:, 0]
        state = state.astype(jnp.float32)
        state = state * jax.lax.rsqrt(jnp.maximum(jnp.sum(state**2, axis=-1, keepdims=True), 1e-16))
        score, kind = self.heads
        scored: Any = score.apply({"params": params["score"]}, state, **options)
        logits: Any = kind.apply({"params": params["class"]}, state, **options)
        return jax.nn.sigmoid(scored[:, 0]), logits

    def loss(
        self, params: Params, frozen: Params, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        first, second = jax.random.split(rng) if train else (None, None)
        good, good_logits = self.read(params, batch.source, batch.source_mask, first)
        rest, rest_logits = self.read(params, batch.target, batch.target_mask, second)
        hinge = jax.nn.relu(self.margin - good + rest)
        entropy = -jax.nn.log_softmax(good_logits)[:, 1] - jax.nn.log_softmax(rest_logits)[:, 0]
        right = (good > rest).astype(jnp.float32)
        return Mean.of(hinge + 0.5 * entropy, batch.valid), {"pair_accuracy": Mean.of(right, batch.valid)}


def mark_places(ids: Int[Array, "N S"], mask: Bool[Array, "N S"], mark: int) -> Int[Array, " N"]:
    """Where the mark of each row is: its last occurrence."""
    places = jnp.arange(ids.shape[1])[None]
    return jnp.max(jnp.where(mask & (ids == mark), places, 0), axis=1)


@functools.lru_cache(maxsize=8)
def _scores(task: Ranker) -> Encoder:
    """One function per ranker, so that its compiled code is found again."""
    return lambda params, ids, mask: task.read(params, ids, mask, None)[0][:, None]


@dataclasses.dataclass(frozen=True)
class TrainedRanker:
    """A trained ranker, ready to score facts."""

    task: Ranker
    params: Params
    tokenizer: Tokenizer
    max_tokens: int

    def __call__(self, contexts: Sequence[Sequence[str]], facts: Sequence[Fact]) -> Float[np.ndarray, " N"]:
        """A score for each context with its fact."""
        rows = render(self.tokenizer, contexts, facts, self.max_tokens, self.task.mark)
        options = {"pad_id": self.tokenizer.pad_id, "buckets": BUCKETS, "mesh": local_mesh()}
        progress = "facts" if len(rows) > 1000 else None
        return embed(_scores(self.task), self.params, rows, progress=progress, **options)[:, 0]


def load_ranker(run: RunContext, name: str) -> TrainedRanker:
    """The ranker of the finished stage `name`."""
    stage = run.settings(name, RankerTaskSettings)
    encoder = _encoder(stage, run, with_params=False)
    task = Ranker(encoder.model, mark_of(encoder.tokenizer), stage.margin)
    return TrainedRanker(task, load_params(run.files.stage(name)), encoder.tokenizer, stage.max_tokens)


def _encoder(
    stage: RankerTaskSettings, run: RunContext, *, with_params: bool = True, planned: bool = False
) -> LoadedEncoder:
    tokenizer = None if stage.encoder.pretrained else run_tokenizer(run, planned=planned)
    return load_encoder(stage.encoder, tokenizer, with_params=with_params, planned=planned, sentences=False)


def check_ranker(stage: RankerTaskSettings, run: RunContext) -> None:
    """Whether there will be facts, and texts fit the encoder.

    Raises:
      ConfigError: no stage finds facts before this one, no such encoder, or one that reads fewer tokens.
    """
    check_prepared(run)
    check_knowledge(run, WITHOUT)
    if stage.encoder.pretrained and not may_load(run, stage.encoder.pretrained):
        return
    check_weights(stage.encoder.pretrained)
    encoder = _encoder(stage, run, with_params=False, planned=not stage.encoder.pretrained)
    most = min(BUCKETS[-1], run.named(run.stage).loop.buckets[-1])
    if stage.max_tokens > most:
        raise ConfigError(
            f"config.{run.stage}.max_tokens = {stage.max_tokens} is more than the longest of buckets; set it to at "
            f"most {most}."
        )
    check_fits(encoder.model, max_tokens=stage.max_tokens)


def build_ranker(stage: RankerTaskSettings, run: RunContext) -> Assembly:
    encoder = _encoder(stage, run)
    train, validation = (make_pairs(load_instances(run, split)) for split in ("train", "validation"))
    if not train:
        raise ConfigError(
            f"no training response repeats one of its facts about things, so config.{run.stage} has nothing to learn; "
            f"leave it out, with {run.shared}.ranker = ''."
        )
    validation = draw(validation, stage.max_validation_examples) or train[:1]

    def initial(params: Params) -> Params:
        return params if encoder.params is None else {**params, "encoder": encoder.params}

    task = Ranker(encoder.model, mark_of(encoder.tokenizer), stage.margin)
    examples = (PairExamples(pairs, encoder.tokenizer, stage.max_tokens) for pairs in (train, validation))
    return Assembly(task, *examples, initial=initial)


def sketch_ranker(stage: RankerTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    encoder = _encoder(stage, run, with_params=False, planned=True)
    return Sketch(Ranker(encoder.model, 0, stage.margin), shapes_of(Batch, B=batch_size, S=length, T=length))
