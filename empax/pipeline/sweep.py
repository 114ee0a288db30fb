"""A sweep: one recipe for each combination of some settings and several seeds, each in its own work directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from empax.core.config import ConfigError
from empax.core.files import DataError, WorkDir, hash_json
from empax.core.inputs import Inputs
from empax.core.manifest import read_config
from empax.core.recipe import load_recipe, override
from empax.core.system import RunPlan
from empax.pipeline.absent import leave_out_absent
from empax.pipeline.plan import make_plan, plain
from empax.pipeline.records import differences
from empax.pipeline.run import find_inputs, find_problems
from empax.pipeline.workdirs import alike, check_resumable, made_from_others

_LONGEST = 120  # maximum length of a folder name; file systems allow 255 bytes


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
      arm: settings of the run, "joint.steps=1, joint.patience=2"; "recipe" without any.
      seed: seed of the run.
      folder: work directory of the run.
      plan: plan of the run.
      flags: flags of its command line, except `--reuse`.
    """

    arm: str
    seed: int
    folder: Path
    plan: RunPlan
    flags: tuple[str, ...]

    @functools.cached_property
    def inputs(self) -> Mapping[str, Inputs]:
        """Inputs of each stage from outside the work directory."""
        return find_inputs(self.plan, WorkDir(self.folder))

    def is_finished(self) -> bool:
        """Whether all stages are done, with these settings and from these files."""
        files = WorkDir(self.folder)
        if not all(files.done(name).exists() for name in self.plan.stages):
            return False
        if any(differences(read_config(files), self.plan.config)):
            return False
        return not made_from_others(files, self.plan, self.inputs)

    def is_like(self, other: Run) -> bool:
        """Whether both have the same settings and the same folder of corpora."""
        same_folder = self.plan.data.dir == other.plan.data.dir
        return same_folder and not any(differences(self.plan.config, other.plan.config))


def read_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """Parses the values of each setting, as texts, from "a.b=1,2,3"; commas within brackets do not separate.

    Raises:
      ConfigError: there are no values, or a value or a setting occurs twice.
    """
    grid: dict[str, list[str]] = {}
    for word in words:
        path, equals, text = word.partition("=")
        path = path.removeprefix("config.")
        values = [value.strip() for value in _split(text)]
        if not path or not equals or not all(values):
            raise ConfigError(f"--grid={word}: write --grid SETTING=VALUE,VALUE, such as --grid joint.steps=100,200.")
        if path == "seed":
            raise ConfigError(f"--grid={word}: write --seeds=NUMBER for several seeds, starting with the recipe's own.")
        if path in grid:
            raise ConfigError(f"--grid={word}: {path} is also in another --grid; name all its values in one.")
        if twice := [value for value in values if values.count(value) > 1]:
            raise ConfigError(f"--grid={word}: {twice[0]} is listed twice; leave one out.")
        grid[path] = values
    return grid


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def make_runs(
    recipe: str, grid: Mapping[str, Sequence[str]], seeds: int, overrides: Mapping[str, str], folder: Path
) -> list[Run]:
    """Returns all runs of a sweep: arm by arm, each under `seeds` seeds from the recipe's own on, in folder/ARM/seedN.

    `overrides` are settings of all arms, as texts.

    Raises:
      ConfigError: a setting does not exist, is wrong or is also in `overrides`, or two arms are equal.
    """
    if both := [path for path in grid if path in overrides]:
        raise ConfigError(f"--config.{both[0]}={overrides[both[0]]} and --grid set the same path; leave one out.")
    runs: list[Run] = []
    for values in itertools.product(*grid.values()):
        changes = dict(zip(grid, values, strict=True))
        arm = ", ".join(f"{path}={value}" for path, value in changes.items()) or "recipe"
        first = _plan(recipe, {**overrides, **changes}, folder).seed
        for seed in range(first, first + seeds):
            own = {**overrides, **changes, "seed": str(seed)}
            place = folder / _folder_name(arm) / f"seed{seed}"
            flags = (f"--config={recipe}", f"--workdir={place}", *(f"--config.{k}={v}" for k, v in own.items()))
            run = Run(arm, seed, place, _plan(recipe, own, place), flags)
            if twin := next((other for other in runs if run.is_like(other)), None):
                raise ConfigError(f"--grid: {twin.arm} and {arm} are the same run; leave one out.")
            runs.append(run)
    return runs


def _plan(recipe: str, values: Mapping[str, str], folder: Path) -> RunPlan:
    config = load_recipe(recipe)
    override(config, values)
    return leave_out_absent(make_plan(plain(config)), WorkDir(folder))


def _folder_name(arm: str) -> str:
    name = re.sub(r"[^\w.,=+-]+", "-", arm.replace(", ", ","))
    return name if name == arm.replace(", ", ",") and len(name) <= _LONGEST else f"{name[:_LONGEST]}-{hash_json(arm)}"


def describe(runs: Sequence[Run], folder: Path) -> str:
    """Describes the number of runs, which of them are finished, and their folders."""
    arms = {arm: list(group) for arm, group in itertools.groupby(runs, key=lambda run: run.arm)}
    seeds, finished = len(runs) // len(arms), sum(run.is_finished() for run in runs)
    counts = {"run": len(runs), "arm": len(arms), "seed": seeds}
    made, *of = (f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items())
    lines = [f"{made} ({', '.join(of)}) in {folder}, {finished} finished:"]
    for arm, group in arms.items():
        told = (f"{run.seed} (finished)" if run.is_finished() else f"{run.seed}" for run in group)
        lines.append(f"  {arm}: seeds {', '.join(told)}; {group[0].folder.parent.name}/")
    return "\n".join(lines)


def problems(runs: Sequence[Run]) -> Iterator[ConfigError | DataError]:
    """Yields the problems that are known before any run: of each arm, and of work directories with other settings."""
    unfinished = [run for run in runs if not run.is_finished()]
    for _, group in itertools.groupby(unfinished, key=lambda run: run.arm):
        run = next(group)
        yield from find_problems(run.plan, WorkDir(run.folder), planned=True)
    for run in unfinished:
        try:
            check_resumable(WorkDir(run.folder), run.plan, run.inputs if run.folder.exists() else {})
        except (ConfigError, DataError) as error:
            yield ConfigError(
                f"{error} A sweep takes no --redo: give it to `empax run` with this run's folder, or delete the folder."
            )


def make(runs: Sequence[Run], execute: Callable[[Sequence[str]], int] | None = None) -> dict[str, int]:
    """Runs the unfinished runs one after another, each in its own process.

    A run reuses the identical stages of a finished run. A failed run does not stop the others; an interrupted one does.
    `execute` runs `empax.main` with these flags and returns its exit code.

    Returns:
      Work directory → exit code of each failed run.
    """
    finished = [run for run in runs if run.is_finished()]
    failed: dict[str, int] = {}
    for number, run in enumerate(runs, start=1):
        if run in finished:
            continue
        print(f"\n[{number} of {len(runs)}] {run.arm}, seed {run.seed}: {run.folder}", flush=True)
        code = (execute or _execute)([*run.flags, *_reuse(run, finished)])
        if code:
            failed[str(run.folder)] = code
        else:
            finished.append(run)
        if code in INTERRUPTED:
            break
    return failed


INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of an interrupted run."""


def _reuse(run: Run, finished: Sequence[Run]) -> list[str]:
    """Returns the flag for the finished run with the most equal stages; empty for a resumed run or without any."""
    if WorkDir(run.folder).config.exists() or not finished:
        return []
    counts = {}
    for other in finished:
        with contextlib.suppress(ConfigError, DataError):  # damaged or of another version: nothing is reused
            counts[other.folder] = len(alike(WorkDir(other.folder), run.plan, run.inputs)[0])
    best = max(counts, key=lambda folder: counts[folder], default=None)
    return [f"--reuse={best}"] if best is not None and counts[best] else []


def _execute(flags: Sequence[str]) -> int:
    """Executes a run and returns its exit code; forwards Ctrl-C and SIGTERM, so that it saves and exits."""
    with subprocess.Popen([sys.executable, "-m", "empax.main", *flags]) as process:
        before = {
            number: signal.signal(number, lambda number, _: process.send_signal(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
