"""A run: its stages in order, each once; run again, it goes on where it stopped."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from empax.core import distributed
from empax.core.config import ConfigError, check_keys, to_settings
from empax.core.files import WorkDir, read_json, write_json
from empax.core.run import RunContext, RunOptions, cache_dir

log = logging.getLogger("empax")

KINDS = ("prepare", "annotate", "train", "assess", "index", "evaluate", "report")
"""What a section's `kind` may be: a module of this package, with `Settings` and `run`."""

_OWN_KEYS = ("system", "seed", "run", "data")

PLACE_ONLY = ("config.data.dir", "config.report.peers", *(f"config.{name}" for name in RunOptions.names()))
"""Settings that change no result, such as where things are: they may differ when a run goes on."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage with its checked settings."""

    name: str
    kind: str
    settings: Any


def plain(value: Any) -> Any:
    """A ConfigDict as dicts, lists and numbers, references resolved, as JSON would give it back."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def load_system(config: Mapping[str, Any]) -> Any:
    from empax.pipeline.train import load_system

    return load_system(config["system"])


def make_stages(config: Mapping[str, Any]) -> list[Stage]:
    """Checks the whole config and turns every section into settings, before any work starts.

    Raises:
      ConfigError: naming the path, what was found, what is allowed.
    """
    if missing := [key for key in _OWN_KEYS if key not in config]:
        raise ConfigError(f"the config lacks {', '.join(missing)}.")
    if type(config["seed"]) is not int:
        raise ConfigError(f"config.seed = {config['seed']!r} must be int.")
    RunOptions.of(config)
    system = load_system(config)
    check_keys(
        config, [*_OWN_KEYS, *RunOptions.names(), config["system"], *config["run"]], where="config", owner="the run"
    )
    if config["system"] not in config:
        raise ConfigError(f"the config lacks its section config.{config['system']}.")
    to_settings(system.SETTINGS, config[config["system"]], where=f"config.{config['system']}")
    from empax.pipeline.prepare import DataSettings

    to_settings(DataSettings, config["data"], where="config.data")
    return [_make_stage(name, config) for name in config["run"]]


def _make_stage(name: str, config: Mapping[str, Any]) -> Stage:
    where = f"config.{name}"
    if name not in config:
        raise ConfigError(f"config.run names {name!r}, but there is no {where}.")
    section = config[name]
    if "kind" not in section:
        raise ConfigError(f"{where} lacks kind; it must be one of {', '.join(KINDS)}.")
    kind = section["kind"]
    if kind not in KINDS:
        raise ConfigError(f"{where}.kind = {kind!r} must be one of {', '.join(KINDS)}.")
    module = importlib.import_module(f"empax.pipeline.{kind}")
    if kind == "train":
        return Stage(name, kind, module.make_settings(section, config["system"], where))
    settings = module.ReportSettings if kind == "report" else module.Settings
    return Stage(name, kind, to_settings(settings, section, where=where))


def run(config: Mapping[str, Any], workdir: Path) -> None:
    """Runs all stages of a plain config in `workdir`.

    Raises:
      ConfigError: a bad config, or a work directory that another config made.
    """
    stages = make_stages(config)
    files = WorkDir(workdir)
    _claim(files, config)
    system = load_system(config)
    for stage in stages:
        context = RunContext(files=files, config=config, stage=stage.name)
        if files.done(stage.name).exists():
            log.info("%s: done before", stage.name)
            continue
        if stage.kind != "train" and not distributed.is_writer():
            distributed.wait_for(files.done(stage.name))
            continue
        log.info("%s: begins", stage.name)
        begin = time.perf_counter()
        module = importlib.import_module(f"empax.pipeline.{stage.kind}")
        if stage.kind in ("index", "evaluate"):
            module.run(stage.settings, context, system)
        else:
            module.run(stage.settings, context)
        if not distributed.is_writer():
            continue
        seconds = time.perf_counter() - begin
        if stage.kind == "train":  # the loop has marked it done itself; this is how long it took
            write_json(files.stage(stage.name) / "seconds.json", {"seconds": seconds})
        else:
            write_json(files.done(stage.name), {"seconds": seconds})
        log.info("%s: done in %.0f s", stage.name, seconds)


def _claim(files: WorkDir, config: Mapping[str, Any]) -> None:
    """Writes config.json and run.json, or checks that this work directory is of the same config."""
    if not distributed.is_writer():
        distributed.wait_for(files.config)
    if not files.config.exists():
        write_json(files.config, config)
        write_json(files.run, describe_run(config))
        return
    old = read_json(files.config)
    found = [f"{path}: {was!r} there, {now!r} here" for path, was, now in differences(old, config)]
    if found:
        raise ConfigError(
            f"{files.root} was made by another config ({'; '.join(found[:5])}). "
            "Choose another --workdir, or delete it to start over."
        )


def differences(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    """What differs between two configs but PLACE_ONLY: path ("config.a.b"), value in the first, in the second."""
    if ".".join(("config", *path)) in PLACE_ONLY:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), (*path, key))
    elif old != new:
        yield ".".join(("config", *path)), old, new


def enable_compilation_cache() -> None:
    """Keeps compiled programs across runs."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def quiet_logging(level: int = logging.WARNING) -> None:
    """Our own lines at `level` on standard error; of Orbax, which tells every file it touches, warnings alone."""
    from absl import logging as absl_logging

    absl_logging.set_verbosity(absl_logging.WARNING)
    absl_logging.set_stderrthreshold("warning")
    log.setLevel(level)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.propagate = False


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
