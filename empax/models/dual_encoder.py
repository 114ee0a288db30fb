"""The retriever's model: one tower for queries and passages, pooled to a vector."""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.models.heads import ClassificationHead, masked_mean


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


class EmotionEncoder(nn.Module):
    r"""A text's vector with the distribution of its emotion beside it, so that a dot product weighs both.

    .. math:: s(q, k) = (1 - w) \, q^\top k + w \sum_e p(e \mid q) \, p(e \mid k)

    The second sum is the probability that both have the same emotion. Ours; REG retrieves "via emotion similarity"
    and leaves it to the vectors. Parameters: `encoder` as DualEncoder has them, the head's under "emotion".

    Attributes:
      encoder: gives the vectors.
      emotion: classifies them, each scaled by `unit_variance`.
      share: w, in [0, 1]; 0 gives the encoder's vectors alone.
    """

    encoder: DualEncoder
    emotion: ClassificationHead
    share: float = 0.0

    def embed(
        self, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> Float[Array, "B D"]:
        """One float32 vector per text, of the encoder's width and, where emotions have a share, one more per class."""
        vectors = self.encoder.embed(ids, mask, deterministic=deterministic)
        if self.share == 0.0:
            return vectors
        emotions = jax.nn.softmax(self.emotion(unit_variance(vectors)))
        return jnp.concatenate([vectors * (1.0 - self.share) ** 0.5, emotions * self.share**0.5], axis=-1)

    @property
    def semantic_size(self) -> int:
        """How many entries of a vector are the encoder's; they stand first."""
        return self.encoder.encoder.config.d_model

    @property
    def size(self) -> int:
        """Entries of a vector."""
        return self.semantic_size + (self.emotion.num_classes if self.share else 0)


def unit_variance(vectors: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """Unit vectors blown up to entries of order one, so that a fresh linear head learns at its usual rate."""
    # Not through a norm, whose gradient at zero (a filler row) is NaN.
    square = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(square, 1e-12)) * vectors.shape[-1] ** 0.5
