r"""Checks judges of empathy against human ratings of replies.

  python -m empax.judges --data=DATA                          # VADER, the linear judge and reply length
  python -m empax.judges --data=DATA --workdir=RUN            # also the identifiers or classifiers of a finished run
  python -m empax.judges --data=DATA --output=DIR             # also writes DIR/report.json

DATA holds human_ratings/empathy_ratings.csv and EPITOME. A judge with a low correlation is a poor judge, whatever F1
it reaches on held-out posts.
"""

from __future__ import annotations

import functools

from absl import flags

from empax.core.command import in_one_line, run_command
from empax.core.paths import report_folder

_DATA = flags.DEFINE_string(
    "data", None, "Folder with human_ratings/empathy_ratings.csv and, for the linear judge, EPITOME.", required=True
)
_WORKDIR = flags.DEFINE_string("workdir", "", "Finished run, or RUN/STAGE, whose neural judges to check as well.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder for report.json.")
_SAMPLES = flags.DEFINE_integer("bootstrap_samples", 1000, "Resamples behind each interval.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the resamples.", lower_bound=0)


@in_one_line
def main(argv: list[str]) -> int:
    """Returns 0, or 2 for an invalid file."""
    # Imported here so that --help and a mistyped flag answer at once.
    from empax.core.files import write_json
    from empax.pipeline.run import quiet_logging
    from empax.reporting import judges

    quiet_logging()
    output = report_folder(_OUTPUT.value, "--output") if _OUTPUT.value else None
    found = judges.check_judges(_DATA.value, _WORKDIR.value, samples=_SAMPLES.value, seed=_SEED.value)
    print(judges.text(found))
    if output:
        write_json(output / "report.json", found)
        print(f"\nwrote report.json to {output}")
    return 0


command_line = functools.partial(run_command, main, __name__)


if __name__ == "__main__":
    command_line()
