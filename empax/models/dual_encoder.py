"""The retriever's model: texts pooled to vectors, with one shared tower or separate towers for queries and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Params
from empax.core.vectors import unit
from empax.models.heads import masked_max, masked_mean
from empax.models.layers import apply, gelu

Pooling: TypeAlias = Literal["mean", "cls", "max", "mean_sqrt_len_tokens", "lasttoken", "weightedmean"]
"""How states are pooled to a vector, with sentence-transformers' names."""


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": gelu,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


@dataclasses.dataclass(frozen=True)
class Projection:
    """A linear layer after the pooling.

    Attributes:
      features: output size.
      activation: "identity", "tanh", "relu", "gelu" (by the error function), "silu" or "sigmoid".
      use_bias: whether the layer has a bias.
    """

    features: int
    activation: str = "tanh"
    use_bias: bool = True


def pooled(
    states: Float[Array, "B S D"], mask: Bool[Array, "B S"], pooling: Pooling, *, unpooled: int = 0
) -> Float[Array, "B D"]:
    """Pools the states of real tokens to one float32 vector; zeros for a text without tokens, except for "cls".

    The first `unpooled` positions are left out; "weightedmean" still counts positions from the first token.

    Source: "mean", "cls", "max" and "mean_sqrt_len_tokens" Reimers and Gurevych 2019, Sec. 3, and their code (sum
    divided by the root of the length); "weightedmean", by position, and "lasttoken" Muennighoff 2022, Sec. 4.1.
    """
    places = jnp.arange(mask.shape[1])[None]
    first = jnp.argmax(mask, axis=1)[:, None]
    mask &= places >= unpooled
    if pooling == "cls":
        return states[:, unpooled].astype(jnp.float32)
    if pooling == "max":
        return masked_max(states, mask)
    if pooling == "lasttoken":
        return masked_mean(states, mask & (places == jnp.max(jnp.where(mask, places, -1), axis=1, keepdims=True)))
    if pooling == "weightedmean":
        weights = mask * (places - first + 1).astype(jnp.float32)
        total = jnp.einsum("BSD,BS->BD", states.astype(jnp.float32), weights)
        return total / jnp.maximum(weights.sum(axis=1, keepdims=True), 1.0)
    mean = masked_mean(states, mask)
    if pooling == "mean":
        return mean
    return mean * jnp.sqrt(mask.sum(axis=1, keepdims=True).astype(jnp.float32))


class DualEncoder(nn.Module):
    """Encodes texts as vectors whose dot product is the relevance.

    Contriever: mean pooling, not normalised, shared tower (Izacard et al. 2022, Sec. 3). MiniLM: mean, normalised.
    Parameters: "encoder", and "dense_0", "dense_1", … for the projections.

    Attributes:
      encoder: `(ids[B,S], mask[B,S], embedded=, deterministic=) -> states[B,S,D]`, a BertEncoder or a T5Encoder.
      pooling: see `pooled`.
      normalize: whether the final vector is normalised to unit length.
      projections: layers between pooling and normalisation.
      truncate: number of leading entries of a vector to keep; 0 = all. Source: Kusupati et al. 2022, Sec. 3.
      normalize_whole: whether the vector is normalised to unit length before truncation.
    """

    encoder: nn.Module
    pooling: Pooling = "mean"
    normalize: bool = False
    projections: tuple[Projection, ...] = ()
    truncate: int = 0
    normalize_whole: bool = False

    def setup(self) -> None:
        self.dense = [nn.Dense(p.features, use_bias=p.use_bias) for p in self.projections]

    @property
    def width(self) -> int:
        """Entries of a vector."""
        whole = self.projections[-1].features if self.projections else self.encoder.config.d_model  # pyright: ignore[reportAttributeAccessIssue]
        return min(self.truncate, whole) if self.truncate else whole

    def __call__(
        self,
        ids: Int[Array, "B S"] | None,
        mask: Bool[Array, "B S"],
        *,
        embedded: Float[Array, "B S _"] | None = None,
        unpooled: int = 0,
        deterministic: bool = True,
    ) -> Float[Array, "B D"]:
        """Returns one float32 vector per text; `embedded` replaces the embeddings of `ids`, which is then None.

        The first `unpooled` tokens are encoded but not pooled: a prompt.
        """
        options = {} if embedded is None else {"embedded": embedded}
        states = self.encoder(ids, mask, deterministic=deterministic, **options)
        vectors = pooled(states, mask, self.pooling, unpooled=unpooled)
        for layer, projection in zip(self.dense, self.projections, strict=True):
            vectors = _ACTIVATIONS[projection.activation](layer(vectors))
        vectors = unit(vectors) if self.normalize_whole else vectors
        vectors = vectors[:, : self.truncate] if self.truncate else vectors
        return unit(vectors) if self.normalize else vectors


@dataclasses.dataclass(frozen=True)
class Towers:
    """Encodes queries and keys into one vector space, with one shared tower or two separate towers.

    Parameters: "encoder" for a shared tower, or "query_encoder" and "key_encoder".
    Source: two towers Karpukhin et al. 2020, Sec. 3.1; one Izacard et al. 2022, Sec. 3.

    Attributes:
      query: tower for queries.
      key: tower for keys; None = `query` encodes both.
    """

    query: DualEncoder
    key: DualEncoder | None = None

    @property
    def names(self) -> tuple[str, str]:
        """Parameter names of the query tower and of the key tower."""
        return ("encoder", "encoder") if self.key is None else ("query_encoder", "key_encoder")

    def init(self, rng: jax.Array, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Params:
        """Initializes parameters; two towers with equal models start with equal parameters."""
        towers = dict(zip(self.names, (self.query, self.key or self.query), strict=True))
        return {name: tower.init(rng, ids, mask)["params"] for name, tower in towers.items()}

    def embed_queries(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, rng: jax.Array | None = None
    ) -> Float[Array, "B D"]:
        """Returns vectors of queries, with dropout if there is an `rng`."""
        return apply(self.query, params[self.names[0]], ids, mask, rng=rng)

    def embed_keys(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, rng: jax.Array | None = None
    ) -> Float[Array, "B D"]:
        """Returns vectors of keys, with dropout if there is an `rng`."""
        return apply(self.key or self.query, params[self.names[1]], ids, mask, rng=rng)


def random_params(init: Callable[..., Params], rng: jax.Array) -> Params:
    """Calls an encoder's `init`, compiled as one function: op by op it takes seconds."""
    return jax.jit(init)(rng, jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool))
