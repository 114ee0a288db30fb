"""Cross-entropy over labels and over a vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Mean


def token_log_probs(logits: Float[Array, "B T V"], target: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns log p(target) at every position, float32.

    .. math:: \\log p_t = z_{t, y_t} - \\log \\sum_v \\exp z_{t, v}
    """
    logits = logits.astype(jnp.float32)
    return _picked(logits, target) - jax.nn.logsumexp(logits, axis=-1)


def label_losses(
    log_probs: Float[Array, "N C"], labels: Int[Array, " N"]
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Returns each row's negative log-likelihood of its label, and 1 if it is the likeliest; meaningless at -1."""
    nll = -jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    return nll, (log_probs.argmax(axis=1) == labels).astype(jnp.float32)


def cross_entropy(
    logits: Float[Array, "B T V"], target: Int[Array, "B T"], mask: Bool[Array, "B T"], *, label_smoothing: float = 0.0
) -> Mean:
    """Computes the mean negative log-likelihood of the real target tokens, in nats per token.

    .. math:: L = -(1 - e) \\log p(y) - \\frac{e}{V} \\sum_v \\log p(v)

    Source: Szegedy et al. 2016, Sec. 7 (label smoothing e).

    Args:
      logits: any float type; computed in float32.
      target: ids in [0, V); ids under a False mask may be anything.
      mask: True at tokens that count.
      label_smoothing: e in [0, 1).
    """
    logits = logits.astype(jnp.float32)
    expected = (1.0 - label_smoothing) * _picked(logits, target)
    if label_smoothing:
        expected = expected + label_smoothing * jnp.mean(logits, axis=-1)
    return Mean.of(jax.nn.logsumexp(logits, axis=-1) - expected, mask)


def _picked(logits: Float[Array, "B T V"], target: Int[Array, "B T"]) -> Float[Array, "B T"]:
    # A masked sum instead of a gather: its gradient fuses with that of the softmax; a gather's is a scatter.
    hot = jax.lax.broadcasted_iota(target.dtype, logits.shape, 2) == target[:, :, None]
    return jnp.sum(jnp.where(hot, logits, 0.0), axis=-1)
