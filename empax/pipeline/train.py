"""A training stage: a task of the system (or of another one) through the one loop."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Mapping
from typing import Any

from empax.core.config import ConfigError, split_keys, to_settings
from empax.core.run import RunContext, RunOptions, TaskSpec
from empax.core.sharding import LOGICAL, make_mesh
from empax.core.tree import hash_tree
from empax.training.loop import LoopSettings, fit

log = logging.getLogger("empax")


@dataclasses.dataclass(frozen=True)
class TaskName:
    """`kind` is "train"; `task` is "SYSTEM.TASK", or a task of the run's own system."""

    task: str
    kind: str = "train"


@dataclasses.dataclass(frozen=True)
class Settings:
    name: TaskName
    loop: LoopSettings
    spec: TaskSpec
    task: Any


def make_settings(section: Mapping[str, Any], system: str, where: str) -> Settings:
    """Deals one flat section out to the loop and to the task that it names."""
    if "task" not in section:
        raise ConfigError(f"{where} lacks task, the name of what to train.")
    spec = find_task(section["task"], system, where)
    name, loop, task = split_keys(section, TaskName, LoopSettings, spec.settings, where=where)
    return Settings(
        to_settings(TaskName, name, where=where),
        to_settings(LoopSettings, loop, where=where),
        spec,
        to_settings(spec.settings, task, where=where),
    )


def find_task(name: str, system: str, where: str) -> TaskSpec:
    owner, _, task = name.rpartition(".")
    tasks = load_system(owner or system).TASKS
    if task not in tasks:
        raise ConfigError(f"{where}.task = {name!r} is unknown; {owner or system} has {', '.join(tasks)}.")
    return tasks[task]


def load_system(name: str) -> Any:
    """The module `empax.systems.NAME`."""
    try:
        return importlib.import_module(f"empax.systems.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"empax.systems.{name}":
            raise
        raise ConfigError(f"config.system = {name!r} is no module of empax/systems.") from error


def check(settings: Settings, context: RunContext) -> None:
    """What the task knows to be wrong before any work; see TaskSpec."""
    settings.spec.check(settings.task, context)


def run(settings: Settings, context: RunContext) -> dict[str, Any]:
    """Trains; returns what `DONE` says of it."""
    assembly = settings.spec.build(settings.task, context)
    options = RunOptions.of(context.config)
    result = fit(
        assembly.task,
        train=assembly.train,
        validation=assembly.validation,
        settings=dataclasses.replace(settings.loop, seed=context.seed),
        frozen=assembly.frozen,
        directory=context.directory,
        metrics_path=context.files.metrics,
        stage=context.stage,
        initial=assembly.initial,
        on_refresh=assembly.on_refresh,
        on_end=assembly.on_end,
        mesh=make_mesh(options.mesh),
        logical={**LOGICAL, **options.mesh.logical},
        profile=context.directory / "profile" if options.profile else None,
    )
    log.info(
        "%s: %d steps, %.1f examples/s, best %s = %s at step %d",
        context.stage, result.step, result.examples_per_second, settings.loop.best_metric, result.best_value,
        result.best_step,
    )  # fmt: skip
    return {
        "step": result.step,
        "best_step": result.best_step,
        "best_value": result.best_value,
        "examples_per_second": result.examples_per_second,
        "result": hash_tree(result.params),
    }
