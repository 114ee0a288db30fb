"""Plans of a part of a config, for tests that need no more of a run."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir, read_json
from empax.core.settings import DataSettings, RunOptions
from empax.core.system import RunContext, RunPlan, Stage, System, load_system
from empax.pipeline import plan


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with "a.b" set as `changes` say, or removed where that is `...`; stages that nobody runs go."""
    made = copy.deepcopy(dict(config))
    for path, value in changes.items():
        *sections, name = path.split(".")
        node = functools.reduce(lambda node, part: node.setdefault(part, {}), sections, made)
        if value is ...:
            del node[name]
        else:
            node[name] = value
    idle = [name for name, one in made.items() if isinstance(one, dict) and "kind" in one and name not in made["run"]]
    return {name: value for name, value in made.items() if name not in idle}


def plan_of(config: Mapping[str, Any]) -> RunPlan:
    """As `make_plan`, but what `config` lacks is left out, and a stage that cannot be parsed has no settings."""
    system = load_system(config["system"]) if "system" in config else System("none", object, {})
    shared = to_settings(system.settings, config.get(system.name, {}), where="config") if "system" in config else None
    names = config.get(
        "run", [name for name, section in config.items() if isinstance(section, dict) and "kind" in section]
    )
    stages = {name: _stage(name, config, system) for name in names}
    return RunPlan(
        config,
        system,
        shared,
        to_settings(DataSettings, config.get("data", {}), where="config.data"),
        RunOptions.of(config),
        stages,
        config.get("seed", 0),
    )


def context_of(workdir: Path, stage: str = "evaluate") -> RunContext:
    """A stage of the run in a work directory."""
    return RunContext(WorkDir(workdir), plan.make_plan(read_json(workdir / "config.json")), stage)


def run_by_files(config: Mapping[str, Any]) -> RunPlan:
    """The plan of `config`, whose stages a small module runs, so that there is little code to compare."""
    made = plan.make_plan(config)
    stages = {name: dataclasses.replace(one, modules=("empax.core.files",)) for name, one in made.stages.items()}
    return dataclasses.replace(made, stages=stages)


def _stage(name: str, config: Mapping[str, Any], system: System) -> Stage:
    try:
        whole = {"seed": 0, "data": {}, "system": "none", system.name: {}, **config}
        return plan._make_stage(name, whole, system)
    except (ConfigError, KeyError):
        section = config.get(name, {})
        return Stage(name, section.get("kind", ""), None, seed=section.get("seed"))
