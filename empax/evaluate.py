r"""Scores the outputs of any system.

  python -m empax.evaluate FILE.jsonl --output=DIR --empathy=WORKDIR
  python -m empax.evaluate A.jsonl B.jsonl C.jsonl --peers=FOLDER                    # one table, every pair tested
  python -m empax.evaluate --predictions=A.jsonl --compare=B.jsonl --compare=C.jsonl  # A against each
  python -m empax.evaluate --seeds RUN1/report.json RUN2/report.json RUN3/report.json --output=DIR

FILE.jsonl holds one JSON object per line: `context` (list of turns), `response`, `reference`, and optionally
`emotion`, `emotion_prediction`, `id`, `exemplars`, `attributes`, `nll` with `num_tokens`, `intent` with
`intent_prediction`. With --data a line may give `id` and omit context, reference and emotion, which then come from the
corpus (as in a run's outputs.jsonl.gz). --predictions=FILE.jsonl also names the first file. Metrics: docs/metrics.md.

The last lines state which system is better on which metric, and for each file whether its replies are degenerate.

--metric=my_metrics:polite is your own function of contexts, responses and references; it returns a number per row.

--seeds scores nothing. It summarizes finished runs of one recipe under several seeds: mean, standard deviation and
95% t-interval of every metric. With --output it writes seeds.json and seeds.md.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from empax.core.command import in_one_line, run_command
from empax.core.paths import expand, given_folder, report_folder

if TYPE_CHECKING:
    from empax.data.empathetic_dialogues import Corpus

_PREDICTIONS = flags.DEFINE_string("predictions", None, "JSON-lines file to score; the same as naming it first.")
_SEEDS = flags.DEFINE_bool("seeds", False, "Instead of scoring, summarise the report.json files named after this flag.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder for report.json, report.md and report.html.")
_COMPARE = flags.DEFINE_multi_string(
    "compare", [], "Another system's file on the same rows; may be given several times."
)
_PEERS = flags.DEFINE_string("peers", None, "Folder of *.jsonl with released outputs to compare with.")
_METRICS = flags.DEFINE_list("metrics", [], "What to compare, chosen beforehand: fewer tests need less correction.")
_METRIC = flags.DEFINE_multi_string(
    "metric", [], "Also a metric of your own, MODULE:FUNCTION; may be given several times."
)
_EMPATHY = flags.DEFINE_string(
    "empathy", None, "Judge of empathy: empathy-minilm (published), WORKDIR, WORKDIR/STAGE or linear."
)
_BART_SCORE = flags.DEFINE_string("bart_score", None, "Folder of a BART, for BARTScore.")
_DATA = flags.DEFINE_string(
    "data",
    None,
    "Folder or archive of EmpatheticDialogues, for lines with only an id; folder of EPITOME, for --empathy=linear.",
)
_SKIP = flags.DEFINE_bool(
    "skip_bad_lines", False, "Skip bad lines and score the others; otherwise a bad line stops the scoring."
)
_SAMPLES = flags.DEFINE_integer("bootstrap_samples", 1000, "Resamples behind each interval.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the resamples.", lower_bound=0)
_VARIANTS = flags.DEFINE_bool("variants", False, "Also print the metrics as other papers compute them.")


@in_one_line
def main(argv: list[str]) -> int:
    """Returns 0, or 2 for invalid files."""
    words = [*([_PREDICTIONS.value] if _PREDICTIONS.value else []), *argv[1:]]
    wrong = _misused(words)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    files = [expand(word) for word in words]
    checked = given_folder if _SEEDS.value else report_folder  # --seeds writes no report.json
    output = checked(_OUTPUT.value, "--output") if _OUTPUT.value else None
    return _sum_up(files, output) if _SEEDS.value else _evaluate(files, output)


def _misused(files: list[str]) -> str:
    if _SEEDS.value:
        unused = (_PREDICTIONS, _COMPARE, _PEERS, _METRICS, _METRIC, _EMPATHY, _BART_SCORE, _DATA, _SKIP)
        given = [f"--{flag.name}" for flag in unused if flag.value]
        given += [f"--{flag.name}" for flag in (_SAMPLES, _SEED) if flag.present]
        return f"--seeds takes reports and scores nothing; leave out {', '.join(given)}." if given else ""
    if not files:
        return "name a file to score (FILE.jsonl or --predictions=FILE.jsonl), or reports after --seeds."
    if len(files) > 1 and _COMPARE.value:
        return (
            f"{len(files)} files and --compare: give either several files, which are all compared with each other, or "
            "one file and a --compare for each of the others."
        )
    if _METRICS.value and not (len(files) > 1 or _COMPARE.value or _PEERS.value):
        return "--metrics says what to compare; name a second file, --compare or --peers, or leave it out."
    return ""


def _sum_up(paths: list[Path], output: Path | None) -> int:
    from empax.reporting import seeds

    summary = seeds.summarize(paths)
    print(seeds.text(summary, variants=_VARIANTS.value))
    if output:
        seeds.write(summary, output)
        print(f"\nwrote seeds.json and seeds.md to {output}")
    return 0


def _evaluate(files: list[Path], output: Path | None) -> int:
    from empax.core.text_files import visible
    from empax.evaluation.scoring import VARIANTS, ScoringSettings
    from empax.reporting import score_file

    names = VARIANTS if _VARIANTS.value or output else ()
    settings = ScoringSettings(_SAMPLES.value, _SEED.value, names, own=tuple(_METRIC.value))
    peers = expand(_PEERS.value) if _PEERS.value else None
    others = [*files[1:], *map(expand, _COMPARE.value)]
    found = score_file.score_file(
        files[0],
        settings,
        others=score_file.Others(others, all_pairs=len(files) > 1, peers=peers, metrics=_METRICS.value),
        judge=_EMPATHY.value or "",
        bart_score=_BART_SCORE.value or "",
        data=_DATA.value or "",
        corpus=_corpus(),
        skip_bad_lines=_SKIP.value,
    )
    print(visible(score_file.text(found, variants=_VARIANTS.value)))
    if output:
        score_file.write(found, output)
        print(f"\nwrote report.json, report.md and report.html to {output}")
    print(f"\n{visible(score_file.conclusion(found))}")
    return 0


def _corpus() -> Corpus | None:
    """Returns the corpus of --data; None if the folder holds EPITOME alone, for a judge without a run."""
    from empax.core.files import DataError
    from empax.data.empathetic_dialogues import find_archive, load_corpus
    from empax.pipeline.judging import ALONE

    if _DATA.value and _EMPATHY.value in ALONE:
        try:
            find_archive(_DATA.value)
        except DataError:
            return None
    return load_corpus(_DATA.value) if _DATA.value else None


command_line = functools.partial(run_command, main, __name__, takes_words=True)


if __name__ == "__main__":
    command_line()
