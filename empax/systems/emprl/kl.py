"""KL divergence of a policy from its reference: estimators on sampled tokens, and the penalty's coefficient."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.core.types import Mean

Tokens: TypeAlias = Float[Array, "B T"]
"""A number for each token of each response."""

Mask: TypeAlias = Bool[Array, "B T"]
"""True at the tokens that count. Values elsewhere (NaN too) affect neither value nor gradient."""


def log_ratios(log_probs: Tokens, other_log_probs: Tokens, mask: Mask) -> Tokens:
    """Returns the logarithm of the ratio of two policies at each token; no gradient flows to the second."""
    return real(log_probs, mask) - jax.lax.stop_gradient(real(other_log_probs, mask))


def kl_penalty(
    log_probs: Tokens, reference_log_probs: Tokens, mask: Mask, *, estimator: Literal["k1", "k3"] = "k1"
) -> Tokens:
    r"""Returns KL(policy || reference) at each token, estimated from the sampled token; in nats.

    .. math::
      k_1 = \log \frac{\pi}{\rho}, \quad k_3 = \frac{\rho}{\pi} - 1 + k_1

    Source: EmpRL, Eq. 6 ("k1"); Schulman 2020, "Approximating KL divergence". Both are unbiased; k3 is never negative,
    and has the lower variance if the policies are close. The gradient flows to `log_probs` alone; that of k1 has mean
    0, so a loss needs k3. Under a False mask the KL is 0.
    Departure: Eq. 6 names no token; ours is the sampled one.
    """
    log_ratio = log_ratios(log_probs, reference_log_probs, mask)
    if estimator == "k1":
        return log_ratio
    return jnp.expm1(-log_ratio) + log_ratio  # expm1, since the terms cancel near 0, where most ratios are


def sequence_kl(kl: Tokens, mask: Mask) -> Mean:
    """Returns the KL in nats per response: summed over tokens, averaged over the responses that have any."""
    return Mean.of(jnp.sum(real(kl, mask), axis=1), jnp.any(mask, axis=1))


def real(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Returns `values` as float32, 0 under a False mask; before any arithmetic, so that no NaN reaches a gradient."""
    return jnp.where(mask, values.astype(jnp.float32), 0.0)


def adapted(coefficient: Float[Array, ""], kl: Mean, *, target: float, horizon: float) -> Float[Array, ""]:
    r"""Returns the KL coefficient after a rollout, which keeps the KL of whole responses at a target.

    .. math:: e = \mathrm{clip}(\mathrm{KL} / \mathrm{target} - 1, -0.2, 0.2), \quad
      \beta \leftarrow \beta \, \max(0, 1 + e \, n / \mathrm{horizon})

    with `kl` the `sequence_kl` of the rollout's tokens, whose weight is its number n of responses (0 = no change).
    Source: Ziegler et al. 2019, Sec. 2.2, in the form of their code and TRL's.

    `target` is in nats per response, above 0. After `horizon` responses, a constant error of 20% has changed beta by
    about 20%; it should be well above n, or beta may become 0.
    """
    error = jnp.clip(kl.value() / target - 1.0, -0.2, 0.2)
    return coefficient * jnp.maximum(0.0, 1.0 + error * kl.weight / horizon)
