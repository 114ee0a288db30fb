"""Scanned Transformer layers, and the settings that tell one Transformer from another.

Layers are scanned: their parameters are stacked, [L, ...], and compile time does not grow with depth.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Literal, TypeAlias

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.sharding import keep_rows_split
from empax.core.types import Params
from empax.models.arithmetic import WEIGHT_PRODUCT
from empax.models.layers import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    Attention,
    Dropout,
    FeedForward,
    Norm,
    normal,
    relative_bucket,
)

Remat: TypeAlias = Literal["none", "minimal", "full"]
"""What the backward pass computes again, see `rematerialized`."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Everything that tells one Transformer from another.

    Attributes:
      inner_dropout: whether dropout also follows the activation of the feed-forward (T5).
      attention_scale: logits times head_dim ** -0.5; T5 has none.
      position: "relative" (T5's bias, shared by all layers of a stack), "sinusoidal" or "learned".
      max_positions: how many learned positions there are; the others know no limit.
      position_offset: unused rows before that of the first position (BART: 2).
      shared_positions: whether encoder and decoder read one table of learned positions; BART has one in each.
      embedding_norm: whether a norm follows the embeddings, one in each stack (BART).
      embed_scale: embeddings times sqrt(d_model), as in Vaswani et al. 2017.
      output_scale: output logits times d_model ** -0.5 (T5 v1.0).
      output_bias: whether a constant is added to the logits (BART's `final_logits_bias`); it is never trained.
      init_scale: factor on every initial weight but embeddings.
      embedding_stddev: of initial embeddings; None = d_model ** -0.5.
      start_id: what the decoder reads first.
      remat: what of the layers the backward pass computes again: see `models.stack.rematerialized`.
      unroll: layers per iteration of the scan. More compile slower; on a CPU they run up to 1.6 times faster, since the
        backward pass of a loop copies what it saved.
      dtype: of the arithmetic; parameters, softmax, norms and logits stay float32.
    """

    vocab_size: int
    d_model: int
    num_heads: int
    head_dim: int
    d_ff: int
    num_encoder_layers: int
    num_decoder_layers: int
    dropout: float = 0.1
    inner_dropout: bool = True
    activation: str = "relu"
    norm: Literal["rms", "layer"] = "layer"
    pre_norm: bool = True
    use_bias: bool = True
    attention_scale: bool = True
    position: Literal["relative", "sinusoidal", "learned"] = "relative"
    relative_buckets: int = 32
    relative_max_distance: int = 128
    max_positions: int = 512
    position_offset: int = 0
    shared_positions: bool = True
    embed_scale: bool = False
    embedding_norm: bool = False
    tie_embeddings: bool = True
    output_scale: bool = False
    output_bias: bool = False
    layer_norm_eps: float = 1e-6
    final_norm: bool = True
    init_scale: float = 1.0
    embedding_stddev: float | None = None
    start_id: int = 0
    remat: Remat = "none"
    unroll: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        known = sorted([*ACTIVATIONS, *GATED_ACTIVATIONS])
        if self.activation not in known:
            raise ConfigError(f"activation = {self.activation!r} is unknown; it is one of {', '.join(known)}.")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype = {self.dtype!r} must be float32, bfloat16 or float16.")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout = {self.dropout} must lie in [0, 1).")
        for name in ("vocab_size", "d_model", "num_heads", "head_dim", "d_ff", "num_encoder_layers", "unroll"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1.")

    def initial_embedding_stddev(self) -> float:
        """Of initial embeddings, of tokens as of positions."""
        return self.d_model**-0.5 if self.embedding_stddev is None else self.embedding_stddev

    def position_rows(self) -> int:
        """Rows of a table of learned positions."""
        return self.max_positions + self.position_offset


@flax.struct.dataclass
class DecodeCache:
    """What decoding remembers. Cross keys and values stand once per example, not once per hypothesis.

    Cross keys are turned to what a matrix product reads fastest, since every step multiplies with them.

    Where the scan over layers is unrolled, `weights` holds each layer's own, and cross keys and values are tuples of L
    arrays: cut from their stacks within the loop over tokens, all of them would be copied for every token.

    The fields are arrays, but annotated Any: JAX also builds pytrees of specs, axes and placeholders.
    """

    self_key: Any  # [L, B, K, H, T, N], of `cache_dtype`
    self_value: Any  # [L, B, K, H, T, N], of `cache_dtype`
    cross_key: Any  # [L, B, H, N, S]
    cross_value: Any  # [L, B, H, S, N]
    source_mask: Any  # [B, S] bool
    position: Any  # [] int32, how many tokens have been read
    weights: Any = flax.struct.field(default=None, kw_only=True)  # None where layers are scanned

    def cut(self, weights: Params) -> Any:
        """The same with each layer's part of what is stacked apart; `weights` are the scanned layers' parameters."""

        def apart(stacked: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.map(operator.itemgetter(i), stacked) for i in range(self.self_key.shape[0]))

        cross = {"cross_key": apart(self.cross_key), "cross_value": apart(self.cross_value)}
        return self.replace(weights=apart(weights), **cross)  # type: ignore[attr-defined]

    def reorder(self, parents: Int[Array, "B K"]) -> DecodeCache:
        """Makes hypothesis k a continuation of `parents[b, k]`; only the self-attention cache moves."""
        rows = jnp.arange(parents.shape[0])[:, None]
        return self.replace(  # type: ignore[attr-defined]
            self_key=self.self_key[:, rows, parents], self_value=self.self_value[:, rows, parents]
        )


def cache_dtype(dtype: DTypeLike) -> DTypeLike:
    """The type to keep hypotheses' own keys and values in; they hold numbers of `dtype` all the same.

    XLA has no update of a half-precision slice for CPUs: it would convert the whole cache there and back, every token.
    """
    return jnp.float32 if jax.default_backend() == "cpu" else dtype


def extend_cache(
    cache: Float[Array, "L B K H T N"],
    item: Float[Array, "B K H 1 N"],
    layer: Int[Array, ""],
    position: Int[Array, ""],
) -> tuple[Float[Array, "L B K H T N"], Float[Array, "B K H T N"]]:
    """Puts `item` into `layer` at `position`; gives the cache of all layers and that of this one."""
    # Written in place in the loop's carry: no other part of the cache is copied.
    start = (layer, 0, 0, 0, position, 0)
    cache = jax.lax.dynamic_update_slice(cache, item[None].astype(cache.dtype), start)
    return cache, jax.lax.dynamic_index_in_dim(cache, layer, 0, keepdims=False)


def scan_layers(
    function: Any, layers: nn.Module, carry: Any, per_layer: Any, *shared: Any, length: int, unroll: int
) -> Any:
    """Scans `function(layer, carry, per_layer, *shared) -> (carry, outputs)` over `length` layers."""
    scanned = nn.scan(
        function,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(0, *(nn.broadcast,) * len(shared)),  # type: ignore[arg-type]
        length=length,
        unroll=min(unroll, length),
    )
    return scanned(layers, carry, per_layer, *shared)


def step_layers(
    function: Any, layers: nn.Module, carry: Any, cache: DecodeCache, *shared: Any, length: int, unroll: int
) -> Any:
    """Takes one token through all layers by `function(layer, carry, (number, cross_key, cross_value), *shared)`.

    A scan, or a plain loop where the cache has the layers' weights apart. Gives the last carry.
    """
    if cache.weights is None:
        per_layer = (jnp.arange(length), cache.cross_key, cache.cross_value)
        return scan_layers(function, layers, carry, per_layer, *shared, length=length, unroll=unroll)[0]
    alone = layers.clone(parent=None)
    for number, (own, *cross) in enumerate(zip(cache.weights, cache.cross_key, cache.cross_value, strict=True)):
        carry, _ = function(alone.bind({"params": own}), carry, (jnp.asarray(number), *cross), *shared)
    return carry


def rematerialized(function: Any, remat: Remat) -> Any:
    """The body of `scan_layers` with less kept for the backward pass, and more computed again there.

    "none" keeps everything, "full" what enters a layer alone (a third more time), "minimal" also every product with a
    weight matrix, so that attention's weights and what is done element by element are computed again and no more. The
    names are t5x's.
    """
    if remat == "none":
        return function
    policy = jax.checkpoint_policies.save_only_these_names(WEIGHT_PRODUCT) if remat == "minimal" else None
    return nn.remat(function, prevent_cse=False, policy=policy)


class Layer(nn.Module):
    """One layer: self-attention, cross-attention in a decoder, feed-forward; pre- or post-norm."""

    config: TransformerConfig
    cross: bool

    def setup(self) -> None:
        c = self.config
        dtype = jnp.dtype(c.dtype)

        def attention() -> Attention:
            return Attention(
                c.d_model, c.num_heads, c.head_dim, c.use_bias, c.attention_scale, c.dropout, c.init_scale, dtype
            )

        def norm() -> Norm:
            return Norm(c.norm, c.layer_norm_eps, dtype)

        self.attention, self.attention_norm = attention(), norm()
        if self.cross:
            self.cross_attention, self.cross_attention_norm = attention(), norm()
        inner = c.dropout if c.inner_dropout else 0.0
        self.feed_forward = FeedForward(c.d_ff, c.activation, c.use_bias, inner, c.init_scale, dtype)
        self.feed_forward_norm = norm()
        self.dropout = Dropout(c.dropout)

    def _residual(self, norm: Norm, states: jax.Array, sublayer: Any, deterministic: bool) -> jax.Array:
        changed = sublayer(norm(states) if self.config.pre_norm else states)
        states = states + self.dropout(changed, deterministic=deterministic)
        return states if self.config.pre_norm else norm(states)

    def _feed(self, states: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
        def feed(inputs: jax.Array) -> jax.Array:
            return self.feed_forward(inputs, deterministic=deterministic)

        return self._residual(self.feed_forward_norm, states, feed, deterministic)

    def __call__(
        self,
        states: Float[Array, "B T D"],
        mask: Bool[Array, "#B #T T"],
        bias: Float[Array, "1 H T T"] | None,
        source: Float[Array, "B S D"] | None,
        source_mask: Bool[Array, "B S"] | None,
        *,
        deterministic: bool,
    ) -> Float[Array, "B T D"]:
        def attend(inputs: jax.Array) -> jax.Array:
            return self.attention(inputs, inputs, mask=mask, bias=bias, deterministic=deterministic)

        def attend_source(inputs: jax.Array) -> jax.Array:
            assert source is not None
            assert source_mask is not None
            mask = source_mask[:, None, :]
            return self.cross_attention(inputs, source, mask=mask, bias=None, deterministic=deterministic)

        states = self._residual(self.attention_norm, states, attend, deterministic)
        if self.cross:
            states = self._residual(self.cross_attention_norm, states, attend_source, deterministic)
        return self._feed(states, deterministic)

    def keys_values(self, source: Float[Array, "B S D"]) -> tuple[Float[Array, "B H N S"], Float[Array, "B H S N"]]:
        """Keys and values of cross-attention, as the cache has them."""
        key, value = self.cross_attention.keys_values(source)
        return jnp.swapaxes(key, -2, -1), value

    def step(
        self,
        states: Float[Array, "B K D"],
        self_key: Float[Array, "L B K H T N"],
        self_value: Float[Array, "L B K H T N"],
        layer: Int[Array, ""],
        cross: tuple[Float[Array, "B H N S"], Float[Array, "B H S N"]],
        source_mask: Bool[Array, "B S"],
        bias: Float[Array, "1 H 1 T"] | None,
        position: Int[Array, ""],
    ) -> tuple[Float[Array, "B K D"], Float[Array, "L B K H T N"], Float[Array, "L B K H T N"]]:
        """One token of every hypothesis, reading and extending the caches of all layers at `layer`."""
        batch, hypotheses, size = states.shape
        length = self_key.shape[4]
        caches = {}

        def attend(inputs: jax.Array) -> jax.Array:
            flat = inputs.reshape(batch * hypotheses, 1, size)
            new = self.attention.keys_values(flat)
            read = []
            for name, cache, item in zip(("key", "value"), (self_key, self_value), new, strict=True):
                item = item.reshape(batch, hypotheses, *item.shape[1:])
                caches[name], one = extend_cache(cache, item, layer, position)
                read.append(one.reshape(batch * hypotheses, *one.shape[2:]))
            mask = (jnp.arange(length) <= position)[None, None, :]
            query = self.attention.queries(flat)
            result = self.attention.attend(query, *read, mask=mask, bias=bias, deterministic=True)
            return result.reshape(batch, hypotheses, size)

        def attend_source(inputs: jax.Array) -> jax.Array:
            # Hypotheses stand where the positions of a target stand in training.
            query = self.cross_attention.queries(inputs)
            mask = source_mask[:, None, :]
            return self.cross_attention.attend(query, *cross, mask=mask, bias=None, deterministic=True, turned=True)

        states = self._residual(self.attention_norm, states, attend, True)
        states = self._residual(self.cross_attention_norm, states, attend_source, True)
        return self._feed(states, True), caches["key"], caches["value"]


class Stack(nn.Module):
    """The scanned layers of an encoder or a decoder, with their positions, relative bias and norms at either end."""

    config: TransformerConfig
    num_layers: int
    decoder: bool

    def setup(self) -> None:
        c = self.config
        self.layers = Layer(c, cross=self.decoder)
        if c.position == "relative":
            init = normal(c.init_scale * c.d_model**-0.5)
            self.relative_bias = self.param("relative_bias", init, (c.relative_buckets, c.num_heads))
        if c.position == "learned" and not c.shared_positions:
            init = normal(c.initial_embedding_stddev())
            self.position_embedding = self.param("position_embedding", init, (c.position_rows(), c.d_model))
        if c.embedding_norm:
            self.embedding_norm = Norm(c.norm, c.layer_norm_eps, jnp.dtype(c.dtype))
        if c.final_norm:
            self.final_norm = Norm(c.norm, c.layer_norm_eps, jnp.dtype(c.dtype))
        self.dropout = Dropout(c.dropout)

    def enter(self, states: Float[Array, "B T D"], positions: Int[Array, " #T"]) -> Float[Array, "B T D"]:
        """Token embeddings with what this stack adds to them before its first layer: positions of its own, a norm."""
        c = self.config
        if c.position == "learned" and not c.shared_positions:
            states = states + self.position_embedding[positions + c.position_offset][None]
        return self.embedding_norm(states) if c.embedding_norm else states

    def _bias(self, queries: Int[Array, " T"], keys: Int[Array, " S"]) -> Float[Array, "1 H T S"] | None:
        c = self.config
        if c.position != "relative":
            return None
        distance = keys[None, :] - queries[:, None]
        bucket = relative_bucket(
            distance,
            bidirectional=not self.decoder,
            num_buckets=c.relative_buckets,
            max_distance=c.relative_max_distance,
        )
        return jnp.transpose(self.relative_bias[bucket], (2, 0, 1))[None]

    def _scan(self, function: Any, carry: Any, per_layer: Any, *shared: Any) -> Any:
        """Scans `function(layer, carry, per_layer, *shared) -> (carry, outputs)` over the layers."""
        length, unroll = self.num_layers, self.config.unroll
        return scan_layers(function, self.layers, carry, per_layer, *shared, length=length, unroll=unroll)

    def _finish(self, states: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
        if not self.config.final_norm:
            return states
        return self.dropout(self.final_norm(states), deterministic=deterministic)

    def __call__(
        self,
        states: Float[Array, "B T D"],
        mask: Bool[Array, "#B #T T"],
        source: Float[Array, "B S D"] | None = None,
        source_mask: Bool[Array, "B S"] | None = None,
        *,
        deterministic: bool,
    ) -> Float[Array, "B T D"]:
        def body(layer: Layer, states: jax.Array, _: None, *shared: Any) -> tuple[jax.Array, None]:
            return keep_rows_split(layer(states, *shared, deterministic=deterministic)), None

        states = keep_rows_split(states)
        positions = jnp.arange(states.shape[1])
        bias = self._bias(positions, positions)
        states, _ = self._scan(rematerialized(body, self.config.remat), states, None, mask, bias, source, source_mask)
        return self._finish(states, deterministic)

    def keys_values(self, source: Float[Array, "B S D"]) -> tuple[Float[Array, "L B H N S"], Float[Array, "L B H S N"]]:
        """Keys and values of the cross-attention of every layer, as the cache has them."""

        def body(layer: Layer, carry: None, _: None, source: jax.Array) -> tuple[None, Any]:
            return carry, layer.keys_values(source)

        return self._scan(body, None, None, source)[1]

    def step(self, states: Float[Array, "B K D"], cache: DecodeCache) -> tuple[Float[Array, "B K D"], DecodeCache]:
        """One token of every hypothesis through all layers."""
        length = cache.self_key.shape[4]
        bias = self._bias(cache.position[None], jnp.arange(length))

        def body(layer: Layer, carry: Any, per_layer: Any, *shared: Any) -> tuple[Any, None]:
            index, cross_key, cross_value = per_layer
            return layer.step(*carry, index, (cross_key, cross_value), *shared), None  # type: ignore[call-arg]

        carry, shared = (states, cache.self_key, cache.self_value), (cache.source_mask, bias, cache.position)
        length, unroll = self.num_layers, self.config.unroll
        states, self_key, self_value = step_layers(
            body, self.layers, carry, cache, *shared, length=length, unroll=unroll
        )
        changed = cache.replace(self_key=self_key, self_value=self_value, position=cache.position + 1)  # type: ignore[attr-defined]
        return self._finish(states, True), changed
