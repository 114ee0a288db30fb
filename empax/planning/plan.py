"""`--mode=plan`: describes a recipe's stages and their cost, without allocating anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from empax.core.config import ConfigError
from empax.core.sharding import AXES, LOGICAL, bytes_on_one, shard_params
from empax.core.system import RunPlan, Stage
from empax.core.tree import count_bytes, count_params
from empax.models.layers import logical_axes
from empax.pipeline.run import problems_of_plan
from empax.planning.sketches import sketch_stage, step_flops, trial_flops
from empax.training.programs import optimizer_for


def show(plan: RunPlan, workdir: Path, redo: Sequence[str] = ()) -> int:
    """Prints a plan and its problems, with those of stages to `redo`; returns the exit code, 2 if there are any."""
    problems = list(dict.fromkeys(map(str, problems_of_plan(plan, workdir, redo))))  # several stages may share one
    try:
        print(describe(plan))
    except ConfigError:
        if not problems:  # the problems state the same in terms of the settings
            raise
    print("".join(f"error: {problem}\n" for problem in problems), end="", file=sys.stderr)
    return 2 if problems else 0


def describe(plan: RunPlan) -> str:
    """Formats one line per stage; for a training stage with its parameters, bytes per device, and FLOPs per step.

    Parameters are the trained ones: with adapters only they and the heads. Bytes are those of parameters, gradients and
    optimizer state on one device, as `mesh` splits them, of the frozen parameters there (the weights under adapters, at
    their stored precision; a judge), and of the step's whole batch; activations come on top. FLOPs are those of one
    update on batches of the longest bucket, or of all updates of a reinforced task on one such batch; those of its
    sampling before the updates are listed separately.
    """
    if (topology := plan.options.plan.topology) == "gpu":
        from empax.planning.one_gpu import describe_gpu

        return describe_gpu(plan)
    if topology:
        from empax.planning.slices import describe_topology  # imported here: libtpu is rarely installed

        return describe_topology(plan, topology)
    lines = [f"system {plan.system.name}, data {plan.data.name}, {jax.device_count()} device(s)"]
    for stage in plan.stages.values():
        more = f"  {_describe_training(plan, stage)}" if stage.kind == "train" else ""
        lines.append(f"{stage.name:<12} {stage.kind}{more}")
    return "\n".join(lines)


def _describe_training(plan: RunPlan, stage: Stage) -> str:
    loop, found = stage.loop, sketch_stage(plan, stage)
    params, sketch = found.params, found.sketch
    optimizer = jax.eval_shape(optimizer_for(sketch.task, loop, params).init, params)
    settings = plan.options.mesh
    mesh = AbstractMesh((1, settings.fsdp, settings.tensor), AXES)  # its devices need not be here

    def held(tree: Any) -> int:
        logical = {**LOGICAL, **settings.logical}
        return bytes_on_one(tree, shard_params(tree, mesh, axes=logical_axes, logical=logical))

    bytes_fixed = 2 * held(params) + held(optimizer)
    trials = trial_flops(found)
    together, it = "an update", "it"
    if loop.updates_per_batch > 1:
        together, it = f"in {loop.updates_per_batch} updates", "them"
    before = f" and at most {trials / 1e9:.1f} of answers tried out before {it}" if trials else ""
    frozen = f"{held(sketch.frozen) / 1e6:.0f} MB frozen, " if sketch.frozen else ""
    flops = step_flops(found, loop) / 1e9
    steps, most = str(loop.steps), plan.data.passes
    if most:
        steps = f"at most {loop.steps} (and {most} passes over the rows)"
    return (
        f"{steps} steps of {loop.batch_size}, {count_params(params) / 1e6:.2f} M parameters, "
        f"{bytes_fixed / 1e6:.0f} MB for parameters, gradients and optimiser, {frozen}"
        f"{count_bytes(sketch.batch) / 1e6:.2f} MB a batch, {flops:.1f} GFLOPs {together}{before}"
    )
