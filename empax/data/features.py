"""Converts texts to rows of token ids: attribute tokens, turns, passages, targets, and padding. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.types import ATTRIBUTES, LEVELS, Instance
from empax.data.tokenizers import (
    EXEMPLAR_LISTENER_TOKEN,
    EXEMPLAR_SPEAKER_TOKEN,
    LISTENER_TOKEN,
    SEPARATOR,
    SPEAKER_TOKEN,
)

NUM_ATTRIBUTES = len(ATTRIBUTES)

ATTRIBUTE_LEVELS: tuple[tuple[str, str], ...] = tuple(itertools.product(ATTRIBUTES, LEVELS))
"""All (attribute, level) pairs, attribute by attribute."""


def attribute_token(attribute: str, level: str) -> str:
    """Returns the token of an attribute's level, `<sentiment:low>`."""
    return f"<{attribute}:{level}>"


ATTRIBUTE_TOKENS: tuple[str, ...] = tuple(attribute_token(*pair) for pair in ATTRIBUTE_LEVELS)
"""The 12 attribute tokens."""

TURN_TOKENS: tuple[str, str] = (SPEAKER_TOKEN, LISTENER_TOKEN)
"""Tokens before turns of the speaker and of the listener."""

EXEMPLAR_TURN_TOKENS: tuple[str, str] = (EXEMPLAR_SPEAKER_TOKEN, EXEMPLAR_LISTENER_TOKEN)
"""Turn tokens of an exemplar whose turns must be distinguishable from the context's."""

SPECIAL_TOKENS: tuple[str, ...] = (SEPARATOR, *TURN_TOKENS, *ATTRIBUTE_TOKENS, *EXEMPLAR_TURN_TOKENS)
"""Tokens that a tokenizer needs in addition to its own for `render_source`."""


def render_contexts(
    tokenizer: Tokenizer,
    contexts: Sequence[Sequence[str]],
    *,
    max_tokens: int,
    last: Literal["speaker", "listener"] = "speaker",
    turn_tokens: tuple[str, str] = TURN_TOKENS,
) -> list[list[int]]:
    """Encodes each context: every turn after the token of its speaker, truncated on the left to keep the newest turns.

    A truncated turn keeps its speaker's token. Turns that several contexts share are tokenised once. `last` is the
    author of the last turn: the speaker in a context, the listener if the response is included. `max_tokens` is at
    least 2.
    """
    turns = list(dict.fromkeys(turn for context in contexts for turn in context))
    ids = dict(zip(turns, tokenizer.encode_batch(turns), strict=True))
    roles = [tokenizer.token_id(token) for token in turn_tokens]
    if last == "listener":
        roles.reverse()
    rows = []
    for context in contexts:
        row: list[int] = []
        for distance, turn in zip(range(len(context) - 1, -1, -1), context, strict=True):
            row.append(roles[distance % 2])
            row += ids[turn]
        rows.append(keep_newest(row, max_tokens, roles))
    return rows


def render_exemplars(
    tokenizer: Tokenizer,
    instances: Sequence[Instance],
    *,
    max_tokens: int,
    turn_tokens: tuple[str, str] = TURN_TOKENS,
    response_alone: bool = False,
) -> list[list[int]]:
    """Encodes each instance's context and response as one passage, truncated on the left to keep the response.

    With `response_alone` the context is left out; the other arguments are as in `render_contexts`.
    """
    texts = [(*(() if response_alone else instance.context), instance.response) for instance in instances]
    return render_contexts(tokenizer, texts, max_tokens=max_tokens, last="listener", turn_tokens=turn_tokens)


def keep_newest(ids: Sequence[int], max_tokens: int, turn_ids: Sequence[int] = ()) -> list[int]:
    """Returns the last `max_tokens` of `ids`; a truncated turn keeps its token from `turn_ids` in front."""
    cut = len(ids) - max_tokens
    if cut <= 0:
        return list(ids)
    kept = list(ids[cut:]) if max_tokens > 0 else []
    if not kept or not turn_ids or kept[0] in turn_ids:
        return kept
    if len(kept) > 1 and kept[1] in turn_ids:
        return kept[1:]  # else a turn would consist of its token alone
    for position in range(cut - 1, -1, -1):
        if ids[position] in turn_ids:
            return [ids[position], *kept[1:]]
    return kept


def render_source(
    attributes: Sequence[int],
    context: Sequence[int],
    passage_attributes: Sequence[int] = (),
    passage: Sequence[int] = (),
    *,
    sep_id: int,
    max_tokens: int,
    turn_ids: Sequence[int] = (),
) -> list[int]:
    """Builds `[attributes] context [SEP] [passage attributes] passage`; without a passage it ends after the context.

    If that is too long, the passage is truncated first, down to half of the room besides attributes and separator; then
    the context. The context loses its oldest ids, the passage its last; attributes and separator are never cut.

    `context` is a row of `render_contexts`, `passage` one of `render_exemplars`. With `turn_ids`, the ids of
    `<speaker>` and `<listener>`, a truncated turn keeps its token.

    Raises ConfigError if `max_tokens` does not leave room for 2 ids of each text.
    """
    behind = [sep_id, *passage_attributes] if passage_attributes or passage else []
    room = max_tokens - len(attributes) - len(behind)
    if room < (4 if passage else 2):
        raise ConfigError(
            f"max_tokens = {max_tokens} leaves {room} tokens beside {len(attributes) + len(behind)} attribute tokens "
            "and separators; set it higher."
        )
    for_passage = min(len(passage), max(room - len(context), room // 2))
    context = keep_newest(context, room - for_passage, turn_ids)
    return [*attributes, *context, *behind, *passage[:for_passage]]


def render_target(ids: Sequence[int], eos_id: int, max_tokens: int) -> list[int]:
    """Appends the end-of-sequence id and keeps the first `max_tokens` ids.

    A truncated target has no end: a model trained with one would learn to stop there. (Hugging Face tokenizers with
    `truncation` keep it.)
    """
    return [*ids, eos_id][:max_tokens]


def plain_context(context: Sequence[str]) -> str:
    """Joins the turns with single spaces, for encoders without turn tokens."""
    return " ".join(context)


def encode_for_bert(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    max_tokens: int,
    keep: Literal["left", "right", "ends"] = "right",
    *,
    prompt: str = "",
) -> list[list[int]]:
    """Encodes each text as `[CLS] text [SEP]` (the tokenizer's `cls_id` and `sep_id`); equal texts are tokenised once.

    A row has at most `max_tokens` ids (at least 3), frame and `prompt` included; the prompt precedes every text and is
    never cut. A longer text keeps its "right" end for contexts (newest turns), its "left" end for single posts, or half
    from each of the "ends" (Sun et al. 2019, Sec. 5.3.1).
    """
    first, last = tokenizer.cls_id, tokenizer.sep_id
    given = len(tokenizer.encode(prompt)) if prompt else 0
    room = max_tokens - 2 - given
    if room < 1:
        raise ConfigError(f"max_tokens = {max_tokens} leaves no room after a prompt of {given} tokens; raise it.")
    head = given + {"left": room, "right": 0, "ends": room - room // 2}[keep]
    unique = list(dict.fromkeys(texts))
    ids = dict(zip(unique, tokenizer.encode_batch([prompt + text for text in unique]), strict=True))
    return [[first, *_cut(ids[text], head, room + given - head), last] for text in texts]


def _cut(ids: list[int], head: int, tail: int) -> list[int]:
    """Returns the first `head` and the last `tail` of `ids`, or all if there are no more."""
    return ids if len(ids) <= head + tail else ids[:head] + ids[len(ids) - tail :]


def pad(
    rows: Sequence[Sequence[int]], length: int, pad_id: int
) -> tuple[Int[np.ndarray, "N S"], Bool[np.ndarray, "N S"]]:
    """Pads rows to one int32 array of `length` columns; returns it with the mask of real ids.

    Raises ValueError if a row is longer than `length`; truncation is left to the caller.
    """
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    if sizes.size and sizes.max() > length:
        raise ValueError(f"row {int(sizes.argmax())} has {int(sizes.max())} ids, more than the padded length {length}.")
    mask = np.arange(length) < sizes[:, None]
    ids = np.full(mask.shape, pad_id, np.int32)
    ids[mask] = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(sizes.sum()))
    return ids, mask
