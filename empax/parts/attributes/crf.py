"""Linear-chain conditional random field: the likelihood of a label sequence, and the likeliest sequence.

Positions under a False mask are skipped: the chain goes from one real position to the next.

Letters: B examples, T positions, C labels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.models.arithmetic import rows_of


def sequence_score(
    emissions: Float[Array, "B T C"],
    transitions: Float[Array, "C C"],
    labels: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, " B"]:
    """Returns the sum of the emissions and transitions of `labels`; 0 for a row without a real position."""
    flat = transitions.reshape(-1, 1)

    def body(carry: tuple[jax.Array, ...], part: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
        total, last, begun = carry
        emission, label, real = part
        own = jnp.take_along_axis(emission, label[:, None], axis=1)[:, 0]
        step = jnp.where(begun, rows_of(flat, last * len(transitions) + label)[:, 0], 0.0)
        total = total + jnp.where(real, own + step, 0.0)
        return (total, jnp.where(real, label, last), begun | real), None

    rows = emissions.shape[0]
    start = (jnp.zeros(rows), jnp.zeros(rows, labels.dtype), jnp.zeros(rows, bool))
    return jax.lax.scan(body, start, _by_position(emissions, labels, mask))[0][0]


def log_partition(
    emissions: Float[Array, "B T C"], transitions: Float[Array, "C C"], mask: Bool[Array, "B T"]
) -> Float[Array, " B"]:
    """Returns log Z, the log of the sum of exp(score) over label sequences; 0 for a row without a real position."""

    def body(carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]) -> tuple[Any, None]:
        alpha, begun = carry
        emission, real = part
        onward = jax.nn.logsumexp(alpha[:, :, None] + transitions[None], axis=1) + emission
        new = jnp.where(begun[:, None], onward, emission)
        return (jnp.where(real[:, None], new, alpha), begun | real), None

    rows, _, labels = emissions.shape
    start = (jnp.zeros((rows, labels)), jnp.zeros(rows, bool))
    alpha, begun = jax.lax.scan(body, start, _by_position(emissions, mask))[0]
    return jnp.where(begun, jax.nn.logsumexp(alpha, axis=1), 0.0)


def log_likelihood(
    emissions: Float[Array, "B T C"],
    transitions: Float[Array, "C C"],
    labels: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, " B"]:
    r"""Returns log p(labels) of each row.

    .. math:: \log p(r) = \sum_j (A_{r_{j-1}, r_j} + e_{j, r_j}) - \log Z

    with emissions e, and transitions A from row to column; the first real position has no transition. Labels are in
    [0, C), also under a False mask. Source: Lafferty et al. 2001; ReflectDiffu, Eq. 16.
    """
    emissions = emissions.astype(jnp.float32)
    score = sequence_score(emissions, transitions, labels, mask)
    return score - log_partition(emissions, transitions, mask)


def viterbi(
    emissions: Float[Array, "B T C"], transitions: Float[Array, "C C"], mask: Bool[Array, "B T"]
) -> Int[Array, "B T"]:
    """Returns the likeliest labels; 0 under a False mask."""
    rows, _, labels = emissions.shape
    stay = jnp.broadcast_to(jnp.arange(labels)[None], (rows, labels))

    def forward(carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        best, begun = carry
        emission, real = part
        reached = best[:, :, None] + transitions[None]
        new = jnp.where(begun[:, None], reached.max(axis=1), 0.0) + emission
        came_from = jnp.where((begun & real)[:, None], reached.argmax(axis=1), stay)
        return (jnp.where(real[:, None], new, best), begun | real), came_from

    def backward(label: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        came_from, real = part
        before = jnp.take_along_axis(came_from, label[:, None], axis=1)[:, 0]
        return before, jnp.where(real, label, 0)

    start = (jnp.zeros((rows, labels)), jnp.zeros(rows, bool))
    (best, _), pointers = jax.lax.scan(forward, start, _by_position(emissions, mask))
    _, path = jax.lax.scan(backward, best.argmax(axis=1), (pointers, mask.T), reverse=True)
    return path.T


def _by_position(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(array.swapaxes(0, 1) for array in arrays)
