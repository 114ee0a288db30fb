"""The compiled programs of a stage: its initial state, its updates, its evaluations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from empax.core import distributed
from empax.core.protocols import OnlineTask, ReinforcedTask, Task, untrained_by
from empax.core.sharding import batch_sharding, replicated, shard_params
from empax.core.types import AnyBatch, Params, TrainState
from empax.models.layers import logical_axes
from empax.training.optimizer import averaged, first_updates, learning_rate, make_optimizer, trained_mask
from empax.training.settings import LoopSettings
from empax.training.step import (
    EvalStep,
    ExploreStep,
    IterationStart,
    TrainStep,
    make_eval_step,
    make_explore_step,
    make_iteration_start,
    make_train_step,
)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Compiled programs of a stage. Each is compiled on its first call, or earlier by `Compiling`.

    Attributes:
      template: shapes, types and shardings of the state.
      initialise: () -> a new state, created in its shards.
      train, evaluate, explore, begin: see `training.step`; the last two are None unless the task is an `OnlineTask`, or
        a `ReinforcedTask`.
      average: (optimizer state, parameters) -> their running mean, or the parameters if `optimizer.ema_decay` is 0.
      learning_rate: learning rate of an update, numbered from 0.
    """

    template: TrainState
    initialise: Callable[[], TrainState]
    train: TrainStep
    evaluate: EvalStep
    average: Callable[[optax.OptState, Params], Params]
    explore: ExploreStep | None
    begin: IterationStart | None
    learning_rate: Callable[[int], jax.Array]

    def lower_update(self, frozen: Params, batch: AnyBatch) -> list[jax.stages.Lowered]:
        """Traces the programs of an update: `explore` or `begin`, and `train` on their output.

        The batch has one of the shapes in use, placed on the devices.
        """
        lowered: list[jax.stages.Lowered] = []
        if self.explore is not None:
            lowered.append(self.explore.lower(self.template, frozen, batch))
            batch = lowered[-1].out_info
        if self.begin is not None:
            lowered.append(self.begin.lower(self.template, frozen, batch))
            if not self.begin.gives_batch:  # the host rates the answers
                return lowered
            batch = lowered[-1].out_info[0]
        return [*lowered, self.train.lower(self.template, frozen, batch)]

    def first_state(self, initial: Callable[[Params], Params] | None) -> TrainState:
        """Creates the state before the first update; `initial` maps new parameters to the starting ones.

        Raises:
          ValueError: `initial` changes the structure, a shape or a type.
        """
        state = self.initialise()
        if initial is None:
            return state
        params = initial(state.params)
        wanted, found = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (state.params, params))
        if wanted != found:
            raise ValueError("the initial parameters differ from the model's in names, shapes or types.")
        # A copy: the state is donated, and its source may be in use. `may_alias=False` does not copy to a mesh.
        params = jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, params)
        places = jax.tree.map(lambda leaf: leaf.sharding, self.template.params)
        return dataclasses.replace(state, params=distributed.place(params, places))


class Compiling:
    """Compiles programs in parallel threads: XLA's compiler does not hold Python's lock.

    Tracing does hold it, and depends on thread-local settings: pass programs traced in the thread that calls them
    later. That call finds the compiled program, once `wait` has returned.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="compile")
        self._pending: list[Future[Any]] = []

    def begin(self, *lowered: jax.stages.Lowered) -> None:
        """Starts compiling each program."""
        self._pending += [self._threads.submit(one.compile) for one in lowered]

    @property
    def busy(self) -> bool:
        """Whether a compilation is in progress."""
        return not all(one.done() for one in self._pending)

    def wait(self) -> None:
        """Waits for all compilations; raises their errors."""
        while self._pending:
            self._pending.pop().result()

    def close(self) -> None:
        """Cancels compilations that have not started."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def optimizer_for(task: Task, settings: LoopSettings, params: Params) -> optax.GradientTransformation:
    """Builds the optimizer of a task's parameters, arrays or shapes."""
    starts = first_updates(task, params, settings.updates_per_batch)
    untrained = untrained_by(task)
    return make_optimizer(settings.optimizer, params, settings.updates, starts=starts, untrained=untrained)


def make_programs(
    task: Task, settings: LoopSettings, batch: AnyBatch, *, mesh: Mesh, logical: Mapping[str, str]
) -> Programs:
    """Builds the programs of a stage without computing anything, since a plan's devices need not be there.

    `batch`, any batch of the task or its shapes, fixes the dimensions. `logical`: see `fit`.
    """

    def rngs() -> tuple[jax.Array, ...]:
        return tuple(jax.random.split(jax.random.key(settings.seed)))

    init_rng, rng = jax.eval_shape(rngs)
    # A separate program, so that it is traced only once.
    init = jax.jit(lambda rng, batch: task.init(rng, batch))
    shapes = jax.eval_shape(init, init_rng, batch)
    optimizer = optimizer_for(task, settings, shapes)
    reinforced = task if isinstance(task, ReinforcedTask) else None

    def make(init_rng: jax.Array, rng: jax.Array, batch: AnyBatch) -> TrainState:
        params = init(init_rng, batch)
        memory = reinforced.init_memory() if reinforced else {}
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), rng, memory)

    template = jax.eval_shape(make, init_rng, rng, batch)
    shardings = shard_params(template, mesh, axes=logical_axes, logical=logical)
    initialise = jax.jit(make, out_shardings=shardings)
    rows, whole = batch_sharding(mesh), replicated(mesh)
    return Programs(
        template=jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), template, shardings
        ),
        initialise=lambda: initialise(*rngs(), batch),
        train=make_train_step(
            task,
            optimizer,
            state=shardings,
            batch=rows,
            replicated=whole,
            accumulate=settings.accumulate,
            epochs=settings.epochs,
            minibatches=settings.minibatches,
            trained=trained_mask(settings.optimizer, shapes, untrained_by(task)),
        ),
        evaluate=make_eval_step(task, batch=rows, replicated=whole),
        average=jax.jit(averaged),
        explore=make_explore_step(task, batch=rows) if isinstance(task, OnlineTask) else None,
        begin=make_iteration_start(reinforced, batch=rows, replicated=whole) if reinforced else None,
        learning_rate=learning_rate(settings.optimizer, settings.updates),
    )
