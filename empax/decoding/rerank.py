"""Choosing among what a search found by more than its likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float

from empax.core.types import Generated

Utility: TypeAlias = Callable[..., Float[Array, " N"]]
"""`(candidates[N,T], candidate_mask, references[N,T], reference_mask)`: how good each candidate is as an answer where
the reference is right."""


def by_consensus(
    generated: Generated, utility: Utility, *, eos_id: int, pad_id: int, length_power: float = 0.0
) -> Generated:
    r"""Hypotheses in the order of what they are worth if any of the others is what should have been said.

    .. math:: u_k = \tfrac{|y_k|^a}{K - 1} \sum_{j \ne k} F(y_k, y_j)

    With hypotheses drawn from the model this is the Monte Carlo form of the decision with the least Bayes risk: it
    prefers what much of the probability agrees on to what has the single highest probability, which in dialogue is the
    same few sentences for everybody. Source: Kumar and Byrne 2004; with samples, Eikema and Aziz 2020, Sec. 6.

    Args:
      generated: K >= 2 hypotheses of each example; equal ones count as often as they were drawn.
      utility: F, of token ids; a mask excludes padding and the end-of-sequence token.
      eos_id: ends a hypothesis.
      pad_id: fills it up.
      length_power: a; above 0 makes up for a utility that prefers short hypotheses.

    Returns:
      The same hypotheses and log-probabilities, best first.
    """
    tokens = generated.tokens
    batch, num, length = tokens.shape
    made = (tokens != eos_id) & (tokens != pad_id)

    def pairs(values: Array, *, first: bool) -> Array:
        spread = values[:, :, None] if first else values[:, None]
        return jnp.broadcast_to(spread, (batch, num, num, length)).reshape(-1, length)

    rows = [pairs(values, first=first) for first in (True, False) for values in (tokens, made)]
    values = utility(*rows).reshape(batch, num, num)
    others = 1.0 - jnp.eye(num)[None]
    worth = (values * others).sum(axis=2) / max(num - 1, 1) * made.sum(axis=2) ** length_power
    order = jnp.argsort(-worth, axis=1, stable=True)
    return Generated(
        tokens=jnp.take_along_axis(tokens, order[:, :, None], axis=1),
        log_probs=jnp.take_along_axis(generated.log_probs, order, axis=1),
    )
