"""Constraints on a search: banned, forced and penalised tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.decoding.settings import DecodeSettings


def named_ids(settings: DecodeSettings) -> dict[str, tuple[int, ...]]:
    """Returns the token ids that `settings` name, by option, without options that name none."""
    single = ("suppress_tokens", "begin_suppress_tokens", "more_eos_ids")
    ids = {name: getattr(settings, name) for name in single}
    ids["bad_words"] = tuple(itertools.chain(*settings.bad_words))
    ids["first_token"] = () if settings.first_token is None else (settings.first_token,)
    return {name: tokens for name, tokens in ids.items() if tokens}


def check_ids(settings: DecodeSettings, vocab_size: int, where: str = "") -> None:
    """Raises ConfigError for the first token id of `settings`, the section `where`, that the vocabulary lacks."""
    for name, tokens in named_ids(settings).items():
        for token in tokens:
            if token >= vocab_size:
                raise ConfigError(
                    f"{where}{'.' * bool(where)}{name} names the token {token}; it must be below {vocab_size}, the "
                    "size of the vocabulary."
                )


def penalise(
    scores: Float[Array, "B K V"],
    text: Int[Array, "#B #K L"],
    settings: DecodeSettings,
    source: Int[Array, "B S"] | None,
) -> Float[Array, "B K V"]:
    """Applies both repetition penalties to logits or log-probabilities; in text and source -1 = no token.

    Source: Keskar et al. 2019, Sec. 4.1; for negative scores, Hugging Face's `RepetitionPenaltyLogitsProcessor`.
    """
    if settings.encoder_repetition_penalty != 1.0 and source is not None:
        scores = _divided(scores, source[:, None], 1.0 / settings.encoder_repetition_penalty)
    if settings.repetition_penalty != 1.0:
        scores = _divided(scores, text, settings.repetition_penalty)
    return scores


def _divided(scores: Float[Array, "B K V"], text: Int[Array, "#B #K L"], by: float) -> Float[Array, "B K V"]:
    text = jnp.broadcast_to(text, (*scores.shape[:2], text.shape[2]))
    old = jnp.take_along_axis(scores, jnp.maximum(text, 0), axis=-1)
    new = jnp.where(old < 0, old * by, old / by)  # a repeated token is set twice, to the same value
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
    """Sets the scores of tokens that `settings` forbid to -inf.

    The `text` of a hypothesis is its prompt if that counts, the start token and the response; in text and source,
    -1 = no token. `place` is the column of its latest token; later columns are meaningless. `index` is the number of
    response tokens. `min_tokens` are the fewest tokens before each end; None = that of the settings.
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
    if size := settings.no_repeat_ngram:
        whole = jnp.arange(text.shape[-1]) <= place + 1 - size  # where an n-gram begins that ends at `place` or before
        scores = _ban_ngrams(scores, text, _latest(text, place, size - 1), whole)
    if (size := settings.encoder_no_repeat_ngram) and source is not None:
        whole = jnp.ones(source.shape[-1], bool)
        scores = _ban_ngrams(scores, source[:, None], _latest(text, place, size - 1), whole)
    for length in sorted({len(word) for word in settings.bad_words} - {1}):
        scores = _ban_words(scores, text, place, [word for word in settings.bad_words if len(word) == length])
    return scores


def _ban(scores: Float[Array, "B K V"], tokens: Sequence[int]) -> Float[Array, "B K V"]:
    if not tokens:
        return scores
    banned = np.zeros((1, 1, scores.shape[-1]), bool)
    banned[..., list(tokens)] = True
    return jnp.where(banned, -jnp.inf, scores)


def _latest(text: Int[Array, "B K L"], place: Int[Array, ""], num: int) -> Int[Array, "B K n"]:
    """Returns the `num` tokens up to `place`; -2, which equals no token, before the first."""
    columns = place + jnp.arange(1 - num, 1)
    return jnp.where(columns[None, None] < 0, -2, text[:, :, jnp.maximum(columns, 0)])


def _ban_ngrams(
    scores: Float[Array, "B K V"], text: Int[Array, "#B #K L"], last: Int[Array, "B K n"], whole: Bool[Array, " L"]
) -> Float[Array, "B K V"]:
    """Bans the last token of every n-gram of `text` that starts with the latest n - 1 tokens, where `whole` is True."""
    before = last.shape[-1]
    following = text[:, :, before:]
    windows = following.shape[-1]
    matches = jnp.broadcast_to(whole[None, None, :windows], (*scores.shape[:2], windows))
    for offset in range(before):
        matches &= text[:, :, offset : offset + windows] == last[:, :, offset, None]
    return _place(scores, jnp.where(matches & (following >= 0), following, scores.shape[-1]), -jnp.inf)


def _ban_words(
    scores: Float[Array, "B K V"], text: Int[Array, "B K L"], place: Int[Array, ""], words: list[tuple[int, ...]]
) -> Float[Array, "B K V"]:
    """Bans the last token of each word after its other tokens; words have one length, above 1."""
    listed = np.array(words)
    before = listed.shape[1] - 1
    last = _latest(text, place, before)
    matches = (last[:, :, None] == listed[None, None, :, :-1]).all(axis=-1)
    return _place(scores, jnp.where(matches, listed[None, None, :, -1], scores.shape[-1]), -jnp.inf)


def _place(
    scores: Float[Array, "B K V"], tokens: Int[Array, "B K n"], values: Float[Array, "B K n"] | float
) -> Float[Array, "B K V"]:
    """Sets `scores` to `values` at `tokens`; the id V is ignored."""
    rows, columns = jnp.arange(scores.shape[0])[:, None, None], jnp.arange(scores.shape[1])[None, :, None]
    return scores.at[rows, columns, tokens].set(values, mode="drop")


def forced_tokens(
    index: Int[Array, ""], eos_id: int, *, first_token: int | None, end_at: Int[Array, "#B"] | int | None
) -> Int[Array, "#B"] | None:
    """Returns each example's forced token at `index`, -1 = free choice; None if no option forces tokens.

    `first_token` is forced at 0, `eos_id` at `end_at`.
    """
    if first_token is None and end_at is None:
        return None
    forced = jnp.full((1,), -1, jnp.int32)
    if first_token is not None:
        forced = jnp.where(index == 0, first_token, forced)
    if end_at is not None:
        forced = jnp.where(index == end_at, eos_id, forced)
    return forced


def force(logits: Float[Array, "B K V"], forced: Int[Array, "#B"] | None) -> Float[Array, "B K V"]:
    """Makes a forced token certain: its log-probability is 0, that of all others -inf."""
    if forced is None:
        return logits
    wanted = forced[:, None, None]
    is_wanted = jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2) == wanted
    return jnp.where(wanted >= 0, jnp.where(is_wanted, 0.0, -jnp.inf), logits)
