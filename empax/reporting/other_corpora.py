"""Evaluations other than the main one, on another corpus, stage or split: scores and their tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from empax.core.files import WorkDir, read_json
from empax.core.manifest import remedy
from empax.evaluation.published import OTHER_CORPORA
from empax.evaluation.rows import read_all
from empax.evaluation.scoring import METRICS, ScoringSettings, score
from empax.reporting.tables import Row, describe, format_value, intervals

_TITLES = {"": "This run's data", "dailydialog": "DailyDialog"}

_OF_EMOTION = frozenset({"emotion_accuracy", "intent_accuracy", "sentiment_mae", "exemplar_emotion_match"})
"""Metrics that do not apply to small talk."""


def score_evaluations(
    files: WorkDir, config: Mapping[str, Any], settings: ScoringSettings
) -> dict[str, dict[str, Any]]:
    """Scores every evaluate stage but the main one that has written `STAGE/predictions.jsonl`.

    Of the variants in `settings`, computes only those of BLEU.

    Returns:
      By stage: `stage` (the stage of the model), `corpus` (empty = the run's own), `split`, `data`, `metrics`,
      `variants`, `counts` and `rows` as in `scoring.Scores`, and `published` (row → metric → value), a paper's table on
      that corpus.

    Raises:
      DataError: a file of predictions is damaged.
    """
    settings = dataclasses.replace(settings, variants=tuple(v for v in settings.variants if v.startswith("bleu_")))
    found = {}
    for name in config["run"]:
        path = files.evaluation(name)
        if not path.exists():
            continue
        about = read_json(path.with_name("evaluate.json"))
        scores = score(read_all(path, remedy=remedy(name)), settings=settings)
        dropped = _OF_EMOTION if about["corpus"] else frozenset()
        found[name] = {
            **about,
            "metrics": {metric: value for metric, value in scores.metrics.items() if metric not in dropped},
            "variants": scores.variants,
            "counts": scores.counts,
            "rows": scores.rows,
            "published": OTHER_CORPORA[about["corpus"]][1] if about["corpus"] else {},
        }
    return found


def tables(report: Mapping[str, Any]) -> list[tuple[str, str, list[str], list[Row]]]:
    """Returns title, note, metrics and rows of a table for every evaluated (corpus, split)."""
    groups: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for name, found in report["evaluations"].items():
        groups.setdefault((found["corpus"], found["split"]), {})[name] = found
    made = []
    for (corpus, split), group in groups.items():
        first = next(iter(group.values()))
        rows: list[Row] = [
            ("ours", name if name == one["stage"] else f"{name}, by {one['stage']}", intervals(one["metrics"]))
            for name, one in group.items()
        ]
        for name, values in first["published"].items():
            kind = "own" if name == report["paper_row"] else "paper"
            rows.append((kind, name, {metric: (format_value(metric, value), "") for metric, value in values.items()}))
        rows.sort(key=lambda row: ("ours", "own", "paper").index(row[0]))
        shown = {metric for found in group.values() for metric in found["metrics"]}
        names = [metric for metric in METRICS if metric in shown]
        title = f"{_TITLES[corpus]}, {split} split"
        note = f"{_note(corpus, group)} {describe(first['rows'], names, corpus=_TITLES[corpus])}"
        made.append((title, note, names, rows))
    return made


def _note(corpus: str, group: Mapping[str, Mapping[str, Any]]) -> str:
    sizes = {(d["answered"], d["instances"], d.get("chosen", "")) for d in (found["data"] for found in group.values())}
    counted = "; ".join(
        f"{answered:,} of {instances:,} turns answered{f', {chosen}' if chosen else ''}"
        for answered, instances, chosen in sorted(sizes)
    )
    if not corpus:
        return f"{counted}."
    where, _ = OTHER_CORPORA[corpus]
    return (
        f"{counted}. No model was trained on this corpus. As published: {where}, which does not say which turns are "
        "answered and which BLEU is meant; its ROUGE-L is divided by 100."
    )
