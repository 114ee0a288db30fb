"""Ownership of a work directory, reuse of stages from another run, and removal of stages to redo."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import DataError, WorkDir, metric_rows, read_json, write_text
from empax.core.inputs import Inputs
from empax.core.lock import holder
from empax.core.manifest import ROOT_FILES, is_known, read_config, read_done, read_sealed, verify_stage, write_config
from empax.core.system import RunPlan
from empax.pipeline.code import commit
from empax.pipeline.plan import read_plan
from empax.pipeline.records import (
    check_origins,
    difference,
    differences,
    has_begun,
    record_anew,
    recorded,
    recorded_inputs,
    settings_hash,
)

log = logging.getLogger("empax")

AllInputs = Mapping[str, Inputs]
"""Stage → its inputs from outside the work directory."""


def claim(
    files: WorkDir,
    plan: RunPlan,
    reuse: Path | None = None,
    redo: Sequence[str] = (),
    *,
    inputs: AllInputs = MappingProxyType({}),
    command: str = "",
) -> None:
    """Writes config.json and run.json, or checks that this work directory has the same config.

    Another config is accepted if it differs only in sections of stages that have not begun, or that it leaves out at
    the end; with `redo`, in anything that no kept stage reads. A missing or damaged config.json is rewritten if all
    stages were made with the same settings.

    Args:
      files: the work directory; this process holds its lock.
      plan: plan of the run.
      reuse: run whose finished stages a new work directory starts with; None = no run.
      redo: stages to redo, with all stages after the first of them.
      inputs: current inputs of the stages.
      command: a command line for this run, for run.json; empty = none.

    Raises:
      ConfigError: the directory comes from another config or from other files than `inputs`; `reuse` has no usable
        stage; or `redo` names no stage.
      DataError: there are stages to redo, and a kept stage was made with other settings.
    """
    order = list(plan.stages)
    if unknown := [name for name in redo if name not in order]:
        raise ConfigError(f"--redo={unknown[0]}: no such stage; config.run has {', '.join(order)}.")
    first = min((order.index(name) for name in redo), default=len(order))
    old = _known_plan(files)
    if old is not None:
        kept = _check_same(files, old, plan, inputs, order[:first])
    else:
        kept = _check_recorded(files, plan, order[:first])
    _check_inputs(files, plan, inputs, kept)
    unwanted = [name for name in order if files.stage(name).is_dir() and name not in kept]
    if unwanted:  # a run that is rejected below removes nothing
        check_origins(files, [plan.stages[name] for name in kept])
    _forget(files, unwanted)
    run = _description(files)
    redone = any(plan.stages[name].kind != "report" for name in order[first:])  # a report describes what made the rest
    if old is not None and run and files.checksums.is_file() and old.config == plan.config and not redone:
        return
    if not run and old is not None:
        log.warning("%s was damaged; it now describes this process.", files.provenance)
    if not run:
        run = describe_run(plan, command)
    elif old is not None and (redone or any(differences(old.config, plan.config))):
        run = {**describe_run(plan, command), **_still_reused(run, kept), "earlier": [*run.pop("earlier", []), run]}
    if old is None and reuse is not None:  # before config.json, which marks the work directory as used
        run["reused"] = take_stages(WorkDir(reuse), files, plan, inputs)
    write_config(files, plan.config, run)


def _still_reused(run: Mapping[str, Any], kept: Sequence[str]) -> dict[str, Any]:
    """Returns the `reused` of a description with the stages in `kept` alone; empty without any."""
    reused = run.get("reused", {})
    stages = [name for name in reused.get("stages", []) if name in kept]
    return {"reused": {**reused, "stages": stages}} if stages else {}


def _known_plan(files: WorkDir) -> RunPlan | None:
    """Returns the plan of config.json; None if it is missing or damaged. Without CHECKSUMS, being readable suffices."""
    if files.checksums.is_file() and not is_known(files, files.config):
        return None
    try:
        return read_plan(files)
    except (FileNotFoundError, DataError):
        return None


def _description(files: WorkDir) -> dict[str, Any]:
    """Reads run.json; empty if it is known to be damaged."""
    with contextlib.suppress(FileNotFoundError, DataError):
        if "run.json" in read_sealed(files.checksums) and not is_known(files, files.provenance):
            return {}
    with contextlib.suppress(FileNotFoundError, DataError):
        if isinstance(found := read_json(files.provenance), dict):
            return found
    return {}


def check_same(files: WorkDir, plan: RunPlan) -> None:
    """Raises ConfigError unless the work directory, which another process has claimed, has the same config."""
    if found := list(differences(read_config(files), plan.config)):
        path, was, now = found[0]
        raise ConfigError(
            f"{path}: {was!r} in the first process, {now!r} in this one; give all processes the same command."
        )


def check_resumable(files: WorkDir, plan: RunPlan, inputs: AllInputs) -> None:
    """Raises ConfigError if the work directory comes from another config or from other files; writes nothing."""
    if (old := _known_plan(files)) is not None:
        _check_inputs(files, plan, inputs, _check_same(files, old, plan, inputs, list(plan.stages)))


def _check_same(files: WorkDir, old: RunPlan, plan: RunPlan, inputs: AllInputs, wanted: Sequence[str]) -> list[str]:
    """Returns the stages among `wanted` to keep; raises ConfigError if another config made one of them."""
    found = list(differences(old.config, plan.config))
    same = [
        name == other and settings_hash(old.stages[name]) == settings_hash(plan.stages[name])
        for name, other in itertools.zip_longest(wanted, list(old.stages)[: len(wanted)])
    ]
    place = same.index(False) if False in same else len(wanted)
    changed = {path.split(".")[1] for path, _, _ in found}
    left_out = {"run", *old.stages} - set(plan.stages)
    if place == len(wanted) and (place < len(plan.stages) or changed <= left_out):
        return list(wanted)  # stages that differ are redone or not run at all
    if changed <= {name for name in wanted[place:] if not has_begun(files, name)}:
        return [name for name in wanted if name not in changed]
    shown = "; ".join(difference(*one) for one in found[:5])
    redo = wanted[place] if place < len(wanted) else next(iter(plan.stages))
    raise ConfigError(
        f"{files.root} was made with another config ({shown}). Choose another "
        f"--workdir{_with_reuse(files, plan, inputs)}; or add --redo={redo} to redo that stage and all later ones here."
    )


def _with_reuse(files: WorkDir, plan: RunPlan, inputs: AllInputs) -> str:
    """Describes the stages that another work directory could reuse, as the end of a message."""
    try:
        common = alike(files, plan, inputs)[0]
    except DataError:
        common = []
    return f", with --reuse={files.root} to start with its {', '.join(common)}" if common else ""


def _check_inputs(files: WorkDir, plan: RunPlan, inputs: AllInputs, kept: Sequence[str]) -> None:
    """Raises ConfigError if a kept stage was made from other files than the current ones."""
    for name in (name for name in kept if has_begun(files, name)):
        recorded, now = recorded_inputs(files, name), inputs.get(name, {})
        if differs := other_input(recorded, now):
            raise ConfigError(
                f"{files.stage(name)} was made from other files: {differs}. Name the original files (config.data.dir, "
                f"or a path in config.{name} or {plan.system.name}'s section), or choose another "
                f"--workdir{_with_reuse(files, plan, inputs)}; or add --redo={name} to redo that stage and all later "
                "ones here."
            )
        for what, one in recorded.items():
            if what not in now:
                log.warning("%s: %s (%s) no longer exists, so it was not compared.", name, what, one.path)


def made_from_others(files: WorkDir, plan: RunPlan, inputs: AllInputs) -> bool:
    """Whether a stage of the work directory was made from other files than `inputs`, according to its record."""
    return any(other_input(recorded_inputs(files, name), inputs.get(name, {})) for name in plan.stages)


def other_input(recorded: Inputs, now: Inputs) -> str:
    """Describes the first input that has changed; empty without one."""
    pairs = ((what, one.difference(now[what])) for what, one in recorded.items() if what in now)
    return next((f"{what}: {words}" for what, words in pairs if words), "")


def _check_recorded(files: WorkDir, plan: RunPlan, wanted: Sequence[str]) -> list[str]:
    """Does the same without a trusted config.json, by the settings that each stage has recorded."""
    begun = [name for name in wanted if has_begun(files, name)]
    for name in begun:
        try:
            agrees = recorded(files, name)["settings"] == settings_hash(plan.stages[name])
            reason = "was made with other settings than this command's"
        except DataError as error:
            agrees, reason = False, f"does not record its settings ({error})"
        if not agrees:
            try:
                command = f" ({read_json(files.provenance)['command']})"
            except (OSError, DataError, TypeError, KeyError):
                command = ""
            raise ConfigError(
                f"{files.config} is gone or damaged, and {files.stage(name)} {reason}. Give the command that began "
                f"this run{command}, choose another --workdir, or add --redo={wanted[0]} to redo everything here."
            )
    if begun:
        log.warning(
            "%s or its checksum was missing or damaged. It is rewritten; these stages have the same settings: %s.",
            files.config, ", ".join(begun),
        )  # fmt: skip
    return list(wanted)


def _forget(files: WorkDir, names: Sequence[str]) -> None:
    """Removes the output of stages, last one first, so that the rest is consistent after an interruption."""
    for leftover in (path for path in files.root.glob(".*.redone") if path.is_dir()):
        shutil.rmtree(leftover, ignore_errors=True)
    for name in reversed(names):
        _forget_root_files(files, name)
        shutil.rmtree(files.tensorboard(name), ignore_errors=True)
        aside = files.root / f".{name}.redone"
        os.rename(files.stage(name), aside)  # at once: a stage without DONE would resume from its checkpoints
        shutil.rmtree(aside)
    if names and files.metrics.is_file():
        kept = (line for line, row in metric_rows(files.metrics) if row["stage"] not in names)
        write_text(files.metrics, "".join(f"{line}\n" for line in kept))
    if names:
        log.info("to be redone: %s", ", ".join(names))


def _forget_root_files(files: WorkDir, name: str) -> None:
    """Removes a finished stage's files in the work directory itself: predictions, or a report."""
    try:
        made = read_done(files.stage(name))["files"]
    except (OSError, DataError):
        return
    for made_name in set(made) & set(ROOT_FILES):
        (files.root / made_name).unlink(missing_ok=True)


def take_stages(other: WorkDir, files: WorkDir, plan: RunPlan, inputs: AllInputs) -> dict[str, Any]:
    """Starts the new work directory `files` with finished stages of `other`, so that ablations share common stages.

    It takes the stages up to the first that differs in name, settings or contents of its inputs, or that is not
    finished there. Settings of the system's section that a training stage does not read may differ (`TaskSpec.unread`),
    and so may the system if both have the task: thus REG and EmpRL share one fine-tuning. With another seed, it stops
    before the first stage that depends on it: judges with their own seed are trained once for all seeds. Judges on a
    pretrained encoder depend on no other stage, so they are also taken after the stop. Evaluations and reports are
    always redone.

    Returns:
      `stages`, and the `commit` of the other run: for run.json.

    Raises:
      ConfigError: `other` is not a work directory, or shares no stage with a run of `plan`.
      DataError: a file of `other` is damaged.
    """
    if not other.config.is_file():
        raise ConfigError(f"--reuse={other.root} holds no run to reuse; give the work directory of one.")
    taken, end = alike(other, plan, inputs)
    if not taken:
        raise ConfigError(f"--reuse={other.root}: no stage of that run can be reused ({end}); leave it out.")
    for name in taken:
        verify_stage(other.stage(name))
        _link(other.stage(name), files.stage(name))
        _link(other.tensorboard(name), files.tensorboard(name))
    record_anew(files, [plan.stages[name] for name in taken])
    copies = [files.stage(name) / "metrics.jsonl" for name in taken]
    if rows := "".join(path.read_text(encoding="utf-8") for path in copies if path.is_file()):
        write_text(files.metrics, rows)
    log.info("taken from %s: %s%s", other.root, ", ".join(taken), f" (then {end})" if end else "")
    _check_inputs(files, plan, inputs, taken)  # warns of inputs that no longer exist
    return {"stages": taken, "commit": _description(other).get("commit", "")}


def alike(other: WorkDir, plan: RunPlan, inputs: AllInputs) -> tuple[list[str], str]:
    """Returns the finished stages of `other` that a run of `plan` can reuse, and the reason against the first other."""
    old = read_plan(other)
    taken: list[str] = []
    there, here = ({"data": next(iter(one.stages.values())).reads["data"]} for one in (old, plan))
    found = differences(there, here)
    shared = end = next((difference(*one) for one in found), "")
    theirs_in_order = [*old.stages, *["nothing"] * len(plan.stages)]
    for (name, stage), theirs in zip(plan.stages.items(), theirs_in_order, strict=False):
        if stage.kind in ("evaluate", "swaps", "report"):
            break
        obstacle = shared if stage.alone else end
        if theirs != name and not stage.alone:
            obstacle = obstacle or f"config.run: {theirs!r} there, {name!r} here"
        obstacle = obstacle or _obstacle(other, old, plan, name, inputs.get(name, {}))
        end = end or obstacle
        if not obstacle:
            taken.append(name)
    return taken, end


def _obstacle(other: WorkDir, old: RunPlan, new: RunPlan, name: str, now: Inputs) -> str:
    """Returns why the stage `name` of `other` is not one of the plan `new`; empty if it is."""
    if name not in old.stages:
        return f"config.{name} exists only here"
    for path, one, two in differences(old.stages[name].reads, new.stages[name].reads):
        return difference(path.replace("config.system", f"config.{new.system.name}", 1), one, two)
    if not other.done(name).exists():
        running = holder(other)
        return f"{name} is not finished there" + (f", {running} is still running it" if running else "")
    differs = other_input(recorded_inputs(other, name), now)
    return f"its {name} was made from other files: {differs}" if differs else ""


def _link(source: Path, target: Path) -> None:
    """Copies a folder with hard links if the file system has them: files of a finished stage never change."""
    if target.exists() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, copy_function=_link_file)
    unfinished.rename(target)


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def describe_run(plan: RunPlan, command: str) -> dict[str, Any]:
    """Returns versions, commit, seed, devices and `command`."""
    import jax

    packages = ("empax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "scann", "tokenizers")
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "commit": commit(),
        "seed": plan.seed,
        "deterministic": plan.options.deterministic,
        "devices": [f"{device.platform} {device.device_kind}" for device in jax.devices()],
        "command": command,
    }
