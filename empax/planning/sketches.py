"""Sketches of training stages for plans: shapes, and floating-point operations counted from jaxprs.

Nothing is compiled or allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import partial_eval

from empax.core.files import WorkDir
from empax.core.machine import planned_for
from empax.core.protocols import OnlineTask, ReinforcedTask, untrained_by
from empax.core.system import RunContext, RunPlan, Sketch, Stage
from empax.core.types import Params
from empax.losses.real_tokens import PARTS
from empax.training.optimizer import trained_mask
from empax.training.settings import LoopSettings


def count_flops(function: Callable[..., Any], *args: Any, while_turns: int = 1) -> int:
    """Counts multiply-adds of all matrix products that the result needs, times two: the usual FLOPs of a model.

    A loop counts as often as it runs; a `while`, whose length is unknown, counts `while_turns` times. The products are
    those of a CPU's program: on a GPU, those of cuDNN's attention could not be seen, and there would be others in place
    of sums of rows.
    """
    with planned_for("cpu"):
        jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    # Gradient rules also produce unused values, such as products with a dropped cotangent.
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
      params: shapes of the trained parameters.
      trained: False where a parameter group of the optimizer or the task freezes the parameter.
    """

    sketch: Sketch
    params: Params
    trained: Params


def sketch_stage(plan: RunPlan, stage: Stage) -> Sketched:
    loop: LoopSettings = stage.loop
    assert stage.spec is not None  # true for a training stage
    run = RunContext(WorkDir(Path("plan-of-a-run")), plan, stage.name)
    sketch = stage.spec.sketch(stage.settings, run, loop.batch_size, loop.buckets[-1])
    rng = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(sketch.task.init, rng, sketch.batch)
    return Sketched(sketch, params, trained_mask(loop.optimizer, params, untrained_by(sketch.task)))


def trial_flops(found: Sketched) -> int:
    """Counts FLOPs of sampling before an update, with answers of maximum length; 0 for tasks without sampling.

    Rating the answers is not counted.
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
    """Counts FLOPs of one update on the whole batch, without sampling before it (`trial_flops`)."""

    def update(params: Any, frozen: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            kept = jax.tree.map(lambda p, t: p if t else jax.lax.stop_gradient(p), params, found.trained)
            return found.sketch.task.loss(kept, frozen, batch, jax.random.key(0), train=True)[0].total

        return jax.grad(loss)(params)

    # The loop of `over_real_tokens`, if every token is real.
    return count_flops(update, found.params, found.sketch.frozen, found.sketch.batch, while_turns=PARTS)


def step_flops(found: Sketched, loop: LoopSettings) -> int:
    """Counts FLOPs of all updates on one batch."""
    return loop.epochs * update_flops(found)  # in an epoch, each update has its share of the rows
