"""Latent variables: drawing from a diagonal Gaussian."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Gaussian: TypeAlias = tuple[Float[Array, "B L"], Float[Array, "B L"]]
"""Mean and log-variance."""


def draw(gaussian: Gaussian, rng: jax.Array | None) -> Float[Array, "B L"]:
    """A draw through which gradients flow to mean and log-variance; the mean without an `rng`.

    Source: Kingma and Welling 2014, Sec. 2.4.
    """
    mean, log_var = gaussian
    if rng is None:
        return mean
    return mean + jnp.exp(0.5 * log_var) * jax.random.normal(rng, mean.shape, mean.dtype)
