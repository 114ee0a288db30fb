"""The top-k of many numbers, without sorting them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

GROUP = 32
"""Width of vocabulary groups. On a CPU, [192, 12000] logits: top-8 3 ms (lax.top_k 7, sort 700, argmax 11)."""


def group_width(vocab_size: int) -> int:
    """Returns the multiple of 8 nearest to `GROUP` that divides the vocabulary, so that no logits need padding."""
    widths = [width for width in range(GROUP // 2, 2 * GROUP + 1, 8) if vocab_size % width == 0]
    return min(widths, key=lambda width: abs(width - GROUP), default=GROUP)


def largest(logits: Float[Array, "*B V"], k: int) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """Returns the `k` largest entries, best first, and their ids: like `jax.lax.top_k`, faster on large vocabularies.

    Exact, ties included (lowest id first): each of the k groups with the largest maxima holds at least one entry that
    ranks before everything in the other groups, so these groups hold all k winners. There must be no NaN.

    Raises:
      ValueError: k is not in 1 to V.
    """
    *lead, vocab_size = logits.shape
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k = {k} is not allowed; it takes 1 to {vocab_size}, the size of the vocabulary.")
    width = group_width(vocab_size)
    num_groups = -(-vocab_size // width)
    if num_groups <= k:
        values, ids = jax.lax.top_k(logits, k)
        return values, ids
    groups = grouped(logits)
    _, best = jax.lax.top_k(jnp.max(groups, axis=-1), k)
    best = jnp.sort(best, axis=-1)  # sorted by id, so that ties go to the lowest id
    candidates = jnp.take_along_axis(groups, best[..., None], axis=-2).reshape(*lead, k * width)
    values, places = jax.lax.top_k(candidates, k)
    return values, jnp.take_along_axis(best, places // width, axis=-1) * width + places % width


def grouped(logits: Float[Array, "*B V"]) -> Float[Array, "*B G W"]:
    """Splits neighbouring logits into groups of `group_width`; pads the last group with -inf."""
    *lead, vocab_size = logits.shape
    width = group_width(vocab_size)
    padded = jnp.pad(logits, [(0, 0)] * len(lead) + [(0, -vocab_size % width)], constant_values=-jnp.inf)
    return padded.reshape(*lead, -1, width)
