"""Parses a config: every section as settings, and for each stage the settings that it reads and its code."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from empax.core.config import LARGEST_INT, ConfigError, check_keys, split_keys, to_settings
from empax.core.files import WorkDir
from empax.core.manifest import read_config
from empax.core.settings import DataSettings, RunOptions
from empax.core.system import RunPlan, Stage, System, find_task, load_system, module_of
from empax.pipeline.code import has_source
from empax.training.settings import LoopSettings

_HERE = ("prepare", "annotate", "knowledge", "train", "assess", "index", "evaluate", "swaps")
KINDS = {
    **{kind: f"empax.pipeline.{kind}" for kind in _HERE},
    "report": "empax.reporting.report",  # as text, since reporting is built on this package
}
"""Values of a section's `kind` → the module, with `Settings`, `check(settings, run)` and `run(settings, run)`."""

BY_SYSTEM = ("train", "index", "evaluate", "swaps")
"""Kinds of stages that use modules of a system."""

_WITHOUT_CHANCE = ("prepare", "annotate", "knowledge", "assess")
"""Kinds of stages without randomness."""

_FUNCTION = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
_OWN_KEYS = ("system", "seed", "run", "data")


def plain(value: Any) -> Any:
    """Converts a ConfigDict to dicts, lists and numbers, with references resolved, as in JSON."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def with_kinds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the `kind` to stages that omit it and are named after one."""
    found = {name: section for name, section in config.items() if name in KINDS and isinstance(section, Mapping)}
    return {**config, **{name: {"kind": name, **section} for name, section in found.items()}}


def make_plan(config: Mapping[str, Any]) -> RunPlan:
    """Checks the whole config and converts every section to settings, before any work starts.

    Raises:
      ConfigError: the config is invalid; the message names the path, the value found and the values allowed.
    """
    config = with_kinds(config)
    if missing := [key for key in _OWN_KEYS if key not in config]:
        raise ConfigError(f"the config lacks {', '.join(missing)}.")
    if type(config["seed"]) is not int:
        raise ConfigError(f"config.seed = {config['seed']!r} must be int.")
    if not 0 <= config["seed"] <= LARGEST_INT:
        raise ConfigError(f"config.seed = {config['seed']} must lie in [0, {LARGEST_INT}].")
    _check_names(config["run"])
    options = RunOptions.of(config)
    system = load_system(config["system"])
    check_keys(config, [*_OWN_KEYS, *RunOptions.names(), system.name, *config["run"]], where="config", owner="the run")
    if system.name not in config:
        raise ConfigError(f"the config lacks its section config.{system.name}.")
    return RunPlan(
        config=config,
        system=system,
        system_settings=to_settings(system.settings, config[system.name], where=f"config.{system.name}"),
        data=to_settings(DataSettings, config["data"], where="config.data"),
        options=options,
        stages={name: _make_stage(name, config, system) for name in config["run"]},
        seed=config["seed"],
        package=module_of(config["system"]),
    )


def read_plan(files: WorkDir) -> RunPlan:
    """Returns the plan of the run in a work directory.

    Raises:
      DataError: config.json is damaged.
      ConfigError: the config does not fit this version.
    """
    config = read_config(files)
    try:
        return make_plan(config)
    except ConfigError as error:
        raise ConfigError(
            f"{files.config} does not fit this version of empax: {error} Use the version that made it "
            f"({files.provenance} names its commit), or choose another --workdir."
        ) from error


def changed_plan(plan: RunPlan, changes: Mapping[str, Mapping[str, Any]], gone: Collection[str]) -> RunPlan:
    """Returns the plan with changed settings of some stages, and without the stages in `gone`.

    A setting of None is removed from its section.
    """
    config = {name: section for name, section in plan.config.items() if name not in gone}
    for name, values in changes.items():
        config[name] = {key: value for key, value in {**config[name], **values}.items() if value is not None}
    return make_plan({**config, "run": [name for name in config["run"] if name not in gone]})


def _check_names(names: Any) -> None:
    words = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not words or not names or len(set(names)) < len(names):
        raise ConfigError(f"config.run = {names!r} must list names of stages, each once.")


def _make_stage(name: str, config: Mapping[str, Any], system: System) -> Stage:
    where = f"config.{name}"
    if name not in config:
        raise ConfigError(f"config.run names {name!r}, but there is no {where}.")
    section = config[name]
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where} = {section!r} must be a section of settings.")
    if "kind" not in section:
        raise ConfigError(f"{where} lacks kind; it must be one of {', '.join(KINDS)}.")
    kind = section["kind"]
    if kind not in list(KINDS):  # it may have any type
        raise ConfigError(f"{where}.kind = {kind!r} must be one of {', '.join(KINDS)}.")
    own = {key: value for key, value in section.items() if key != "kind"}
    module = importlib.import_module(KINDS[kind])
    if kind == "train":
        stage, owner = _training_stage(name, own, config["system"])
    else:
        stage, owner = Stage(name, kind, to_settings(module.Settings, own, where=where)), config["system"]
    modules = [module.__name__, *_modules_of_users(section), *([module_of(owner)] if kind in BY_SYSTEM else [])]
    return dataclasses.replace(stage, reads=_reads(stage, config, system), modules=modules)


def _training_stage(name: str, section: Mapping[str, Any], system: str) -> tuple[Stage, str]:
    """Splits one flat section between the loop and its task; also returns the name of the task's system.

    Raises:
      ConfigError: the task does not exist, or neither it nor the loop has a setting.
    """
    where = f"config.{name}"
    if "task" not in section:
        raise ConfigError(f"{where} lacks task, the name of what to train.")
    owner, task = find_task(section["task"], system, where)
    spec = owner.tasks[task]
    rest = {key: value for key, value in section.items() if key != "task"}
    loop, own = split_keys(rest, LoopSettings, spec.settings, where=where)
    made, settings = to_settings(LoopSettings, loop, where=where), to_settings(spec.settings, own, where=where)
    alone = spec.alone is not None and spec.alone(settings)
    stage = Stage(name, "train", settings, f"{owner.name}.{task}", spec, made, section.get("seed"), alone=alone)
    return stage, section["task"].rpartition(".")[0] or system


def _reads(stage: Stage, config: Mapping[str, Any], system: System) -> dict[str, Any]:
    """Returns the settings that a stage reads from a config, the same for two systems that share a task.

    Settings that a task or an index does not use are omitted.
    """
    read: dict[str, Any] = {"data": config["data"], stage.name: config[stage.name]}
    if stage.kind in _WITHOUT_CHANCE:
        return read
    if stage.seed is None:
        read["seed"] = config["seed"]
    if stage.alone:
        return read
    owner, unread = config["system"], system.index_unread if stage.kind == "index" else ()
    if stage.spec is not None:
        build, unread = stage.spec.build, stage.spec.unread
        owner = f"{build.__module__}.{build.__qualname__}"
    shared = {key: value for key, value in config[system.name].items() if key not in unread}
    return {**read, "task": owner, "system": shared}


def _modules_of_users(value: Any) -> list[str]:
    """Lists the modules of functions that settings name as "module:name": rewards, losses, metrics."""
    if isinstance(value, Mapping):
        return [module for inner in value.values() for module in _modules_of_users(inner)]
    if isinstance(value, (list, tuple)):
        return [module for inner in value for module in _modules_of_users(inner)]
    found = _FUNCTION.fullmatch(value) if isinstance(value, str) else None
    return [found[1]] if found and has_source(found[1]) else []
