"""The contents of a report in order, independent of the output format."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from empax.evaluation.scoring import METRICS, is_own
from empax.reporting.tables import Row, few_note, format_value, intervals, metric_title

Report = Mapping[str, Any]

CLEANED = ":moel"
"""Suffix of metrics that clean both sides as MoEL's authors did."""

NOTE = (
    "Values with 95% intervals over dialogues, or over rows if ids name no dialogues: by the bootstrap, and for Dist, "
    "Sent-Std and Top-5 by parts of the rows. Top-5 is the share of the five most frequent clauses. BLEU, Dist, "
    "accuracies, F1, Top-5 and exemplar match are percentages, ROUGE-L and sentiment MAE fractions. “As published” "
    "rows are copied from the papers, which do not all state the unit of their perplexities. “Released outputs” are "
    "scored by this code on the rows that their authors published."
)

HEADLINE = (
    "perplexity", "bleu_2", "rouge_l", "distinct_2", "emotion_accuracy", "empathy_f1", "exemplar_emotion_match",
    "length_ratio", "top5_share",
)  # fmt: skip
"""Metrics at the top of a report: the first six that it has."""

_LEADING = 6

REPLIES = 3
"""Number of replies at the top of a report."""

UNCHANGED = "text unchanged; BLEU and Dist of lower-cased NLTK words"
APART = "†"
"""Mark of a published number that is not comparable with ours."""

_CLEANED_ALIKE = "both sides cleaned and split into words as MoEL's (“:moel”)"


def recipe_of(report: Report) -> str:
    """Returns the run's recipe from its command ("classic.py:mime"); else the system."""
    words = _words(report["run"].get("command", ""))
    for word, following in itertools.pairwise([*words, ""]):
        if word == "--config" or word.startswith("--config="):
            spec = following if word == "--config" else word.removeprefix("--config=")
            name, colon, argument = spec.partition(":")
            return f"{Path(name).name}{colon}{argument}"
    return str(report["system"])


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # the command was recorded without quotes
        return command.split()


class Results(NamedTuple):
    """A results table: its sources and text normalisation, its metrics and rows, and absent rows with reasons."""

    caption: str
    names: list[str]
    rows: list[Row]
    absent: str


def results_tables(report: Report) -> list[Results]:
    """Returns tables of the run beside published results on the same rows, and beside released outputs, all cleaned."""
    ours: Row = ("ours", recipe_of(report), intervals({**report["metrics"], **report["variants"]}))
    test_set = report["test_set"]["title"]
    published = [(name, published_cells(report, values)) for name, values in report["published"].items()]
    rows = [
        ours,
        # The row that this run reproduces is directly below it.
        *(("own", name, cells) for name, cells in published if name == report["paper_row"]),
        *(("paper", name, cells) for name, cells in published if name != report["paper_row"]),
    ]
    absent = report["published_absent"]
    why = f"Published rows are absent: {absent}." if absent else _not_comparable(report)
    how = UNCHANGED + ("; published rows as their authors cleaned them" if published else "")
    names = [*(name for name in METRICS if name in report["metrics"]), *filter(is_own, report["metrics"])]
    named = {name for values in report["published"].values() for name in values}
    names += [name for name in report["variants"] if name in named]
    few = few_note(report["rows"]) if report["rows"] else ""
    tables = [Results(f"{test_set}; {how}.{f' {few}' if few else ''}", names, rows, why)]
    if report["peers"] or report["peers_absent"]:
        tables.append(_beside_peers(report))
    return tables


def published_cells(report: Report, values: Mapping[str, float]) -> dict[str, tuple[str, str]]:
    """Formats numbers of a paper as cells, with a mark if they are not comparable with ours."""
    apart = report["notes"].get("not_comparable", {})
    return {
        metric: (format_value(metric, value) + (APART if metric in apart else ""), "")
        for metric, value in values.items()
    }


def _not_comparable(report: Report) -> str:
    reasons: dict[str, list[str]] = {}
    for metric, why in report["notes"].get("not_comparable", {}).items():
        reasons.setdefault(why, []).append(metric_title(metric))
    told = "; ".join(f"{', '.join(metrics)}: {why}" for why, metrics in reasons.items())
    return f"{APART} The published number is not comparable with ours. {told}." if told else ""


def _peer_keys(report: Report) -> dict[str, str]:
    """Returns the metrics of released outputs, and their names in the peers' scores: the cleaned variants, if any."""
    scored = {name for values in report["peers"].values() for name in values}
    keys = {name: f"{name}{CLEANED}" if f"{name}{CLEANED}" in scored else name for name in METRICS}
    return {name: key for name, key in keys.items() if key in scored}


def _beside_peers(report: Report) -> Results:
    keys = _peer_keys(report)
    names = list(keys)

    def cells(values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        return intervals({name: values[keys[name]] for name in names if keys[name] in values})

    rows: list[Row] = [("ours", recipe_of(report), cells({**report["metrics"], **report["variants"]}))]
    for name, values in report["peers"].items():
        found = report["peer_sets"].get(name)
        rows.append(("peer", f"{name}, {found['rows']:,} rows" if found else name, cells(values)))
    absent = "; ".join(f"{name}: {why}" for name, why in report["peers_absent"].items())
    why = f"Released outputs are absent: {absent}." if absent else ""
    return Results(f"{report['test_set']['title']}, with released outputs; {_CLEANED_ALIKE}.", names, rows, why)


class Panel(NamedTuple):
    """One metric of the run, with its interval, beside those of other systems, of which published ones have none."""

    name: str
    ours: Mapping[str, float]
    others: Mapping[str, Mapping[str, float]]


def panels(report: Report) -> tuple[list[Panel], str]:
    """Returns the panels at the top of a report, and the source of the other numbers: released outputs, else papers."""
    keys, found = _peer_keys(report), {**report["metrics"], **report["variants"]}
    keys = {name: key for name, key in keys.items() if key in found}
    apart = report["notes"].get("not_comparable", {})
    made = []
    for name, own in headline(report).items():
        if name in keys:
            others = {peer: values[keys[name]] for peer, values in report["peers"].items() if keys[name] in values}
            own = found[keys[name]]
        else:
            papers = {} if keys or name in apart else report["published"]
            others = {paper: {"value": values[name]} for paper, values in papers.items() if name in values}
        made.append(Panel(name, own, others))
    if not any(panel.others for panel in made):
        return made, ""
    how = f"Compared with released outputs, scored by this code: {_CLEANED_ALIKE}." if keys else "Compared with papers."
    return made, how


def headline(report: Report) -> dict[str, Mapping[str, float]]:
    """Returns the metrics at the top of a report."""
    known = [name for name in HEADLINE if name in report["metrics"]]
    return {name: report["metrics"][name] for name in known[:_LEADING]}


def facts(report: Report) -> dict[str, list[tuple[str, str]]]:
    """Returns short tables of names and values: counts, data, speed, index, the run."""
    answered = report["notes"].get("evaluate", {})
    answering = {name: answered[name] for name in ("responses_per_second", "seconds") if name in answered}
    tables = {
        "Checks": [(check["name"], check["found"]) for check in report["verdict"]["checks"]],
        "Rows scored": _flatten({**report["counts"], **answered.get("data", {})}),
        "Data": _flatten(report["data"]),
        "Speed": _flatten({**report["speed"], "answers": answering}),
        "Index": _flatten(report["notes"].get("indexes", {})),
        "Utility of exemplars on validation": [
            (
                f"{stage} · {name}",
                f"{cell['value']:.4f} ({cell['low']:.4f} to {cell['high']:.4f})"
                if isinstance(cell, Mapping)
                else str(cell),
            )
            for stage, found in report["notes"].get("utility", {}).items()
            for name, cell in found.items()
        ],
        "Emotion heads": _flatten({name: note for name, note in answered.items() if name.startswith("emotion_head")}),
        "Attributes left out": [
            (name, f"the run has no classifier of it (config.{stage}.left_out)")
            for stage, section in report["config"].items()
            if isinstance(section, Mapping)
            for name in section.get("left_out", ())
        ],
        "Attribute classifiers, held out": [
            (
                mechanism,
                f"accuracy {found['accuracy']:.1f}, weighted F1 {found['weighted_f1']:.1f}, {found['pairs']} pairs",
            )
            for mechanism, found in report["notes"].get("classifiers", {}).items()
        ],
        "Variants of the metrics": [
            (name, f"{format_value(name.split(':')[0], m['value'])}") for name, m in report["variants"].items()
        ],
        "The run": _flatten(report["run"]),
    }
    return {title: table for title, table in tables.items() if table}


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        items = [(f"{prefix} · {key}" if prefix else str(key), item) for key, item in value.items()]
        return [pair for name, item in items for pair in _flatten(item, name)]
    if isinstance(value, (list, tuple)):
        return [(prefix, ", ".join(map(str, value)))]
    return [
        (prefix, f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value))
    ]


def exemplar_parts(exemplar: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the context and the response of an exemplar; either may be empty."""
    context = exemplar.get("context", "")
    if isinstance(context, (list, tuple)):
        context = " / ".join(map(str, context))
    return str(context or exemplar.get("text", "")), str(exemplar.get("response", ""))


def about(exemplar: Mapping[str, Any]) -> str:
    score = exemplar.get("score")
    parts = [str(exemplar.get("emotion") or "no emotion"), *levels(exemplar.get("attributes"))]
    if isinstance(score, (int, float)):
        parts.append(f"score {score:.3f}")
    return ", ".join(parts)


def levels(attributes: Any) -> list[str]:
    return [f"{name.replace('_', ' ')} {level}" for name, level in (attributes or {}).items()]
