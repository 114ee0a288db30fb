"""A report as one self-contained HTML page (inline style and SVG, light and dark, printable): page.html, parts.html."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2

from empax.evaluation.scoring import METRICS, VARIANTS
from empax.reporting import charts, comparisons, controls, other_corpora, swaps
from empax.reporting.content import (
    NOTE,
    REPLIES,
    Panel,
    Report,
    about,
    exemplar_parts,
    facts,
    levels,
    panels,
    published_cells,
    recipe_of,
    results_tables,
)
from empax.reporting.tables import KINDS, TITLES, format_value, intervals, metric_title

_CURVES = frozenset({"loss", "reward", "kl", "entropy", "response_tokens"})
"""Curves that are shown unfolded, as are all other losses; a stage's other curves are folded."""


_OPEN = ("Results", swaps.TITLE, "Emotion and attributes")
"""Sections that are initially unfolded."""


def html(report: Report) -> str:
    """Returns the report as one HTML page."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("empax.reporting", ""), autoescape=True, undefined=jinja2.StrictUndefined
    )
    templates.globals |= {
        "KINDS": KINDS, "NOTE": NOTE, "about": about, "exemplar_parts": exemplar_parts, "format_value": format_value,
        "metric_title": metric_title, "tags_of": _tags_of,
    }  # fmt: skip
    parts: Any = templates.get_template("parts.html").module
    more = "Replies and their exemplars" if any(one["exemplars"] for one in report["examples"]) else "Replies"
    ablations = report["notes"].get("paper_ablations") or {}
    found, beside = panels(report)
    config = json.dumps(report["config"], indent=2, ensure_ascii=False, default=str) if report["config"] else ""
    sections = [
        ("Results", parts.results(results_tables(report))),
        ("Comparison", parts.comparison(comparisons.parts(report))),
        (swaps.TITLE, parts.tables(swaps.tables(report), [swaps.chart(one) for one in report["swaps"].values()])),
        ("Controls", parts.tables(controls.tables(report))),
        ("Other test sets", parts.other_test_sets(other_corpora.tables(report))),
        (
            "Ablations in the paper",
            parts.ablations(
                [name for name in (*METRICS, *VARIANTS) if any(name in values for values in ablations.values())],
                {row: published_cells(report, values) for row, values in ablations.items()},
            ),
        ),
        ("Learning curves", parts.curves(_curves(report["history"]))),
        ("Emotion and attributes", parts.attributes(*_confusions(report))),
        ("Emotions and their intents", parts.intents(_intents(report))),
        ("Training, heard", parts.heard(report["replies"])),
        (more, parts.examples(report["examples"][REPLIES:])),
        ("Intents corrected though the emotion was misread", parts.examples(report["corrected"])),
        ("Facts", parts.facts(facts(report))),
        ("Settings", parts.settings(config)),
    ]
    return templates.get_template("page.html").render(
        report=report,
        title=recipe_of(report),
        subtitle=_subtitle(report),
        cards=[(one.name, *intervals({one.name: one.ours})[one.name], _beside(one)) for one in found],
        beside=beside,
        replies=parts.examples(report["examples"][:REPLIES]),
        sections=[(title, body, title in _OPEN) for title, body in sections if body],
    )


def _beside(panel: Panel) -> str:
    """Returns the run's interval above the others' as SVG; empty if there are no others."""
    rows = {name: (one["value"], one.get("low"), one.get("high")) for name, one in panel.others.items()}
    ours = (panel.ours["value"], panel.ours["low"], panel.ours["high"])
    return charts.beside(ours, rows, label=TITLES[panel.name.partition(":")[0]]) if rows else ""


def _subtitle(report: Report) -> str:
    rows = report["counts"].get("rows")
    parts = [f"{rows:,} test rows" if rows else ""]
    parts += [f"{key} {report['run'][key]}" for key in ("commit", "seed") if report["run"].get(key) is not None]
    return " · ".join(part for part in parts if part)


def _curves(history: Mapping[str, Any]) -> list[tuple[str, list[str], list[str]]]:
    """Returns each stage's main curves and its other curves, as SVG."""
    stages = []
    for stage, names in history.items():
        drawn: tuple[list[str], list[str]] = ([], [])
        for name, points in names.items():
            folded = name not in _CURVES and not name.endswith("_loss")
            drawn[folded].append(charts.line_chart(points, x_label="step", y_label=name.replace("_", " ")))
        stages.append((stage, *drawn))
    return stages


def _confusions(report: Report) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns large and small heat maps with their titles, as SVG."""
    found: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for title, one in report["confusion"].items():
        small = len(one["labels"]) <= 8
        titles = {"row_title": one["rows"], "column_title": one["columns"]}
        svg = charts.heat_map(one["labels"], one["matrix"], **titles, cell=52 if small else 17)
        found[small].append((title.replace("_", " "), svg))
    return found


def _intents(report: Report) -> str:
    """Returns the heat map of ReflectDiffu's Fig. 3, if a stage has written it."""
    shares = report["notes"].get("intents", {}).get("shares", {})
    if not shares:
        return ""
    intents = list(next(iter(shares.values())))
    percent = [[100.0 * row[intent] for intent in intents] for row in shares.values()]
    titles = {"row_title": "emotion of the dialogue", "column_title": "intent of the listener"}
    return charts.heat_map(list(shares), percent, **titles, columns=intents, cell=17)


def _tags_of(example: Mapping[str, Any]) -> list[str]:
    """Returns the tags above an example: emotion, intents, levels."""
    kinds = {"emotion": "emotion", "predicted": "emotion_prediction", "intent": "intent"}
    tags = [f"{kind} {example[name]}" for kind, name in kinds.items() if example[name]]
    tags += [f"thought {' → '.join(example['intents'])}"] if example["intents"] else []
    return [*tags, *levels(example["attributes"])]
