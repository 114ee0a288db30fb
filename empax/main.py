"""Runs a recipe: `python -m empax.main --config=configs/reg_transformer.py [--workdir=DIR] [--config.a.b=VALUE ...]`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from absl import app, flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe, FILE.py or FILE.py:ARG.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; default runs/NAME-OF-THE-RECIPE.")
_MODE = flags.DEFINE_enum("mode", "run", ["run", "plan"], "plan: say what would be done, allocate nothing.")


def default_workdir() -> Path:
    """Runs/NAME, NAME being the config file's, with its argument."""
    path, _, arg = str(config_flags.get_config_filename(flags.FLAGS["config"])).partition(":")
    return Path("runs") / "-".join(filter(None, (Path(path).stem, arg)))


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Settings are given as --config.a.b=VALUE.")
    if _CONFIG.value is None:
        raise app.UsageError("--config=FILE.py is needed; recipes are in configs/.")
    # Here and not above, so that --help and a mistyped flag answer at once.
    from empax.core.config import ConfigError
    from empax.core.files import DataError
    from empax.pipeline import plan, run
    from empax.training.interruption import Interrupted

    try:
        config: dict[str, Any] = run.plain(_CONFIG.value)
        workdir = Path(_WORKDIR.value) if _WORKDIR.value else default_workdir()
        if _MODE.value == "plan":
            print(plan.describe(config))
            return
        run.quiet_logging(logging.INFO)
        run.enable_compilation_cache()
        run.run(config, workdir)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as interrupted:
        print(f"{interrupted}\nRun the same command again to go on.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    app.run(main)
