"""Hypotheses of a search: their start, their allowed continuations, and their reordering."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.decoding.constraints import check_ids, constrain, force, forced_tokens, penalise
from empax.decoding.settings import DecodeSettings

BARRED = -1e9
"""Added to the score of a barred hypothesis; finite, as in Hugging Face's search, so that barred ones keep an order."""


Limits: TypeAlias = tuple[Int[Array, " B"], Int[Array, " B"]]
"""Fewest and most tokens of each response."""


class Progress(NamedTuple):
    """The best response so far, without the start, how many of its tokens are settled, and whether it has ended."""

    tokens: Int[Array, "B T"]
    settled: Int[Array, " B"]
    ended: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Start:
    """Start of every search; holds arguments of `search_of`.

    Attributes:
      source: tokens for options that depend on the source; -1 = no token.
      limits: fewest and most tokens of each response; None = `min_tokens` and `max_tokens` of the settings.
      before: right-aligned prompt tokens before the start token, if the prompt counts for repetition; -1 = no token.
    """

    batch_size: int
    start_id: int | Int[Array, " B"]
    eos_ids: tuple[int, ...]
    pad_id: int
    source: Int[Array, "B S"] | None = None
    before: Int[Array, "B P"] | None = None
    limits: Limits | None = None

    def most(self, settings: DecodeSettings) -> Int[Array, "#B 1"]:
        """Returns the maximum number of tokens of each response."""
        return jnp.full((1, 1), settings.max_tokens, jnp.int32) if self.limits is None else self.limits[1][:, None]

    def ends(self, tokens: Int[Array, "B K"]) -> Bool[Array, "B K"]:
        """Returns a mask of the tokens that end a response."""
        return functools.reduce(jnp.logical_or, [tokens == eos_id for eos_id in self.eos_ids])

    def history(self, num: int, max_tokens: int) -> Int[Array, "B K T"]:
        """Returns the initial history, [B, K, 1 + max_tokens]: the start token and padding."""
        empty = jnp.full((self.batch_size, num, 1 + max_tokens), self.pad_id, jnp.int32)
        first = jnp.asarray(self.start_id, jnp.int32).reshape(-1, 1)
        return empty.at[:, :, 0].set(jnp.broadcast_to(first, empty.shape[:2]))

    def text(self, history: Int[Array, "B K T"]) -> tuple[Int[Array, "B K L"], int]:
        """Returns `history`, behind the prompt if that counts, and the column where `history` begins."""
        if self.before is None:
            return history, 0
        before = jnp.broadcast_to(self.before[:, None], (*history.shape[:2], self.before.shape[1]))
        return jnp.concatenate([before, history], axis=2), self.before.shape[1]


def tokens_before(tokens: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Int[Array, "B P"]:
    """Returns the real tokens of each prompt without the last, right-aligned and padded with -1."""
    order = jnp.argsort(mask, axis=1, stable=True)
    return jnp.take_along_axis(jnp.where(mask, tokens, -1), order, axis=1)[:, :-1].astype(jnp.int32)


def choices(
    logits: Float[Array, "B K V"],
    history: Int[Array, "B K T"],
    index: Int[Array, ""],
    start: Start,
    settings: DecodeSettings,
    less: Float[Array, "B 1 V"] | None = None,
) -> tuple[Float[Array, "B K V"], Float[Array, "B K V"]]:
    """Returns the logits to choose tokens by, and the logits that give their log-probabilities."""
    check_ids(settings, logits.shape[-1])
    if settings.penalises and settings.method == "beam":
        logits = jax.nn.log_softmax(logits, axis=-1)  # a penalty depends on the sign of a score
    text, offset = start.text(history)
    place, scores = index + offset, logits if less is None else logits - less
    if settings.penalises:
        read = jnp.where(jnp.arange(text.shape[2]) <= place, text, -1)
        scores = penalise(scores, read, settings, start.source)
    fewest = None if start.limits is None else start.limits[0]
    scores = constrain(scores, text, place, index, start.eos_ids, settings, start.source, min_tokens=fewest)
    forced = forced_tokens(
        index,
        start.eos_ids[0],
        first_token=settings.first_token,
        end_at=start.most(settings)[:, 0] - 1 if settings.end_at_limit else None,
    )
    return force(scores, forced), force(logits, forced)


def gather(values: Array, order: Int[Array, "B N"]) -> Array:
    """Returns `values[b, order[b, n]]` for values of shape [B, K, ...]."""
    return jnp.take_along_axis(values, order.reshape(order.shape + (1,) * (values.ndim - 2)), axis=1)


def column(history: Int[Array, "B K T"], index: Int[Array, ""]) -> Int[Array, "B K"]:
    """Returns the token of each hypothesis at `index`."""
    return jax.lax.dynamic_index_in_dim(history, index, axis=2, keepdims=False)
