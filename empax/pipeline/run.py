"""Runs the stages of a run in order, each once; a second call resumes the run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm.contrib.logging import logging_redirect_tqdm

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.determinism import make_deterministic
from empax.core.files import DataError, WorkDir
from empax.core.inputs import Inputs, noting
from empax.core.lock import writing
from empax.core.memory import give_back_freed_memory, peak_memory
from empax.core.sharding import batch_shards, make_mesh
from empax.core.system import RunContext, RunPlan, Stage
from empax.data.store import planned_vocab_size
from empax.decoding.constraints import check_ids, named_ids
from empax.decoding.options import check_all_read
from empax.decoding.settings import DecodeSettings
from empax.pipeline.absent import leave_out_absent
from empax.pipeline.plan import BY_SYSTEM, KINDS, make_plan
from empax.pipeline.records import Records
from empax.pipeline.workdirs import check_same, claim
from empax.training.checkpoint import meet
from empax.training.settings import check_batch_sizes

log = logging.getLogger("empax")


def find_problems(
    plan: RunPlan, files: WorkDir, *, planned: bool = False, redo: Sequence[str] = ()
) -> Iterator[ConfigError | DataError]:
    """Yields the problems of stages to run that are known before any work, in the order of the stages.

    Writes nothing; with `planned`, also downloads nothing and skips checks that would need a download. The first stage
    of `redo` and all later ones run again.
    """
    redone = list(itertools.dropwhile(lambda name: name not in redo, plan.stages))
    shared: list[Callable[[RunContext], object]] = [lambda run: _check_decodings(plan.system_settings, run.shared, run)]
    if plan.system.check:  # judges that run alone share no models
        shared.append(plan.system.check)
    for stage in plan.stages.values():
        if files.done(stage.name).exists() and stage.name not in redone:
            continue
        checks: list[Callable[[RunContext], object]] = [
            functools.partial(importlib.import_module(KINDS[stage.kind]).check, stage.settings),
            lambda run: _check_decodings(run.named(run.stage).settings, f"config.{run.stage}", run),
        ]
        if stage.kind in BY_SYSTEM:
            checks, shared = [*shared, *checks], []  # once
        for check in checks:
            try:
                check(RunContext(files, plan, stage.name, planned, redone))
            except (ConfigError, DataError) as error:
                yield error


def _check_decodings(settings: Any, where: str, run: RunContext) -> None:
    """Raises ConfigError if decoding settings, anywhere in `settings`, hold an idle option or an unknown token id."""
    if isinstance(settings, DecodeSettings):
        check_all_read(settings, where)
        if named_ids(settings) and (size := planned_vocab_size(run)) is not None:
            check_ids(settings, size, where)
    elif dataclasses.is_dataclass(settings):
        for field in dataclasses.fields(settings):
            _check_decodings(getattr(settings, field.name), f"{where}.{field.name}", run)


def find_inputs(plan: RunPlan, files: WorkDir) -> dict[str, Inputs]:
    """Returns the inputs of each stage from outside the work directory, as found by its check.

    Nothing is downloaded, and missing inputs are omitted: a finished stage no longer needs them.
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
        if plan.system.check and stage.kind in BY_SYSTEM and not stage.alone:
            shared = noted(plan.system.check, stage) if shared is None else shared
            inputs[name] = {**shared, **inputs[name]}
    return inputs


def problems_of_plan(plan: RunPlan, workdir: Path, redo: Sequence[str] = ()) -> list[ConfigError | DataError]:
    """Lists the problems of `find_problems` for a plan; empty for a plan for remote devices."""
    return [] if plan.options.plan.topology else list(find_problems(plan, WorkDir(workdir), planned=True, redo=redo))


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
      config: plain config.
      workdir: a new work directory, or one of the same config.
      reuse: another run's work directory; see `pipeline.workdirs.take_stages`. A resumed run ignores it.
      redo: stages to redo, with all stages after the first of them.
      command: equivalent command line, for run.json; empty = none.

    Raises:
      ConfigError, DataError: the config is bad, batches do not divide over the devices, `find_problems` finds a
        problem, another config made or another process writes the work directory, `reuse` has no usable stage, or
        `redo` names no stage. Nothing has been written then.
      DataError: the output of a finished stage is damaged.
    """
    files = WorkDir(workdir)
    plan = leave_out_absent(make_plan(config), files)
    if plan.options.deterministic:
        make_deterministic()
    with logging_redirect_tqdm([log]):  # log lines appear above the progress bar
        _run(plan, files, reuse, redo, command)


def _run(plan: RunPlan, files: WorkDir, reuse: Path | None, redo: Sequence[str], command: str) -> None:
    shards = batch_shards(make_mesh(plan.options.mesh))
    for stage in plan.stages.values():
        if stage.kind == "train":
            check_batch_sizes(stage.loop, shards, where=f"config.{stage.name}")
    for problem in find_problems(plan, files, redo=redo):
        raise problem
    if not distributed.is_writer():
        meet("work directory")  # before this, stages to redo may still be there
        check_same(files, plan)
        _run_stages(plan, files, None)
        return
    inputs = find_inputs(plan, files)
    with writing(files):
        claim(files, plan, reuse, redo, inputs=inputs, command=command)
        meet("work directory")
        records = Records(files, plan, inputs)
        records.check(first=True)
        _run_stages(plan, files, records)


def _run_stages(plan: RunPlan, files: WorkDir, records: Records | None) -> None:
    """Runs the unfinished stages; only the writing process has `records`."""
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
        if stage.kind == "prepare":  # a vocabulary may be smaller than planned
            run = RunContext(files, plan, stage.name)
            _check_decodings(plan.system_settings, run.shared, run)
            for one in plan.stages.values():
                _check_decodings(one.settings, f"config.{one.name}", run)
        log.info(
            "%s: done in %.0f s; %d MB of memory at most so far", stage.name, note["seconds"], note["peak_memory_mb"]
        )


def _run_stage(stage: Stage, files: WorkDir, plan: RunPlan) -> dict[str, Any]:
    jax.clear_caches()  # programs of the previous stage, several hundred megabytes, are no longer needed
    give_back_freed_memory()
    module = importlib.import_module(KINDS[stage.kind])
    return module.run(stage.settings, RunContext(files, plan, stage.name)) or {}


def quiet_logging(level: int = logging.WARNING) -> None:
    """Logs our own messages at `level` on standard error; Orbax, which logs every file, is limited to warnings."""
    from absl import logging as absl_logging

    absl_logging.set_verbosity(absl_logging.WARNING)
    absl_logging.set_stderrthreshold("warning")
    log.setLevel(level)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.propagate = False
