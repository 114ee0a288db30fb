"""Training stages: train a task of the run's system, or of another one, with the common loop."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from empax.core.config import ConfigError
from empax.core.protocols import ReinforcedTask
from empax.core.sharding import LOGICAL, make_mesh
from empax.core.system import RunContext, TaskSpec
from empax.core.tree import hash_tree
from empax.data.exemplars import warn_of_cut
from empax.training.loop import LoopSettings, fit
from empax.training.settings import check_whole_batches, within_passes
from empax.training.sinks import check_sinks

log = logging.getLogger("empax")


def spec_of(run: RunContext) -> tuple[TaskSpec[Any], LoopSettings]:
    """Returns the task's `TaskSpec` and the loop settings of the stage."""
    stage = run.named(run.stage)
    assert stage.spec is not None  # true for a training stage
    return stage.spec, stage.loop


def check(settings: Any, run: RunContext) -> None:
    """Checks the task's settings (see `TaskSpec`) and those of the loop, before any work.

    Raises:
      ConfigError: the task refuses its settings, or those of the loop do not fit it: whole batches, updates per batch,
        refreshing. `--mode=plan` also checks the parameter groups, which takes seconds.
    """
    spec, loop = spec_of(run)
    where = f"config.{run.stage}"
    check_sinks(run.plan.options.sinks)
    spec.check(settings, run)
    if loop.refresh_every_steps and not spec.refreshes:
        raise ConfigError(
            f"{where}.refresh_every_steps = {loop.refresh_every_steps}, but this task has nothing to refresh; set it "
            "to 0."
        )
    if loop.accumulate == loop.updates_per_batch == 1:
        return
    task = spec.sketch(settings, run, loop.batch_size, loop.buckets[-1]).task
    check_whole_batches(loop, task, where=where)
    if loop.updates_per_batch > 1 and not isinstance(task, ReinforcedTask):
        raise ConfigError(
            f"{where}: epochs = {loop.epochs} and minibatches = {loop.minibatches} repeat the updates of a batch of "
            "answers, but this task generates none; set both to 1, and set the passes over the data with steps."
        )


def _of_own_size(loop: LoopSettings, num_examples: int, run: RunContext) -> LoopSettings:
    """Returns the recipe's steps, or fewer for a small corpus of the user; logs this, and rows that are never read."""
    most = run.plan.data.passes
    fewer = within_passes(loop, num_examples, most)
    if fewer.steps < loop.steps:
        log.warning(
            "%s: %d steps would pass %.0f times over %d rows; reduced to %d steps, %d passes, with warm-up and "
            "evaluations earlier in proportion. --config.data.most_passes=0 keeps the recipe's steps.",
            run.stage, loop.steps, loop.steps / -(-num_examples // loop.batch_size), num_examples, fewer.steps, most,
        )  # fmt: skip
    if most and (read := loop.steps * loop.batch_size) < num_examples:
        log.info(
            "%s: %d steps read %d of %d rows; --config.%s.steps=%d reads all of them once.",
            run.stage, loop.steps, read, num_examples, run.stage, -(-num_examples // loop.batch_size),
        )  # fmt: skip
    return fewer


def run(settings: Any, run: RunContext) -> dict[str, Any]:
    """Trains; returns metrics for `DONE`."""
    spec, loop = spec_of(run)
    assembly, options = spec.build(settings, run), run.plan.options
    loop = _of_own_size(loop, len(assembly.train), run)
    if run.plan.data.name == "jsonl":
        warn_of_cut(assembly.train, run.stage)
    result = fit(
        assembly,
        settings=dataclasses.replace(loop, seed=run.seed),
        directory=run.directory,
        mesh=make_mesh(options.mesh),
        logical={**LOGICAL, **options.mesh.logical},
        profile=run.directory / "profile" if options.profile else None,
        sinks=options.sinks,
    )
    kept = f"step {result.best_step}"
    if result.best_value is not None:
        kept += f" ({loop.best_metric} {result.best_value:.4g})"
    log.info("%s: %d steps, %.4g examples/s; kept %s", run.stage, result.step, result.examples_per_second, kept)
    return {
        "step": result.step,
        "best_step": result.best_step,
        "best_value": result.best_value,
        "examples_per_second": result.examples_per_second,
        "result": hash_tree(result.params),
    }
