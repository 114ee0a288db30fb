"""Building blocks of every Transformer here: attention, norms, activations, positions, dropout.

One table gives the sharding of layers by parameter name (`logical_axes`), so parameters stay plain arrays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from empax.core.machine import backend
from empax.core.types import Params
from empax.models.arithmetic import add_bias, contract, dropout
from empax.models.attention_kernels import AttentionKernel, flash_attention, fused_attention, is_fused
from empax.models.rotary import Rotary, rotate

Sinusoids: TypeAlias = Literal["tensor2tensor", "paper"]
"""The rates that `sinusoidal_positions` uses."""

MASKED = -1e9
"""Logit of masked positions. Not -inf: a row with every position masked must give numbers, not NaN."""


def gelu(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x Phi(x), with Phi the normal distribution function. Source: Hendrycks and Gimpel 2016, Sec. 2.

    Uses erf, like PyTorch: erfc, which `jax.nn.gelu` uses, takes more than twice the time on a CPU. Always in float32:
    in half precision 1 + erf would lose small values, and erfc is off by up to 5%.
    """
    wide = values.astype(jnp.float32)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(values.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}
GATED_ACTIVATIONS = {"gated-gelu": "gelu_new", "gated-silu": "silu", "gated-relu": "relu"}
"""Gated feed-forwards and the activation of their gate. T5 v1.1 calls the tanh approximation "gated-gelu"."""

_KEPT = r"(/values|/scale)?$"  # a weight, or an eight-bit weight with its scales (models.lora.Int8)

_LOGICAL_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(token|output)_embedding$", ("vocab", "embed")),
    (r"output_bias$", ("vocab",)),
    (r"(position|type)_embedding$", (None, "embed")),
    (r"embedding_in$", (None, "embed")),
    (r"embedding_out$", ("embed", None)),
    (r"relative_bias$", (None, "heads")),
    (r"attention/(query|key|value)" + _KEPT, ("embed", "heads", "head_dim")),
    (r"attention/(query|key|value)_bias$", ("heads", "head_dim")),
    (r"attention/(query|key)_norm/scale$", ("head_dim",)),
    (r"attention/out" + _KEPT, ("heads", "head_dim", "embed")),
    (r"feed_forward/(wi|gate)" + _KEPT, ("embed", "mlp")),
    (r"feed_forward/wi_bias$", ("mlp",)),
    (r"feed_forward/wo" + _KEPT, ("mlp", "embed")),
    # Adapters: a has the inputs of the adapted weight, b its outputs.
    (r"attention/(query|key|value)/a$", ("embed", "rank")),
    (r"attention/(query|key|value)/b$", ("rank", "heads", "head_dim")),
    (r"attention/out/a$", ("heads", "head_dim", "rank")),
    (r"(attention/out|feed_forward/wo)/b$", ("rank", "embed")),
    (r"feed_forward/(wi|gate)/a$", ("embed", "rank")),
    (r"feed_forward/(wi|gate)/b$", ("rank", "mlp")),
    (r"feed_forward/wo/a$", ("mlp", "rank")),
    (r"feed_forward/conv_in$", (None, "embed", "mlp")),
    (r"feed_forward/conv_out$", (None, "mlp", "embed")),
    (r"feed_forward/conv_in_bias$", ("mlp",)),
    (r"feed_forward/conv_out_bias$", ("embed",)),
    (r"(attention/out_bias|feed_forward/wo_bias|norm/scale|norm/bias)$", ("embed",)),
)


def apply(
    module: nn.Module, params: Params, *args: Any, method: str = "__call__", rng: jax.Array | None, **kwargs: Any
) -> Any:
    """Calls `module.apply`, with dropout if there is an `rng`."""
    rngs = None if rng is None else {"dropout": rng}
    return module.apply({"params": params}, *args, method=method, rngs=rngs, deterministic=rng is None, **kwargs)


def logical_axes(name: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Names the axes of a parameter: "vocab", "embed", "heads", "head_dim", "mlp", "rank", "layers" or None.

    Args:
      name: path of the parameter, "encoder/layers/attention/query".
      shape: its shape; one axis more than the table gives is the stack of scanned layers, in front.

    Returns:
      One name per axis; all None for a parameter that the table does not know (it is then replicated).
    """
    for pattern, axes in _LOGICAL_AXES:
        if re.search(pattern, name):
            if len(axes) == len(shape):
                return axes
            if len(axes) + 1 == len(shape):
                return ("layers", *axes)
    return (None,) * len(shape)


class Dropout(nn.Module):
    """Dropout with the module's "dropout" key; the identity when `deterministic` or at rate 0."""

    rate: float

    def __call__(self, values: Float[Array, "..."], *, deterministic: bool) -> Float[Array, "..."]:
        if deterministic or self.rate == 0.0:
            return values
        return dropout(values, self.rate, self.make_rng("dropout"))


class Norm(nn.Module):
    """LayerNorm ("layer") or RMS norm without mean and bias ("rms", T5), computed in float32.

    Source: Ba et al. 2016, Eq. 4; Zhang and Sennrich 2019, Eq. 4.
    """

    kind: str
    eps: float
    dtype: DTypeLike = jnp.float32
    scale_init: nn.initializers.Initializer = nn.initializers.ones

    @nn.compact
    def __call__(self, values: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        size = values.shape[-1]
        scale = self.param("scale", self.scale_init, (size,))
        values = values.astype(jnp.float32)
        if self.kind == "layer":
            values = values - jnp.mean(values, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(values), axis=-1, keepdims=True)
        values = values * jax.lax.rsqrt(variance + self.eps) * over_last(scale, values.ndim)
        if self.kind == "layer":
            values = values + over_last(self.param("bias", nn.initializers.zeros, (size,)), values.ndim)
        return values.astype(self.dtype)


def over_last(vector: Num[Array, " D"], ndim: int) -> Num[Array, "*B D"]:
    """Reshapes `vector` to `ndim` axes, so that it broadcasts over all but the last."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


normal = nn.initializers.normal


def alternating(rng: jax.Array, shape: tuple[int], dtype: DTypeLike = jnp.float32) -> Float[Array, " D"]:
    """Returns the initial scale 1, -1, 1, ... of a norm."""
    del rng
    return (1 - 2 * (jnp.arange(*shape) % 2)).astype(dtype)


class Attention(nn.Module):
    """Multi-head attention; self-attention, cross-attention and cached attention all call `attend`.

    Weights are [D, H, N], so `num_heads * head_dim` need not be `d_model`. T5 has neither biases nor the
    1/sqrt(N) scale (`scale` False). Source: Vaswani et al. 2017, Eq. 1.

    With `num_kv_heads` G < H (None: G = H), one head of keys and values serves H / G neighbouring query heads.
    Source: Ainslie et al. 2023, Sec. 2.2.

    Attributes:
      use_bias: whether queries, keys and values have biases, and the output unless `out_bias` says otherwise.
      head_norm_eps: epsilon of an RMS norm of each head's queries and keys before rotation; None = no norm.
        Source: Dehghani et al. 2023, Sec. 2.1, there LayerNorm; RMS: Qwen3.
      kernel: the program that computes attention.
    """

    d_model: int
    num_heads: int
    head_dim: int
    use_bias: bool
    scale: bool
    dropout: float
    init_scale: float = 1.0
    dtype: DTypeLike = jnp.float32
    num_kv_heads: int | None = None
    out_bias: bool | None = None
    head_norm_eps: float | None = None
    kernel: AttentionKernel = "auto"

    def setup(self) -> None:
        inner = (self.num_heads, self.head_dim)
        inner_kv = (self.num_kv_heads or self.num_heads, self.head_dim)
        # T5 leaves the scale out of the logits and puts it into the initial query weights.
        unscaled = 1.0 if self.scale else self.head_dim**-0.5
        self.query_weight, self.query_offset = self._projection("query", inner, unscaled)
        self.key_weight, self.key_offset = self._projection("key", inner_kv)
        self.value_weight, self.value_offset = self._projection("value", inner_kv)
        init = normal(self.init_scale * (self.num_heads * self.head_dim) ** -0.5)
        self.out_weight = self.param("out", init, (*inner, self.d_model))
        if self._has_out_bias():
            self.out_offset = self.param("out_bias", nn.initializers.zeros, (self.d_model,))
        if self.head_norm_eps is not None:
            self.query_norm, self.key_norm = (Norm("rms", self.head_norm_eps, self.dtype) for _ in range(2))
        self.weights_dropout = Dropout(self.dropout)

    def _projection(self, name: str, heads: tuple[int, int], factor: float = 1.0) -> tuple[Any, jax.Array | None]:
        """Creates the weights [D, H, N] and, with `use_bias`, the bias [H, N]."""
        weight = self.param(name, normal(self.init_scale * factor * self.d_model**-0.5), (self.d_model, *heads))
        return weight, self.param(f"{name}_bias", nn.initializers.zeros, heads) if self.use_bias else None

    def _has_out_bias(self) -> bool:
        return self.use_bias if self.out_bias is None else self.out_bias

    def _project(self, states: Float[Array, "B T D"], weight: Any, offset: jax.Array | None) -> Float[Array, "B H T N"]:
        return self._turned(contract("BTD,DHN->BTHN", states, weight), offset)

    def _turned(self, heads: Float[Array, "B T H N"], offset: jax.Array | None) -> Float[Array, "B H T N"]:
        # Transposed after the product: a product with transposed output takes twice as long on a CPU.
        if offset is not None:
            heads = add_bias(heads, offset[None, None])
        return jnp.swapaxes(heads, 1, 2)

    def queries(self, states: Float[Array, "B T D"], angles: Rotary | None = None) -> Float[Array, "B H T N"]:
        """Returns queries, already scaled by 1/sqrt(N) if `scale`, and rotated by `angles` if given."""
        return self._finished_queries(self._project(states, self.query_weight, self.query_offset), angles)

    def _finished_queries(self, query: Float[Array, "B H T N"], angles: Rotary | None) -> Float[Array, "B H T N"]:
        query = query if self.head_norm_eps is None else self.query_norm(query)
        query = query * self.head_dim**-0.5 if self.scale else query
        return query if angles is None else rotate(query, angles)

    def keys_values(
        self, states: Float[Array, "B S D"], angles: Rotary | None = None
    ) -> tuple[Float[Array, "B G S N"], Float[Array, "B G S N"]]:
        """Returns the keys, rotated by `angles` if given, and values of the attended states."""
        key = self._finished_keys(self._project(states, self.key_weight, self.key_offset), angles)
        return key, self._project(states, self.value_weight, self.value_offset)

    def cached_keys_values(
        self, states: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B G N S"], Float[Array, "B G S N"]]:
        """Returns `keys_values` in the layout of the cache."""
        key, value = self.keys_values(states)
        return jnp.swapaxes(key, -2, -1), value

    def _finished_keys(self, key: Float[Array, "B G S N"], angles: Rotary | None) -> Float[Array, "B G S N"]:
        key = key if self.head_norm_eps is None else self.key_norm(key)
        return key if angles is None else rotate(key, angles)

    def queries_keys_values(
        self, states: Float[Array, "B T D"], angles: Rotary | None = None
    ) -> tuple[Float[Array, "B H T N"], Float[Array, "B G T N"], Float[Array, "B G T N"]]:
        """Returns `queries` and `keys_values` of the same states; on a GPU one product, which reads the states once."""
        weights = (self.query_weight, self.key_weight, self.value_weight)
        offsets = (self.query_offset, self.key_offset, self.value_offset)
        alike = all(isinstance(weight, jax.Array) and weight.shape == weights[0].shape for weight in weights)
        if not alike or backend() != "gpu":
            return self.queries(states, angles), *self.keys_values(states, angles)
        three = contract("BTD,DCHN->BTCHN", states, jnp.stack(weights, axis=1))
        query, key, value = (self._turned(three[:, :, i], offset) for i, offset in enumerate(offsets))
        return self._finished_queries(query, angles), self._finished_keys(key, angles), value

    def _logits(
        self, query: Float[Array, "B H T N"], key: Float[Array, "B G _ _"], *, turned: bool = False
    ) -> Float[Array, "B H T S"]:
        """Returns the attention logits. Keys are [B, G, S, N], or [B, G, N, S] if `turned`."""
        # Query heads that share a key are adjacent: a reshape turns them into more positions of one head.
        grouped = _regroup(query, key.shape[1]).astype(key.dtype)
        spec = "BHTN,BHNS->BHTS" if turned else "BHTN,BHSN->BHTS"
        return _regroup(contract(spec, grouped, key, result=jnp.float32), query.shape[1])

    def _mix(self, weights: Float[Array, "B H T S"], value: Float[Array, "B G S N"]) -> Float[Array, "B H T N"]:
        mixed = contract("BHTS,BHSN->BHTN", _regroup(weights, value.shape[1]).astype(value.dtype), value)
        return _regroup(mixed, weights.shape[1]).astype(self.dtype)

    def _out(self, heads: Float[Array, "B H T N"]) -> Float[Array, "B T D"]:
        result = contract("BHTN,HND->BTD", heads, self.out_weight)
        if self._has_out_bias():
            result = add_bias(result, over_last(self.out_offset, 3))
        return result

    def attend(
        self,
        query: Float[Array, "B H T N"],
        key: Float[Array, "B G _ _"],
        value: Float[Array, "B G S N"],
        *,
        mask: Bool[Array, "#B #T S"] | None,
        bias: Float[Array, "#B H T S"] | None,
        deterministic: bool,
        turned: bool = False,
        causal: bool = False,
    ) -> Float[Array, "B T D"]:
        """Attends and applies the output projection. `mask` is True where attention is allowed; softmax in float32.

        `causal`: the mask is a key mask combined with the causal mask; its last row is the key mask.
        Keys are [B, G, S, N], or [B, G, N, S] if `turned`. Keys and values may have a wider type than the layer.
        """
        dropped = not deterministic and self.dropout > 0.0
        if not turned and is_fused(
            self.kernel, query.shape[2], key.shape[2], self.head_dim, self.dtype, dropped=dropped
        ):
            given: dict[str, Any] = {"mask": mask, "bias": bias, "dtype": self.dtype}
            if self.kernel == "flash":
                return self._out(flash_attention(query, key, value, causal=causal, **given))
            return self._out(fused_attention(query, key, value, **given))
        weights = self.weights(query, key, mask=mask, bias=bias, turned=turned).astype(self.dtype)
        weights = self.weights_dropout(weights, deterministic=deterministic)
        return self._out(self._mix(weights, value))

    def weights(
        self,
        query: Float[Array, "B H T N"],
        key: Float[Array, "B G _ _"],
        *,
        mask: Bool[Array, "#B #T S"] | None,
        bias: Float[Array, "#B H T S"] | None,
        turned: bool = False,
    ) -> Float[Array, "B H T S"]:
        """Returns attention weights in float32, without dropout; arguments as for `attend`."""
        logits = self._logits(query, key, turned=turned)
        if bias is not None:
            logits = add_bias(logits, bias)
        if mask is not None:
            logits = jnp.where(mask[:, None, :, :], logits, MASKED)
        return jax.nn.softmax(logits, axis=-1)

    def attend_shared_and_own(
        self,
        query: Float[Array, "B H K N"],
        shared: tuple[Float[Array, "B G N S"], Float[Array, "B G S N"]],
        shared_mask: Bool[Array, "B S"],
        own: tuple[Float[Array, "B K G T N"], Float[Array, "B K G T N"]],
        own_mask: Bool[Array, " T"],
    ) -> Float[Array, "B K D"]:
        """Attends with one query per hypothesis (K) to shared keys and to its own keys, under one softmax."""
        batch, heads, num, _ = query.shape
        own_key, own_value = (item.reshape(batch * num, *item.shape[2:]) for item in own)
        own_logits = self._logits(_one_row_each(query), own_key).reshape(batch, num, heads, -1).swapaxes(1, 2)
        logits = jnp.concatenate(
            [
                jnp.where(shared_mask[:, None, None, :], self._logits(query, shared[0], turned=True), MASKED),
                jnp.where(own_mask[None, None, None, :], own_logits, MASKED),
            ],
            axis=-1,
        )
        weights = jax.nn.softmax(logits, axis=-1).astype(self.dtype)
        from_shared, from_own = jnp.split(weights, [shared_mask.shape[1]], axis=-1)
        mixed_own = self._mix(_one_row_each(from_own), own_value).reshape(batch, num, heads, -1).swapaxes(1, 2)
        return self._out(self._mix(from_shared, shared[1]) + mixed_own)

    def __call__(
        self,
        target: Float[Array, "B T D"],
        source: Float[Array, "B S D"],
        *,
        mask: Bool[Array, "#B #T S"] | None,
        bias: Float[Array, "#B H T S"] | None,
        deterministic: bool,
    ) -> Float[Array, "B T D"]:
        """Attends from `target` to `source` (the same array in self-attention)."""
        parts = (
            self.queries_keys_values(target) if target is source else (self.queries(target), *self.keys_values(source))
        )
        return self.attend(*parts, mask=mask, bias=bias, deterministic=deterministic)


def causal(length: int) -> Bool[Array, "1 T T"]:
    """Returns the causal attention mask."""
    return jnp.tril(jnp.ones((1, length, length), bool))


def _regroup(values: Float[Array, "B H T N"], heads: int) -> Float[Array, "B G R N"]:
    """Reshapes the H * T rows of all heads to another number of heads, in order."""
    batch, old, length, size = values.shape
    return values.reshape(batch, heads, old * length // heads, size)


def _one_row_each(values: Float[Array, "B H K N"]) -> Float[Array, "C H 1 N"]:
    """Makes every hypothesis a separate example: C = B * K."""
    batch, heads, num, size = values.shape
    return values.swapaxes(1, 2).reshape(batch * num, heads, 1, size)


def relative_bucket(
    distance: Int[Array, "T S"], *, bidirectional: bool, num_buckets: int, max_distance: int
) -> Int[Array, "T S"]:
    """Returns T5's bucket of `distance` = key position - query position.

    Half of the buckets hold one distance each; the rest grow logarithmically up to `max_distance`.
    Source: Raffel et al. 2020, Sec. 2.1.
    """
    bucket = jnp.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        bucket = bucket + (distance > 0).astype(distance.dtype) * num_buckets
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = num_buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (num_buckets - exact)).astype(distance.dtype)
    return bucket + jnp.where(distance < exact, distance, jnp.minimum(far, num_buckets - 1))


def sinusoidal_positions(
    positions: Int[Array, " T"], size: int, kind: Sinusoids = "tensor2tensor"
) -> Float[Array, "T D"]:
    """Returns sines in the first half of the features, cosines in the second. Source: Vaswani et al. 2017, Sec. 3.5.

    Feature i of a half has a rate of 10000 ** (-2i / D) radians per position ("paper"), or rates are spaced so that the
    last is 1 / 10000 ("tensor2tensor", the authors' code). An odd D has one more sine ("paper"), or a 0 at the end.
    """
    half = size // 2
    sines, last = (size - half, size / 2) if kind == "paper" else (half, max(half - 1, 1))
    rates = jnp.exp(-math.log(10_000.0) / last * jnp.arange(sines, dtype=jnp.float32))
    angles = positions.astype(jnp.float32)[:, None] * rates[None, :]
    signal = jnp.concatenate([jnp.sin(angles), jnp.cos(angles[:, :half])], axis=-1)
    return jnp.pad(signal, ((0, 0), (0, size - sines - half)))
