"""A run: its stages in order, each once; run again, it goes on where it stopped."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from empax.core import distributed
from empax.core.config import LARGEST_INT, ConfigError, check_keys, to_settings
from empax.core.files import DataError, WorkDir
from empax.core.lock import writing
from empax.core.memory import give_back_freed_memory, peak_memory
from empax.core.run import RunContext, RunOptions, cache_dir
from empax.core.sharding import batch_shards, make_mesh
from empax.pipeline.records import Records
from empax.pipeline.workdirs import check_same, claim
from empax.training.checkpoint import meet
from empax.training.settings import check_batch_sizes

log = logging.getLogger("empax")

KINDS = {
    **{kind: f"empax.pipeline.{kind}" for kind in ("prepare", "annotate", "train", "assess", "index", "evaluate")},
    "report": "empax.reporting.report",  # by name: reporting is built on this package
}
"""What a section's `kind` may be → the module, with `Settings` and `run`."""

_OWN_KEYS = ("system", "seed", "run", "data")


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
    if not 0 <= config["seed"] <= LARGEST_INT:
        raise ConfigError(f"config.seed = {config['seed']} must lie in [0, {LARGEST_INT}].")
    _check_names(config["run"])
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


def _check_names(names: Any) -> None:
    words = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not words or not names or len(set(names)) < len(names):
        raise ConfigError(f"config.run = {names!r} must be a list of names of stages, each once.")


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
    module = importlib.import_module(KINDS[kind])
    if kind == "train":
        return Stage(name, kind, module.make_settings(section, config["system"], where))
    return Stage(name, kind, to_settings(module.Settings, section, where=where))


def find_problems(
    stages: Sequence[Stage], config: Mapping[str, Any], files: WorkDir, *, planned: bool = False
) -> Iterator[ConfigError | DataError]:
    """What is known to be wrong before any work, of the stages that are not done; in their order.

    Args:
      stages: what `make_stages` gives.
      config: plain.
      files: the work directory, which need not exist; nothing is written.
      planned: fetch nothing; what would have to be fetched is not looked at.
    """
    system = load_system(config)
    shared = [system.check_system] if hasattr(system, "check_system") else []  # judges alone share no models
    for stage in stages:
        if files.done(stage.name).exists():
            continue
        checks = [functools.partial(_check_stage, stage, system)]
        if stage.kind in ("train", "index", "evaluate"):
            checks, shared = [*shared, *checks], []  # once
        for check in checks:
            try:
                check(RunContext(files, config, stage.name, planned))
            except (ConfigError, DataError) as error:
                yield error


def problems_of_plan(config: Mapping[str, Any], workdir: Path) -> list[ConfigError | DataError]:
    """What `find_problems` finds for a plan; nothing where it is made for devices that are elsewhere."""
    if RunOptions.of(config).plan.topology:
        return []
    return list(find_problems(make_stages(config), config, WorkDir(workdir), planned=True))


def _check_stage(stage: Stage, system: Any, context: RunContext) -> None:
    module = importlib.import_module(KINDS[stage.kind])
    if stage.kind in ("index", "evaluate") and not hasattr(system, "load_responder"):
        raise ConfigError(
            f"config.run has {stage.name!r} of kind {stage.kind!r}, but the system {context.config['system']!r} trains "
            "judges alone, which answer nothing; leave that stage out."
        )
    more = (system,) if stage.kind == "evaluate" else ()
    module.check(stage.settings, context, *more)


def run(config: Mapping[str, Any], workdir: Path, *, reuse: Path | None = None, redo: Sequence[str] = ()) -> None:
    """Runs all stages of a plain config in `workdir`.

    Args:
      config: plain.
      workdir: new, or of the same config.
      reuse: another run's work directory; see `pipeline.workdirs.take_stages`. A run that goes on needs it no more.
      redo: stages to make anew, with all that follow the first of them.

    Raises:
      ConfigError, DataError: a bad config, batches that do not divide over the devices, whatever `find_problems`
        finds, a work directory that another config made or another process writes, nothing to use in `reuse`, or
        `redo` names no stage. Nothing has been written then.
      DataError: what a finished stage left is damaged.
    """
    stages = make_stages(config)
    shards = batch_shards(make_mesh(RunOptions.of(config).mesh))
    for stage in stages:
        if stage.kind == "train":
            check_batch_sizes(stage.settings.loop, shards, where=f"config.{stage.name}")
    files = WorkDir(workdir)
    for problem in find_problems(stages, config, files):
        raise problem
    if not distributed.is_writer():
        meet("work directory")  # before, stages may be there that are to be made anew
        check_same(files, config)
        _run_stages(stages, files, config, None)
        return
    with writing(files):
        claim(files, config, reuse, redo)
        meet("work directory")
        records = Records(files, config, {stage.name: KINDS[stage.kind] for stage in stages})
        records.check(first=True)
        _run_stages(stages, files, config, records)


def _run_stages(stages: Sequence[Stage], files: WorkDir, config: Mapping[str, Any], records: Records | None) -> None:
    """Runs what is not done; `records` are of the process that writes."""
    for stage in stages:
        if files.done(stage.name).exists():
            log.info("%s: done before", stage.name)
            continue
        if records is None:
            if stage.kind == "train":
                _run_stage(stage, files, config)
            distributed.wait_for(files.done(stage.name))
            continue
        log.info("%s: begins", stage.name)
        records.check()
        records.begin(stage.name)
        begin = time.perf_counter()
        note = _run_stage(stage, files, config)
        note |= {"seconds": time.perf_counter() - begin, "peak_memory_mb": round(peak_memory() / 2**20)}
        records.finish(stage.name, note)
        log.info(
            "%s: done in %.0f s; %d MB of memory at most so far", stage.name, note["seconds"], note["peak_memory_mb"]
        )


def _run_stage(stage: Stage, files: WorkDir, config: Mapping[str, Any]) -> dict[str, Any]:
    jax.clear_caches()  # programs of the stage before, some hundred megabytes, which nobody calls again
    give_back_freed_memory()
    context = RunContext(files=files, config=config, stage=stage.name)
    module = importlib.import_module(KINDS[stage.kind])
    if stage.kind in ("index", "evaluate"):
        return module.run(stage.settings, context, load_system(config)) or {}
    return module.run(stage.settings, context) or {}


def enable_compilation_cache() -> None:
    """Keeps compiled programs across runs."""
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
