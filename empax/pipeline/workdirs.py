"""Whose a work directory is, and what it may take over from another run's."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.files import WorkDir, read_json, read_jsonl, write_json, write_jsonl
from empax.core.run import RunOptions
from empax.pipeline.train import find_task

log = logging.getLogger("empax")

PLACE_ONLY = ("config.data.dir", "config.report.peers", *(f"config.{name}" for name in RunOptions.names()))
"""Settings that change no result, such as where things are: they may differ when a run goes on."""

_WITHOUT_CHANCE = ("prepare", "annotate", "assess")
"""Kinds of stage that draw nothing at random."""


def claim(files: WorkDir, config: Mapping[str, Any], reuse: Path | None = None) -> None:
    """Writes config.json and run.json, or checks that this work directory is of the same config.

    Args:
      files: the work directory.
      config: plain.
      reuse: whose finished stages a new work directory begins with; None = nobody's.

    Raises:
      ConfigError: another config made it, or `reuse` has nothing for it.
    """
    if not distributed.is_writer():
        distributed.wait_for(files.config)
    if not files.config.exists():
        run = describe_run(config)
        if reuse is not None:  # before config.json, which other processes wait for
            run["reused"] = take_stages(WorkDir(reuse), files, config)
        write_json(files.run, run)
        write_json(files.config, config)
        return
    old = read_json(files.config)
    found = [f"{path}: {was!r} there, {now!r} here" for path, was, now in differences(old, config)]
    if found:
        raise ConfigError(
            f"{files.root} was made by another config ({'; '.join(found[:5])}). "
            "Choose another --workdir, or delete it to start over."
        )


def take_stages(other: WorkDir, files: WorkDir, config: Mapping[str, Any]) -> dict[str, Any]:
    """Begins the new work directory `files` with what `other` has finished of the same run: ablations share beginnings.

    Those are the stages up to the first that has another name, other settings or is not finished there, if the data are
    the same. What a training stage does not read of the system's section may differ (`TaskSpec.unread`), and the system
    too where both have the task: so REG and EmpRL begin with one fine-tuning. With another seed they end before the
    first that draws by it: judges with a seed of their own are trained once for all seeds. Judges on a pretrained
    encoder build on no other stage, and are taken behind such an end too. Evaluations and reports are made anew.

    Returns:
      `stages`, and the `commit` that the other run began with: for run.json.

    Raises:
      ConfigError: `other` is no work directory, or has nothing in common with a run of `config`.
    """
    if not other.config.is_file():
        raise ConfigError(f"--reuse={other.root}: there is no run in it; give the work directory of one.")
    old = read_json(other.config)
    taken: list[str] = []
    shared = end = _first_difference(old, config, ("data",))
    for place, name in enumerate(config["run"]):
        section, theirs = config[name], old["run"][place] if place < len(old["run"]) else "nothing"
        if section["kind"] in ("evaluate", "report"):
            break
        alone = _stands_alone(section)
        obstacle = shared if alone else end
        if not obstacle and theirs != name and not alone:
            obstacle = f"config.run: {theirs!r} there, {name!r} here"
        drawn = section["kind"] not in _WITHOUT_CHANCE
        read = [name, *(["seed"] if drawn and "seed" not in section else [])]
        obstacle = obstacle or _first_difference(old, config, read)
        if drawn and not alone:
            obstacle = obstacle or _other_models(old, config, section)
        if not obstacle and not other.done(name).exists():
            obstacle = f"{name} is not finished there"
        if obstacle:
            end = end or obstacle
        else:
            taken.append(name)
    if not taken:
        raise ConfigError(f"--reuse={other.root}: no stage of that run can be used ({end}); leave it out.")
    for name in taken:
        _link(other.stage(name), files.stage(name))
        _link(other.tensorboard(name), files.tensorboard(name))
    if other.metrics.exists():
        write_jsonl(files.metrics, (row for row in read_jsonl(other.metrics) if row["stage"] in taken))
    log.info("taken from %s: %s%s", other.root, ", ".join(taken), f" (then {end})" if end else "")
    return {"stages": taken, "commit": read_json(other.run).get("commit", "")}


def _stands_alone(section: Mapping[str, Any]) -> bool:
    """Whether a stage reads nothing but its own section and the data: a judge that brings its encoder and tokenizer."""
    return section.get("task", "").startswith("attributes.") and bool(section.get("encoder", {}).get("pretrained"))


def _other_models(old: Mapping[str, Any], new: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    """What differs in what a stage reads of the system and of its section; `section` is the stage's own in both."""
    was, now = old["system"], new["system"]
    unread: tuple[str, ...] = ()
    tasks = [find_task(section["task"], system, "config") for system in (was, now)] if "task" in section else []
    if tasks and tasks[0] is tasks[1]:
        unread = tasks[0].unread
    elif was != now:
        return f"config.system: {was!r} there, {now!r} here"
    before, after = ({k: v for k, v in config[config["system"]].items() if k not in unread} for config in (old, new))
    return _first_difference({now: before}, {now: after}, [now])


def _first_difference(old: Mapping[str, Any], new: Mapping[str, Any], sections: Sequence[str]) -> str:
    before, now = ({name: config.get(name) for name in sections} for config in (old, new))
    return next((f"{path}: {one!r} there, {other!r} here" for path, one, other in differences(before, now)), "")


def _link(source: Path, target: Path) -> None:
    """Hard links where the file system has them: nobody changes the files of a finished stage."""
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


def differences(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    """What differs between two configs but PLACE_ONLY: path ("config.a.b"), value in the first, in the second."""
    if ".".join(("config", *path)) in PLACE_ONLY:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), (*path, key))
    elif old != new:
        yield ".".join(("config", *path)), old, new


def describe_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, commit, seed and devices."""
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
        "commit": _commit(),
        "seed": config["seed"],
        "devices": [f"{device.platform} {device.device_kind}" for device in jax.devices()],
        "command": " ".join(["python -m empax.main", *sys.argv[1:]]),
    }


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""  # not a checkout
