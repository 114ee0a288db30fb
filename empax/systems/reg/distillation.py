"""Losses that teach a retriever which passages help the generator: REG's metric distillation, Atlas's PDist, EMDR2.

Masked candidates get probability 0 and no gradient, whatever their scores (-inf and NaN included).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.core.types import Mean

Form = Literal["softmax", "literal_sigmoid"]


def target_distribution(
    utilities: Float[Array, "B K"], mask: Bool[Array, "B K"], *, temperature: float
) -> Float[Array, "B K"]:
    r"""Returns the target distribution over candidates; no gradient flows.

    .. math:: P_k = \exp(F_k / \tau) / \sum_j \exp(F_j / \tau)

    Source: REG (Wang et al.), Eq. 3, with utilities F of the decoded candidates; Izacard et al. 2023 (Atlas, "PDist"),
    Sec. 2.2, with log-likelihoods of the response given each passage.

    `mask` is True at real candidates, `temperature` is tau > 0, in units of the utilities. Without real candidates, all
    probabilities of a row are 0.
    """
    log_probs = _masked_log_softmax(utilities, mask, temperature)
    return jax.lax.stop_gradient(jnp.where(mask, jnp.exp(log_probs), 0.0))


def retriever_kl(
    scores: Float[Array, "B K"],
    targets: Float[Array, "B K"],
    mask: Bool[Array, "B K"],
    valid: Bool[Array, " B"],
    *,
    temperature: float = 1.0,
    form: Form = "softmax",
    weights: Float[Array, " B"] | None = None,
) -> Mean:
    r"""Returns the divergence of the retriever from the targets, averaged over queries (not over candidates).

    .. math:: L = \sum_k P_k (\log P_k - \log Q_k)

    "softmax": Q = softmax(scores / T). "literal_sigmoid": Q = sigmoid(scores / T), for each candidate separately.
    Source: REG (Wang et al.), Eq. 4; with the targets of PDist: Izacard et al. 2023.
    Departure: Eq. 4 prints the sigmoid, by which Q is no distribution, and the loss falls as any score rises.

    `scores` are query times passage, before any temperature; no gradient flows to the `targets`, P of
    `target_distribution`. `mask` is True at real candidates, `valid` False on filler rows; a row without candidates
    does not count either. `temperature` is T > 0, in units of the scores; `weights` are those of queries in the mean.
    """
    targets = jax.lax.stop_gradient(jnp.where(mask, targets, 0.0))
    if form == "softmax":
        log_probs = _masked_log_softmax(scores, mask, temperature)
    else:
        log_probs = jax.nn.log_sigmoid(jnp.where(mask, scores, 0.0) / temperature)
    # Terms with P = 0 are 0: neither log 0 nor the log of a masked candidate may enter.
    counts = targets > 0.0
    surprise = jnp.log(jnp.where(counts, targets, 1.0)) - jnp.where(counts, log_probs, 0.0)
    return Mean.of(jnp.sum(targets * surprise, axis=1), valid & jnp.any(mask, axis=1), weights)


def emdr2(
    scores: Float[Array, "B K"],
    log_likelihoods: Float[Array, "B K"],
    mask: Bool[Array, "B K"],
    valid: Bool[Array, " B"],
    *,
    temperature: float = 1.0,
    weights: Float[Array, " B"] | None = None,
) -> Mean:
    r"""Returns the negative log-likelihood of the response, marginalized over passages, averaged over queries.

    .. math:: L = -\log \sum_k \mathrm{softmax}(s / T)_k \, p(y \mid x, d_k)

    Source: Singh et al. 2021 (EMDR2), Eq. 4, the retriever's term.

    `log_likelihoods` are log p(y | x, d_k), at most 0, without gradient. Other arguments are those of `retriever_kl`.
    """
    likelihoods = jax.lax.stop_gradient(jnp.where(mask, log_likelihoods, 0.0))
    joint = _masked_log_softmax(scores, mask, temperature) + likelihoods
    return Mean.of(-jax.nn.logsumexp(joint, axis=1), valid & jnp.any(mask, axis=1), weights)


def _masked_log_softmax(
    values: Float[Array, "B K"], mask: Bool[Array, "B K"], temperature: float
) -> Float[Array, "B K"]:
    if not temperature > 0.0:
        raise ValueError(f"temperature = {temperature} is not allowed; it must be above 0.")
    scaled = jnp.where(mask, values, 0.0).astype(jnp.float32) / temperature
    # Finite, so that a row without candidates has no NaN; so low that its probability is exactly 0.
    return jax.nn.log_softmax(jnp.where(mask, scaled, -1e9), axis=1)
