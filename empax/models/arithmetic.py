"""Products, sums and dropout that are accurate and fast in half precision, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from empax.core.machine import backend
from empax.core.sharding import rows_are_split


def hashed_bits(rng: jax.Array, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Returns pseudo-random bits, a hash of (key, index): a dozen integer operations that fuse into their consumer.

    Threefry, JAX's default, costs more on a CPU than the matrix product to which dropout is applied; dropout needs no
    such quality. Each element depends only on the key and its index, so any sharding gives the same bits.
    Source: the finaliser "lowbias32" of Wellons 2018; key and counter are ours.
    """
    seeds = jax.random.bits(rng, (2,), jnp.uint32)
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        step = jnp.uint32(stride & 0xFFFFFFFF)
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * step
        stride *= shape[axis]
    bits = (index * jnp.uint32(0x9E3779B1)) ^ seeds[0]
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B) + seeds[1]
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    return bits ^ (bits >> 15)


def dropout(values: Float[Array, "..."], rate: float, rng: jax.Array) -> Float[Array, "..."]:
    """Sets a share `rate` (0 <= rate < 1) of the elements to 0 and scales the rest by 1 / (1 - rate)."""
    threshold = jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    keep = hashed_bits(rng, values.shape) >= threshold
    return jnp.where(keep, values * (1.0 / (1.0 - rate)), jnp.zeros((), values.dtype))


WEIGHT_PRODUCT = "weight product"
"""Name under which `jax.checkpoint` policies find the results of `contract` with a matrix."""


@flax.struct.dataclass
class LowRankSum:
    """The matrix W + f A B as a factor of `contract`, which never forms it. No gradient flows to W.

    W comes first, since Flax looks for a parameter's shape there.

    Attributes:
      base: W [*inputs, *outputs].
      a: [*inputs, r].
      b: [r, *outputs].
      factor: f.
    """

    base: Any
    a: Any
    b: Any
    factor: float = flax.struct.field(pytree_node=False)


def contract(
    spec: str, left: Float[Array, "..."], right: Float[Array, "..."] | LowRankSum, *, result: DTypeLike | None = None
) -> Float[Array, "..."]:
    """Computes `einsum` of two arrays in the type of `left`, summed in float32; `right` may be a float32 parameter.

    The result has the type of `left`, or `result`.

    In half precision, both gradients are also products of half-precision factors summed in float32 (a parameter's
    gradient is float32). By default, the backward pass would multiply in float32, at half the speed or less.
    """
    if isinstance(right, LowRankSum):
        return _low_rank_contract(spec, left, right, result)
    product: Array
    if left.dtype == jnp.float32:
        product = jnp.einsum(spec, left, right.astype(jnp.float32))
    else:
        product = _half_contract(spec, result or left.dtype, left, right)  # type: ignore[assignment]
    first, second, output = spec.replace("->", ",").split(",")
    return product if set(first) & set(second) & set(output) else checkpoint_name(product, WEIGHT_PRODUCT)


def _low_rank_contract(spec: str, left: Array, right: LowRankSum, result: DTypeLike | None) -> Array:
    """Computes the two products separately: the one with W needs no weight gradient, a third of a training step."""
    inputs, output = spec.split("->")
    first, second = inputs.split(",")
    split = right.a.ndim - 1
    if "r" in spec or set(second[:split]) & set(output) or not set(second[split:]) <= set(output):
        raise ValueError(
            f"{spec!r} does not sum over the inputs of a low-rank weight, which are its first {split} axes."
        )
    small = "".join(axis for axis in first if axis not in second[:split]) + "r"
    reduced = contract(f"{first},{second[:split]}r->{small}", left, right.a)
    change = contract(f"{small},r{second[split:]}->{output}", reduced, right.b, result=result)
    return contract(spec, left, jax.lax.stop_gradient(right.base), result=result) + right.factor * change


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _half_contract(spec: str, result: DTypeLike, left: Array, right: Array) -> Array:
    return _product(spec, left, right, left.dtype, result)


def _product(spec: str, left: Array, right: Array, factors: DTypeLike, result: DTypeLike) -> Array:
    made = jnp.einsum(spec, left.astype(factors), right.astype(factors), preferred_element_type=jnp.float32)
    return made.astype(result)


def _half_forward(spec: str, result: DTypeLike, left: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    return _half_contract(spec, result, left, right), (left, right)


def _half_backward(spec: str, result: DTypeLike, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    left, right = saved
    inputs, output = spec.split("->")
    first, second = inputs.split(",")
    half = left.dtype
    return (
        _product(f"{output},{second}->{first}", gradient, right, half, left.dtype),
        _product(f"{first},{output}->{second}", left, gradient, half, right.dtype),
    )


_half_contract.defvjp(_half_forward, _half_backward)


def add_bias(values: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """Adds a float32 `bias` with as many axes as `values`, broadcast along axes of size 1; in the type of `values`.

    In half precision, the bias' gradient is still summed in float32. This is more exact and takes a fortieth of the
    time on a CPU, because XLA has no fast sum for a type that is rounded after each addend.
    """
    repeated = tuple(axis for axis, size in enumerate(bias.shape) if size != values.shape[axis])
    wide: Array = _widen(values.shape, values.dtype, repeated, bias)  # pyright: ignore[reportAssignmentType]
    return values + wide


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _widen(shape: tuple[int, ...], dtype: DTypeLike, repeated: tuple[int, ...], bias: Array) -> Array:
    del repeated
    return jnp.broadcast_to(bias.astype(dtype), shape)


def _widen_forward(
    shape: tuple[int, ...], dtype: DTypeLike, repeated: tuple[int, ...], bias: Array
) -> tuple[Array, None]:
    return _widen(shape, dtype, repeated, bias), None


def _widen_backward(
    shape: tuple[int, ...], dtype: DTypeLike, repeated: tuple[int, ...], _: None, gradient: Array
) -> tuple[Array]:
    del shape, dtype
    gradient = gradient.astype(jnp.float32)
    if repeated == (0,) and backend() == "cpu":
        # Few long rows: on a CPU, XLA's sum takes up to a hundred times as long as this product.
        return (jnp.einsum("zb,b...->z...", jnp.ones((1, len(gradient))), gradient, precision="highest"),)
    return (jnp.sum(gradient, axis=repeated, keepdims=True),)


_widen.defvjp(_widen_forward, _widen_backward)


_FEW_ROWS = 128
_BLOCK = 128


def rows_of(table: Float[Array, "R D"], ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Returns `table[ids]`, 0 <= ids < R.

    On a GPU the gradient uses matrix products: with one-hot rows for a small table, else over sorted rows. By default,
    the backward pass would add to the same rows from many threads, in an order that changes from run to run, and
    thousands of threads would wait at frequent rows. If a batch is split over several devices, the gradient of a large
    table is left to XLA, which sums on each device.
    """
    apart = len(table) > _FEW_ROWS and rows_are_split()
    return table[ids] if apart or backend() != "gpu" else _picked(table, ids)


@jax.custom_vjp
def _picked(table: Array, ids: Array) -> Array:
    return table[ids]


def _picked_forward(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return table[ids], (table, ids)


def _picked_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    table, ids = saved
    flat, ids = gradient.reshape(-1, table.shape[1]).astype(jnp.float32), ids.reshape(-1)
    if len(table) <= _FEW_ROWS:
        hot = jax.nn.one_hot(ids, len(table), dtype=jnp.float32)
        sums = jnp.einsum("NR,ND->RD", hot, flat, precision="highest")
    else:
        sums = sums_by_id(flat, ids, len(table))
    return sums.astype(table.dtype), None


_picked.defvjp(_picked_forward, _picked_backward)


def sums_by_id(values: Float[Array, "N D"], ids: Int[Array, " N"], rows: int) -> Float[Array, "R D"]:
    """Returns the sum of the values of each id, 0 <= id < `rows`, in the same order on any device.

    Values are sorted by id and summed within blocks, then over the blocks that an id spans: two products with matrices
    of equal ids. The sum of an id is read at its last position.
    """
    padding = -len(ids) % _BLOCK
    ids = jnp.pad(ids, (0, padding), constant_values=rows)
    order = jnp.argsort(ids)  # stable
    ids = ids[order]
    blocks = ids.reshape(-1, _BLOCK)
    ordered = jnp.pad(values, ((0, padding), (0, 0)))[order].reshape(-1, _BLOCK, values.shape[1])
    first, last = blocks[:, 0], blocks[:, -1]
    so_far = jnp.tril(blocks[:, :, None] == blocks[:, None, :]).astype(jnp.float32)
    sums = jnp.einsum("BTS,BSD->BTD", so_far, ordered, precision="highest")
    earlier = jnp.tril(first[:, None] == last[None, :], -1).astype(jnp.float32)
    carried = jnp.einsum("BK,KD->BD", earlier, sums[:, -1], precision="highest")  # for each block's first id
    wanted = jnp.arange(rows, dtype=ids.dtype)
    place = jnp.maximum(jnp.searchsorted(ids, wanted, side="right", method="scan_unrolled") - 1, 0)
    block = place // _BLOCK
    found = sums.reshape(-1, values.shape[1])[place]
    found = found + jnp.where((first[block] == wanted)[:, None], carried[block], 0.0)
    return jnp.where((ids[place] == wanted)[:, None], found, 0.0)


def spread(weights: Float[Array, "T S"], ids: Int[Array, " S"], size: int) -> Float[Array, "T V"]:
    """Sums weights by id, 0 <= id < `size`, with 0 for other ids; in a fixed order, also on a GPU."""
    if backend() == "gpu":
        same = ids[:, None] == ids[None, :]
        weights = jnp.einsum("TK,KS->TS", weights, same.astype(weights.dtype), precision="highest")
        ids = jnp.where(jnp.argmax(same, axis=0) == jnp.arange(len(ids)), ids, size)  # keep the first of equal ids
    return jnp.zeros((len(weights), size), weights.dtype).at[:, ids].add(weights)
