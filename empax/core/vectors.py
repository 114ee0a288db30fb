"""Vectors on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def unit(vectors: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """Normalizes vectors to unit length; zero vectors, which filler rows have, stay zero.

    It divides by the root of a sum instead of a norm: the gradient of a norm at zero is NaN, here it is 0.
    """
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(vectors), axis=-1, keepdims=True), 1e-16))
