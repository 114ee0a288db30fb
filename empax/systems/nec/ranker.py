"""The ranker of facts about things: how likely the response repeats a fact (NEC, Sec. 3.2, after SAKDP).

It is trained on pairs of facts about the same context, of which the gold response repeats one: its head is in the
context and its tail in the response, or vice versa. Choosing facts needs no response.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.shapes import shapes_of
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.types import AnyBatch, Batch, Instance, Mean, Metrics, Params
from empax.data import features
from empax.data.batches import draw
from empax.data.knowledge import Fact, facts_of
from empax.data.store import check_prepared, load_instances
from empax.data.tokenizers import SEPARATOR, SubwordTokenizer
from empax.data.wordnet import FUNCTION_WORDS
from empax.models.heads import ClassificationHead
from empax.models.layers import apply
from empax.parts.encoder.stages import assembled, check_buckets, check_encoder, load_stage_encoder
from empax.parts.encoder.task import EncoderTask, Predictor
from empax.parts.knowledge.finder import check_knowledge
from empax.retrieval.encode import BUCKETS
from empax.systems.nec.settings import RankerTaskSettings
from empax.training.checkpoint import load_params

_MARKS = ("[unused0]", SEPARATOR)
"""Marks before a fact: a token of BERT's vocabulary that is unused in pretraining, or else the separator.

Departure: NEC's code adds a token [CSK] and then looks up the id of [unused0]. Ours uses one token for both.
"""
_HIDDEN = 384  # of the heads; NEC's code
_LEAST_LETTERS = 3  # of a repeated word: "be" and "go" are in many responses


def repeats(fact: Fact, context: str, response: str) -> bool:
    """Whether the response repeats the fact: one end of it is in the context, the other in the response.

    Ends match whole words. The end in the response must have a word of at least three letters that is not a function
    word; NEC's code matches any text, so that "be" counts.
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
    """Renders `[CLS] context [SEP] mark thing relation tail` for each; the context loses its oldest tokens."""
    written = tokenizer.encode_batch([f"{fact.head} {fact.relation} {fact.tail}" for fact in facts])
    texts = tokenizer.encode_batch([features.plain_context(context) for context in contexts])
    rows = []
    for context, fact in zip(texts, written, strict=True):
        behind = [tokenizer.sep_id, mark, *fact[: max_tokens // 2]]
        rows.append([tokenizer.cls_id, *features.keep_newest(context, max_tokens - 1 - len(behind)), *behind])
    return rows


def mark_of(tokenizer: Tokenizer) -> int:
    """Returns the id of the mark before a fact."""
    assert isinstance(tokenizer, SubwordTokenizer)
    known = [name for name in _MARKS if tokenizer.backend.token_to_id(name) is not None]
    return tokenizer.token_id(known[0] if known else _MARKS[-1])


@dataclasses.dataclass(frozen=True)
class Pair:
    """A context with a fact that its response repeats and a fact that it does not."""

    context: tuple[str, ...]
    repeated: Fact
    other: Fact


def make_pairs(instances: Sequence[Instance]) -> list[Pair]:
    """Pairs every repeated fact with every other fact of the same instance."""
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
        sides = [
            features.pad([rows[i] if i >= 0 else [] for i in indices], length, self.pad_id)
            for rows in (self.good, self.rest)
        ]
        return Batch(*sides[0], *sides[1], np.asarray(indices) >= 0)  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Ranker(EncoderTask):
    r"""An encoder with two heads on the state of the mark: a score, and whether the fact is repeated.

    .. math:: L = \max(0, \delta - s^+ + s^-) + \tfrac{1}{2} (CE^+ + CE^-)

    with s the score, a sigmoid. Source: NEC's code. The outputs are scores in (0, 1) and logits of (not repeated,
    repeated); predictions are the scores.
    """

    mark: int
    margin: float
    progress: ClassVar[tuple[str, int]] = ("facts", 1001)

    @property
    def heads(self) -> Mapping[str, ClassificationHead]:
        return {name: ClassificationHead(size, hidden=_HIDDEN) for name, size in (("score", 1), ("class", 2))}

    def vectors(
        self, params: Params, ids: Any, mask: Bool[Array, "N S"], *, rng: jax.Array | None, **inputs: Any
    ) -> Float[Array, "N D"]:
        """Returns the state of the mark."""
        states = apply(self.encoder.encoder, params["encoder"]["encoder"], ids, mask, rng=rng, **inputs)
        state = jnp.take_along_axis(states, mark_places(ids, mask, self.mark)[:, None, None], axis=1)[:, 0]
        return state.astype(jnp.float32)

    def said(self, *outputs: Float[Array, "N _"]) -> tuple[Float[Array, " N"], Float[Array, "N 2"]]:
        score, logits = outputs
        return jax.nn.sigmoid(score[:, 0]), logits

    def loss(
        self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        first, second = jax.random.split(rng) if train else (None, None)
        good = self.read(params, batch.source, batch.source_mask, first)
        rest = self.read(params, batch.target, batch.target_mask, second)
        return self.losses((good, rest), batch, train=train)

    def losses(self, found: Any, batch: Any, *, train: bool) -> tuple[Mean, Metrics]:
        (good, good_logits), (rest, rest_logits) = found
        hinge = jax.nn.relu(self.margin - good + rest)
        entropy = -jax.nn.log_softmax(good_logits)[:, 1] - jax.nn.log_softmax(rest_logits)[:, 0]
        right = (good > rest).astype(jnp.float32)
        return Mean.of(hinge + 0.5 * entropy, batch.valid), {"pair_accuracy": Mean.of(right, batch.valid)}

    def rows(self, tokenizer: Tokenizer, max_tokens: int, *given: Any) -> list[list[int]]:
        """Renders contexts, each with a fact."""
        contexts, facts = given
        return render(tokenizer, contexts, facts, max_tokens, self.mark)

    def predicted(self, found: Any) -> Float[Array, " N"]:
        return found[0]


def mark_places(ids: Int[Array, "N S"], mask: Bool[Array, "N S"], mark: int) -> Int[Array, " N"]:
    """Returns the position of the last mark in each row."""
    places = jnp.arange(ids.shape[1])[None]
    return jnp.max(jnp.where(mask & (ids == mark), places, 0), axis=1)


def load_ranker(run: RunContext, name: str) -> Predictor[Ranker]:
    """Loads the ranker of the finished stage `name`."""
    stage = run.settings(name, RankerTaskSettings)
    encoder = load_stage_encoder(stage.encoder, run, with_params=False)
    task = Ranker(encoder.model, mark_of(encoder.tokenizer), stage.margin)
    return Predictor(task, load_params(run.files.stage(name)), encoder.tokenizer, stage.max_tokens)


def check_ranker(stage: RankerTaskSettings, run: RunContext) -> None:
    """Raises ConfigError if no earlier stage finds facts about things, or texts do not fit the encoder."""
    check_prepared(run)
    check_knowledge(run, entity=f"{run.shared}.ranker to '' and leave {run.stage!r} out of config.run")
    check_encoder(stage.encoder, run, max_tokens=stage.max_tokens)
    check_buckets(run, most=BUCKETS[-1], max_tokens=stage.max_tokens)


def build_ranker(stage: RankerTaskSettings, run: RunContext) -> Assembly:
    encoder = load_stage_encoder(stage.encoder, run)
    train, validation = (make_pairs(load_instances(run, split)) for split in ("train", "validation"))
    if not train:
        raise ConfigError(
            f"no training response repeats one of its facts about things, so config.{run.stage} has nothing to learn; "
            f"leave it out, with {run.shared}.ranker = ''."
        )
    validation = draw(validation, stage.max_validation_examples) or train[:1]
    task = Ranker(encoder.model, mark_of(encoder.tokenizer), stage.margin)
    examples = (PairExamples(pairs, encoder.tokenizer, stage.max_tokens) for pairs in (train, validation))
    return assembled(task, encoder, *examples)


def sketch_ranker(stage: RankerTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    encoder = load_stage_encoder(stage.encoder, run, planned=True)
    return Sketch(Ranker(encoder.model, 0, stage.margin), shapes_of(Batch, B=batch_size, S=length, T=length))
