"""Latent variables: sampling from a diagonal Gaussian, and the KL divergence between two."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Gaussian: TypeAlias = tuple[Float[Array, "B L"], Float[Array, "B L"]]
"""Mean and log-variance."""


def draw(gaussian: Gaussian, rng: jax.Array | None) -> Float[Array, "B L"]:
    """Samples with reparameterization: gradients flow to mean and log-variance. Returns the mean without an `rng`.

    Source: Kingma and Welling 2014, Sec. 2.4.
    """
    mean, log_var = gaussian
    if rng is None:
        return mean
    return mean + jnp.exp(0.5 * log_var) * jax.random.normal(rng, mean.shape, mean.dtype)


def gaussian_kl(first: Gaussian, second: Gaussian) -> Float[Array, " B"]:
    r"""Returns KL(first || second), summed over dimensions, in nats.

    .. math:: \tfrac12 \sum (\log\sigma_2^2 - \log\sigma_1^2 + (\sigma_1^2 + (\mu_1 - \mu_2)^2) / \sigma_2^2 - 1)

    Source: Kingma and Welling 2014, Appendix B.
    """
    mean, log_var = first
    other, other_log_var = second
    spread = (jnp.exp(log_var) + jnp.square(mean - other)) * jnp.exp(-other_log_var)
    return 0.5 * jnp.sum(other_log_var - log_var + spread - 1.0, axis=-1)
