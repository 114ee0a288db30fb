"""The retriever's model: one tower for queries and passages, pooled to a vector."""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.models.heads import masked_mean


class DualEncoder(nn.Module):
    """Texts to vectors whose dot product is the relevance.

    Contriever: mean pooling, not normalised, shared tower (Izacard et al. 2022, Sec. 3). MiniLM: mean, normalised.
    Parameters are the encoder's, under "encoder".

    Attributes:
      encoder: `(ids[B,S], mask[B,S], deterministic=) -> states[B,S,D]`, a BertEncoder.
      pooling: "mean" over real tokens, or "cls", the first token's state.
      normalize: to unit length.
    """

    encoder: nn.Module
    pooling: Literal["mean", "cls"] = "mean"
    normalize: bool = False

    def __call__(
        self, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> Float[Array, "B D"]:
        """The vectors of `embed`."""
        return self.embed(ids, mask, deterministic=deterministic)

    def embed(
        self, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> Float[Array, "B D"]:
        """One float32 vector per text; zeros for a text without tokens under mean pooling."""
        states = self.encoder(ids, mask, deterministic=deterministic)
        vectors = masked_mean(states, mask) if self.pooling == "mean" else states[:, 0].astype(jnp.float32)
        if not self.normalize:
            return vectors
        # The square root of a sum, not a norm: its gradient at zero is 0 and not NaN.
        return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, axis=-1, keepdims=True), 1e-24))
