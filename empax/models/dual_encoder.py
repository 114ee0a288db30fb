"""The retriever's model: one tower for queries and passages, pooled to a vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Params
from empax.models.heads import EMOTION_HEAD, ClassificationHead, masked_max, masked_mean

Pooling: TypeAlias = Literal["mean", "cls", "max", "mean_sqrt_len_tokens", "lasttoken", "weightedmean"]
"""How states become a vector, under sentence-transformers' names."""


def _exact_gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": _exact_gelu,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


@dataclasses.dataclass(frozen=True)
class Projection:
    """A linear layer behind the pooling.

    Attributes:
      features: entries of a vector behind it.
      activation: "identity", "tanh", "relu", "gelu" (by the error function), "silu" or "sigmoid".
      use_bias: whether it adds one.
    """

    features: int
    activation: str = "tanh"
    use_bias: bool = True


def pooled(states: Float[Array, "B S D"], mask: Bool[Array, "B S"], pooling: Pooling) -> Float[Array, "B D"]:
    """One float32 vector of the real tokens' states; zeros for a text without tokens, but for "cls".

    Source: "mean", "cls", "max" and "mean_sqrt_len_tokens" Reimers and Gurevych 2019, Sec. 3, and their code (sum over
    the root of the length); "weightedmean", by place, and "lasttoken" Muennighoff 2022, Sec. 4.1.
    """
    if pooling == "cls":
        return states[:, 0].astype(jnp.float32)
    if pooling == "max":
        return masked_max(states, mask)
    if pooling == "lasttoken":
        places = jnp.arange(mask.shape[1])[None]
        return masked_mean(states, mask & (places == jnp.max(jnp.where(mask, places, -1), axis=1, keepdims=True)))
    if pooling == "weightedmean":
        # Places count from the first real token.
        weights = mask * (jnp.arange(mask.shape[1])[None] - jnp.argmax(mask, axis=1)[:, None] + 1).astype(jnp.float32)
        total = jnp.einsum("BSD,BS->BD", states.astype(jnp.float32), weights)
        return total / jnp.maximum(weights.sum(axis=1, keepdims=True), 1.0)
    mean = masked_mean(states, mask)
    if pooling == "mean":
        return mean
    return mean * jnp.sqrt(mask.sum(axis=1, keepdims=True).astype(jnp.float32))


class DualEncoder(nn.Module):
    """Texts to vectors whose dot product is the relevance.

    Contriever: mean pooling, not normalised, shared tower (Izacard et al. 2022, Sec. 3). MiniLM: mean, normalised.
    Parameters are the encoder's, under "encoder", and those of the projections, under "dense_0" and so on.

    Attributes:
      encoder: `(ids[B,S], mask[B,S], deterministic=) -> states[B,S,D]`, a BertEncoder.
      pooling: see `pooled`.
      normalize: to unit length.
      projections: layers between pooling and normalisation.
    """

    encoder: nn.Module
    pooling: Pooling = "mean"
    normalize: bool = False
    projections: tuple[Projection, ...] = ()

    def setup(self) -> None:
        self.dense = [nn.Dense(p.features, use_bias=p.use_bias) for p in self.projections]

    @property
    def width(self) -> int:
        """Entries of a vector."""
        return self.projections[-1].features if self.projections else self.encoder.config.d_model  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(
        self, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> Float[Array, "B D"]:
        """The vectors of `embed`."""
        return self.embed(ids, mask, deterministic=deterministic)

    def embed(
        self, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> Float[Array, "B D"]:
        """One float32 vector per text."""
        vectors = pooled(self.encoder(ids, mask, deterministic=deterministic), mask, self.pooling)
        for layer, projection in zip(self.dense, self.projections, strict=True):
            vectors = _ACTIVATIONS[projection.activation](layer(vectors))
        if not self.normalize:
            return vectors
        # The square root of a sum, not a norm: its gradient at zero is 0 and not NaN.
        return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, axis=-1, keepdims=True), 1e-24))


@dataclasses.dataclass(frozen=True)
class EmotionEncoder:
    r"""Texts to vectors with emotions beside them, so that one dot product weighs both.

    .. math:: s(q, k) = (1 - w) \, q^\top k + w \, p(e_k \mid q)

    A query is read twice: by the encoder, which is left to learn relevance, and by an encoder of its own for the
    emotions, so that learning one costs nothing of the other. An exemplar's emotion e_k is known; where it is not,
    the second term is 0. Ours; REG retrieves "via emotion similarity" and leaves it to the
    vectors.

    Parameters: "encoder" as DualEncoder has them, "emotion_encoder" likewise where emotions have a share, and the
    head's under "emotion".

    Attributes:
      encoder: gives the vectors; without a share, the head reads those too.
      head: classifies vectors, each scaled by `unit_variance`.
      share: w, in [0, 1]; 0 gives the encoder's vectors alone.
    """

    encoder: DualEncoder
    head: ClassificationHead = EMOTION_HEAD
    share: float = 0.0

    @property
    def size(self) -> int:
        """Entries of a vector: those of the encoder's vectors and, with a share, one more per emotion."""
        return self.encoder.width + (self.head.num_classes if self.share else 0)

    def init(self, rng: jax.Array, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Params:
        """Fresh parameters."""
        first, second, third = jax.random.split(rng, 3)
        width = jnp.zeros((1, self.encoder.width))
        params: Params = {
            "encoder": self.encoder.init(first, ids, mask)["params"],
            "emotion": self.head.init(second, width)["params"],
        }
        if self.share:
            params["emotion_encoder"] = self.encoder.init(third, ids, mask)["params"]
        return params

    def embed(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, rng: jax.Array | None = None
    ) -> Float[Array, "B D"]:
        """The encoder's vectors, without emotions; dropout where there is an `rng`."""
        return _apply(self.encoder, params["encoder"], ids, mask, rng=rng)

    def emotions(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, rng: jax.Array | None = None
    ) -> Float[Array, "B C"]:
        """Logits of the emotions of queries."""
        first, second = (None, None) if rng is None else jax.random.split(rng)
        reader = params["emotion_encoder" if self.share else "encoder"]
        return self._classify(params, _apply(self.encoder, reader, ids, mask, rng=first), second)

    def read(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, rng: jax.Array | None = None
    ) -> tuple[Float[Array, "B E"], Float[Array, "B C"]]:
        """Vectors of queries, `size` entries each, and the logits of their emotions."""
        first, second = (None, None) if rng is None else jax.random.split(rng)
        vectors = self.embed(params, ids, mask, rng=first)
        if not self.share:
            return vectors, self._classify(params, vectors, second)
        logits = self.emotions(params, ids, mask, rng=second)
        return self.join(vectors, jax.nn.softmax(logits)), logits

    def queries(self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B E"]:
        """What an index is searched with; without a share the encoder is all that it takes."""
        return self.read(params, ids, mask)[0] if self.share else self.embed(params, ids, mask)

    def keys(self, vectors: Float[Array, "N D"], emotion: Int[Array, " N"]) -> Float[Array, "N E"]:
        """The encoder's vectors of exemplars as an index holds them; `emotion` counts from 0, -1 = unknown."""
        return self.join(vectors, jax.nn.one_hot(emotion, self.head.num_classes)) if self.share else vectors

    def join(self, vectors: Float[Array, "N D"], emotions: Float[Array, "N C"]) -> Float[Array, "N E"]:
        """Both weighed so that the dot product of two joined vectors is the sum above."""
        return jnp.concatenate([vectors * (1.0 - self.share) ** 0.5, emotions * self.share**0.5], axis=-1)

    def _classify(self, params: Params, vectors: Float[Array, "N D"], rng: jax.Array | None) -> Float[Array, "N C"]:
        return _apply(self.head, params["emotion"], unit_variance(vectors), rng=rng)


def _apply(module: nn.Module, params: Params, *args: Array, rng: jax.Array | None) -> Array:
    rngs = None if rng is None else {"dropout": rng}
    return jnp.asarray(module.apply({"params": params}, *args, rngs=rngs, deterministic=rng is None))


def unit_variance(vectors: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """Unit vectors blown up to entries of order one, so that a fresh linear head learns at its usual rate."""
    # Not through a norm, whose gradient at zero (a filler row) is NaN.
    square = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(square, 1e-12)) * vectors.shape[-1] ** 0.5
