"""The training step, and its two companions: the evaluation and exploration steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from empax.core.protocols import OnlineTask, ReinforcedTask, Task
from empax.core.sharding import rows_split_as
from empax.core.types import AnyBatch, Mean, Metrics, Params, TrainState

TrainStep: TypeAlias = jax.stages.Wrapped
"""(state, frozen, batch) -> (state, metrics), compiled."""
EvalStep: TypeAlias = jax.stages.Wrapped
"""(params, frozen, batch, rng) -> metrics, compiled."""
ExploreStep: TypeAlias = jax.stages.Wrapped
"""(state, frozen, batch) -> batch, compiled."""

_EXPLORE_STREAM = 2**31 - 1  # updates fold in a micro-batch index here, which is never that large
_ORDER_STREAM = 2**31 - 3


def make_train_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    *,
    state: Any = None,
    batch: Any = None,
    replicated: Any = None,
    accumulate: int = 1,
    epochs: int = 1,
    minibatches: int = 1,
    trained: Params | None = None,
) -> TrainStep:
    r"""Compiles one update of `task.loss`, or several in a row on parts of one batch. Donates the state.

    .. math:: g = \nabla \sum_i \mathrm{total}_i \,/\, \sum_i \mathrm{weight}_i

    over the micro-batches i, so the number of micro-batches affects only memory and dropout masks.

    Args:
      task: task whose loss is minimised; the first batch fixes its dimensions, each new shape compiles again. A batch
        with a field `step` gets the number of updates made.
      optimizer: optimizer of the gradient g.
      state: shardings of the state; like `batch` and `replicated`, None leaves the placement to the arguments.
      batch: sharding of the batch, a numpy-like tree whose leaves share their leading axis.
      replicated: sharding of the metrics.
      accumulate: number of micro-batches of an update; must divide its rows.
      epochs: number of passes over the rows.
      minibatches: updates per epoch, each on different rows, redrawn in every epoch; must divide the batch size.
      trained: tree of bools like the parameters; no gradient is computed where False. None = train all.

    Returns:
      (state, frozen, batch) -> (state, metrics): the task's metrics, `loss` and `grad_norm` (before clipping), summed
        over all updates.
    """

    def gradient(state: TrainState, frozen: Params, batch: AnyBatch, rng: jax.Array) -> tuple[Params, Metrics]:
        batch = batch.replace(step=state.step) if hasattr(batch, "step") else batch

        def total(params: Params) -> tuple[jax.Array, Metrics]:
            if trained is not None:
                params = jax.tree.map(lambda p, kept: p if kept else jax.lax.stop_gradient(p), params, trained)
            loss, metrics = task.loss(params, frozen, batch, rng, train=True)
            return loss.total, {**metrics, "loss": loss}

        return jax.grad(total, has_aux=True)(state.params)

    def accumulated(state: TrainState, frozen: Params, batch: AnyBatch, rng: jax.Array) -> tuple[Params, Metrics]:
        def add(sums: Any, part: tuple[jax.Array, AnyBatch]) -> tuple[Any, None]:
            index, micro = part
            grads = gradient(state, frozen, micro, jax.random.fold_in(rng, index))
            return jax.tree.map(jnp.add, sums, grads), None

        micros = jax.tree.map(lambda leaf: _split(leaf, accumulate), batch)
        shapes = jax.eval_shape(gradient, state, frozen, jax.tree.map(lambda leaf: leaf[0], micros), rng)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add, zeros, (jnp.arange(accumulate), micros))[0]

    def update(state: TrainState, frozen: Params, batch: AnyBatch) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(state.rng, state.step)  # a resumed run repeats its dropout masks
        grads, metrics = (gradient if accumulate == 1 else accumulated)(state, frozen, batch, rng)
        scale = 1.0 / jnp.maximum(metrics["loss"].weight, 1e-9)
        grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["grad_norm"] = Mean(total=optax.tree.norm(grads), weight=jnp.ones((), jnp.float32))
        return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics

    def step(state: TrainState, frozen: Params, given: AnyBatch) -> tuple[TrainState, Metrics]:
        def one(state: TrainState, picked: jax.Array) -> tuple[TrainState, Metrics]:
            return update(state, frozen, jax.tree.map(lambda leaf: leaf[picked], given))

        with rows_split_as(batch):
            if epochs * minibatches == 1:
                return update(state, frozen, given)
            rng = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), _ORDER_STREAM)
            rows = _drawn(rng, given.valid.shape[0], epochs, minibatches)
            state, metrics = jax.lax.scan(one, state, rows)
            return state, jax.tree.map(lambda leaf: leaf.sum(axis=0), metrics)

    shardings = {} if state is None else {"in_shardings": (state, None, batch), "out_shardings": (state, replicated)}
    return jax.jit(step, donate_argnums=0, **shardings)


def _drawn(rng: jax.Array, rows: int, epochs: int, minibatches: int) -> jax.Array:
    """Draws [epochs * minibatches, rows / minibatches] row numbers; each epoch has every row once, in its own order."""
    orders = jax.vmap(lambda rng: jax.random.permutation(rng, rows))(jax.random.split(rng, epochs))
    return orders.reshape(epochs * minibatches, rows // minibatches)


def _split(leaf: jax.Array, parts: int) -> jax.Array:
    """Splits [B, ...] into [parts, B / parts, ...]; part i takes rows i, i + parts, i + 2 parts and so on.

    Strided, because devices hold contiguous blocks of rows: each part keeps every device busy.
    """
    return jnp.swapaxes(leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:]), 0, 1)


def make_eval_step(task: Task, *, batch: Any = None, replicated: Any = None) -> EvalStep:
    """Compiles `task.loss` without dropout: (params, frozen, batch, rng) -> metrics, including `loss`.

    `batch` and `replicated` are shardings of the batch and of the metrics.
    """

    def step(params: Params, frozen: Params, given: AnyBatch, rng: jax.Array) -> Metrics:
        with rows_split_as(batch):
            loss, metrics = task.loss(params, frozen, given, rng, train=False)
        return {**metrics, "loss": loss}

    return jax.jit(step, out_shardings=replicated)


def make_explore_step(task: OnlineTask, *, batch: Any = None) -> ExploreStep:
    """Compiles `task.explore`: (state, frozen, batch) -> the batch to learn from; the state is only read.

    `batch` is the sharding of input and result, as in `make_train_step`; None leaves it to the compiler.
    """

    def step(state: TrainState, frozen: Params, given: AnyBatch) -> AnyBatch:
        rng = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), _EXPLORE_STREAM)
        with rows_split_as(batch):
            return task.explore(state.params, frozen, given, rng)

    return jax.jit(step, out_shardings=batch)


@dataclasses.dataclass(frozen=True)
class IterationStart:
    """(state, frozen, batch) -> (state, rated batch, metrics); see `make_iteration_start`."""

    _first: jax.stages.Wrapped
    _rest: Callable[[Params, AnyBatch, Any], tuple[AnyBatch, Any, Metrics]] | None

    @property
    def gives_batch(self) -> bool:
        """Whether `lower` determines the rated batch."""
        return self._rest is None

    def __call__(self, state: TrainState, frozen: Params, batch: AnyBatch) -> tuple[TrainState, AnyBatch, Metrics]:
        found = self._first(state, frozen, batch)
        rated, memory, metrics = found if self._rest is None else self._rest(frozen, found, state.memory)
        return dataclasses.replace(state, memory=memory), rated, metrics

    def lower(self, state: TrainState, frozen: Params, batch: AnyBatch) -> jax.stages.Lowered:
        """Traces the first compiled call."""
        return self._first.lower(state, frozen, batch)


def make_iteration_start(task: ReinforcedTask, *, batch: Any = None, replicated: Any = None) -> IterationStart:
    """Builds the steps before an iteration's updates: (state, frozen, batch) -> (state, rated batch, metrics).

    It is one compiled call, or three calls if `task.rates_on_host`. `batch` and `replicated` are shardings of the rated
    batch, and of the memory and the metrics; None leaves them to the compiler.
    """
    credited = (batch, replicated, replicated)

    def rollout(state: TrainState, frozen: Params, given: AnyBatch) -> AnyBatch:
        rng = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), _EXPLORE_STREAM)
        with rows_split_as(batch):
            return task.rollout(state.params, frozen, given, rng)

    if task.rates_on_host:
        credit = jax.jit(task.credit, out_shardings=credited)

        def rest(frozen: Params, answered: AnyBatch, memory: Any) -> tuple[AnyBatch, Any, Metrics]:
            return credit(frozen, task.rate(frozen, answered), memory)

        return IterationStart(jax.jit(rollout, out_shardings=batch), rest)

    def whole(state: TrainState, frozen: Params, batch: AnyBatch) -> tuple[AnyBatch, Any, Metrics]:
        return task.credit(frozen, task.rate(frozen, rollout(state, frozen, batch)), state.memory)

    return IterationStart(jax.jit(whole, out_shardings=credited), None)
