"""Batches with exemplars: every instance with retrieved (context, response) pairs of the training split."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.protocols import Examples, Tokenizer
from empax.core.types import EMOTIONS, Batch, Instance
from empax.data import features
from empax.data.sources import PlainForm, Row, SourceForm, Text

log = logging.getLogger("empax")

Key: TypeAlias = Literal["exchange", "response"]
"""The retriever's input for an exemplar: its context and response, or the response alone."""

Query: TypeAlias = Literal["context", "reasons"]
"""The retriever's input for a context: all of it, or the words in the note "reasons" if there are any."""


@flax.struct.dataclass
class LabelledBatch(Batch):
    """A batch with each dialogue's emotion."""

    emotion: Int[Array, " B"]  # index into EMOTIONS, -1 = unknown

    @property
    def lead(self) -> int:
        """Number of leading passages in `source` with the context alone; 0 if all passages contain it."""
        return 0


@flax.struct.dataclass
class ExemplarBatch(LabelledBatch):
    """A batch whose sources have F passages: the context's and K exemplars', or K, each with context and exemplar.

    Exemplars are given as keys for the retriever or as precomputed embeddings; the other is None. When collated, the K
    exemplars are M retrieved candidates followed by R random ones; `explore` chooses K of them. `utilities` is None
    until `explore` has evaluated the candidates. The exemplars' responses (the generator's ids, without an end) are
    for decoding only. So are the states of encoded sources (`decoding.passages`); `context_states` marks the context's
    states if the context has a separate passage.
    """

    source: Int[Array, "B F S"]
    source_mask: Bool[Array, "B F S"]
    query: Int[Array, "B Q"]
    query_mask: Bool[Array, "B Q"]
    key: Int[Array, "B K P"] | None
    key_mask: Bool[Array, "B K P"] | None
    key_embedding: Float[Array, "B K D"] | None
    candidate_mask: Bool[Array, "B K"]
    key_emotion: Int[Array, "B K"]
    utilities: Float[Array, "B K"] | None = None
    response: Int[Array, "B K T"] | None = None
    response_mask: Bool[Array, "B K T"] | None = None
    states: Float[Array, "B R D"] | None = None
    states_mask: Bool[Array, "B R"] | None = None
    context_states: Bool[Array, "B R"] | None = None

    @property
    def lead(self) -> int:
        return self.source.shape[1] - self.candidate_mask.shape[1]


def emotion_ids(instances: Sequence[Instance]) -> np.ndarray:
    """Returns the index into EMOTIONS for each instance, -1 if unknown."""
    order = {name: i for i, name in enumerate(EMOTIONS)}
    return np.array([order.get(instance.emotion, -1) for instance in instances], np.int32)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The exemplars, tokenised for the generator and for the retriever. Rows are index rows.

    Without a retriever's tokenizer there are no `keys`.
    """

    instances: Sequence[Instance]
    passages: list[Text]
    keys: list[list[int]]
    emotions: np.ndarray
    groups: np.ndarray

    @classmethod
    def of(
        cls,
        instances: Sequence[Instance],
        form: SourceForm,
        key_tokenizer: Tokenizer | None = None,
        key: Key = "exchange",
    ) -> Corpus:
        keys = [] if key_tokenizer is None else encode_keys(key_tokenizer, instances, form.layout.max_key_tokens, key)
        return cls(
            instances=instances,
            passages=form.passages(instances),
            keys=keys,
            emotions=emotion_ids(instances),
            groups=dialogue_groups(instances),
        )


def encode_queries(
    tokenizer: Tokenizer, instances: Sequence[Instance], max_tokens: int, query: Query = "context"
) -> list[list[int]]:
    """Encodes contexts for the retriever, truncated on the left to keep the newest turns."""
    texts = [features.plain_context(_query_of(i, query)) for i in instances]
    return _encode(tokenizer, texts, max_tokens, tokenizer.reading.query_prompt)


def _query_of(instance: Instance, query: Query) -> Sequence[str]:
    spans = instance.notes.get("reasons", ()) if query == "reasons" else ()
    return [instance.context[turn][start:end] for turn, start, end in spans] or instance.context


def encode_keys(
    tokenizer: Tokenizer, instances: Sequence[Instance], max_tokens: int, key: Key = "exchange"
) -> list[list[int]]:
    """Encodes exemplars for the retriever; an exchange is truncated on the left, a response alone on the right.

    Source: responses alone, LEMPEx (Majumder et al. 2022), Sec. 3.3; exchanges: ours.
    """
    if key == "response":
        texts = [i.response for i in instances]
        return _encode(tokenizer, texts, max_tokens, tokenizer.reading.key_prompt, keep="left")
    texts = [features.plain_context((*i.context, i.response)) for i in instances]
    return _encode(tokenizer, texts, max_tokens, tokenizer.reading.key_prompt)


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int, prompt: str, keep: Literal["left", "right"] = "right"
) -> list[list[int]]:
    if tokenizer.reading.max_tokens is not None:
        max_tokens = min(max_tokens, tokenizer.reading.max_tokens)
    return features.encode_for_bert(tokenizer, texts, max_tokens, keep=keep, prompt=prompt)


def replies_alone(instances: Sequence[Instance]) -> list[Instance]:
    """Removes contexts, emotions and notes, so that an encoder of exchanges reads the responses alone."""
    return [Instance(i.id, (), i.response, "") for i in instances]


def dialogue_groups(instances: Sequence[Instance]) -> np.ndarray:
    """Returns one number per dialogue, the same in every process: 31 bits of BLAKE2b of its id.

    Dialogues on the same situation (the note "situation", ignoring case) share its number. Among 20,000 dialogues, two
    share a number by chance with probability 0.1; the only effect is that they never retrieve each other.
    """
    return hashed(map(_told_in, instances))


def hashed(texts: Iterable[str]) -> np.ndarray:
    """Returns 31 bits of the BLAKE2b hash of each text."""
    digests = (hashlib.blake2b(text.encode(), digest_size=4).digest() for text in texts)
    return np.array([int.from_bytes(digest, "little") >> 1 for digest in digests], np.int32)


def _told_in(instance: Instance) -> str:
    return " ".join(instance.notes.get("situation", "").casefold().split()) or instance.dialogue_id


def num_turns(instances: Sequence[Instance]) -> np.ndarray:
    """Returns the number of turns before each response."""
    return np.array([len(i.context) for i in instances], np.int32)


def traits(instances: Sequence[Instance]) -> dict[str, np.ndarray]:
    """Returns the arguments of `retrieval.filters.find_exemplars` that describe contexts."""
    return {"groups": dialogue_groups(instances), "emotions": emotion_ids(instances), "turns": num_turns(instances)}


class LabelledExamples:
    """Instances with their responses (ids without an end) as targets: the common base of generators' examples.

    `num_cut` of the targets are truncated. `fixed` holds further fields of a batch, by name, whose rows have one shape:
    arrays (or dataclasses of them) with a row for each instance.
    """

    def __init__(
        self, instances: Sequence[Instance], responses: list[list[int]], tokenizer: Tokenizer, max_target_tokens: int
    ):
        self.instances, self.pad_id, self.max_target_tokens = instances, tokenizer.pad_id, max_target_tokens
        self.targets = [
            features.render_target(ids, eos_id=tokenizer.eos_id, max_tokens=max_target_tokens) for ids in responses
        ]
        self.num_cut = sum(len(ids) >= max_target_tokens for ids in responses)
        self.emotions = emotion_ids(instances)
        self.fixed: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.instances)

    def columns(self, rows: Sequence[int], source: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
        """Returns the fields of a `LabelledBatch`, with the ids and mask of `source`, and those `fixed`.

        Row -1 = filler, which has zeros in fixed fields.

        They are NumPy arrays until they are placed on devices; a batch's annotations are those in the training step.
        """
        target, target_mask = pad_to_level(self.targets, rows, self.pad_id, self.max_target_tokens)
        valid, at = np.array(rows) >= 0, np.maximum(rows, 0)

        def fixed(values: np.ndarray) -> np.ndarray:
            return values[at] * valid.reshape(-1, *[1] * (values.ndim - 1))

        return {
            "source": source[0],
            "source_mask": source[1],
            "target": target,
            "target_mask": target_mask,
            "valid": valid,
            "emotion": np.where(valid, self.emotions[at], -1).astype(np.int32),
            **jax.tree.map(fixed, self.fixed),
        }


def warn_of_cut(examples: Examples, where: str) -> None:
    """Warns if over 1% of the responses are truncated; `where` trains on them."""
    if isinstance(examples, LabelledExamples) and examples.num_cut > len(examples) / 100:
        log.warning(
            "%s: %d of %d responses are longer than max_target_tokens = %d, and are truncated. From these the model "
            "does not learn to end: raise max_target_tokens.",
            where, examples.num_cut, len(examples), examples.max_target_tokens,
        )  # fmt: skip


class ContextExamples(LabelledExamples):
    """Instances as random-access examples (`core.protocols.Examples`): context in, response out.

    Sources are contexts alone; subclasses add exemplars, the rows `candidates` of `corpus`.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        form: SourceForm,
        *,
        corpus: Corpus | None = None,
        candidates: np.ndarray | None = None,
    ):
        responses = form.tokenizer.encode_batch([i.response for i in instances])
        if isinstance(form, PlainForm) and form.first_token is not None:
            first = [form.first_token]
            responses = [ids if ids[:1] == first else first + ids for ids in responses]
        super().__init__(instances, responses, form.tokenizer, form.layout.max_target_tokens)
        self.form, self.corpus = form, corpus
        self.contexts, self.groups = form.contexts(instances), dialogue_groups(instances)
        self.set_candidates(np.full((len(instances), 1), -1) if candidates is None else candidates)

    def set_candidates(self, candidates: np.ndarray, *, order: bool = True) -> None:
        """Sets the rows of the corpus for every instance, [N, M], best first, -1 = none.

        Epochs are sorted by the resulting lengths; without `order`, still by the previous ones, so that a running epoch
        sees each instance once.
        """
        self.candidates = candidates
        longest = np.zeros(len(candidates), np.int64)
        if self.corpus is not None:
            sizes = np.array([passage.size for passage in self.corpus.passages])
            longest = np.where(candidates >= 0, sizes[np.maximum(candidates, 0)], 0).max(axis=1, initial=0)
        sources = self.form.lengths(self.contexts, longest)
        self.lengths = np.stack([sources, [len(target) for target in self.targets]], axis=1)
        if order:
            self.order_lengths = self.lengths

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> LabelledBatch:
        return LabelledBatch(**self.context_columns([int(i) for i in indices], length))

    def context_columns(self, rows: Sequence[int], length: int) -> dict[str, Any]:
        """Returns the fields of a `LabelledBatch` of contexts alone; a subclass adds those of its own batch."""
        source = self.form.arrays([(self.contexts[i], None) if i >= 0 else None for i in rows], length)
        return self.columns(rows, source)


class ExemplarExamples(ContextExamples):
    """Instances with all their candidate exemplars.

    With `probability`, a collated row has the M retrieved candidates and `num_random` random ones, never of its own
    dialogue; else it has no exemplars, and the context alone. With `key_embeddings` (one per corpus row), the batch
    contains these instead of keys for the retriever. With `response_tokens`, it contains that many tokens of each
    exemplar's response.
    """

    corpus: Corpus

    def __init__(
        self,
        instances: Sequence[Instance],
        corpus: Corpus,
        candidates: np.ndarray,
        form: SourceForm,
        key_tokenizer: Tokenizer,
        *,
        num_random: int = 0,
        probability: float = 1.0,
        key_embeddings: np.ndarray | None = None,
        response_tokens: int = 0,
        query: Query = "context",
    ):
        super().__init__(instances, form, corpus=corpus, candidates=candidates)
        self.response_tokens = response_tokens
        self.num_random, self.probability = num_random, probability
        self.key_embeddings, self.key_pad_id = key_embeddings, key_tokenizer.pad_id
        self.queries = encode_queries(key_tokenizer, instances, form.layout.max_query_tokens, query)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> ExemplarBatch:
        rows = [int(i) for i in indices]
        chosen = np.full((len(rows), self.candidates.shape[1] + self.num_random), -1, np.int64)
        shown = rng.random(len(rows)) < self.probability
        for b, i in enumerate(rows):
            if i >= 0 and shown[b]:
                chosen[b] = [*self.candidates[i], *self._random(i, rng)]
        passages = [passage for i, found in zip(rows, chosen, strict=True) for passage in self._passages(i, found)]
        return self._batch(rows, chosen, self.form.arrays(passages, length))

    def _passages(self, i: int, found: np.ndarray) -> list[Row]:
        """Returns the rows of one source: context i (-1 = a filler row) and the corpus rows `found` (-1 = none)."""
        context = self.contexts[i] if i >= 0 else None
        exemplars = [self.corpus.passages[row] if row >= 0 else None for row in found]
        if self.form.apart:
            return [pair if any(pair) else None for pair in ((context, None), *((None, e) for e in exemplars))]
        rows: list[Row] = [(context, exemplar) if exemplar else None for exemplar in exemplars]
        if context is not None and found[0] < 0:
            rows[0] = context, None
        return rows

    def _random(self, i: int, rng: np.random.Generator) -> list[int]:
        if not self.num_random:
            return []
        # Twice as many as needed, since the own dialogue has few rows; padded with -1 if still too few.
        drawn = rng.integers(len(self.corpus.groups), size=2 * self.num_random + 8)
        others = drawn[self.corpus.groups[drawn] != self.groups[i]][: self.num_random]
        return [*others.tolist(), *[-1] * (self.num_random - len(others))]

    def _batch(self, rows: list[int], chosen: np.ndarray, sources: tuple[np.ndarray, np.ndarray]) -> ExemplarBatch:
        shape, layout = chosen.shape, self.form.layout
        source, source_mask = (part.reshape(len(rows), -1, part.shape[1]) for part in sources)
        # Always full length: queries are few compared to passages, and fewer shapes mean fewer compilations.
        query, query_mask = padded(self.queries, rows, layout.max_query_tokens, self.key_pad_id)
        key = key_mask = embedding = None
        if self.key_embeddings is None:
            key, key_mask = pad_to_level(self.corpus.keys, chosen.ravel(), self.key_pad_id, layout.max_key_tokens)
            key, key_mask = key.reshape(*shape, -1), key_mask.reshape(*shape, -1)
        else:
            embedding = np.asarray(self.key_embeddings[np.maximum(chosen, 0)], np.float32)
        key_emotion = np.where(chosen >= 0, self.corpus.emotions[np.maximum(chosen, 0)], -1)
        arrays: dict[str, Any] = {
            **self.columns(rows, (source, source_mask)),
            "query": query,
            "query_mask": query_mask,
            "key": key,
            "key_mask": key_mask,
            "key_embedding": embedding,
            "candidate_mask": chosen >= 0,
            "key_emotion": key_emotion.astype(np.int32),
        }
        if self.response_tokens:
            said = [self.corpus.instances[row].response if row >= 0 else "" for row in chosen.ravel()]
            ids = [row[: self.response_tokens] for row in self.form.tokenizer.encode_batch(said)]
            response, response_mask = features.pad(ids, self.response_tokens, self.pad_id)
            arrays |= {"response": response.reshape(*shape, -1), "response_mask": response_mask.reshape(*shape, -1)}
        return ExemplarBatch(**arrays)


def padded(
    texts: Sequence[Sequence[int]], rows: Sequence[int] | np.ndarray, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pads rows of `texts` (-1 = none), of at most `length` ids, to `length`; returns ids and mask."""
    return features.pad([texts[i] if i >= 0 else [] for i in rows], length, pad_id)


def pad_to_level(
    texts: Sequence[list[int]], rows: Sequence[int] | np.ndarray, pad_id: int, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pads rows of `texts` (-1 = none) to 20, 40, 80, ... or `max_tokens`: few shapes, few compilations.

    Accelerators begin with 80, since there compiling shorter shapes takes longer than they save.
    """
    picked = [texts[i] if i >= 0 else [] for i in rows]
    level = 20 if jax.default_backend() == "cpu" else 80
    while level < max(map(len, picked), default=1):
        level *= 2
    return features.pad(picked, min(level, max_tokens), pad_id)
