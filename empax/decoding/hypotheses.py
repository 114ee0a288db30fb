"""Hypotheses of a search: where they start, what may follow them, how they are reordered."""

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
"""Added to the score of what must not win: finite, as in Hugging Face's search, so that order among barred remains."""


Limits: TypeAlias = tuple[Int[Array, " B"], Int[Array, " B"]]
"""Fewest and most tokens of each response."""


class Progress(NamedTuple):
    """How far a search is.

    Attributes:
      tokens: of the best response so far, without the start.
      settled: how many of them no further step can change.
      ended: whether nothing more comes.
    """

    tokens: Int[Array, "B T"]
    settled: Int[Array, " B"]
    ended: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Start:
    """What every search starts from; the arguments of `generate`.

    Attributes:
      source: tokens that options of the source look at; -1 = none.
      limits: fewest and most tokens of each response; None = `min_tokens` and `max_tokens` of the settings.
      before: tokens of the prompt that count with a response, up to that before the start token, last ones last;
        -1 = none.
    """

    batch_size: int
    start_id: int | Int[Array, " B"]
    eos_ids: tuple[int, ...]
    pad_id: int
    prefix: Int[Array, "B P"] | None = None
    source: Int[Array, "B S"] | None = None
    before: Int[Array, "B P"] | None = None
    limits: Limits | None = None

    def most(self, settings: DecodeSettings) -> Int[Array, "#B 1"]:
        """Most tokens of each response."""
        return jnp.full((1, 1), settings.max_tokens, jnp.int32) if self.limits is None else self.limits[1][:, None]

    def ends(self, tokens: Int[Array, "B K"]) -> Bool[Array, "B K"]:
        """Which tokens end a response."""
        return functools.reduce(jnp.logical_or, [tokens == eos_id for eos_id in self.eos_ids])

    def prefix_lengths(self) -> Int[Array, "#B 1"]:
        """How many tokens of each response are given."""
        if self.prefix is None:
            return jnp.zeros((1, 1), jnp.int32)
        return jnp.sum(self.prefix >= 0, axis=1, keepdims=True, dtype=jnp.int32)

    def history(self, num: int, max_tokens: int) -> Int[Array, "B K T"]:
        """Nothing but the start token yet: what each hypothesis has read, [B, K, 1 + max_tokens]."""
        empty = jnp.full((self.batch_size, num, 1 + max_tokens), self.pad_id, jnp.int32)
        first = jnp.asarray(self.start_id, jnp.int32).reshape(-1, 1)
        return empty.at[:, :, 0].set(jnp.broadcast_to(first, empty.shape[:2]))

    def text(self, history: Int[Array, "B K T"]) -> tuple[Int[Array, "B K L"], int]:
        """What a hypothesis has read, with the prompt where that counts, and where `history` begins in it."""
        if self.before is None:
            return history, 0
        before = jnp.broadcast_to(self.before[:, None], (*history.shape[:2], self.before.shape[1]))
        return jnp.concatenate([before, history], axis=2), self.before.shape[1]


def tokens_before(tokens: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Int[Array, "B P"]:
    """The real tokens of each prompt but the last, at the right end; -1 in front of them."""
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
    """Logits to choose by, and logits whose log-probabilities the chosen tokens get."""
    check_ids(settings, logits.shape[-1])
    if settings.penalises and settings.method == "beam":
        logits = jax.nn.log_softmax(logits, axis=-1)  # what is divided by a penalty depends on its sign
    text, offset = start.text(history)
    place, scores = index + offset, logits if less is None else logits - less
    if settings.penalises:
        read = jnp.where(jnp.arange(text.shape[2]) <= place, text, -1)
        scores = penalise(scores, read, settings, start.source)
    fewest = None if start.limits is None else start.limits[0]
    scores = constrain(scores, text, place, index, start.eos_ids, settings, start.source, min_tokens=fewest)
    forced = forced_tokens(
        index,
        start.prefix,
        start.eos_ids[0],
        first_token=settings.first_token,
        end_at=start.most(settings)[:, 0] - 1 if settings.end_at_limit else None,
    )
    return force(scores, forced), force(logits, forced)


def gather(values: Array, order: Int[Array, "B N"]) -> Array:
    """`values[b, order[b, n]]` for values of shape [B, K, ...]."""
    return jnp.take_along_axis(values, order.reshape(order.shape + (1,) * (values.ndim - 2)), axis=1)


def column(history: Int[Array, "B K T"], index: Int[Array, ""]) -> Int[Array, "B K"]:
    """What each hypothesis has at place `index`."""
    return jax.lax.dynamic_index_in_dim(history, index, axis=2, keepdims=False)
