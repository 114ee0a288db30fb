"""Losses in which frequent words count less."""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Mean
from empax.losses.cross_entropy import token_log_probs


def frequency_weights(counts: Int[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
    r"""A weight for each word, less the more frequent it is; their mean is 1 and the most frequent one's is 0.

    .. math:: w_v \propto 1 - f_v / \max_u f_u

    Source: Sabour et al. 2022 (CEM), after Jiang et al. 2019.

    Args:
      counts: of each word; where all are 0, all weights are 1.
    """
    most = counts.max(initial=0)
    if not most:
        return np.ones(counts.shape, np.float32)
    weights = 1.0 - counts / most
    total = weights.sum()
    return (weights * len(weights) / total if total else np.ones(counts.shape)).astype(np.float32)


def weighted_cross_entropy(
    logits: Float[Array, "B T V"],
    target: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    weights: Float[Array, " V"],
) -> Mean:
    """Negative log-likelihood, each token times the weight of its word, per token."""
    nll = -token_log_probs(logits, target) * jax.lax.stop_gradient(weights)[target]
    return Mean.of(nll, mask)
