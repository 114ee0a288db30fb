"""What a search may not choose, what it must, and what it had better not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from empax.core.config import ConfigError
from empax.decoding.settings import DecodeSettings


def check_ids(settings: DecodeSettings, vocab_size: int) -> None:
    """Raises ConfigError for the first token id of `settings` that the vocabulary lacks."""
    single = ("suppress_tokens", "begin_suppress_tokens", "more_eos_ids")
    ids = {name: getattr(settings, name) for name in single}
    ids["bad_words"] = tuple(itertools.chain(*settings.bad_words))
    ids["first_token"] = () if settings.first_token is None else (settings.first_token,)
    for name, tokens in ids.items():
        for token in tokens:
            if token >= vocab_size:
                raise ConfigError(f"{name} names the token {token}; it must be below {vocab_size}, the vocabulary.")


def penalise(
    scores: Float[Array, "B K V"],
    text: Int[Array, "#B #K L"],
    settings: DecodeSettings,
    source: Int[Array, "B S"] | None,
) -> Float[Array, "B K V"]:
    """Scores, logits or log-probabilities, after the two penalties of repetition; in text and source -1 = no token.

    Source: Keskar et al. 2019, Sec. 4.1, for negative scores as in Hugging Face's `RepetitionPenaltyLogitsProcessor`.
    """
    if settings.encoder_repetition_penalty != 1.0 and source is not None:
        scores = _divided(scores, source[:, None], 1.0 / settings.encoder_repetition_penalty)
    if settings.repetition_penalty != 1.0:
        scores = _divided(scores, text, settings.repetition_penalty)
    return scores


def _divided(scores: Float[Array, "B K V"], text: Int[Array, "#B #K L"], by: float) -> Float[Array, "B K V"]:
    text = jnp.broadcast_to(text, (*scores.shape[:2], text.shape[2]))
    old = jnp.take_along_axis(scores, jnp.maximum(text, 0), axis=-1)
    new = jnp.where(old < 0, old * by, old / by)  # a token that comes twice is set twice, to the same
    return _place(scores, jnp.where(text >= 0, text, scores.shape[-1]), new)


def constrain(
    scores: Float[Array, "B K V"],
    text: Int[Array, "B K L"],
    place: Int[Array, ""],
    index: Int[Array, ""],
    eos_ids: Sequence[int],
    settings: DecodeSettings,
    source: Int[Array, "B S"] | None = None,
    *,
    min_tokens: Int[Array, " B"] | None = None,
) -> Float[Array, "B K V"]:
    """-inf where `settings` forbid a token.

    Args:
      scores: of the next token.
      text: what each hypothesis has read: its prompt if that counts, the start token, its own; -1 = no token.
      place: where in `text` the latest token is; what comes later means nothing.
      index: how many tokens each hypothesis has of its own.
      eos_ids: what ends a response.
      settings: which tokens may not come.
      source: its tokens, -1 = no token; for `encoder_no_repeat_ngram`.
      min_tokens: before the end of each response; None = as the settings have it.
    """
    single = {word[0] for word in settings.bad_words if len(word) == 1} - set(eos_ids)
    scores = _ban(scores, (*settings.suppress_tokens, *single))
    if min_tokens is not None:
        scores = jnp.where((index < min_tokens)[:, None, None], _ban(scores, eos_ids), scores)
    elif settings.min_tokens:
        scores = jnp.where(index < settings.min_tokens, _ban(scores, eos_ids), scores)
    if settings.begin_suppress_tokens:
        first = int(settings.first_token is not None)
        scores = jnp.where(index == first, _ban(scores, settings.begin_suppress_tokens), scores)
    size = settings.no_repeat_ngram
    if 0 < size < text.shape[-1]:
        scores = _ban_ngrams(scores, text[..., :-1], _latest(text, place, size - 1), last_window=place + 1 - size)
    size = settings.encoder_no_repeat_ngram
    if size and source is not None and size - 1 <= text.shape[-1]:
        enough = jnp.where(place + 2 >= size, source.shape[-1], -1)
        scores = _ban_ngrams(scores, source[:, None], _latest(text, place, size - 1), last_window=enough)
    for length in sorted({len(word) for word in settings.bad_words} - {1}):
        if length - 1 <= text.shape[-1]:
            scores = _ban_words(scores, text, place, [word for word in settings.bad_words if len(word) == length])
    return scores


def _ban(scores: Float[Array, "B K V"], tokens: Sequence[int]) -> Float[Array, "B K V"]:
    if not tokens:
        return scores
    banned = np.zeros((1, 1, scores.shape[-1]), bool)
    banned[..., list(tokens)] = True
    return jnp.where(banned, -jnp.inf, scores)


def _latest(text: Int[Array, "B K L"], place: Int[Array, ""], num: int) -> Int[Array, "B K n"]:
    """The `num` tokens up to `place`; where there are not so many, something else."""
    return jax.lax.dynamic_slice_in_dim(text, place + 1 - num, num, axis=2)


def _ban_ngrams(
    scores: Float[Array, "B K V"],
    text: Int[Array, "#B #K L"],
    last: Int[Array, "B K n"],
    *,
    last_window: Int[Array, ""],
) -> Float[Array, "B K V"]:
    """An n-gram of `text` that starts like the latest n - 1 tokens forbids its own last token."""
    before = last.shape[-1]
    num_windows = text.shape[-1] - before
    if num_windows < 1:
        return scores
    matches = jnp.broadcast_to(jnp.arange(num_windows) <= last_window, (*scores.shape[:2], num_windows))
    for offset in range(before):
        matches &= text[:, :, offset : offset + num_windows] == last[:, :, offset, None]
    following = text[:, :, before:]
    return _place(scores, jnp.where(matches & (following >= 0), following, scores.shape[-1]), -jnp.inf)


def _ban_words(
    scores: Float[Array, "B K V"], text: Int[Array, "B K L"], place: Int[Array, ""], words: list[tuple[int, ...]]
) -> Float[Array, "B K V"]:
    """Words of one length, above 1: each forbids its last token behind all the others."""
    listed = np.array(words)
    before = listed.shape[1] - 1
    last = _latest(text, place, before)
    matches = (last[:, :, None] == listed[None, None, :, :-1]).all(axis=-1) & (place + 1 >= before)
    return _place(scores, jnp.where(matches, listed[None, None, :, -1], scores.shape[-1]), -jnp.inf)


def _place(
    scores: Float[Array, "B K V"], tokens: Int[Array, "B K n"], values: Float[Array, "B K n"] | float
) -> Float[Array, "B K V"]:
    """`scores` with `values` at `tokens`; V = nowhere."""
    rows, columns = jnp.arange(scores.shape[0])[:, None, None], jnp.arange(scores.shape[1])[None, :, None]
    return scores.at[rows, columns, tokens].set(values, mode="drop")


def forced_tokens(
    index: Int[Array, ""],
    prefix: Int[Array, "B P"] | None,
    eos_id: int,
    *,
    first_token: int | None,
    end_at: Int[Array, "#B"] | int | None,
) -> Int[Array, "#B"] | None:
    """What every hypothesis of an example must take at `index`, -1 = it may choose; None = nothing ever is forced.

    That is `first_token` at 0, and `eos_id` at `end_at`; what the response begins with, `prefix`, goes before both.
    It is -1 where a hypothesis may choose.
    """
    if prefix is None and first_token is None and end_at is None:
        return None
    forced = jnp.full((1,), -1, jnp.int32)
    if first_token is not None:
        forced = jnp.where(index == 0, first_token, forced)
    if end_at is not None:
        forced = jnp.where(index == end_at, eos_id, forced)
    if prefix is not None:
        # Past its end there is a last column of -1: nothing.
        padded = jnp.pad(prefix, ((0, 0), (0, 1)), constant_values=-1).astype(jnp.int32)
        given = jax.lax.dynamic_index_in_dim(padded, index, axis=1, keepdims=False)  # out of range: the last
        forced = jnp.where(given >= 0, given, forced)
    return forced


def force(logits: Float[Array, "B K V"], forced: Int[Array, "#B"] | None) -> Float[Array, "B K V"]:
    """Logits under which a forced token is certain: its log-probability is 0, that of all others -inf."""
    if forced is None:
        return logits
    wanted = forced[:, None, None]
    is_wanted = jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2) == wanted
    return jnp.where(wanted >= 0, jnp.where(is_wanted, 0.0, -jnp.inf), logits)
