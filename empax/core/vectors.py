"""Vectors on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def unit(vectors: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """The vectors at length 1; those of zeros, which filler rows have, stay zeros.

    By the root of a sum and not by a norm: the gradient of a norm at zero is NaN, of this it is 0.
    """
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(vectors), axis=-1, keepdims=True), 1e-16))
