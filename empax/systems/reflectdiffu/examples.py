"""ReflectDiffu's examples: contexts in words for the generator, in pieces for pretrained encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.protocols import Tokenizer
from empax.core.types import Instance
from empax.data import features
from empax.data.exemplars import LabelledBatch, LabelledExamples, hashed, num_turns, pad_to_level, padded
from empax.data.spans import place_contexts
from empax.data.tokenizers import LISTENER_TOKEN, SPEAKER_TOKEN
from empax.evaluation.empathy import sentiment
from empax.parts.attributes.reasons import pieces_of, told_of
from empax.systems.reflectdiffu.labels import INTENTS, intent_ids
from empax.systems.reflectdiffu.settings import ReflectSettings


@flax.struct.dataclass
class ReflectBatch(LabelledBatch):
    """Contexts, responses and their labels; pieces if reasons are annotated. A rollout sets the fields after `row`."""

    polarity: Int[Array, " B"]  # of the context by VADER: -1, 0, 1
    turns: Int[Array, " B"]  # number of turns of the context
    intent: Int[Array, " B"]  # index into INTENTS, -1 = unknown
    prior: Float[Array, "B I"]  # distribution by the classifier of intents
    number: Int[Array, " B"]  # a hash of the instance's id
    piece: Int[Array, "B P"] | None = None
    piece_mask: Bool[Array, "B P"] | None = None
    told: Bool[Array, "B P"] | None = None
    place: Int[Array, "B S"] | None = None  # the piece of each word, -1 = none
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


def polarities(contexts: Sequence[Sequence[str]]) -> Int[np.ndarray, " N"]:
    """Returns -1, 0 or 1 for each context by VADER's compound score, with VADER's thresholds of 0.05."""
    compounds = np.array([sentiment(features.plain_context(turns)) for turns in contexts])
    return ((compounds >= 0.05).astype(np.int32) - (compounds <= -0.05)).astype(np.int32)


def fill_slots(
    tokenizer: Tokenizer, most: int, context: tuple[list[int], list[str]], response: tuple[list[int], list[str]]
) -> tuple[list[str], list[int], list[int]]:
    """Gives unknown words of a context ids behind the vocabulary, its slots, in the context and in the response.

    `context` and `response` are ids with the text of each. Returns the words that have a slot, at most `most`, the
    newest first, and both ids. A slot's number is that of its word.
    """
    unknown = tokenizer.unk_id
    newest = (text for i, text in zip(*map(reversed, context), strict=True) if i == unknown)
    words = list(dict.fromkeys(newest))[:most]
    slot = {word: tokenizer.vocab_size + number for number, word in enumerate(words)}

    def filled(ids: list[int], texts: list[str]) -> list[int]:
        return [slot.get(text, i) if i == unknown else i for i, text in zip(ids, texts, strict=True)]

    return words, filled(*context), filled(*response)


NO_PRIOR = np.full(len(INTENTS), 1.0 / len(INTENTS), np.float32)
"""The prior without a classifier: uniform."""


class ReflectExamples(LabelledExamples):
    """Instances as random-access examples (`core.protocols.Examples`).

    An unknown word of a response gets its slot (`fill_slots`) if its context, as far as it is kept, contains the word;
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
        contexts, self.max_pieces = [i.context for i in instances], settings.max_piece_tokens
        roles = tokenizer.token_id(SPEAKER_TOKEN), tokenizer.token_id(LISTENER_TOKEN)
        rows = place_contexts(
            tokenizer, contexts, max_tokens=settings.max_context_tokens, first=tokenizer.cls_id, roles=roles
        )
        self.sources: list[list[int]] = []
        self.words: list[list[str]] = []
        responses: list[list[int]] = []
        said = tokenizer.encode_with_places([i.response for i in instances])
        for instance, row, (ids, places) in zip(instances, rows, said, strict=True):
            told = [instance.response[start:end].lower() for start, end in places]
            context = row.ids, row.texts(instance.context)
            words, source, response = fill_slots(tokenizer, slots, context, (ids, told))
            self.words.append(words)
            self.sources.append(source)
            responses.append(response)
        super().__init__(instances, responses, tokenizer, max_target_tokens or settings.max_target_tokens)
        self.piece_tokenizer = piece_tokenizer
        if piece_tokenizer is not None:
            pieces = pieces_of(piece_tokenizer, contexts, self.max_pieces)
            self.pieces, self.told = [row.ids for row in pieces], told_of(pieces, contexts)
            self.places = [row.aligned_with(other).tolist() for row, other in zip(rows, pieces, strict=True)]
        self.fixed = {
            "prior": np.asarray(prior, np.float32),
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
        arrays = self.columns(rows, padded(self.sources, rows, length, self.pad_id))
        arrays["row"] = np.array(rows, np.int32)
        arrays["intent"] = np.where(arrays["valid"], arrays["intent"], -1).astype(np.int32)
        if self.piece_tokenizer is not None:
            most, pad_id = self.max_pieces, self.piece_tokenizer.pad_id
            arrays["piece"], arrays["piece_mask"] = pad_to_level(self.pieces, rows, pad_id, most)
            arrays["told"] = pad_to_level(self.told, rows, 0, most)[0].astype(bool)
            arrays["place"] = padded(self.places, rows, length, -1)[0]
        return ReflectBatch(**arrays)
