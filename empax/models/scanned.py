"""Scans over layers with stacked parameters, [L, ...], so that compile time does not grow with depth.

In decoding, the layers read and extend one cache.
"""

from __future__ import annotations

import operator
import re
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from empax.core.machine import backend
from empax.core.tree import map_named
from empax.core.types import Params
from empax.models.arithmetic import WEIGHT_PRODUCT
from empax.models.feed_forward import ConvWindow
from empax.models.transformer_config import Remat


class Past(NamedTuple):
    """Cached keys, values and convolution inputs of the hypotheses' own tokens, in all layers; of `cache_dtype`."""

    key: Float[Array, "L B K H T N"]
    value: Float[Array, "L B K H T N"]
    windows: ConvWindow | None = None  # [L, B, K, W, D] and [L, B, K, W, F]


@flax.struct.dataclass
class DecodeCache:
    """Cache of decoding. Cross keys and values are stored once per example, not once per hypothesis.

    Cross keys are stored in the layout that a matrix product reads fastest, since every step multiplies with them.

    `weights` of the layers and `table` of the logits are in the type of the computation; else a loop over tokens would
    convert them for every token. If the scan over layers is unrolled, `weights`, cross keys and cross values are tuples
    with one entry per layer; else the loop would copy each layer's slice of a stack for every token.
    """

    past: Any  # a Past
    cross: Any  # keys [L, B, H, N, S] and values [L, B, H, S, N]
    source_mask: Any  # [B, S] bool
    position: Any  # [] int32, number of tokens read so far
    weights: Any = flax.struct.field(default=None, kw_only=True)  # stacked, or one per layer; None = the model's
    table: Any = flax.struct.field(default=None, kw_only=True)  # [V, D]; None = the model's
    # (keys, values, mask) by name, the first two in the layout of the source's.
    memories: Any = flax.struct.field(default_factory=dict, kw_only=True)
    start: Any = flax.struct.field(default=None, kw_only=True)  # [B, D]: replaces the start token's embedding

    def with_weights(self, weights: Params, table: Any, *, dtype: DTypeLike, apart: bool) -> Any:
        """Returns the cache with weights converted once for all steps; a CPU does not benefit.

        `weights` are the scanned layers' parameters, `table` is that of the logits. `apart`: split stacks by layer.
        """
        if jnp.dtype(dtype) == jnp.float32 or backend() == "cpu":
            return self._cut(weights) if apart else self
        weights = map_named(lambda name, leaf: leaf.astype(dtype) if _is_factor(name, leaf) else leaf, weights)
        held = self._cut(weights) if apart else self.replace(weights=weights)  # type: ignore[attr-defined]
        return held.replace(table=table.astype(dtype)) if isinstance(table, jax.Array) else held

    def _cut(self, weights: Params) -> Any:
        def apart(stacked: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.map(operator.itemgetter(i), stacked) for i in range(self.past.key.shape[0]))

        memories = {name: (apart(key), apart(value), mask) for name, (key, value, mask) in self.memories.items()}
        cross = tuple(map(apart, self.cross))
        return self.replace(weights=apart(weights), cross=cross, memories=memories)  # type: ignore[attr-defined]

    def reorder(self, parents: Int[Array, "B K"]) -> DecodeCache:
        """Makes hypothesis k a continuation of `parents[b, k]`; only arrays stored per hypothesis are reordered."""
        rows = jnp.arange(parents.shape[0])[:, None]
        past = jax.tree.map(lambda values: values[:, rows, parents], self.past)
        return self.replace(past=past)  # type: ignore[attr-defined]

    def take(self, rows: Int[Array, " R"]) -> Any:
        """Returns the cache of these examples alone."""
        apart = isinstance(self.cross[0], tuple)

        def of(stacked: Any) -> Any:
            return jax.tree.map(lambda values: values[rows] if apart else values[:, rows], stacked)

        return self.replace(  # type: ignore[attr-defined]
            past=jax.tree.map(lambda values: values[:, rows], self.past),
            cross=of(self.cross),
            source_mask=self.source_mask[rows],
            memories={name: (of(key), of(value), mask[rows]) for name, (key, value, mask) in self.memories.items()},
            start=None if self.start is None else self.start[rows],
        )


_FACTOR = re.compile(r"(attention/(query|key|value|out)|feed_forward/(wi|gate|wo))(/(base|a|b))?$")


def _is_factor(name: str, leaf: Array) -> bool:
    """Whether a parameter is used only as a factor of `contract`, which converts it."""
    return leaf.dtype == jnp.float32 and _FACTOR.search(name) is not None


def cache_dtype(dtype: DTypeLike) -> DTypeLike:
    """Returns the storage type of hypotheses' own keys and values; the values are still rounded to `dtype`.

    On a CPU, XLA cannot update a half-precision slice in place: it would convert the whole cache and back every token.
    """
    return jnp.float32 if backend() == "cpu" else dtype


def extend_cache(
    cache: Float[Array, "L B K H T N"], item: Float[Array, "B K H 1 N"], layer: Int[Array, ""], position: Int[Array, ""]
) -> tuple[Float[Array, "L B K H T N"], Float[Array, "B K H T N"]]:
    """Writes `item` to `layer` at `position`; returns the cache of all layers and that of this layer."""
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
        # Parameters do not depend on it, and the outputs of initialization are discarded.
        unroll=1 if layers.is_initializing() else min(unroll, length),
    )
    return scanned(layers, carry, per_layer, *shared)


def step_layers(
    function: Any, layers: nn.Module, carry: Any, cache: DecodeCache, *shared: Any, length: int, unroll: int
) -> Any:
    """Passes one token through all layers by `function(layer, carry, per_layer, *shared)`; returns the last carry.

    `per_layer` is the layer's index, its cross keys and values, and those of its memories by name.
    Uses a scan, or a Python loop if the cache holds weights split by layer.
    """
    memories = {name: (key, value) for name, (key, value, _) in cache.memories.items()}
    if cache.weights is None:
        per_layer = (jnp.arange(length), cache.cross, memories)
        return scan_layers(function, layers, carry, per_layer, *shared, length=length, unroll=unroll)[0]
    alone = layers.clone(parent=None)
    if not isinstance(cache.weights, tuple):

        def one(carry: Any, given: Any) -> tuple[Any, None]:
            own, *per_layer = given
            return function(alone.bind({"params": own}), carry, tuple(per_layer), *shared)[0], None

        stacked = (cache.weights, jnp.arange(length), cache.cross, memories)
        return jax.lax.scan(one, carry, stacked, unroll=min(unroll, length))[0]
    for number, (own, *cross) in enumerate(zip(cache.weights, *cache.cross, strict=True)):
        read = {name: (key[number], value[number]) for name, (key, value) in memories.items()}
        carry, _ = function(alone.bind({"params": own}), carry, (jnp.asarray(number), tuple(cross), read), *shared)
    return carry


def rematerialized(function: Any, remat: Remat) -> Any:
    """Wraps the body of `scan_layers` so that the backward pass keeps less and recomputes more.

    "none" keeps everything. "full" keeps only the inputs of each layer (a third more time). "minimal" also keeps every
    product with a weight matrix, so only attention weights and elementwise operations are recomputed. The names are
    t5x's.
    """
    if remat == "none":
        return function
    policy = jax.checkpoint_policies.save_only_these_names(WEIGHT_PRODUCT) if remat == "minimal" else None
    return nn.remat(function, prevent_cse=False, policy=policy)
