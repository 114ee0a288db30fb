"""The compiled programs of a stage: its first state, its updates, its evaluations."""

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
from empax.core.protocols import OnlineTask, ReinforcedTask, Task
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
    """What a stage calls. Each program is compiled when it is first called, or before that by `Compiling`.

    Attributes:
      template: shapes, types and shardings of the state.
      initialise: () -> a fresh state, made in its shards.
      train: see `make_train_step`.
      evaluate: see `make_eval_step`.
      average: (optimiser's state, parameters) -> their running mean; fails where `optimizer.ema_decay` is 0.
      explore: see `make_explore_step`; None unless the task is an `OnlineTask`.
      begin: see `make_iteration_start`; None unless the task is a `ReinforcedTask`.
      learning_rate: of an update, numbered from 0.
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
        """What an update calls, traced: `explore` or `begin`, and `train` on what they give.

        The batch is one of these shapes, as it lies on the devices.
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
        """The state before the first update; `initial` maps fresh parameters to those to start from.

        Raises:
          ValueError: `initial` changes the structure, a shape or a type.
        """
        state = self.initialise()
        if initial is None:
            return state
        params = initial(state.params)
        wanted, found = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (state.params, params))
        if wanted != found:
            raise ValueError("the initial parameters have other names, shapes or types than the model's.")
        # A copy: the state is donated, and what these came from may be frozen beside it.
        places = jax.tree.map(lambda leaf: leaf.sharding, self.template.params)
        return dataclasses.replace(state, params=distributed.place(params, places, may_alias=False))


class Compiling:
    """Programs that are compiled side by side in threads: XLA, which compiles, does not hold Python's lock.

    Tracing does, and reads settings of its thread: so what is traced comes here, from the thread that calls it later.
    That call finds the compiled program, once `wait` has returned.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="compile")
        self._pending: list[Future[Any]] = []

    def begin(self, *lowered: jax.stages.Lowered) -> None:
        """Begins to compile each."""
        self._pending += [self._threads.submit(one.compile) for one in lowered]

    @property
    def busy(self) -> bool:
        """Whether something is not compiled yet."""
        return not all(one.done() for one in self._pending)

    def wait(self) -> None:
        """Waits for all of them; raises what compiling raised."""
        while self._pending:
            self._pending.pop().result()

    def close(self) -> None:
        """Leaves what has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def make_programs(
    task: Task, settings: LoopSettings, batch: AnyBatch, *, mesh: Mesh, logical: Mapping[str, str]
) -> Programs:
    """The programs of a stage; `batch`, any of the task's data, fixes the model's dimensions. `logical`: see `fit`."""
    init_rng, rng = jax.random.split(jax.random.key(settings.seed))
    # A program of its own, so that it is traced once for all that follows.
    init = jax.jit(lambda rng, batch: task.init(rng, batch))
    shapes = jax.eval_shape(init, init_rng, batch)
    starts = first_updates(task, shapes, settings.updates_per_batch)
    optimizer = make_optimizer(settings.optimizer, shapes, settings.updates, starts=starts)
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
        initialise=lambda: initialise(init_rng, rng, batch),
        train=make_train_step(
            task,
            optimizer,
            state=shardings,
            batch=rows,
            replicated=whole,
            accumulate=settings.accumulate,
            epochs=settings.epochs,
            minibatches=settings.minibatches,
            trained=trained_mask(settings.optimizer, shapes),
        ),
        evaluate=make_eval_step(task, batch=rows, replicated=whole),
        average=jax.jit(averaged),
        explore=make_explore_step(task, batch=rows) if isinstance(task, OnlineTask) else None,
        begin=make_iteration_start(reinforced, batch=rows, replicated=whole) if reinforced else None,
        learning_rate=learning_rate(settings.optimizer, settings.updates),
    )
