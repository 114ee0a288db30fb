"""Scores, judges and compares predictions from files, with each other and with peers; and formats the results."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import DataError, WorkDir, hash_file, read_json
from empax.core.text_files import visible
from empax.core.types import Instance, Prediction
from empax.data.empathetic_dialogues import Corpus
from empax.evaluation.comparing import check_compared, compare_systems
from empax.evaluation.normalisation import beside_peers
from empax.evaluation.pairing import pair_rows
from empax.evaluation.published import REG_PAPER
from empax.evaluation.rows import read_predictions
from empax.evaluation.scoring import METRICS, VARIANTS, Scores, ScoringSettings, score
from empax.evaluation.verdict import verdict
from empax.pipeline import judging
from empax.pipeline.bart_score import BartScorer, bart_scored
from empax.reporting import comparisons, controls, report, tables

_SHOWN = 20
"""Bad lines of a file that are named."""


@dataclasses.dataclass(frozen=True)
class Others:
    """The files to compare the first file with.

    Attributes:
      files: other systems' predictions of the same rows.
      all_pairs: tests all pairs of files; False = the first against each.
      peers: folder of *.jsonl with released outputs; None = none.
      metrics: metrics to compare; empty = all, and with peers all that are comparable with theirs.
    """

    files: Sequence[Path] = ()
    all_pairs: bool = False
    peers: Path | None = None
    metrics: Sequence[str] = ()

    def names(self, own: Sequence[str]) -> list[str]:
        """Returns the metrics to compare, with the user's `own`.

        Raises:
          ConfigError: a metric is unknown, or not comparable with peers.
        """
        check_compared(self.metrics)
        for name in self.metrics:
            if name not in (*METRICS, *VARIANTS):
                raise ConfigError(
                    f"--metrics: {name!r} is not one of {', '.join(METRICS)}, or a variant in docs/metrics.md."
                )
            if self.peers and beside_peers(name) != name:
                cleaned = beside_peers(name)
                raise ConfigError(
                    f"--metrics: {name} cannot be compared with released outputs, whose text is cleaned; "
                    + (f"take {cleaned}." if cleaned else "no metric of its kind can.")
                )
        if own and self.peers:
            raise ConfigError(
                f"--metric: {', '.join(own)} would compare the cleaned text of released outputs with other text; "
                "leave out --peers, or your own metrics."
            )
        if self.metrics or not self.peers:
            return [*(self.metrics or METRICS), *own]
        return [cleaned for name in METRICS if (cleaned := beside_peers(name))]


@dataclasses.dataclass(frozen=True)
class Scored:
    """A file's rows with their scores, every file's verdict, and the comparison with other files, if any.

    The comparison is as in `reporting.comparisons`.
    """

    source: Path
    files: Mapping[str, Path]  # by label, the source first
    rows: Sequence[Prediction]
    scores: Scores
    comparison: Mapping[str, Any]
    verdicts: Mapping[str, Mapping[str, Any]]  # by label, see `evaluation.verdict`
    corpus: Corpus | None = None
    linear_judge: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def score_file(
    source: Path,
    settings: ScoringSettings,
    *,
    others: Others = Others(),
    judge: str = "",
    bart_score: str = "",
    data: str = "",
    corpus: Corpus | None = None,
    skip_bad_lines: bool = False,
) -> Scored:
    """Scores predictions.

    Args:
      source: JSON lines, see `evaluation.rows`.
      settings: settings of the scores.
      others: files to compare with.
      judge: the judge of empathy of all files, see `judging.find_jury`; empty = none.
      bart_score: folder of a BART that scores all files; empty = none.
      data: folder of EPITOME, see `judging.find_jury`.
      corpus: has the instances of lines with only an `id`, see `evaluation.rows.read_predictions`; None = unknown.
      skip_bad_lines: scores the other lines; the first bad lines are listed on standard error either way.

    Raises:
      DataError: a bad line is not skipped, a file cannot be read, or the files have different rows.
      ConfigError: a metric is unknown.
    """
    names = others.names(settings.own)  # a mistyped metric fails before any work
    files = _labelled([source, *others.files])
    instances, name = (corpus.instances, corpus.name) if corpus else (None, "")
    systems = {label: _read(path, instances, skip_bad_lines) for label, path in files.items()}
    first, *rest = systems
    for other in rest:  # compare_systems does the same, but only after the judges
        pair_rows(systems[first], systems[other], (first, other))
    peers = _read_peers(others.peers, instances, taken=systems) if others.peers else {}
    scorer = BartScorer.load(bart_score) if bart_score else None
    about: dict[str, Any] = {}
    if judge:
        jury = judging.find_jury(judge, data)
        systems = {label: jury(rows) for label, rows in systems.items()}
        about = jury.about()
    if scorer:
        systems = {label: bart_scored(rows, scorer) for label, rows in systems.items()}
    rows = systems[first]
    scores = score(rows, settings=settings)
    verdicts = {label: verdict(own) for label, own in systems.items()}
    comparison: dict[str, Any] = {}
    if others.files or others.peers:
        pairs = None if others.all_pairs else [(first, other) for other in rest]
        comparison = compare_systems(systems, pairs, peers=peers, settings=settings, names=names)
        comparison |= {"corpus": name, "peers": list(peers), "verdicts": verdicts}
    return Scored(source, files, rows, scores, comparison, verdicts, corpus, about)


def _read(path: Path, corpus: Mapping[str, Instance] | None, skip_bad_lines: bool) -> list[Prediction]:
    rows, bad = read_predictions(path, corpus)
    for line in bad[:_SHOWN]:
        print(visible(f"{path}, {line}"), file=sys.stderr)
    if more := bad[_SHOWN:]:
        print(visible(f"{path}, {len(more)} more bad lines, up to line {more[-1].number}"), file=sys.stderr)
    if bad and all(line.id_alone for line in bad):
        raise DataError(
            f"{len(bad)} lines of {path} have an id, but no context and no reference: for EmpatheticDialogues, add "
            "--data=FOLDER; for a run on another corpus, score its predictions.jsonl."
        )
    if bad and not (skip_bad_lines and rows):
        others = "; --skip_bad_lines scores the others" if rows else ", and no others"
        raise DataError(f"{len(bad)} bad lines in {path}{others}.")
    if not rows:
        raise DataError(f"{path}: there are no predictions to score.")
    return rows


def _read_peers(
    folder: Path, corpus: Mapping[str, Instance] | None, *, taken: Mapping[str, Any]
) -> dict[str, list[Prediction]]:
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise DataError(f"--peers={folder}: there is no folder with *.jsonl of released outputs.")
    return {f"{path.stem} (peer)" if path.stem in taken else path.stem: _read(path, corpus, False) for path in paths}


def _labelled(paths: Sequence[Path]) -> dict[str, Path]:
    """Returns files by their labels in tables: the file's name, or the folder's if every run uses the same name.

    Raises:
      DataError: a file is given twice.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise DataError(f"one file is given twice: {', '.join(map(str, paths))}.")
    labels = [path.resolve().parent.name if _of_run(path) else _stem(path) for path in paths]
    return {label if labels.count(label) == 1 else str(path): path for label, path in zip(labels, paths, strict=True)}


def _of_run(path: Path) -> bool:
    files = WorkDir(path.parent)
    return path in (files.predictions, files.outputs)


def _stem(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem


def _origin(path: Path) -> dict[str, Any]:
    """Returns `system` and `config` of the run that wrote the file, if its report or its config is beside it."""
    files = WorkDir(path.parent)
    if _of_run(path):
        for beside, get in ((path.with_name("report.json"), lambda found: found["config"]), (files.config, dict)):
            if beside.is_file() and isinstance(config := get(read_json(beside)), dict) and "system" in config:
                return {"system": config["system"], "config": config}
    return {"system": _stem(path), "config": {}}


def text(found: Scored, *, variants: bool) -> str:
    """Formats metrics, numbers of rows, judges and the comparison as lines of text."""
    scores = found.scores
    shown = {**scores.metrics, **(scores.variants if variants else {})}
    lines = [
        tables.describe(scores.rows, shown, corpus=found.corpus.name if found.corpus else ""),
        tables.text_table(shown),
    ]
    lines.append("  ".join(f"{name} {count}" for name, count in scores.counts.items() if count or name == "rows"))
    empathy = report.empathy_findings(found.rows, {"linear_judge": found.linear_judge})
    lines += ["", controls.text({"controls": {}, "empathy": empathy})] if empathy else []
    if found.comparison:
        lines += ["", comparisons.text(found.comparison)]
    return "\n".join(lines)


def conclusion(found: Scored) -> str:
    """Formats the conclusion: which system is better by which metrics, and the verdict of every file by name."""
    better = comparisons.conclusions(found.comparison) if found.comparison else []
    return "\n".join([*better, *(f"{label}: {one['line']}" for label, one in found.verdicts.items())])


def write(found: Scored, folder: Path) -> None:
    """Writes report.json, report.md and report.html to `folder`."""
    run: dict[str, Any] = {
        "predictions": found.source.name,
        "predictions_sha256": hash_file(found.source),
        "command": f"python -m empax.evaluate {shlex.join(sys.argv[1:])}",
    }
    _, *others = found.files.values()
    if others:
        run |= {
            "compared_with": ", ".join(path.name for path in others),
            "compared_with_sha256": ", ".join(map(hash_file, others)),
        }
    notes = {"comparisons": found.comparison, "linear_judge": found.linear_judge}
    made = report.build_report(
        report.Recorded(**_origin(found.source), data={"test": {"instances": len(found.rows)}}, run=run),
        found.rows,
        found.scores,
        paper=REG_PAPER,
        peers={},
        history=(),
        notes={name: dict(note) for name, note in notes.items() if note},
        training=found.corpus.training if found.corpus else (),
    )
    report.write_report(made, folder)
