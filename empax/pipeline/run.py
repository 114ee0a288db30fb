"""A run: its stages in order, each once; run again, it goes on where it stopped."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm.contrib.logging import logging_redirect_tqdm

from empax.core import distributed
from empax.core.config import LARGEST_INT, ConfigError, check_keys, to_settings
from empax.core.determinism import make_deterministic
from empax.core.files import DataError, WorkDir
from empax.core.inputs import Inputs, noting
from empax.core.lock import writing
from empax.core.memory import give_back_freed_memory, peak_memory
from empax.core.settings import DataSettings, RunOptions, cache_dir
from empax.core.sharding import batch_shards, make_mesh
from empax.core.system import RunContext, RunPlan, Stage, load_system
from empax.pipeline.absent import leave_out_absent
from empax.pipeline.records import BY_SYSTEM, Records, stands_alone
from empax.pipeline.workdirs import check_same, claim
from empax.training.checkpoint import meet
from empax.training.settings import check_batch_sizes

log = logging.getLogger("empax")

_HERE = ("prepare", "annotate", "knowledge", "train", "assess", "index", "evaluate", "swaps")
KINDS = {
    **{kind: f"empax.pipeline.{kind}" for kind in _HERE},
    "report": "empax.reporting.report",  # by name: reporting is built on this package
}
"""What a section's `kind` may be → the module, with `Settings`, `check(settings, run)` and `run(settings, run)`."""

_OWN_KEYS = ("system", "seed", "run", "data")


def plain(value: Any) -> Any:
    """A ConfigDict as dicts, lists and numbers, references resolved, as JSON would give it back."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def with_kinds(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the `kind` of each stage that leaves it out and is called after one."""
    found = {name: section for name, section in config.items() if name in KINDS and isinstance(section, Mapping)}
    return {**config, **{name: {"kind": name, **section} for name, section in found.items()}}


def make_plan(config: Mapping[str, Any]) -> RunPlan:
    """Checks the whole config and turns every section into settings, before any work starts.

    Raises:
      ConfigError: naming the path, what was found, what is allowed.
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
        stages={name: _make_stage(name, config) for name in config["run"]},
        seed=config["seed"],
    )


def decided(plan: RunPlan, files: WorkDir) -> RunPlan:
    """The plan without what it leaves out because a corpus is not there; see `pipeline.absent`."""
    config = leave_out_absent(plan, files)
    return plan if config == plan.config else make_plan(config)


def _check_names(names: Any) -> None:
    words = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not words or not names or len(set(names)) < len(names):
        raise ConfigError(f"config.run = {names!r} must be a list of names of stages, each once.")


def _make_stage(name: str, config: Mapping[str, Any]) -> Stage:
    where = f"config.{name}"
    if name not in config:
        raise ConfigError(f"config.run names {name!r}, but there is no {where}.")
    section = config[name]
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where} = {section!r} must be a section of settings.")
    if "kind" not in section:
        raise ConfigError(f"{where} lacks kind; it must be one of {', '.join(KINDS)}.")
    kind, section = section["kind"], {key: value for key, value in section.items() if key != "kind"}
    if kind not in list(KINDS):  # it may be anything
        raise ConfigError(f"{where}.kind = {kind!r} must be one of {', '.join(KINDS)}.")
    module = importlib.import_module(KINDS[kind])
    if kind == "train":
        return module.make_stage(name, section, config["system"])
    return Stage(name, kind, to_settings(module.Settings, section, where=where))


def find_problems(plan: RunPlan, files: WorkDir, *, planned: bool = False) -> Iterator[ConfigError | DataError]:
    """What is known to be wrong before any work, of the stages that are not done; in their order.

    Args:
      plan: of the run.
      files: the work directory, which need not exist; nothing is written.
      planned: fetch nothing; what would have to be fetched is not looked at.
    """
    shared = [plan.system.check] if plan.system.check else []  # judges alone share no models
    for stage in plan.stages.values():
        if files.done(stage.name).exists():
            continue
        checks = [functools.partial(importlib.import_module(KINDS[stage.kind]).check, stage.settings)]
        if stage.kind in BY_SYSTEM:
            checks, shared = [*shared, *checks], []  # once
        for check in checks:
            try:
                check(RunContext(files, plan, stage.name, planned))
            except (ConfigError, DataError) as error:
                yield error


def find_inputs(plan: RunPlan, files: WorkDir) -> dict[str, Inputs]:
    """What each stage reads from outside of the work directory: what its check looks at.

    Nothing is fetched for that, and what cannot be found is left out: a stage that is done needs it no more.
    """

    def noted(check: Callable[[RunContext], object], stage: Stage) -> Inputs:
        with noting() as found, contextlib.suppress(ConfigError, DataError):
            check(RunContext(files, plan, stage.name, planned=True))
        return found

    inputs: dict[str, Inputs] = {}
    shared: Inputs | None = None
    for name, stage in plan.stages.items():
        check = functools.partial(importlib.import_module(KINDS[stage.kind]).check, stage.settings)
        inputs[name] = noted(check, stage)
        if plan.system.check and stage.kind in BY_SYSTEM and not stands_alone(plan.config[name]):
            shared = noted(plan.system.check, stage) if shared is None else shared
            inputs[name] = {**shared, **inputs[name]}
    return inputs


def problems_of_plan(plan: RunPlan, workdir: Path) -> list[ConfigError | DataError]:
    """What `find_problems` finds for a plan; nothing where it is made for devices that are elsewhere."""
    return [] if plan.options.plan.topology else list(find_problems(plan, WorkDir(workdir), planned=True))


def run(
    config: Mapping[str, Any],
    workdir: Path,
    *,
    reuse: Path | None = None,
    redo: Sequence[str] = (),
    command: str = "",
) -> None:
    """Runs all stages of a plain config in `workdir`.

    Args:
      config: plain.
      workdir: new, or of the same config.
      reuse: another run's work directory; see `pipeline.workdirs.take_stages`. A run that goes on needs it no more.
      redo: stages to make anew, with all that follow the first of them.
      command: a command line that does the same, for run.json; empty = there is none.

    Raises:
      ConfigError, DataError: a bad config, batches that do not divide over the devices, whatever `find_problems`
        finds, a work directory that another config made or another process writes, nothing to use in `reuse`, or
        `redo` names no stage. Nothing has been written then.
      DataError: what a finished stage left is damaged.
    """
    files = WorkDir(workdir)
    plan = decided(make_plan(config), files)
    if plan.options.deterministic:
        make_deterministic()
    with logging_redirect_tqdm([log]):  # lines of the log stand above the progress bar, not inside it
        _run(plan, files, reuse, redo, command)


def _run(plan: RunPlan, files: WorkDir, reuse: Path | None, redo: Sequence[str], command: str) -> None:
    config = plan.config
    shards = batch_shards(make_mesh(plan.options.mesh))
    for stage in plan.stages.values():
        if stage.kind == "train":
            check_batch_sizes(stage.loop, shards, where=f"config.{stage.name}")
    for problem in find_problems(plan, files):
        raise problem
    if not distributed.is_writer():
        meet("work directory")  # before, stages may be there that are to be made anew
        check_same(files, config)
        _run_stages(plan, files, None)
        return
    inputs = find_inputs(plan, files)
    with writing(files):
        claim(files, config, reuse, redo, inputs=inputs, command=command)
        meet("work directory")
        records = Records(files, config, {name: KINDS[stage.kind] for name, stage in plan.stages.items()}, inputs)
        records.check(first=True)
        _run_stages(plan, files, records)


def _run_stages(plan: RunPlan, files: WorkDir, records: Records | None) -> None:
    """Runs what is not done; `records` are of the process that writes."""
    for stage in plan.stages.values():
        if files.done(stage.name).exists():
            log.info("%s: done before", stage.name)
            continue
        if records is None:
            if stage.kind == "train":
                _run_stage(stage, files, plan)
            distributed.wait_for(files.done(stage.name))
            continue
        log.info("%s: begins", stage.name)
        records.check()
        records.begin(stage.name)
        begin = time.perf_counter()
        note = _run_stage(stage, files, plan)
        note |= {"seconds": time.perf_counter() - begin, "peak_memory_mb": round(peak_memory() / 2**20)}
        records.finish(stage.name, note)
        log.info(
            "%s: done in %.0f s; %d MB of memory at most so far", stage.name, note["seconds"], note["peak_memory_mb"]
        )


def _run_stage(stage: Stage, files: WorkDir, plan: RunPlan) -> dict[str, Any]:
    jax.clear_caches()  # programs of the stage before, some hundred megabytes, which nobody calls again
    give_back_freed_memory()
    module = importlib.import_module(KINDS[stage.kind])
    return module.run(stage.settings, RunContext(files, plan, stage.name)) or {}


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
