"""Anybody's predictions from a file: scored, compared with another system's, judged; and what is printed of it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.files import DataError, hash_file
from empax.core.types import Instance, Prediction
from empax.data.dialogues import to_instances
from empax.data.empathetic_dialogues import SPLITS, find_archive, read_dialogues
from empax.evaluation.rows import read_predictions
from empax.evaluation.scoring import Scores, ScoringSettings, compare, score
from empax.evaluation.verdict import verdict
from empax.pipeline import judging
from empax.reporting import controls, report, tables


@dataclasses.dataclass(frozen=True)
class Scored:
    """A file's rows with their scores; `compared` is empty where there is no other file."""

    source: Path
    other: Path | None
    rows: Sequence[Prediction]
    scores: Scores
    compared: Mapping[str, Any]
    linear_judge: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def score_file(
    source: Path,
    settings: ScoringSettings,
    *,
    other: Path | None = None,
    judge: str = "",
    data: str = "",
    corpus: Mapping[str, Instance] | None = None,
    skip_bad_lines: bool = False,
) -> Scored:
    """Scores predictions.

    Args:
      source: JSON lines, see `evaluation.rows`.
      settings: of the scores.
      other: another system's predictions of the same rows; the paired tests are of `source` minus `other`.
      judge: a work directory, or a stage in one, whose empathy identifiers are to judge both; or "linear".
      data: where EPITOME is, see `judging.find_jury`.
      corpus: what lines with an `id` alone leave out, see `evaluation.rows.read_predictions`.
      skip_bad_lines: score the others; bad lines are named on standard error either way.

    Raises:
      DataError: a bad line that is not to be skipped, or a file that cannot be read.
    """
    rows = _read(source, corpus, skip_bad_lines)
    others = _read(other, corpus, skip_bad_lines) if other else None
    about: dict[str, Any] = {}
    if judge:
        jury = judging.find_jury(judge, data)
        rows = jury(rows)
        others = jury(others) if others is not None else None
        about = jury.about()
    scores = score(rows, settings=settings)
    compared = compare(rows, others, settings=settings) if others is not None else {}
    return Scored(source, other, rows, scores, compared, about)


def load_corpus(data: str) -> dict[str, Instance]:
    """EmpatheticDialogues by the ids of its instances, all splits; `data` as `config.data.dir`."""
    archive = find_archive(data)
    return {i.id: i for split in SPLITS for i in to_instances(read_dialogues(archive, split))}


def _read(path: Path, corpus: Mapping[str, Instance] | None, skip_bad_lines: bool) -> list[Prediction]:
    rows, bad = read_predictions(path, corpus)
    for line in bad:
        print(f"{path}, {line}", file=sys.stderr)
    if bad and not skip_bad_lines:
        raise DataError(f"{len(bad)} bad lines in {path}; --skip_bad_lines scores the others.")
    return rows


def text(found: Scored, *, variants: bool) -> str:
    """The verdict, metrics, how many rows they are over, judges and the comparison, as lines of text."""
    scores = found.scores
    lines = [verdict(found.rows)["line"], ""]
    lines.append(tables.text_table({**scores.metrics, **(scores.variants if variants else {})}))
    lines.append("  ".join(f"{name} {count}" for name, count in scores.counts.items() if count or name == "rows"))
    empathy = report.empathy_findings(found.rows, {"linear_judge": found.linear_judge})
    lines += ["", controls.text({"controls": {}, "empathy": empathy})] if empathy else []
    if found.compared:
        lines += ["", tables.comparison_table(found.compared)]
    return "\n".join(lines)


def write(found: Scored, folder: Path) -> None:
    """Writes report.json, report.md and report.html into `folder`."""
    run = {
        "predictions": found.source.name,
        "predictions_sha256": hash_file(found.source),
        "command": " ".join(["python -m empax.evaluate", *sys.argv[1:]]),
    }
    if found.other is not None:
        run |= {"compared_with": found.other.name, "compared_with_sha256": hash_file(found.other)}
    made = report.of_predictions(
        found.rows,
        found.scores,
        system=Path(found.source.name.removesuffix(".gz")).stem,
        run=run,
        comparison=found.compared,
        linear_judge=found.linear_judge,
    )
    report.write_report(made, folder)
