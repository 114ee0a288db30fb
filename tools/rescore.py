r"""Scores committed outputs again, with the metrics and statistics of this code.

  python -m tools.rescore results --data=DATA --peers=DATA/peer_outputs

FOLDER/rescore.json lists the comparisons and the rows to leave out; FOLDER/runs/SYSTEM/RECIPE/SEED/outputs.jsonl.gz
are the outputs. Writes scores.json beside each outputs.jsonl.gz, seeds.json for recipes with several seeds, and
FOLDER/comparisons.json. Skips files that are up to date, by a hash of the outputs, the settings, the corpora and
the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import DataError, hash_file, hash_json, message_of, read_json, write_json
from empax.core.paths import expand
from empax.core.types import Prediction
from empax.data.empathetic_dialogues import Corpus, load_corpus
from empax.data.epitome import FILES, find_epitome
from empax.evaluation.comparing import compare_systems
from empax.evaluation.controls import score_controls
from empax.evaluation.normalisation import MOEL_METRICS
from empax.evaluation.rows import read_all
from empax.evaluation.scoring import JUDGES, VARIANTS, ScoringSettings, make_statistics, score
from empax.evaluation.statistics import estimate
from empax.evaluation.text import SAMPLED_VARIANT
from empax.evaluation.verdict import verdict
from empax.pipeline import judging
from empax.reporting import controls as report_controls
from empax.reporting import report, seeds

log = logging.getLogger("empax")

_VARIANTS = tuple(
    name
    for name in VARIANTS
    if name in (*MOEL_METRICS, "token_f1", f"distinct_2:{SAMPLED_VARIANT}")
    or name.startswith("intent_accuracy:")
    or name.endswith(("utterance_mean", "macro", "macro_binary", *JUDGES))
)
"""The variants that documents quote."""

_OF_CONTROLS = tuple(
    name for name in _VARIANTS if name.startswith(("bleu_2", "distinct_2", "length_ratio", "top5_share"))
)
"""The variants by which tables set a control beside systems."""

_CODE = (
    *("empax/data", "empax/evaluation", "empax/parts/attributes/linear.py", "empax/pipeline/judging.py"),
    *("empax/reporting/report.py", "tools/rescore.py"),
)
"""The code that the scores depend on."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Everything that scores depend on besides the outputs.

    Attributes:
      corpus: EmpatheticDialogues.
      jury: the linear judge, which no system was trained with.
      settings: settings of the scores.
      inputs: hash of the code, and of EPITOME, on which the judge is trained.
    """

    corpus: Corpus
    jury: judging.Jury
    settings: ScoringSettings
    inputs: str

    def read(self, run: Path, skip: int) -> tuple[list[Prediction], int]:
        """Returns a run's rows in order, without the first `skip` if it has more, and the number of rows left out."""
        rows = read_all(run / "outputs.jsonl.gz", self.corpus.instances)
        skipped = skip if len(rows) > skip else 0
        rows = rows[skipped:]
        return self.jury(rows), skipped


def load_source(data: str, *, samples: int) -> Source:
    """Reads the corpus (`config.data.dir`) and trains the linear judge; `samples`: resamples per interval.

    Raises:
      ConfigError: `data` lacks EmpatheticDialogues or EPITOME.
    """
    settings = ScoringSettings(bootstrap_samples=samples, variants=_VARIANTS)
    return Source(load_corpus(data), judging.find_jury(judging.LINEAR, data), settings, _hash_inputs(data))


def _hash_inputs(data: str) -> str:
    root, epitome = Path(__file__).parents[1], find_epitome(data)
    files = [path for part in _CODE for path in (sorted((root / part).rglob("*.py")) or [root / part])]
    code = [[str(path.relative_to(root)), hash_file(path)] for path in files]
    return hash_json([code, [hash_file(epitome / name) for name in FILES.values()]])


def _kept(path: Path, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the contents of `path` if it was made from `key`; else makes and writes them."""
    if path.is_file() and (found := read_json(path)).get("made_from") == key:
        return found
    log.info("scoring %s", path)
    made = {"made_from": key, **make()}
    write_json(path, made)
    return made


def rescore(folder: Path, source: Source, peers: Path | None = None) -> None:
    """Writes the scores of all runs below `folder`, the means over seeds and the comparisons.

    Raises:
      DataError: there are no runs, or a file cannot be read.
      ConfigError: comparisons need released outputs, but `peers` is None.
    """
    plan = read_json(folder / "rescore.json")
    runs = sorted(path.parent for path in (folder / "runs").glob("*/*/*/outputs.jsonl.gz"))
    if not runs:
        raise DataError(f"there is no {folder}/runs/SYSTEM/RECIPE/SEED/outputs.jsonl.gz.")
    for run in runs:
        skip = plan["skip_rows"].get(run.parents[1].name, 0)
        key = hash_json([hash_file(run / "outputs.jsonl.gz"), skip, source.settings, source.corpus.name, source.inputs])
        _kept(run / "scores.json", key, lambda run=run, skip=skip: score_run(run, skip, source))
    for recipe in sorted({run.parent for run in runs}):
        _sum_up([run for run in runs if run.parent == recipe])
    path = folder / "comparisons.json"
    old = read_json(path) if path.is_file() else {}
    groups = plan["groups"].items()
    write_json(path, {n: _compare(folder, plan, group, source, peers, old.get(n, {})) for n, group in groups})


def score_run(run: Path, skip: int, source: Source) -> dict[str, Any]:
    """Computes everything that documents quote of one run, without the first `skip` rows if it has more.

    Returns:
      `corpus`, `rows` (as from `pairing.describe_rows`), `first_row` (counted from 1), `metrics` and `variants` (with
      intervals), `counts`, `controls`, `verdict`, `empathy` (as in a report) and `emotion_by_head` (accuracies).
    """
    rows, skipped = source.read(run, skip)
    scores = score(rows, settings=source.settings)
    return {
        "corpus": source.corpus.name,
        "rows": scores.rows,
        "first_row": 1 + skipped,
        "metrics": scores.metrics,
        "variants": scores.variants,
        "counts": scores.counts,
        "controls": score_controls(rows, source.corpus.training, variants=_OF_CONTROLS),
        "verdict": verdict(rows),
        "empathy": report.empathy_findings(rows, {"linear_judge": source.jury.about()}),
        "emotion_by_head": _by_head(rows),
    }


def _by_head(rows: Sequence[Prediction]) -> dict[str, float]:
    heads = dict.fromkeys(head for row in rows for head in row.notes.get("emotion_by_head", {}))
    found = {}
    for head in heads:
        guessed = [dataclasses.replace(r, emotion_prediction=r.notes["emotion_by_head"].get(head, "")) for r in rows]
        if statistic := make_statistics(guessed, ("emotion_accuracy",)).get("emotion_accuracy"):
            found[head] = estimate(statistic)
    return found


def _sum_up(runs: Sequence[Path]) -> None:
    """Writes seeds.json of a recipe with several seeds; results on other corpora come from the runs' reports."""
    if len(runs) < 2:
        return
    scored = [read_json(run / "scores.json") for run in runs]
    left_out: list[str] = []
    parts = {part: seeds.over_runs([one[part] for one in scored], "", left_out) for part in ("metrics", "variants")}
    others = seeds.summarize([run / "report.json" for run in runs])["evaluations"]
    about = {key: scored[0][key] for key in ("corpus", "rows", "first_row")} | {"seeds": [run.name for run in runs]}
    empathy = {judge: _mean([one["empathy"][judge] for one in scored]) for judge in _judges(scored)}
    found = {**about, **parts, "empathy": empathy, "evaluations": others, "left_out": left_out}
    write_json(runs[0].parent / "seeds.json", found)


def _judges(scored: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the judges that all runs have."""
    judges = [report_controls.key(judge) for judge in ("", *JUDGES)]
    return [judge for judge in judges if all(judge in one["empathy"] for one in scored)]


def _mean(found: Sequence[Any]) -> Any:
    """Averages the numbers in nested mappings with the same keys; takes the first of other values."""
    if isinstance(found[0], Mapping):
        return {key: _mean([one[key] for one in found]) for key in found[0]}
    return found[0] if isinstance(found[0], str) else sum(found) / len(found)


def _compare(
    folder: Path,
    plan: Mapping[str, Any],
    group: Mapping[str, Any],
    source: Source,
    peers: Path | None,
    old: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Compares one group of `rescore.json`: `systems`, `pairs` of them, `metrics`, and `peers`, names of peer files."""
    wanted = group.get("peers", [])
    if wanted and peers is None:
        raise ConfigError("rescore.json compares with released outputs; give their folder with --peers.")
    files = {name: (peers or Path()) / f"{name}.jsonl" for name in wanted}
    outputs = [folder / "runs" / name / "outputs.jsonl.gz" for name in group["systems"]]
    hashes = [hash_file(path) for path in (*outputs, *files.values())]
    key = hash_json([hashes, group, plan["skip_rows"], source.settings, source.corpus.name, source.inputs])
    if old.get("made_from") == key:
        return old
    log.info("comparing %s", ", ".join(group["systems"]))
    skip = {name: plan["skip_rows"].get(name.partition("/")[0], 0) for name in group["systems"]}
    systems = {name: source.read(folder / "runs" / name, skip[name])[0] for name in group["systems"]}
    released = {f"{name} (released)": read_all(path) for name, path in files.items()}
    pairs = [tuple(pair) for pair in group["pairs"]]
    names = group["metrics"]
    found = compare_systems(systems, pairs, peers=released, settings=source.settings, names=names)
    return {"made_from": key, "corpus": source.corpus.name, **found}


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 if a file is missing or invalid."""
    parser = argparse.ArgumentParser(prog="python -m tools.rescore", description="Scores outputs again.")
    parser.add_argument("folder", type=Path, help="results")
    parser.add_argument("--data", required=True, help="folder with EmpatheticDialogues and EPITOME")
    parser.add_argument(
        "--peers", type=Path, help="folder of *.jsonl with released outputs, if a comparison needs them"
    )
    parser.add_argument("--bootstrap_samples", type=int, default=1000, help="resamples behind each interval")
    given = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO, force=True)
    try:
        source = load_source(given.data, samples=given.bootstrap_samples)
        rescore(expand(given.folder), source, expand(given.peers) if given.peers else None)
    except (ConfigError, DataError, ValueError, OSError) as error:
        print(f"error: {message_of(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
