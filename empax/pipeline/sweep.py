"""A sweep: one recipe under each combination of some settings and under several seeds, each in a work directory."""

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
from empax.pipeline.workdirs import alike, made_from_others, other_input

_LONGEST = 120  # letters of a folder's name; file systems take 255 bytes


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
      arm: what is set in it, "joint.steps=1, joint.patience=2"; "recipe" where nothing is.
      seed: of the run.
      folder: its work directory.
      plan: of the run.
      flags: of the command line that makes it, but `--reuse`.
    """

    arm: str
    seed: int
    folder: Path
    plan: RunPlan
    flags: tuple[str, ...]

    @functools.cached_property
    def inputs(self) -> Mapping[str, Inputs]:
        """Stage → what it reads from outside of the work directory."""
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
        """Whether both have the same settings and the same corpus."""
        if any(differences(self.plan.config, other.plan.config)):
            return False
        if self.plan.data.dir == other.plan.data.dir:
            return True
        first = next(iter(self.plan.stages))  # reads the corpus; where that is not there nobody knows
        mine, theirs = self.inputs[first], other.inputs[first]
        return bool(mine and theirs) and not other_input(mine, theirs)


def read_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each setting, as texts, from "a.b=1,2,3"; a comma within brackets separates nothing.

    Raises:
      ConfigError: no values, one twice, or a setting twice.
    """
    grid: dict[str, list[str]] = {}
    for word in words:
        path, equals, text = word.partition("=")
        path = path.removeprefix("config.")
        values = [value.strip() for value in _split(text)]
        if not path or not equals or not all(values):
            raise ConfigError(f"--grid={word}: write --grid SETTING=VALUE,VALUE, such as --grid joint.steps=100,200.")
        if path == "seed":
            raise ConfigError(f"--grid={word}: write --seeds=NUMBER for several seeds, from the recipe's own on.")
        if path in grid:
            raise ConfigError(f"--grid={word}: {path} stands in another --grid; name all its values in one.")
        if twice := [value for value in values if values.count(value) > 1]:
            raise ConfigError(f"--grid={word}: {twice[0]} stands there twice; leave one out.")
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
    """All runs of a sweep: arm after arm, each under its seeds.

    Args:
      recipe: FILE.py:ARG or a name.
      grid: of `read_grid`.
      seeds: how many, from the recipe's own on.
      overrides: settings of all arms, as texts.
      folder: of the sweep; a run has the work directory ARM/seedN in it.

    Raises:
      ConfigError: a setting that there is not or that is wrong, one that is also in `overrides`, or two arms alike.
    """
    if both := [path for path in grid if path in overrides]:
        raise ConfigError(f"--config.{both[0]}={overrides[both[0]]} and --grid set the same; leave one out.")
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
                raise ConfigError(f"--grid: {twin.arm} and {arm} make the very same run; leave one out.")
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
    """How many runs there are, which of them are finished, and where they are."""
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
    """What is known to be wrong with an arm before any run; seeds change nothing of that."""
    for _, group in itertools.groupby(runs, key=lambda run: run.arm):
        run = next(group)
        yield from find_problems(run.plan, WorkDir(run.folder), planned=True)


def make(runs: Sequence[Run], execute: Callable[[Sequence[str]], int] | None = None) -> dict[str, int]:
    """Makes what is not finished, one run after the other, each in a process of its own.

    A run begins with the stages that a finished one has made alike. One that fails leaves the others alone.

    Args:
      runs: of `make_runs`.
      execute: runs `empax.main` with these flags and says with what exit code it ended.

    Returns:
      By work directory the exit code of each run that is not finished; one that was interrupted ends the sweep.
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
"""Exit codes of a run that somebody stopped."""


def _reuse(run: Run, finished: Sequence[Run]) -> list[str]:
    """The flag that names the finished run with the most stages alike; none where a run goes on or none is alike."""
    if WorkDir(run.folder).config.exists() or not finished:
        return []
    counts = {}
    for other in finished:
        with contextlib.suppress(ConfigError, DataError):  # damaged, or of another version: then nothing is taken
            counts[other.folder] = len(alike(WorkDir(other.folder), run.plan, run.inputs)[0])
    best = max(counts, key=lambda folder: counts[folder], default=None)
    return [f"--reuse={best}"] if best is not None and counts[best] else []


def _execute(flags: Sequence[str]) -> int:
    """The exit code of a run; Ctrl-C and SIGTERM are handed on, so that it saves and leaves."""
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
