r"""Runs a recipe, or resumes a run.

  python -m empax.main --config=FILE.py[:ARG] [--workdir=DIR] [--config.a.b=VALUE ...]
  empax run RECIPE[:ARG] [--workdir=DIR] [--config.a.b=VALUE ...]
  empax plan RECIPE[:ARG] [--config.a.b=VALUE ...]

RECIPE is a file, or the name of a recipe that comes with empax. --config.a.b=VALUE changes one of its settings.
After an interruption, the same command without --redo resumes the run.
"""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path

from empax.training.interruption import leave_at_ctrl_c

if __name__ == "__main__":
    leave_at_ctrl_c()  # before the imports, which take time

from absl import flags

from empax.core.command import in_one_line, run_command
from empax.core.config import ConfigError
from empax.core.machine import check_gpu
from empax.core.memory import keep_freed_memory
from empax.core.paths import check_folder, expand
from empax.core.recipe import load_recipe, override, run_name, sized_for_this_machine

_CONFIG = flags.DEFINE_string(
    "config", None, "The recipe, FILE.py or FILE.py:ARG; --config.a.b=VALUE changes a setting."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's work directory; default runs/RECIPE.")
_REUSE = flags.DEFINE_string("reuse", None, "Earlier workdir, whose matching finished stages a new one starts with.")
_REDO = flags.DEFINE_multi_string("redo", [], "A stage to redo, with all later ones; leave it out to resume.")
_MODE = flags.DEFINE_enum("mode", "run", ["run", "plan"], "plan: show what would be done; allocate nothing.")


@in_one_line
def main(argv: list[str]) -> None:
    keep_freed_memory()
    # Imported here so that --help and a mistyped word answer at once.
    from empax.core.files import WorkDir
    from empax.training.loop import Interrupted

    try:
        if len(argv) > 1 or not _CONFIG.value:
            what = f"what is {argv[1]!r}? " if len(argv) > 1 else ""
            raise ConfigError(f"{what}--config=FILE.py is needed (see configs/); settings are --config.a.b=VALUE.")
        if _MODE.value == "plan" and _REUSE.value:
            raise ConfigError("a plan copies no earlier stages; leave out --reuse.")
        recipe = sized_for_this_machine(_CONFIG.value)
        config = load_recipe(recipe)
        override(config, _OVERRIDES)
        workdir = expand(_WORKDIR.value or Path("runs") / run_name(_CONFIG.value))
        from empax.core import cache, distributed
        from empax.core.determinism import make_deterministic
        from empax.core.settings import RunOptions
        from empax.pipeline import run
        from empax.pipeline.absent import leave_out_absent
        from empax.pipeline.plan import make_plan, plain

        run.quiet_logging(logging.INFO)
        if recipe != _CONFIG.value:
            logging.getLogger("empax").info("This machine has a GPU: the recipe is %s; machine=cpu overrides.", recipe)
        values = plain(config)
        if _MODE.value == "plan":
            from empax.planning.plan import show

            plan = leave_out_absent(make_plan(values), WorkDir(workdir), planned=True)
            sys.exit(show(plan, workdir, _REDO.value))
        check_folder(workdir, "--workdir")
        if RunOptions.of(values).deterministic:
            make_deterministic()  # before anything queries the devices
        distributed.initialize()
        if recipe != _CONFIG.value:
            check_gpu(recipe)
        cache.enable_compilation_cache()
        if not distributed.is_writer():
            run.quiet_logging()  # the first process logs the same
        sized = {f"{flag}{_CONFIG.value}": f"{flag}{recipe}" for flag in ("--config=", "-config=", "")}
        command = f"python -m empax.main {shlex.join(sized.get(word, word) for word in sys.argv[1:])}"
        reuse = expand(_REUSE.value) if _REUSE.value else None
        run.run(values, workdir, reuse=reuse, redo=_REDO.value, command=command)
    except Interrupted as interrupted:
        again = f" Leave out --redo={_REDO.value[0]}, which would begin anew." if _REDO.value else ""
        print(f"{interrupted}{again}", file=sys.stderr)
        sys.exit(interrupted.exit_code)


_OVERRIDES: dict[str, str] = {}


def command_line() -> None:
    leave_at_ctrl_c()
    run_command(main, __name__, takes_words=True, overrides=_OVERRIDES)


if __name__ == "__main__":
    command_line()
