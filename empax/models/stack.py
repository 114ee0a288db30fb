"""A Transformer layer, and the stack of layers that forms an encoder or a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.sharding import keep_rows_split
from empax.models.arithmetic import contract, rows_of
from empax.models.feed_forward import ConvFeedForward, ConvWindow, FeedForward
from empax.models.layers import Dropout, normal, relative_bucket
from empax.models.memory_attention import Memories, MemoryAttention, SingleMemory
from empax.models.scanned import DecodeCache, Past, cache_dtype, extend_cache, rematerialized, scan_layers, step_layers
from empax.models.transformer_config import TransformerConfig


class StepInputs(NamedTuple):
    """Inputs of a layer for one token, in addition to the hypotheses' states and past.

    Attributes:
      layer: index of the layer.
      cross: keys and values of the source.
      memories: keys, values and mask, by name.
      position: number of tokens read so far.
    """

    layer: Int[Array, ""]
    cross: tuple[Float[Array, "B H N S"], Float[Array, "B H S N"]]
    memories: Mapping[str, tuple[Any, Any, Any]]
    source_mask: Bool[Array, "B S"]
    bias: Float[Array, "1 H 1 T"] | None
    position: Int[Array, ""]


def empty_past(config: TransformerConfig, rows: tuple[int, int, int], max_length: int) -> Past:
    """Returns the past before the first of at most `max_length` tokens; `rows` are [L, B, K]."""
    c, dtype, width = config, cache_dtype(config.dtype), config.feed_forward_kernel - 1
    empty = jnp.zeros((*rows, c.num_heads, max_length, c.head_dim), dtype)
    if not width:
        return Past(empty, empty)
    windows = jnp.zeros((*rows, width, c.d_model), dtype), jnp.zeros((*rows, width, c.d_ff), dtype)
    return Past(empty, empty, windows)


class Layer(nn.Module):
    """Self-attention, attention to source and memories (decoder only) and feed-forward; pre-norm or post-norm."""

    config: TransformerConfig
    cross: bool

    def setup(self) -> None:
        c = self.config
        self.attention, self.attention_norm = c.make_attention(), c.make_norm()
        if self.cross:
            self.cross_attention, self.cross_attention_norm = c.make_attention(), c.make_norm()
            for name in c.memories:
                setattr(self, name, SingleMemory(c) if c.single_memories else MemoryAttention(c))
        if c.feed_forward_kernel > 1:
            sizes = (c.d_model, c.d_ff, c.feed_forward_kernel)
            self.feed_forward = ConvFeedForward(*sizes, c.activation, c.use_bias, c.dropout, self.cross, c.init_scale)
        else:
            inner, dtype = c.inner_dropout_rate(), jnp.dtype(c.dtype)
            self.feed_forward = FeedForward(c.d_ff, c.activation, c.use_bias, inner, c.init_scale, dtype)
        self.feed_forward_norm = c.make_norm()
        self.dropout = Dropout(c.dropout)

    def _inputs(self, norm: Callable[[jax.Array], jax.Array], states: jax.Array) -> jax.Array:
        """Returns the inputs of a sublayer."""
        return norm(states) if self.config.pre_norm else states

    def _added(
        self, norm: Callable[[jax.Array], jax.Array], states: jax.Array, changed: jax.Array, deterministic: bool
    ) -> jax.Array:
        """Adds the output of a sublayer to the states, with dropout; then the norm, if it is not before."""
        states = states + self.dropout(changed, deterministic=deterministic)
        return states if self.config.pre_norm else norm(states)

    def _feed(
        self, states: Float[Array, "B T D"], mask: Bool[Array, "#B T"], deterministic: bool
    ) -> Float[Array, "B T D"]:
        inputs = self._inputs(self.feed_forward_norm, states)
        if isinstance(self.feed_forward, ConvFeedForward):
            changed = self.feed_forward(inputs, mask, deterministic=deterministic)
        else:
            changed = self.feed_forward(inputs, deterministic=deterministic)
        return self._added(self.feed_forward_norm, states, changed, deterministic)

    def _read_memories(
        self, states: Float[Array, "B T D"], memories: Mapping[str, tuple[Any, Any, Any]], deterministic: bool
    ) -> Float[Array, "B T D"]:
        """Attends to each memory in turn; `memories` holds keys, values and mask by name."""
        for name in self.config.memories:
            key, value, mask = memories[name]
            module: MemoryAttention | SingleMemory = getattr(self, name)
            read = module(self._inputs(module.norm, states), key, value, mask, deterministic=deterministic)
            changed = self._added(module.norm, states, read, deterministic)
            states = jnp.where(jnp.any(mask, axis=1)[:, None, None], changed, states)
        return states

    def __call__(
        self,
        states: Float[Array, "B T D"],
        mask: Bool[Array, "#B #T T"],
        bias: Float[Array, "1 H T T"] | None,
        source: Float[Array, "B S D"] | None,
        source_mask: Bool[Array, "B S"] | None,
        memories: Memories,
        *,
        deterministic: bool,
        with_weights: bool = False,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T S"] | None]:
        """Returns the states and, if `with_weights`, the cross-attention weights, averaged over heads, no dropout."""
        weights = None
        inputs = self._inputs(self.attention_norm, states)
        changed = self.attention(inputs, inputs, mask=mask, bias=bias, deterministic=deterministic)
        states = self._added(self.attention_norm, states, changed, deterministic)
        if self.cross:
            assert source is not None
            assert source_mask is not None
            may, inputs = source_mask[:, None, :], self._inputs(self.cross_attention_norm, states)
            if with_weights:
                key, _ = self.cross_attention.keys_values(source)
                weights = self._copy_weights(inputs, key, may, turned=False)
            changed = self.cross_attention(inputs, source, mask=may, bias=None, deterministic=deterministic)
            states = self._added(self.cross_attention_norm, states, changed, deterministic)
            read = {name: (*getattr(self, name).keys_values(one.states), one.mask) for name, one in memories.items()}
            states = self._read_memories(states, read, deterministic)
        return self._feed(states, mask[:, -1], deterministic), weights

    def _copy_weights(
        self, inputs: Float[Array, "B T D"], key: Float[Array, "B H _ _"], mask: Bool[Array, "B 1 S"], *, turned: bool
    ) -> Float[Array, "B T S"]:
        query = self.cross_attention.queries(inputs)
        weights = self.cross_attention.weights(query, key, mask=mask, bias=None, turned=turned)
        return jnp.mean(weights, axis=1)

    def step(
        self, states: Float[Array, "B K D"], past: Past, read: StepInputs, *, with_weights: bool = False
    ) -> tuple[Float[Array, "B K D"], Past, Float[Array, "B K S"] | None]:
        """Processes one token of every hypothesis; returns states, the updated past, and weights as in `__call__`."""
        changed, past = self._attend_past(self._inputs(self.attention_norm, states), past, read)
        states = self._added(self.attention_norm, states, changed, True)
        # Hypotheses take the axis that target positions have in training.
        mask, inputs = read.source_mask[:, None, :], self._inputs(self.cross_attention_norm, states)
        weights = self._copy_weights(inputs, read.cross[0], mask, turned=True) if with_weights else None
        query = self.cross_attention.queries(inputs)
        changed = self.cross_attention.attend(query, *read.cross, mask=mask, bias=None, deterministic=True, turned=True)
        states = self._added(self.cross_attention_norm, states, changed, True)
        states = self._read_memories(states, read.memories, True)
        if past.windows is None:
            return self._feed(states, jnp.ones((1, states.shape[1]), bool), True), past, weights
        inputs = self._inputs(self.feed_forward_norm, states)
        changed, windows = self._convolve(inputs, past.windows, read.layer)
        return self._added(self.feed_forward_norm, states, changed, True), past._replace(windows=windows), weights

    def _attend_past(
        self, inputs: Float[Array, "B K D"], past: Past, read: StepInputs
    ) -> tuple[Float[Array, "B K D"], Past]:
        batch, hypotheses, size = inputs.shape
        flat = inputs.reshape(batch * hypotheses, 1, size)

        def extend(cache: jax.Array, item: jax.Array) -> tuple[jax.Array, jax.Array]:
            item = item.reshape(batch, hypotheses, *item.shape[1:])
            cache, own = extend_cache(cache, item, read.layer, read.position)
            return cache, own.reshape(batch * hypotheses, *own.shape[2:])

        key, value = self.attention.keys_values(flat)
        all_keys, own_key = extend(past.key, key)
        all_values, own_value = extend(past.value, value)
        mask = (jnp.arange(past.key.shape[4]) <= read.position)[None, None, :]
        query = self.attention.queries(flat)
        result = self.attention.attend(query, own_key, own_value, mask=mask, bias=read.bias, deterministic=True)
        return result.reshape(batch, hypotheses, size), Past(all_keys, all_values, past.windows)

    def _convolve(
        self, inputs: Float[Array, "B K D"], windows: ConvWindow, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "B K D"], ConvWindow]:
        assert isinstance(self.feed_forward, ConvFeedForward)
        batch, hypotheses, size = inputs.shape
        own = jax.tree.map(lambda window: jax.lax.dynamic_index_in_dim(window, layer, 0, keepdims=False), windows)
        flat = jax.tree.map(lambda window: window.reshape(batch * hypotheses, *window.shape[2:]), own)
        result, flat = self.feed_forward.step(inputs.reshape(batch * hypotheses, 1, size), flat)

        def put_back(window: jax.Array, one: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(window, one.reshape(window.shape[1:]), layer, 0)

        return result.reshape(batch, hypotheses, size), jax.tree.map(put_back, windows, flat)


class Stack(nn.Module):
    """The scanned layers of an encoder or a decoder, with positions, relative bias, and norms at both ends."""

    config: TransformerConfig
    num_layers: int
    decoder: bool

    def setup(self) -> None:
        c = self.config
        self.layers = Layer(c, cross=self.decoder)
        if c.position == "relative":
            init = self._slopes if c.relative_slopes else normal(c.init_scale * c.d_model**-0.5)
            self.relative_bias = self.param("relative_bias", init, (c.relative_buckets, c.num_heads))
        if c.position == "learned" and not c.shared_positions:
            init = normal(c.initial_embedding_stddev())
            self.position_embedding = self.param("position_embedding", init, (c.position_rows(), c.d_model))
        if c.embedding_projection:
            init = normal(c.init_scale * c.d_model**-0.5)
            self.embedding_projection = self.param("embedding_projection", init, (c.d_model, c.d_model))
        if c.embedding_norm:
            self.embedding_norm = c.make_norm()
        if c.final_norm:
            self.final_norm = c.make_norm(alternates=self.decoder and c.alternating_norm)
        self.dropout = Dropout(c.dropout)

    def project(self, embedded: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Projects scaled embeddings, before positions are added; the identity without `embedding_projection`."""
        if not self.config.embedding_projection:
            return embedded
        return contract("BTD,DF->BTF", embedded, self.embedding_projection)

    def enter(self, states: Float[Array, "B T D"], positions: Int[Array, " #T"]) -> Float[Array, "B T D"]:
        """Adds this stack's own learned positions and embedding norm to the input of its first layer."""
        c = self.config
        if c.position == "learned" and not c.shared_positions:
            states = states + self.position_embedding[positions + c.position_offset][None]
        return self.embedding_norm(states) if c.embedding_norm else states

    @nn.nowrap
    def _buckets(self, distance: Int[Array, "T S"]) -> Int[Array, "T S"]:
        c = self.config
        sizes = {"num_buckets": c.relative_buckets, "max_distance": c.relative_max_distance}
        return relative_bucket(distance, bidirectional=not self.decoder, **sizes)

    @nn.nowrap
    def _slopes(self, rng: jax.Array, shape: tuple[int, int]) -> Float[Array, "K H"]:
        """Returns an initial bias of -slope * distance, by the least distance of each bucket.

        The slopes of H heads are 2 ** (-8 h / H), h = 1 to H. Source: ALiBi (Press et al. 2022), Sec. 3.
        """
        del rng
        buckets, heads = shape
        most = self.config.relative_max_distance
        distance = jnp.arange(-most, most + 1)
        least = jnp.full(buckets, most).at[self._buckets(distance[None])[0]].min(jnp.abs(distance))
        least = jnp.where(least < most, least, 0)  # the bucket that no distance reaches
        return -jnp.outer(least, 2.0 ** (-8.0 * jnp.arange(1, heads + 1) / heads))

    def _bias(self, queries: Int[Array, " T"], keys: Int[Array, " S"]) -> Float[Array, "1 H T S"] | None:
        if self.config.position != "relative":
            return None
        bucket = self._buckets(keys[None, :] - queries[:, None])
        return jnp.transpose(rows_of(self.relative_bias, bucket), (2, 0, 1))[None]

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
        memories: Memories | None = None,
        *,
        deterministic: bool,
        with_weights: bool = False,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T S"] | None]:
        """Returns the last layer's states and, if `with_weights`, its cross-attention weights, as in `Layer`."""

        def body(layer: Layer, states: jax.Array, _: None, *shared: Any) -> tuple[jax.Array, Any]:
            states, weights = layer(states, *shared, deterministic=deterministic, with_weights=with_weights)
            return keep_rows_split(states), weights

        states = keep_rows_split(states)
        positions = jnp.arange(states.shape[1])
        bias = self._bias(positions, positions)
        shared = (mask, bias, source, source_mask, dict(memories or {}))
        states, weights = self._scan(rematerialized(body, self.config.remat), states, None, *shared)
        return self._finish(states, deterministic), None if weights is None else weights[-1]

    def keys_values(self, source: Float[Array, "B S D"]) -> tuple[Float[Array, "L B H N S"], Float[Array, "L B H S N"]]:
        """Returns keys and values of cross-attention in every layer, in the layout of the cache."""

        def body(layer: Layer, carry: None, _: None, source: jax.Array) -> tuple[None, Any]:
            return carry, layer.cross_attention.cached_keys_values(source)

        return self._scan(body, None, None, source)[1]

    def remember(self, memories: Memories) -> dict[str, tuple[jax.Array, jax.Array, jax.Array]]:
        """Returns keys, values and mask of every memory in every layer, in the layout of the cache."""
        if not memories:
            return {}

        def body(layer: Layer, carry: None, _: None, memories: Any) -> tuple[None, Any]:
            return carry, {name: getattr(layer, name).keys_values(one.states) for name, one in memories.items()}

        found = self._scan(body, None, None, dict(memories))[1]
        return {name: (*found[name], memories[name].mask) for name in memories}

    def step(
        self, states: Float[Array, "B K D"], cache: DecodeCache, *, with_weights: bool = False
    ) -> tuple[Float[Array, "B K D"], DecodeCache, Float[Array, "B K S"] | None]:
        """Passes one token of every hypothesis through all layers; weights of the last layer as in `__call__`."""
        bias = self._bias(cache.position[None], jnp.arange(cache.past.key.shape[4]))

        def body(layer: Layer, carry: Any, per_layer: Any, masks: Any, *shared: Any) -> tuple[Any, None]:
            number, cross, memories = per_layer
            read = {name: (*memories[name], mask) for name, mask in masks.items()}
            states, past, _ = carry
            inputs = StepInputs(number, cross, read, *shared)
            return layer.step(states, past, inputs, with_weights=with_weights), None

        masks = {name: mask for name, (_, _, mask) in cache.memories.items()}
        empty = jnp.zeros((*states.shape[:2], cache.source_mask.shape[1])) if with_weights else None
        carry = (states, cache.past, empty)
        shared = (masks, cache.source_mask, bias, cache.position)
        length, unroll = self.num_layers, self.config.unroll
        states, past, weights = step_layers(body, self.layers, carry, cache, *shared, length=length, unroll=unroll)
        changed = cache.replace(past=past, position=cache.position + 1)  # type: ignore[attr-defined]
        return self._finish(states, True), changed, weights
