"""ReflectDiffu's examples: contexts in words for the generator, in pieces for pretrained encoders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.protocols import Tokenizer
from empax.core.types import Batch, Instance
from empax.data import features
from empax.data.exemplars import LabelledBatch, LabelledExamples, hashed, newest, num_turns, pad_to_level, padded
from empax.data.spans import PlacedRow, SpanExample, place_contexts
from empax.data.tokenizers import LISTENER_TOKEN, SPEAKER_TOKEN
from empax.evaluation.empathy import sentiment
from empax.systems.reflectdiffu.labels import INTENTS, intent_ids
from empax.systems.reflectdiffu.settings import ReflectSettings


@flax.struct.dataclass
class ReasonBatch(Batch):
    """Contexts in pieces with their tags; the target is empty."""

    tags: Int[Array, "B S"]
    told: Bool[Array, "B S"]  # True at the speaker's pieces


@flax.struct.dataclass
class ReflectBatch(LabelledBatch):
    """Contexts, responses and their labels; pieces if reasons are annotated. A rollout sets the fields after `row`."""

    polarity: Int[Array, " B"]  # of the context by VADER: -1, 0, 1
    turns: Int[Array, " B"]  # number of turns of the context
    intent: Int[Array, " B"]  # index into INTENTS, -1 = unknown
    prior: Float[Array, "B I"]  # distribution by the classifier of intents
    number: Int[Array, " B"]  # a hash of the instance's id
    piece: Int[Array, "B P"] | None
    piece_mask: Bool[Array, "B P"] | None
    told: Bool[Array, "B P"] | None
    place: Int[Array, "B S"] | None  # the piece of each word, -1 = none
    row: Int[Array, " B"] | None = None  # -1 = filler
    reasoning: Float[Array, "B P R"] | None = None
    reasons: Int[Array, "B S"] | None = None
    noise: Float[Array, "B 2 D"] | None = None
    actions: Int[Array, "B A"] | None = None  # the intents to choose from
    action: Int[Array, " B"] | None = None  # column of the chosen one
    log_prob: Float[Array, " B"] | None = None
    reward: Float[Array, " B"] | None = None
    advantage: Float[Array, " B"] | None = None
    reply: Int[Array, "B T"] | None = None


def pieces_of(tokenizer: Tokenizer, contexts: Sequence[Sequence[str]], max_tokens: int) -> list[PlacedRow]:
    """Renders `[CLS] turn [SEP] turn [SEP] ...` for annotator and classifier; the oldest pieces are cut."""
    return place_contexts(tokenizer, contexts, max_tokens=max_tokens, first=tokenizer.cls_id, behind=tokenizer.sep_id)


def told_of(rows: Sequence[PlacedRow], contexts: Sequence[Sequence[str]]) -> list[list[int]]:
    """Returns for each id of a context's row whether it belongs to the speaker's words (1) or not (0)."""
    return [[*map(int, row.told(len(context)))] for row, context in zip(rows, contexts, strict=True)]


class ReasonExamples:
    """Random-access examples of annotated contexts."""

    def __init__(self, examples: Sequence[SpanExample], tokenizer: Tokenizer, max_tokens: int):
        contexts = [one.context for one in examples]
        rows = pieces_of(tokenizer, contexts, max_tokens)
        self.ids, self.told = [row.ids for row in rows], told_of(rows, contexts)
        self.tags = [row.labels(one.spans) for row, one in zip(rows, examples, strict=True)]
        self.pad_id = tokenizer.pad_id
        self.lengths = np.array([len(ids) for ids in self.ids])

    def __len__(self) -> int:
        return len(self.ids)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> ReasonBatch:
        del rng
        source, mask = padded(self.ids, indices, length, self.pad_id)
        tags, told = (padded(values, indices, length, 0)[0] for values in (self.tags, self.told))
        none, valid = np.zeros((len(indices), 1), np.int32), np.asarray(indices) >= 0
        return ReasonBatch(source, mask, none, none > 0, valid, tags, told > 0)  # pyright: ignore


def polarities(contexts: Sequence[Sequence[str]]) -> Int[np.ndarray, " N"]:
    """Returns -1, 0 or 1 for each context by VADER's compound score, with VADER's thresholds of 0.05."""
    compounds = np.array([sentiment(features.plain_context(turns)) for turns in contexts])
    return ((compounds >= 0.05).astype(np.int32) - (compounds <= -0.05)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Slots:
    """Ids after a vocabulary for the unknown words of a context, numbered per context."""

    first: int  # id of the first slot
    unknown_id: int  # of all other unknown words
    most: int  # number of slots

    def named(self, ids: Sequence[int], texts: Sequence[str]) -> list[str]:
        """Returns the words of the slots, the newest first."""
        unknown = (text for i, text in zip(reversed(ids), reversed(texts), strict=True) if i == self.unknown_id)
        return list(dict.fromkeys(unknown))[: self.most]

    def filled(self, ids: Sequence[int], texts: Sequence[str], words: Sequence[str]) -> list[int]:
        """Returns the ids with the slots of `words`."""
        slot = {word: self.first + number for number, word in enumerate(words)}
        return [slot.get(text, i) if i == self.unknown_id else i for i, text in zip(ids, texts, strict=True)]

    def found(self, target: Int[np.ndarray, "B T"], source: Int[np.ndarray, "B S"]) -> Int[np.ndarray, "B T"]:
        """Replaces slots of the target by the unknown id if its source, which may have been cut, lacks them."""
        lacking = (target >= self.first) & ~(target[:, :, None] == source[:, None, :]).any(axis=2)
        return np.where(lacking, self.unknown_id, target)


NO_PRIOR = np.full(len(INTENTS), 1.0 / len(INTENTS), np.float32)
"""The prior without a classifier: uniform."""


class ReflectExamples(LabelledExamples):
    """Instances as random-access examples (`core.protocols.Examples`).

    An unknown word of a response gets its slot (see `Slots`) if its context, as the row has it, contains the word;
    `words` are those of the slots, for each instance. A `max_target_tokens` other than 0 overrides the settings'.
    `prior` is the classifier's, [N, intents]; `intents` are those of responses, by instance id, others are unknown.
    Reasons are annotated if there is a `piece_tokenizer`.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        tokenizer: Tokenizer,
        settings: ReflectSettings,
        prior: np.ndarray,
        intents: Mapping[str, str],
        *,
        piece_tokenizer: Tokenizer | None = None,
        slots: int = 0,
        max_target_tokens: int = 0,
    ):
        contexts, self.prior, self.max_pieces = [i.context for i in instances], prior, settings.max_piece_tokens
        roles = tokenizer.token_id(SPEAKER_TOKEN), tokenizer.token_id(LISTENER_TOKEN)
        rows = place_contexts(
            tokenizer, contexts, max_tokens=settings.max_context_tokens, first=tokenizer.cls_id, roles=roles
        )
        self.sources, said = [row.ids for row in rows], tokenizer.encode_with_places([i.response for i in instances])
        responses = [ids for ids, _ in said]
        self.words: list[list[str]] = [[] for _ in instances]
        self.slots = None if tokenizer.unk_id is None else Slots(tokenizer.vocab_size, tokenizer.unk_id, slots)
        if self.slots is not None:
            texts = [row.texts(context) for row, context in zip(rows, contexts, strict=True)]
            told = [
                [i.response[start:end].lower() for start, end in places]
                for i, (_, places) in zip(instances, said, strict=True)
            ]
            self.words = list(map(self.slots.named, self.sources, texts))
            self.sources = list(map(self.slots.filled, self.sources, texts, self.words))
            responses = list(map(self.slots.filled, responses, told, self.words))
        super().__init__(instances, responses, tokenizer, max_target_tokens or settings.max_target_tokens)
        self.piece_tokenizer = piece_tokenizer
        if piece_tokenizer is not None:
            pieces = pieces_of(piece_tokenizer, contexts, self.max_pieces)
            self.pieces, self.told = [row.ids for row in pieces], told_of(pieces, contexts)
            self.places = [row.aligned_with(other).tolist() for row, other in zip(rows, pieces, strict=True)]
        self.labels = {
            "intent": intent_ids(intents.get(i.id, "") for i in instances),
            "polarity": polarities(contexts),
            "turns": num_turns(instances),
            "number": hashed(i.id for i in instances),  # equal in all processes and batches
        }
        self.lengths = np.array([[len(s), len(t)] for s, t in zip(self.sources, self.targets, strict=True)])

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> ReflectBatch:
        """Collates the rows `indices` (-1 = filler) into numpy arrays; does not use `rng`."""
        del rng
        rows = [int(i) for i in indices]
        at = np.maximum(rows, 0)
        arrays = {
            **self.columns(rows, newest(self.sources, rows, length, self.pad_id)),
            "row": np.array(rows, np.int32),
            "prior": np.asarray(self.prior[at], np.float32),
            **dict.fromkeys(("piece", "piece_mask", "told", "place")),
            **{name: values[at] for name, values in self.labels.items()},
        }
        arrays["intent"] = np.where(arrays["valid"], arrays["intent"], -1).astype(np.int32)
        if self.slots is not None:
            arrays["target"] = self.slots.found(arrays["target"], arrays["source"])
        if self.piece_tokenizer is not None:
            most, pad_id = self.max_pieces, self.piece_tokenizer.pad_id
            arrays["piece"], arrays["piece_mask"] = pad_to_level(self.pieces, rows, pad_id, most)
            arrays["told"] = pad_to_level(self.told, rows, 0, most)[0].astype(bool)
            arrays["place"] = newest(self.places, rows, length, -1)[0]
        return ReflectBatch(**arrays)
