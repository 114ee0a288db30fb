"""Losses of the real tokens of a batch, without those of padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jaxtyping import Array, Bool, Float, Int

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


class _Cells(NamedTuple):
    """The cells of a batch in PARTS equal parts, real ones first, and the arrays that no gradient flows to."""

    num_real: Int[Array, ""]
    order: Int[Array, " N"]  # positions of all cells, and those that fill the last part
    mask: Bool[Array, "B T"]
    known: list[Array]

    @property
    def size(self) -> int:  # of a part
        return self.order.shape[0] // PARTS

    def loop(self, step: Callable[[Any, Any], Any], start: Any) -> Any:
        """Calls `step` with the number of each part that has real cells, and its last result."""
        return jax.lax.fori_loop(0, -(-self.num_real // self.size), step, start)

    def of(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        """Returns the cells of one part, [N, 1, ...]."""
        index = jax.lax.dynamic_slice_in_dim(self.order, part * self.size, self.size)
        return [array.reshape(-1, 1, *array.shape[2:])[index] for array in arrays]

    def held(self, part: Any) -> list[Array]:
        """Returns mask and known arrays of one part."""
        real = part * self.size + jnp.arange(self.size) < self.num_real
        return [real[:, None], *self.of(self.known, part)]

    def placed(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns the cells of all parts, [N, 1, ...], at their places in the batch; 0 at padding."""
        place = jnp.cumsum(self.mask.ravel()).reshape(self.mask.shape) - 1  # among the real ones
        return [jnp.where(jnp.expand_dims(self.mask, range(2, one.ndim)), one[place][:, :, 0], 0) for one in arrays]


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
    order = jnp.pad(jnp.argsort(~mask.ravel(), stable=True), (0, -mask.size % PARTS))
    cells = _Cells(mask.sum(), order, mask, [*known])
    # All arrays become arguments: a function with a derivative of its own may not close over them.
    first = cells.held(0), cells.of(states, 0)
    converted, params = jax.closure_convert(lambda held, states: function(held[0], states, *held[1:]), *first)
    shapes = jax.eval_shape(converted, *first, *params)

    def nothing() -> tuple[Mean, Metrics]:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    @jax.custom_vjp
    def summed(params: list[Array], states: list[Array], cells: _Cells) -> tuple[Mean, Metrics]:
        def step(part: Any, sums: Any) -> Any:
            return _sum(sums, converted(cells.held(part), cells.of(states, part), *params))

        return cells.loop(step, nothing())

    def forward(params: list[Any], states: list[Any], cells: Any) -> tuple[tuple[Mean, Metrics], Any]:
        trained = [one.value if one.perturbed else None for one in params]
        states, cells = custom_vjp_primal_tree_values((states, cells))

        def step(part: Any, sums: Any) -> Any:
            def loss(trained: Any, states: Any) -> tuple[Array, Any]:
                merged = [one.value if own is None else own for one, own in zip(params, trained, strict=True)]
                found = converted(cells.held(part), states, *merged)
                return found[0].total, found

            (slopes, own), found = jax.grad(loss, (0, 1), has_aux=True)(trained, cells.of(states, part))
            put = lambda whole, new: jax.lax.dynamic_update_slice_in_dim(whole, new, part * cells.size, 0)  # noqa: E731
            return *_sum(sums[:2], (found, slopes)), jax.tree.map(put, sums[2], own)

        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
        rooms = [jnp.zeros((*cells.order.shape, *one.shape[1:]), one.dtype) for one in first[1]]
        found, slopes, own = cells.loop(step, (nothing(), start, rooms))
        slopes = jax.tree.map(lambda slope, leaf: slope.astype(leaf.dtype), slopes, trained)
        return found, (slopes, cells.placed(own))

    def backward(slopes: Any, given: tuple[Mean, Metrics]) -> Any:
        return *jax.tree.map(lambda slope: slope * given[0].total.astype(slope.dtype), slopes), None

    summed.defvjp(forward, backward, symbolic_zeros=True)
    return summed(params, [*states], cells)


def _sum(first: Any, second: Any) -> Any:
    return jax.tree.map(lambda one, other: one + other.astype(one.dtype), first, second)
