"""The report of a run: everything it found as one JSON object, a Markdown page and a page to show.

`build_report` is a pure function from what the stages left behind; `run` gathers that from the work directory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from empax.core.cache import kept
from empax.core.config import ConfigError
from empax.core.files import DataError, WorkDir, hash_file, hash_json, read_json, read_jsonl, write_json, write_text
from empax.core.types import ATTRIBUTES, EMOTIONS, LEVELS, MECHANISMS, Prediction
from empax.evaluation.empathy import confusion_matrix
from empax.evaluation.published import PAPER_OF, REG_PAPER, TABLES
from empax.evaluation.rows import read_predictions
from empax.evaluation.scoring import VARIANTS, Scores, ScoringSettings, score
from empax.reporting import findings, other_corpora, page

Report = dict[str, Any]

_MAX_POINTS = 200  # of a learning curve: more than a chart of 460 pixels can show


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the `report` stage.

    Attributes:
      kind: of stage.
      bootstrap_samples: resamples behind each interval.
      seed: of the resamples.
      variants: named variants of the metrics, see `evaluation.scoring.VARIANTS`.
      examples: how many predictions the page shows, evenly spaced over the test set.
      paper_row: the row of a paper's main table that this system stands beside, and with it the others; "" = no row.
      peers: folder of *.jsonl with released outputs of other systems, scored by the same code; "" = none.
    """

    kind: str = "report"
    bootstrap_samples: int = 1000
    seed: int = 0
    variants: tuple[str, ...] = VARIANTS
    examples: int = 12
    paper_row: str = ""
    peers: str = ""

    def __post_init__(self) -> None:
        if self.paper_row and self.paper_row not in PAPER_OF:
            raise ValueError(f"paper_row = {self.paper_row!r} is not a row of {', '.join(PAPER_OF)}.")
        if self.examples < 0:
            raise ValueError(f"examples must be at least 0, got {self.examples}.")
        self.scoring()  # a bad number or variant fails here, before any stage runs

    def scoring(self) -> ScoringSettings:
        return ScoringSettings(self.bootstrap_samples, self.seed, self.variants)


class ReportContext(Protocol):
    """What the stage needs of a run."""

    @property
    def files(self) -> WorkDir: ...

    @property
    def config(self) -> Mapping[str, Any]: ...


def run(settings: Settings, context: ReportContext) -> None:
    """Scores the predictions of the work directory and writes report.json, report.md and report.html.

    Raises:
      DataError: there are no predictions yet, or a file of the work directory is damaged.
    """
    files = context.files
    predictions, bad = read_predictions(files.predictions)
    if bad:
        raise DataError(f"{files.predictions}, {bad[0]}; run again with --redo of the stage that decodes.")
    config = dict(context.config)
    history = list(read_jsonl(files.metrics)) if files.metrics.exists() else []
    scores = score(predictions, settings=settings.scoring())
    others = other_corpora.score_evaluations(files, config, settings.scoring())
    table = PAPER_OF.get(settings.paper_row, "")
    paper, ablations = TABLES.get(table, ({}, {}))
    report = build_report(
        system=str(config["system"]),
        config=config,
        data=findings.count_instances(files),
        predictions=predictions,
        metrics=scores.metrics,
        variants=scores.variants,
        counts=scores.counts,
        speed=findings.find_speed(history, findings.find_seconds(files)) | findings.find_peak_memory(files),
        paper=paper,
        paper_row=settings.paper_row,
        peers=score_peers(Path(settings.peers), cache=files.stage("report") / "peers", settings=settings.scoring())
        if settings.peers
        else {},
        history=history,
        run=read_json(files.run) if files.run.exists() else {},
        notes={
            "indexes": findings.find_indexes(files),
            "paper_table": table,
            "paper_ablations": ablations,
            **{
                path.stem: read_json(path)
                for path in sorted((*files.root.glob("*/classifiers.json"), *files.root.glob("*/evaluate.json")))
                if path.stem != "evaluate" or path.parent.name not in others
            },
        },
        examples=settings.examples,
        replies=findings.find_replies(files),
        evaluations=others,
    )
    write_report(report, files.root)


def build_report(
    *,
    system: str,
    config: Mapping[str, Any],
    data: Mapping[str, Any],
    predictions: Sequence[Prediction],
    metrics: Mapping[str, Mapping[str, float]],
    speed: Mapping[str, Any],
    paper: Mapping[str, Mapping[str, float]],
    peers: Mapping[str, Mapping[str, Mapping[str, float]]],
    history: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    notes: Mapping[str, Any],
    variants: Mapping[str, Mapping[str, float]] | None = None,
    counts: Mapping[str, int] | None = None,
    paper_row: str = "",
    examples: int = 12,
    replies: Sequence[Mapping[str, Any]] = (),
    evaluations: Mapping[str, Mapping[str, Any]] | None = None,
) -> Report:
    """Everything about a run as one JSON object.

    Args:
      system: its name.
      config: resolved settings.
      data: split → what is in it, and where it comes from.
      predictions: of the test split.
      metrics: `Scores.metrics`.
      speed: named measurements.
      paper: row of the paper → metric → value.
      peers: released outputs of another system → its metrics by the same code.
      history: rows of metrics.jsonl, each with `stage`, `step`, `split` and numbers by name.
      run: versions, commit, seed, devices.
      notes: anything else by name; `indexes`, `paper_ablations` and `comparison` have a place on the page.
      variants: `Scores.variants`.
      counts: `Scores.counts`.
      paper_row: the row of `paper` that is this system; its values become report["paper"].
      examples: how many predictions to show.
      replies: `findings.find_replies`.
      evaluations: `other_corpora.score_evaluations`.

    Raises:
      ConfigError: `paper_row` is not a row of `paper`.
    """
    if paper_row and paper_row not in paper:
        raise ConfigError(f"paper_row = {paper_row!r} is not among the paper's rows: {', '.join(paper)}.")
    return {
        "system": system,
        "config": dict(config),
        "data": dict(data),
        "metrics": dict(metrics),
        "variants": dict(variants or {}),
        "counts": dict(counts or {}),
        "speed": dict(speed),
        "paper": dict(paper[paper_row]) if paper_row else {},
        "paper_row": paper_row,
        "published": {name: dict(values) for name, values in paper.items()},
        "peers": {name: dict(values) for name, values in peers.items()},
        "run": dict(run),
        "history": collect_curves(history),
        "examples": [_example(row) for row in _spread(predictions, examples)],
        "replies": [dict(row) for row in replies],
        "evaluations": {name: dict(found) for name, found in (evaluations or {}).items()},
        "attributes": attribute_shares(predictions),
        "confusion": confusions(predictions),
        "notes": dict(notes),
    }


def write_report(report: Report, folder: Path) -> None:
    """Writes report.json, report.md and report.html (one file, nothing loaded from anywhere) into `folder`.

    Examples and replies quote the corpus, so they are on the pages only: report.json may be passed on, whatever its
    licence.
    """
    kept = {name: part for name, part in report.items() if name not in ("examples", "replies")}
    write_json(folder / "report.json", _finite(kept))
    write_text(folder / "report.md", page.markdown(report))
    write_text(folder / "report.html", page.html(report))


def _finite(value: Any) -> Any:
    """nan and infinity as null: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def score_peers(
    folder: Path, *, cache: Path | None = None, settings: ScoringSettings | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics of every *.jsonl in `folder`, by file name; kept in `cache` by the hash of file and settings.

    Raises:
      DataError: no such folder, or a file with a bad line.
    """
    settings = settings or ScoringSettings()
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder} with outputs of other systems; set config.report.peers.")
    peers = {}
    for path in sorted(folder.glob("*.jsonl")):
        stored = cache / f"{hash_json([hash_file(path), settings])}.json" if cache else None
        make = functools.partial(_score_peer, path, settings)
        peers[path.stem] = kept(stored, make, write=write_json, read=read_json) if stored else make()
    return peers


def _score_peer(path: Path, settings: ScoringSettings) -> dict[str, dict[str, float]]:
    rows, bad = read_predictions(path)
    if bad:
        raise DataError(f"{path}, {bad[0]} ({len(bad)} bad lines).")
    return score(rows, settings=settings).metrics


def collect_curves(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, list[list[float]]]]]:
    """Numbers of metrics.jsonl as stage → name → split → [step, value] points, thinned to what a chart can show."""
    curves: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
    for row in history:
        for name, value in row.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            points = curves.setdefault(str(row["stage"]), {}).setdefault(name, {})
            points.setdefault(str(row.get("split", "train")), []).append([row["step"], value])
    return {
        stage: {
            name: {split: _spread(sorted(points), _MAX_POINTS) for split, points in splits.items()}
            for name, splits in names.items()
        }
        for stage, names in curves.items()
    }


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """`count` items evenly spaced from the first to the last; all if there are no more."""
    if len(items) <= count:
        return list(items)
    if count < 2:
        return list(items[:count])
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _example(row: Prediction) -> dict[str, Any]:
    return {
        "id": row.id,
        "context": list(row.context),
        "emotion": row.emotion,
        "emotion_prediction": row.emotion_prediction,
        "attributes": dict(row.attributes),
        "response": row.response,
        "reference": row.reference,
        "exemplars": [dict(exemplar) for exemplar in row.exemplars],
    }


def attribute_shares(predictions: Sequence[Prediction]) -> dict[str, dict[str, dict[str, float]]]:
    """How often each level of each attribute occurs: whose ("contexts", "exemplars") → attribute → level → share."""
    sources = {
        "contexts": [row.attributes for row in predictions],
        "exemplars": [exemplar.get("attributes") or {} for row in predictions for exemplar in row.exemplars],
    }
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for whose, attributes in sources.items():
        for name in ATTRIBUTES:
            counts = Counter(levels[name] for levels in attributes if levels.get(name))
            if counts:
                order = [*LEVELS, *sorted(set(counts) - set(LEVELS))]
                shares.setdefault(whose, {})[name] = {level: counts[level] / counts.total() for level in order}
    return shares


def _level(attributes: Any, name: str) -> str:
    return (attributes or {}).get(name) or ""


def confusions(predictions: Sequence[Prediction]) -> dict[str, dict[str, Any]]:
    """Confusion matrices of whatever the rows hold: emotion, attributes of exemplars, mechanisms of responses."""
    pairs: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
        "emotion": ("emotion of the dialogue", "predicted", [(r.emotion, r.emotion_prediction) for r in predictions])
    }
    for name in ATTRIBUTES:
        matched = [
            (_level(row.attributes, name), _level(exemplar.get("attributes"), name))
            for row in predictions
            for exemplar in row.exemplars
        ]
        pairs[f"{name} of exemplars"] = ("context", "its exemplars", matched)
    for name in MECHANISMS:
        levels = [
            (_level(row.notes.get("reference_attributes"), name), _level(row.notes.get("response_attributes"), name))
            for row in predictions
        ]
        pairs[f"{name} of responses"] = ("reference", "response", levels)
    found = {}
    for title, (row_title, column_title, values) in pairs.items():
        known = [(label, guess) for label, guess in values if label and guess]
        if not known:
            continue
        labels, guesses = [label for label, _ in known], [guess for _, guess in known]
        usual = EMOTIONS if title == "emotion" else LEVELS
        names = [*usual, *sorted({*labels, *guesses} - set(usual))]
        matrix = confusion_matrix(labels, guesses, names).tolist()
        found[title] = {"labels": names, "matrix": matrix, "rows": row_title, "columns": column_title}
    return found


def of_predictions(
    predictions: Sequence[Prediction],
    scores: Scores,
    *,
    system: str,
    run: Mapping[str, Any],
    comparison: Mapping[str, Mapping[str, float]],
) -> Report:
    """The report of a file of predictions; `run` says where they are from, `comparison` is as of `scoring.compare`."""
    return build_report(
        system=system,
        config={},
        data={"test": {"instances": len(predictions)}},
        predictions=predictions,
        metrics=scores.metrics,
        variants=scores.variants,
        counts=scores.counts,
        speed={},
        paper=REG_PAPER,
        peers={},
        history=(),
        run=run,
        notes={"comparison": dict(comparison)},
    )
