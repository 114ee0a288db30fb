"""Comparisons of systems as text, Markdown and HTML: all systems in one table, then a table for each tested pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from empax.evaluation.scoring import LOWER_IS_BETTER, is_own
from empax.reporting.tables import (
    NO_DIRECTION,
    Row,
    aligned,
    describe,
    format_difference,
    format_interval,
    format_value,
    intervals,
)

Comparison = Mapping[str, Any]
"""A result of `evaluation.comparing.compare_systems` with `corpus`, a name, `peers`, the labels of released outputs,
and `verdicts` of the others by label."""

_ACROSS = 4  # systems side by side in a terminal
_ALPHA = 0.05


def text(found: Comparison) -> str:
    """Formats aligned tables for a terminal."""
    names, systems = _names(found), found["systems"]
    parts = ["\n".join([describe(found["rows"], names, corpus=found["corpus"]), *_notes(found)])]
    if len(systems) > 2:  # for two, the pair's table has the same numbers
        labels = list(systems)
        for start in range(0, len(labels), _ACROSS):
            block = labels[start : start + _ACROSS]
            rows = [["rows", *(f"{systems[label]['rows']:,}" for label in block)]]
            rows += [[name, *(_value(name, systems[label]["metrics"].get(name)) for label in block)] for name in names]
            parts.append("\n".join(aligned(["", *block], rows)))
    for pair in found["pairs"]:
        parts.append("\n".join([_title(pair), *aligned(*_pair_table(pair)), *_left_out(pair)]))
    return "\n\n".join(parts)


class Pair(NamedTuple):
    """A tested pair: a table of plain text, and notes below it."""

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str]


class Parts(NamedTuple):
    """The contents of the section, in order."""

    conclusions: list[str]
    head: str
    names: list[str]
    rows: list[Row]
    notes: list[str]
    pairs: list[Pair]


def parts(report: Mapping[str, Any]) -> Parts | None:
    """Returns the section of a report; None without a comparison."""
    found = report["notes"].get("comparisons")
    if not found:
        return None
    names = _names(found)
    pairs = [Pair(_title(pair), *_pair_table(pair), _left_out(pair)) for pair in found["pairs"]]
    rows: list[Row] = [
        ("peer" if label in found["peers"] else "ours", f"{label}, {one['rows']:,} rows", intervals(one["metrics"]))
        for label, one in found["systems"].items()
    ]
    head = describe(found["rows"], names, corpus=found["corpus"])
    return Parts(conclusions(found), head, names, rows, _notes(found), pairs)


def conclusions(found: Comparison) -> list[str]:
    """Returns a sentence for each pair on which system is better by which metrics, by the corrected p-values."""
    return [_conclusion(pair, found) for pair in found["pairs"]]


def _conclusion(pair: Mapping[str, Any], found: Comparison) -> str:
    labels = (pair["first"], pair["second"])
    better: tuple[list[str], list[str]] = ([], [])
    other = []
    for name, cell in pair["metrics"].items():
        base = name.partition(":")[0]
        if cell["p_holm"] >= _ALPHA or not cell["difference"]:
            continue
        if base in NO_DIRECTION or is_own(name):
            other.append(name)
        else:
            better[(cell["difference"] > 0) == (base in LOWER_IS_BETTER)].append(name)
    named = [
        f"{label} (degenerate)" if found["verdicts"].get(label, {}).get("degenerate") else label for label in labels
    ]
    kinds = {"better on": better[0], "worse on": better[1], "different in": other}
    parts = [f"{kind} {', '.join(metrics)}" for kind, metrics in kinds.items() if metrics]
    if undecided := len(pair["metrics"]) - sum(map(len, kinds.values())):
        parts.append(f"no difference found in {undecided} of {len(pair['metrics'])} metrics")
    return f"{' against '.join(named)}: {'; '.join(parts) or 'no metric is known for both'} (p Holm < {_ALPHA})."


def _names(found: Comparison) -> list[str]:
    """Returns all metrics of the systems, in order of first appearance."""
    return list(dict.fromkeys(name for system in found["systems"].values() for name in system["metrics"]))


def family(correction: Mapping[str, Any]) -> str:
    """Describes the tests that a correction counts, whether a table shows them or not."""
    pairs = "1 pair" if correction["pairs"] == 1 else f"{correction['pairs']} pairs"
    return f"{correction['tests']} tests ({pairs}, {correction['metrics']} metrics)"


def _notes(found: Comparison) -> list[str]:
    made, unit = found["correction"], found["rows"]["resampled"].removesuffix("s")
    notes = [
        f"p: two-sided, {made['test']}, outputs swapped {unit} by {unit} {made['samples']:,} times. "
        f"p Holm: p corrected over {family(made)}. p boot: from as many bootstrap resamples of {unit}s; Distinct, "
        "Sent-Std and Top-5 have none."
    ]
    if any("equal" in cell for pair in found["pairs"] for cell in pair["metrics"].values()):
        notes.append(
            "Distinct and BLEU-2 precision change with the length of replies: differences and p are at equal length."
        )
    if len(found["systems"]) > 2:
        for name, one in found["equal"].items():
            values = ", ".join(f"{label} {format_value(name, value)}" for label, value in one["values"].items())
            notes.append(f"{name} of {one['count']:,} {one['unit']} each: {values}.")
    if any(system["rows"] < found["rows"]["rows"] for system in found["systems"].values()):
        notes.append(
            "Metrics that depend on the number of rows (Distinct, Sent-Std, Top-5) are left out of the table for "
            "systems that lack rows; the tables of pairs are over the rows that both have."
        )
    return notes + [f"{label} is absent: {reason}." for label, reason in found["absent"].items()]


def _title(pair: Mapping[str, Any]) -> str:
    return f"{pair['first']} - {pair['second']}, {pair['rows']:,} rows"


def _pair_table(pair: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["metric", pair["first"], pair["second"], "difference", "p", "p Holm", "p boot"]
    rows = []
    for name, cell in pair["metrics"].items():
        tested = [
            format_difference(name, cell),
            f"{cell['p_value']:.4f}",
            f"{cell['p_holm']:.4f}",
            f"{cell['p_bootstrap']:.4f}" if "p_bootstrap" in cell else "–",
        ]
        values = [format_interval(name, cell["first"]), format_interval(name, cell["second"])]
        if "equal" not in cell:
            rows.append([name, *values, *tested])
            continue
        equal = cell["equal"]
        at_equal = [format_value(name, equal["first"]), format_value(name, equal["second"])]
        rows.append([name, *values, "–", "–", "–", "–"])
        rows.append([f"{name}, {equal['count']:,} {equal['unit']} each", *at_equal, *tested])
    return head, rows


def _left_out(pair: Mapping[str, Any]) -> list[str]:
    return [f"{name} is not compared: {reason}." for name, reason in pair["left_out"].items()]


def _value(name: str, found: Mapping[str, float] | None) -> str:
    return "–" if found is None else format_interval(name, found)
