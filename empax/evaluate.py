r"""Scores anybody's outputs.

  python -m empax.evaluate --predictions=FILE.jsonl --output=DIR --compare=OTHER.jsonl --empathy=WORKDIR
  python -m empax.evaluate --seeds RUN1/report.json RUN2/report.json RUN3/report.json --output=DIR

FILE.jsonl holds one JSON object a line: `context` (list of turns), `response`, `reference`, and optionally `emotion`,
`emotion_prediction`, `id`, `exemplars`, `attributes`, `nll` with `num_tokens`, `intent` with `intent_prediction`. With
--data a line may say `id` and leave context, reference and emotion to the corpus, as a run's outputs.jsonl.gz does.

--seeds scores nothing: of the finished runs of one recipe under several seeds it gives mean, standard deviation and
95% t-interval of every metric, and with --output seeds.json and seeds.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import app, flags

from empax.core.recipe import parse_flags

_PREDICTIONS = flags.DEFINE_string("predictions", None, "JSON-lines file to score.")
_SEEDS = flags.DEFINE_bool("seeds", False, "Instead: sum up the report.json of several runs, named behind this flag.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder for report.json, report.md and report.html.")
_COMPARE = flags.DEFINE_string("compare", None, "Another system's file on the same rows: paired tests, first - other.")
_EMPATHY = flags.DEFINE_string("empathy", None, "Judge of empathy: WORKDIR, WORKDIR/STAGE or linear.")
_DATA = flags.DEFINE_string("data", None, "Folder or archive of EmpatheticDialogues, for lines that give an id alone.")
_SKIP = flags.DEFINE_bool("skip_bad_lines", False, "Score the other lines if some are bad; else nothing is scored.")
_SAMPLES = flags.DEFINE_integer("bootstrap_samples", 1000, "Resamples behind each interval.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the resamples.", lower_bound=0)
_VARIANTS = flags.DEFINE_bool("variants", False, "Also print the metrics as other papers compute them.")


def main(argv: list[str]) -> int:
    """Returns 0, or 2 where the files are not what they should be."""
    if bool(_PREDICTIONS.value) == _SEEDS.value:
        print("error: either --predictions=FILE.jsonl or --seeds REPORT.json ... is needed.", file=sys.stderr)
        return 2
    if len(argv) > 1 and not _SEEDS.value:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; options start with --.")
    # Imported here so that --help and a mistyped flag answer at once.
    from empax.core.config import ConfigError
    from empax.core.files import DataError

    try:
        return _evaluate(Path(_PREDICTIONS.value)) if _PREDICTIONS.value else _sum_up([Path(word) for word in argv[1:]])
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _sum_up(paths: list[Path]) -> int:
    from empax.reporting import seeds

    summary = seeds.summarize(paths)
    print(seeds.text(summary, variants=_VARIANTS.value))
    if _OUTPUT.value:
        seeds.write(summary, Path(_OUTPUT.value))
        print(f"\nwrote seeds.json and seeds.md to {_OUTPUT.value}")
    return 0


def _evaluate(source: Path) -> int:
    from empax.evaluation.scoring import VARIANTS, ScoringSettings
    from empax.reporting import score_file

    names = VARIANTS if _VARIANTS.value or _OUTPUT.value else ()
    settings = ScoringSettings(bootstrap_samples=_SAMPLES.value, seed=_SEED.value, variants=names)
    other = Path(_COMPARE.value) if _COMPARE.value else None
    corpus = score_file.load_corpus(_DATA.value) if _DATA.value else None
    judges = {"judge": _EMPATHY.value or "", "data": _DATA.value or ""}
    found = score_file.score_file(source, settings, other=other, **judges, corpus=corpus, skip_bad_lines=_SKIP.value)
    print(score_file.text(found, variants=_VARIANTS.value))
    if _OUTPUT.value:
        score_file.write(found, Path(_OUTPUT.value))
        print(f"\nwrote report.json, report.md and report.html to {_OUTPUT.value}")
    return 0


if __name__ == "__main__":
    flags.FLAGS.set_gnu_getopt()  # flags may stand behind the reports
    app.run(main, flags_parser=parse_flags)
