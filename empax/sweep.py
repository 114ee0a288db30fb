r"""Runs a recipe for each combination of some settings and several seeds, and collects the metrics in one table.

  python -m empax.sweep --config=FILE.py[:ARG] --grid a.b=1,2 [--grid c.d=x,y] [--seeds=3] [--config.e.f=VALUE ...]
  empax sweep RECIPE[:ARG] --grid a.b=1,2 [--grid c.d=x,y] [--seeds=3] [--config.e.f=VALUE ...]

Every run is checked before the first begins. Each has its own work directory, WORKDIR/ARM/seedN. After an
interruption, the same command resumes; more values or seeds may be added. Runs share identical finished stages. The
table is in WORKDIR/sweep.md and sweep.json: means with intervals over seeds, and differences from the first arm.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from absl import flags

from empax.core.command import in_one_line, run_command
from empax.core.config import ConfigError
from empax.core.paths import given_folder
from empax.core.recipe import run_name, sized_for_this_machine

_CONFIG = flags.DEFINE_string(
    "config", None, "The recipe, FILE.py or FILE.py:ARG; --config.a.b=VALUE changes a setting in all runs."
)
_GRID = flags.DEFINE_multi_string("grid", [], "A setting and its values, a.b=1,2,3; may be given several times.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "How many seeds, starting with the recipe's own.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the runs; default runs/RECIPE-sweep.")
_MODE = flags.DEFINE_enum("mode", "run", ["run", "plan"], "plan: list the runs without making them.")

_OVERRIDES: dict[str, str] = {}


@in_one_line
def main(argv: list[str]) -> int:
    """Returns 0; 2 for a wrong setting or a failed run; 130 after an interruption."""
    # Imported here so that --help and a mistyped word answer at once.
    import jax

    jax.config.update("jax_platforms", "cpu")  # this process computes nothing; the runs need the accelerator
    if len(argv) > 1 or not _CONFIG.value:
        what = f"what is {argv[1]!r}? " if len(argv) > 1 else ""
        raise ConfigError(f"{what}A sweep takes one recipe: empax sweep reg_transformer:tiny --grid joint.steps=2,4")
    from empax.pipeline import sweep
    from empax.reporting import sweeps

    recipe = _CONFIG.value
    folder = given_folder(_WORKDIR.value or Path("runs") / f"{run_name(recipe)}-sweep", "--workdir")
    recipe = sized_for_this_machine(recipe)
    runs = sweep.make_runs(recipe, sweep.read_grid(_GRID.value), _SEEDS.value, _OVERRIDES, folder)
    wrong = list(dict.fromkeys(map(str, sweep.problems(runs))))
    print(f"{recipe}: {sweep.describe(runs, folder)}")
    if wrong or _MODE.value == "plan":
        print("".join(f"error: {problem}\n" for problem in wrong), end="", file=sys.stderr)
        return 2 if wrong else 0
    failed = sweep.make(runs)
    arms: dict[str, dict[int, Path]] = {}
    for run in runs:
        if run.is_finished():
            arms.setdefault(run.arm, {})[run.seed] = run.folder
    if arms:
        found = sweeps.summarize(arms)
        sweeps.write(found, folder)
        print(f"\n{sweeps.text(found)}\n\nwrote sweep.json and sweep.md to {folder}")
    for place, code in failed.items():
        print(f"error: {place} ended with exit code {code}; the same command retries it.", file=sys.stderr)
    stopped = set(failed.values()) & set(sweep.INTERRUPTED)
    return 130 if stopped else 2 if failed else 0


command_line = functools.partial(run_command, main, __name__, takes_words=True, overrides=_OVERRIDES)


if __name__ == "__main__":
    command_line()
