"""Soft texts, whose tokens are distributions, for losses by models that read text."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SoftForm: TypeAlias = Literal["expected", "straight_through"]
SoftAxis: TypeAlias = Literal["vocabulary", "time"]


def soft_tokens(
    logits: Float[Array, "B T V"],
    *,
    form: SoftForm = "expected",
    axis: SoftAxis = "vocabulary",
    temperature: float = 1.0,
    rng: jax.Array | None = None,
) -> Float[Array, "B T V"]:
    """Returns soft tokens in place of one-hot tokens.

    Args:
      logits: logits of the tokens.
      form: "expected": probabilities, whose product with an embedding table is its expectation; "straight_through":
        one-hot samples of a Gumbel-softmax with the gradient of its probabilities (Jang et al. 2017, Sec. 2.2).
      axis: axis of the softmax. "time" is an error of LEMPEx' released code: each word is normalized over positions, so
        the rows are not distributions, and a position sees later ones.
      temperature: divides the logits.
      rng: key of the samples; None = take the likeliest token.
    """
    along = {"vocabulary": 2, "time": 1}[axis]
    logits = logits.astype(jnp.float32)
    if form == "straight_through" and rng is not None:
        logits = logits + jax.random.gumbel(rng, logits.shape)
    soft = jax.nn.softmax(logits / temperature, axis=along)
    if form == "expected":
        return soft
    hard = jax.nn.one_hot(soft.argmax(axis=2), soft.shape[2], dtype=soft.dtype)
    return hard + soft - jax.lax.stop_gradient(soft)


def splice(
    embedded: Float[Array, "B J D"], soft: Float[Array, "B T D"], start: Int[Array, " B"], count: Int[Array, " B"]
) -> Float[Array, "B J D"]:
    """Replaces `count` rows of `embedded`, from `start` on, by the first rows of `soft`."""
    place = jnp.arange(embedded.shape[1])[None] - start[:, None]
    inside: Bool[Array, "B J"] = (place >= 0) & (place < count[:, None])
    chosen = jnp.take_along_axis(soft, jnp.clip(place, 0, soft.shape[1] - 1)[:, :, None], axis=1)
    return jnp.where(inside[:, :, None], chosen, embedded)
