"""Losses of the real tokens of a batch, without those of padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.core.machine import backend
from empax.core.sharding import rows_are_split
from empax.core.types import Mean, Metrics

PARTS = 8
"""Number of equal parts of a batch's cells, of which those with real tokens are computed."""

LEAST = 640
"""Fewer cells are computed at once: a part takes time of its own, however small it is."""


def over_real_tokens(
    function: Callable[..., tuple[Mean, Metrics]],
    mask: Bool[Array, "B T"],
    states: Sequence[Float[Array, "B T ..."]],
    *known: Array,
) -> tuple[Mean, Metrics]:
    """Returns `function(mask, states, *known)`, computed at real tokens alone where that is faster.

    That is on a CPU, see `in_parts`. On a GPU, the host would wait for the device before each turn of the loop (XLA's
    `WhileThunk`), and each turn would read and write the gradient of the whole output layer, where a product of all
    cells is cheap; `benchmarks.real_tokens` measures both. TPU plans need loops of known length. Batches of few cells,
    or with rows on several devices, are also computed at once.

    Args:
      function: (mask, states, *known) -> loss and metrics, of these arrays or of cells of them [N, 1, ...]; cells are
        independent. It may close over parameters. Gradients flow through the loss' total alone.
      mask: True at cells that count.
      states: arrays that gradients flow to.
      known: arrays [B, T, ...] that none flow to.
    """
    if mask.size < LEAST or rows_are_split() or backend() != "cpu":
        return function(mask, states, *known)
    return in_parts(function, mask, states, *known)


def in_parts(
    function: Callable[..., tuple[Mean, Metrics]],
    mask: Bool[Array, "B T"],
    states: Sequence[Float[Array, "B T ..."]],
    *known: Array,
) -> tuple[Mean, Metrics]:
    r"""Returns `function(mask, states, *known)`, computed part by part; arguments as for `over_real_tokens`.

    .. math:: L = \sum_p f(x_p), \quad \nabla L = \sum_p \nabla f(x_p)

    over parts p of the cells, real ones first; a loop ends before the first part of padding alone. Most target cells of
    a training batch are padding, and an output layer on all of them would take much of an update's time.
    The gradient of a part is computed with its value, so there are logits of only one part at a time.

    Source: ours.
    """
    count, size = mask.sum(), -(-mask.size // PARTS)
    order = jnp.pad(jnp.argsort(~mask.ravel(), stable=True), (0, PARTS * size - mask.size))

    def cells(arrays: Sequence[Array], order: Array, part: Any) -> list[Array]:
        index = jax.lax.dynamic_slice_in_dim(order, part * size, size)
        return [array.reshape(-1, 1, *array.shape[2:])[index] for array in arrays]

    def loop(count: Array, step: Callable[[Any, Any], Any], start: Any) -> Any:
        return jax.lax.fori_loop(0, -(-count // size), step, start)

    # All arrays become arguments: a function with a derivative of its own may not close over them.
    first = cells((mask, *known), order, 0), cells(states, order, 0)
    converted, params = jax.closure_convert(lambda held, states: function(held[0], states, *held[1:]), *first)

    def computed(
        part: Any, params: Sequence[Array], states: Sequence[Array], given: Sequence[Array]
    ) -> tuple[Mean, Metrics]:
        count, order, _, *known = given
        real = part * size + jnp.arange(size) < count
        return converted([real[:, None], *cells(known, order, part)], states, *params)

    shapes = jax.eval_shape(converted, *first, *params)

    def nothing() -> tuple[Mean, Metrics]:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    @jax.custom_vjp
    def summed(params: list[Array], states: list[Array], given: list[Array]) -> tuple[Mean, Metrics]:
        count, order, *_ = given
        step = lambda part, sums: _sum(sums, computed(part, params, cells(states, order, part), given))  # noqa: E731
        return loop(count, step, nothing())

    def forward(params: list[Any], states: list[Any], given: list[Any]) -> tuple[tuple[Mean, Metrics], Any]:
        trained = [one.value if one.perturbed else None for one in params]
        values, given = ([one.value for one in some] for some in (states, given))
        count, order, mask, *_ = given

        def step(part: Any, sums: Any) -> Any:
            def loss(trained: Any, states: Any) -> tuple[Array, Any]:
                merged = [one.value if own is None else own for one, own in zip(params, trained, strict=True)]
                found = computed(part, merged, states, given)
                return found[0].total, found

            (slopes, own), found = jax.grad(loss, (0, 1), has_aux=True)(trained, cells(values, order, part))
            put = lambda whole, new: jax.lax.dynamic_update_slice_in_dim(whole, new, part * size, 0)  # noqa: E731
            return *_sum(sums[:2], (found, slopes)), jax.tree.map(put, sums[2], own)

        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
        found, slopes, own = loop(count, step, (nothing(), start, [_room(one, PARTS * size) for one in first[1]]))
        # Where each cell is among the real ones.
        place = jnp.cumsum(mask.ravel()).reshape(mask.shape) - 1
        spread = [jnp.where(_like(mask, one), flat[place][:, :, 0], 0) for one, flat in zip(values, own, strict=True)]
        return found, (jax.tree.map(lambda slope, leaf: slope.astype(leaf.dtype), slopes, trained), spread)

    def backward(slopes: Any, given: tuple[Mean, Metrics]) -> Any:
        return *jax.tree.map(lambda slope: slope * given[0].total.astype(slope.dtype), slopes), None

    summed.defvjp(forward, backward, symbolic_zeros=True)
    return summed(params, [*states], [count, order, mask, *known])


def _sum(first: Any, second: Any) -> Any:
    return jax.tree.map(lambda one, other: one + other.astype(one.dtype), first, second)


def _room(one: Array, cells: int) -> Array:
    return jnp.zeros((cells, *one.shape[1:]), one.dtype)


def _like(mask: Array, values: Array) -> Array:
    return mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
