"""`--mode=plan`: what a recipe would do and take, without allocating anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from empax.core.files import WorkDir
from empax.core.flops import count_flops
from empax.core.run import RunContext
from empax.core.tree import count_bytes, count_params
from empax.pipeline.run import make_stages
from empax.pipeline.train import Settings as TrainSettings
from empax.training.optimizer import make_optimizer, trained_mask


def describe(config: Mapping[str, Any]) -> str:
    """One line per stage; for a training stage its parameters, bytes per device, and FLOPs per step.

    Parameters are those that the stage trains: with adapters no more than they and the heads. Bytes are those of
    parameters, gradients and optimiser state on every device (they are replicated), of what is frozen beside them (the
    weights under adapters, in eight bits if they are kept so; a judge), and of the step's batch; activations come on
    top. FLOPs are those of one update on batches of the longest bucket, without what an online task explores before it.
    """
    lines = [f"system {config['system']}, data {config['data']['name']}, {jax.device_count()} device(s)"]
    for stage in make_stages(config):
        if stage.kind != "train":
            lines.append(f"{stage.name:<12} {stage.kind}")
            continue
        context = RunContext(WorkDir(Path("plan-of-a-run")), config, stage.name)
        lines.append(f"{stage.name:<12} {stage.kind}  {_describe_training(stage.settings, context)}")
    return "\n".join(lines)


def _describe_training(settings: TrainSettings, context: RunContext) -> str:
    loop = settings.loop
    sketch = settings.spec.sketch(settings.task, context, loop.batch_size, loop.buckets[-1])
    rng = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(sketch.task.init, rng, sketch.batch)
    trained = trained_mask(loop.optimizer, params)
    optimizer = jax.eval_shape(make_optimizer(loop.optimizer, params, loop.steps).init, params)

    def update(params: Any, frozen: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            kept = jax.tree.map(lambda p, t: p if t else jax.lax.stop_gradient(p), params, trained)
            return sketch.task.loss(kept, frozen, batch, jax.random.key(0))[0].total

        return jax.grad(loss)(params)

    bytes_fixed = 2 * count_bytes(params) + count_bytes(optimizer)
    flops = count_flops(update, params, sketch.frozen, sketch.batch)
    frozen = f"{count_bytes(sketch.frozen) / 1e6:.0f} MB frozen, " if sketch.frozen else ""
    return (
        f"{loop.steps} steps of {loop.batch_size}, {count_params(params) / 1e6:.2f} M parameters, "
        f"{bytes_fixed / 1e6:.0f} MB for parameters, gradients and optimiser, {frozen}"
        f"{count_bytes(sketch.batch) / 1e6:.2f} MB a batch, {flops / 1e9:.1f} GFLOPs an update"
    )
