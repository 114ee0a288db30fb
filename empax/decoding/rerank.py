"""Choosing among what a search found by more than its likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Generated

Utility: TypeAlias = Callable[..., Float[Array, " N"]]
"""`(candidates[N,T], candidate_mask, references[N,T], reference_mask)`: how good each candidate is as an answer where
the reference is right."""


def by_consensus(
    generated: Generated,
    utility: Utility,
    *,
    eos_id: int,
    pad_id: int,
    length_power: float = 0.0,
    witnesses: tuple[Int[Array, "B M S"], Bool[Array, "B M S"]] | None = None,
    witness_weight: float = 0.0,
) -> Generated:
    r"""Hypotheses in the order of what they are worth if any of the others is what should have been said.

    .. math:: u_k = |y_k|^a \Big( \tfrac{1}{K - 1} \sum_{j \ne k} F(y_k, y_j) + \tfrac{b}{M} \sum_m F(y_k, z_m) \Big)

    With hypotheses drawn from the model this is the Monte Carlo form of the decision with the least Bayes risk: it
    prefers what much of the probability agrees on to what has the single highest probability, which in dialogue is the
    same few sentences for everybody. Source: Kumar and Byrne 2004; with samples, Eikema and Aziz 2020, Sec. 6. The
    witnesses z, what people said in like situations, are ours.

    Args:
      generated: K >= 2 hypotheses of each example; equal ones count as often as they were drawn.
      utility: F, of token ids; a mask excludes padding and the end-of-sequence token.
      eos_id: ends a hypothesis.
      pad_id: fills it up.
      length_power: a; above 0 makes up for a utility that prefers short hypotheses.
      witnesses: M more texts for each example with the mask of their tokens; one without a token does not count.
      witness_weight: b.

    Returns:
      The same hypotheses and log-probabilities, best first.
    """
    tokens = generated.tokens
    batch, num, length = tokens.shape
    made = (tokens != eos_id) & (tokens != pad_id)

    def agreement(others: Array, mask: Array) -> Float[Array, "B K M"]:
        """F of every hypothesis with every one of `others`."""
        shape = (batch, num, others.shape[1])
        own = [jnp.broadcast_to(x[:, :, None], (*shape, length)).reshape(-1, length) for x in (tokens, made)]
        width = others.shape[2]
        theirs = [jnp.broadcast_to(x[:, None], (*shape, width)).reshape(-1, width) for x in (others, mask)]
        return utility(*own, *theirs).reshape(shape)

    worth = (agreement(tokens, made) * (1.0 - jnp.eye(num)[None])).sum(axis=2) / max(num - 1, 1)
    if witnesses is not None and witness_weight:
        present = witnesses[1].any(axis=2)[:, None]
        found = jnp.where(present, agreement(*witnesses), 0.0).sum(axis=2)
        worth += witness_weight * found / jnp.maximum(present.sum(axis=2), 1)
    worth *= made.sum(axis=2) ** length_power
    order = jnp.argsort(-worth, axis=1, stable=True)
    return Generated(
        tokens=jnp.take_along_axis(tokens, order[:, :, None], axis=1),
        log_probs=jnp.take_along_axis(generated.log_probs, order, axis=1),
    )
