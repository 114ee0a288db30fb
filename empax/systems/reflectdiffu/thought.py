"""What ReflectDiffu makes of a context before it answers, and the small functions that it is made with."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Mean
from empax.parts.generator.contrast import Read


@flax.struct.dataclass
class Thought:
    """What the model makes of a context before it answers."""

    states: Float[Array, "B S D"]  # that the decoder attends to: Emo_fused, or the encoder's
    summary: Float[Array, "B D"]  # Q
    emotion: Float[Array, "B E"]  # log-probabilities
    emotion_embedding: Float[Array, "2 E D"]  # by the positive and the negative expert
    first: Float[Array, "B I"]
    final: Float[Array, "B I"]  # log-probabilities
    start: Float[Array, "B D"] | None  # what the decoder starts from; None = its start token
    policy: Float[Array, "B N"] | None = None  # log-probabilities of the reference intents
    actions: Int[Array, "B N"] | None = None  # which intents those are
    second: Int[Array, " B"] | None = None  # the chosen intent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Considered(Read):
    """A context as the decoder takes it, with what was thought of it."""

    thought: Thought


def tags_of_words(tags: Int[Array, "B P"], place: Any) -> Int[Array, "B S"]:
    """The tag of each word's piece; 0 for words without one."""
    return jnp.where(place >= 0, jnp.take_along_axis(tags, jnp.maximum(place, 0), axis=1), 0)


def shown_tags(
    tags: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    numbers: Int[Array, " B"],
    which: Literal["marked", "none", "shuffled"],
) -> Int[Array, "B S"]:
    """The tags as they are "marked", "none" of them, or as many on other words, by the instance's number ("shuffled").

    Padding stands behind the words.
    """
    if which == "none":
        return jnp.zeros_like(tags)
    if which == "marked":
        return tags
    draw = lambda number: jax.random.uniform(jax.random.fold_in(jax.random.key(1), number), tags.shape[1:])  # noqa: E731
    order = jnp.argsort(jnp.where(mask, jax.vmap(draw)(numbers), 2.0), axis=1)
    return jnp.take_along_axis(tags, order, axis=1)


def standardized(vectors: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Mean 0 and variance 1 over features: the scale that the noise of a schedule is made for."""
    centred = vectors - jnp.mean(vectors, axis=1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=1, keepdims=True) + 1e-6)


def log_shares(shares: Float[Array, "B I"]) -> Float[Array, "B I"]:
    """Log-probabilities of what need not sum to 1."""
    return jax.nn.log_softmax(jnp.log(shares + 1e-9))


def policy_loss(log_prob: Float[Array, " B"], batch: Any, counted: Array, weights: Float[Array, " B"]) -> Mean:
    r"""REINFORCE with a baseline, by the ratio to the policy that drew.

    .. math:: L = -\frac{\pi(a)}{\mu(a)} (R - b)

    Source: Williams 1992; the ratio: ReflectDiffu, Sec. 3.3.1, which says nothing of mu. No gradient flows to the
    advantage.
    """
    ratio = jnp.exp(log_prob - jax.lax.stop_gradient(batch.log_prob))
    return Mean.of(-ratio * jax.lax.stop_gradient(batch.advantage), counted, weights)
