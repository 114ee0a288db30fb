"""Heads on top of an encoder: pooling and classification."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.core.types import EMOTIONS
from empax.models.layers import MASKED, Dropout, normal


def masked_mean(states: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> Float[Array, "B D"]:
    """Computes the mean over real tokens, in float32; zeros for a row without any."""
    weights = mask.astype(jnp.float32)
    total = jnp.einsum("BSD,BS->BD", states.astype(jnp.float32), weights)
    return total / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1.0)


def masked_max(states: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> Float[Array, "B D"]:
    """Computes the feature-wise maximum over real tokens, in float32; zeros for a row without any."""
    highest = jnp.max(jnp.where(mask[:, :, None], states.astype(jnp.float32), MASKED), axis=1)
    return jnp.where(mask.any(axis=1, keepdims=True), highest, 0.0)


def unit_variance(vectors: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """Scales vectors so that their entries have a mean square of 1, and a new linear head learns at its usual rate."""
    # Not through a norm: its gradient at zero (a filler row) is NaN.
    square = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(square, 1e-12)) * vectors.shape[-1] ** 0.5


class ClassificationHead(nn.Module):
    """Linear classifier, optionally with a hidden tanh layer.

    Attributes:
      num_classes: C.
      hidden: width of the hidden layer; None = no hidden layer.
      dropout: rate before each projection.
    """

    num_classes: int
    hidden: int | None = None
    dropout: float = 0.1

    @nn.compact
    def __call__(self, features: Float[Array, "B D"], *, deterministic: bool = True) -> Float[Array, "B C"]:
        """Returns the logits, float32."""
        features = Dropout(self.dropout)(features.astype(jnp.float32), deterministic=deterministic)
        if self.hidden is not None:
            size = features.shape[-1]
            weights = self.param("hidden", normal(size**-0.5), (size, self.hidden))
            bias = self.param("hidden_bias", nn.initializers.zeros, (self.hidden,))
            features = jnp.tanh(features @ weights + bias[None])
            features = Dropout(self.dropout)(features, deterministic=deterministic)
        size = features.shape[-1]
        weights = self.param("out", normal(size**-0.5), (size, self.num_classes))
        return features @ weights + self.param("out_bias", nn.initializers.zeros, (self.num_classes,))[None]


EMOTION_HEAD = ClassificationHead(num_classes=len(EMOTIONS))
"""Linear classifier of any encoding, with one class per emotion (32)."""
