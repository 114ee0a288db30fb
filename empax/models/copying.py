"""Copying words of a source in addition to generating from a vocabulary."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from empax.models.arithmetic import spread

_LEAST = 1e-9  # smallest probability before the logarithm


def mixed_with_copies(
    logits: Float[Array, "B T V"],
    gate: Float[Array, "B T"],
    weights: Float[Array, "B T S"],
    source: Int[Array, "B S"],
    *,
    slots: int = 0,
) -> Float[Array, "B T W"]:
    r"""Returns log-probabilities of a mixture of the vocabulary and the words of a source.

    .. math:: p(w) = g P_{vocab}(w) + (1 - g) \sum_{s: w_s = w} a_s

    Source: See et al. 2017, Eq. 9.

    Args:
      logits: logits of the vocabulary.
      gate: g, in [0, 1].
      weights: a, attention to the source; 0 at padding.
      source: word id of each source state.
      slots: ids after the vocabulary, for words that it lacks; W = V + slots.
    """
    said = jnp.pad(jax.nn.softmax(logits, axis=-1), ((0, 0), (0, 0), (0, slots)))
    copied = jax.vmap(functools.partial(spread, size=said.shape[-1]))(weights.astype(jnp.float32), source)
    mixture = gate[..., None] * said + (1.0 - gate[..., None]) * copied
    return jnp.log(jnp.maximum(mixture, _LEAST))
