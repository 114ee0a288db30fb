"""A training stage as shapes, and its floating-point operations, counted from jaxprs: what plans are made of.

Nothing is compiled or allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax
from jax.extend import core as jex
from jax.interpreters import partial_eval

from empax.core.files import WorkDir
from empax.core.protocols import OnlineTask, ReinforcedTask
from empax.core.system import RunContext, RunPlan, Sketch, Stage
from empax.core.types import Params
from empax.training.optimizer import first_updates, make_optimizer, trained_mask
from empax.training.settings import LoopSettings


def count_flops(function: Callable[..., Any], *args: Any, while_turns: int = 1) -> int:
    """Multiply-adds of all matrix products that the result needs, times two, which is what a model's FLOPs mean.

    Loops count as often as they run; a `while`, whose length no program says, `while_turns` times.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    # A gradient's rules also write down what nobody asked for, such as products with a cotangent that is dropped.
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _count(needed, while_turns)


def _count(jaxpr: Any, while_turns: int) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _dot(equation)
            continue
        inner = [_count(part, while_turns) for part in _bodies(equation)]
        if equation.primitive.name == "scan":
            total += equation.params["length"] * sum(inner)
        elif equation.primitive.name == "while":
            total += while_turns * sum(inner)
        elif equation.primitive.name == "cond":
            total += max(inner, default=0)
        else:
            total += sum(inner)
    return total


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _bodies(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, jex.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, jex.Jaxpr):
                yield part


@dataclasses.dataclass(frozen=True)
class Sketched:
    """A stage's task with batches of its longest bucket.

    Attributes:
      params: shapes of what the stage trains.
      trained: False where the optimiser's groups freeze a parameter.
    """

    sketch: Sketch
    params: Params
    trained: Params


def sketch_stage(plan: RunPlan, stage: Stage) -> Sketched:
    loop: LoopSettings = stage.loop
    assert stage.spec is not None  # of a training stage
    run = RunContext(WorkDir(Path("plan-of-a-run")), plan, stage.name)
    sketch = stage.spec.sketch(stage.settings, run, loop.batch_size, loop.buckets[-1])
    rng = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(sketch.task.init, rng, sketch.batch)
    return Sketched(sketch, params, trained_mask(loop.optimizer, params))


def optimizer_of(found: Sketched, loop: LoopSettings) -> optax.GradientTransformation:
    """As training makes it."""
    starts = first_updates(found.sketch.task, found.params, loop.updates_per_batch)
    return make_optimizer(loop.optimizer, found.params, loop.updates, starts=starts)


def trial_flops(found: Sketched) -> int:
    """Of what a task tries out before an update, if every answer becomes as long as it may; 0 where it tries nothing.

    What rates the answers is not counted.
    """
    sketch, rng = found.sketch, jax.eval_shape(lambda: jax.random.key(0))
    if isinstance(sketch.task, ReinforcedTask):
        work = sketch.task.rollout
    elif isinstance(sketch.task, OnlineTask):
        work = sketch.task.explore
    else:
        return 0
    given = sketch.batch if sketch.given is None else sketch.given
    return count_flops(work, found.params, sketch.frozen, given, rng, while_turns=sketch.answer_tokens)


def update_flops(found: Sketched) -> int:
    """Of one update on the whole batch, without what is tried out before it (`trial_flops`)."""

    def update(params: Any, frozen: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            kept = jax.tree.map(lambda p, t: p if t else jax.lax.stop_gradient(p), params, found.trained)
            return found.sketch.task.loss(kept, frozen, batch, jax.random.key(0), train=True)[0].total

        return jax.grad(loss)(params)

    return count_flops(update, found.params, found.sketch.frozen, found.sketch.batch)


def step_flops(found: Sketched, loop: LoopSettings) -> int:
    """Of all updates that are made from one batch."""
    return loop.epochs * update_flops(found)  # of an epoch, each update has its share of the rows
