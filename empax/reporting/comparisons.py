"""Comparisons of systems as text, Markdown and HTML: all systems in one table, then a table for each tested pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from empax.reporting.tables import (
    Row,
    aligned,
    describe,
    format_difference,
    format_interval,
    html_results,
    intervals,
    markdown_results,
    markdown_table,
)

Comparison = Mapping[str, Any]
"""As of `evaluation.comparing.compare_systems`; with `corpus`, a name, and `peers`, the labels of released outputs."""

_ACROSS = 4  # systems beside each other in a terminal


def text(found: Comparison) -> str:
    """Aligned tables for a terminal."""
    names, systems = _names(found), found["systems"]
    parts = ["\n".join([_head(found, names), *_notes(found)])]
    if len(systems) > 2:  # of two, the pair's table says the same
        labels = list(systems)
        for start in range(0, len(labels), _ACROSS):
            block = labels[start : start + _ACROSS]
            rows = [["rows", *(f"{systems[label]['rows']:,}" for label in block)]]
            rows += [[name, *(_value(name, systems[label]["metrics"].get(name)) for label in block)] for name in names]
            parts.append("\n".join(aligned(["", *block], rows)))
    for pair in found["pairs"]:
        parts.append("\n".join([_title(pair), *aligned(*_pair_table(pair)), *_left_out(pair)]))
    return "\n\n".join(parts)


def markdown(report: Mapping[str, Any]) -> list[str]:
    """Lines of the section; none without a comparison."""
    found = report["notes"].get("comparisons")
    if not found:
        return []
    names = _names(found)
    lines = ["## Comparison", "", _head(found, names), "", *markdown_results(names, _rows(found)), ""]
    lines += [f"- {note}" for note in _notes(found)]
    for pair in found["pairs"]:
        lines += ["", f"### {_title(pair)}", "", *markdown_table(*_pair_table(pair)), ""]
        lines += [f"- {note}" for note in _left_out(pair)]
    return [*lines, ""]


def section(report: Mapping[str, Any]) -> str:
    """The section's HTML; empty without a comparison."""
    found = report["notes"].get("comparisons")
    if not found:
        return ""
    names = _names(found)
    parts = [f'<p class="note">{escape(_head(found, names))}</p>', html_results(names, _rows(found))]
    parts += [f'<p class="note">{escape(note)}</p>' for note in _notes(found)]
    for pair in found["pairs"]:
        head, rows = _pair_table(pair)
        cells = "".join(f"<th>{escape(word)}</th>" for word in head)
        body = "".join(
            f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
            for name, *row in rows
        )
        table = f'<table class="results"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
        parts.append(f'<h3>{escape(_title(pair))}</h3><div class="wide">{table}</div>')
        parts += [f'<p class="note">{escape(note)}</p>' for note in _left_out(pair)]
    return "".join(parts)


def _names(found: Comparison) -> list[str]:
    """Every metric that a system has, in the order of the first that has it."""
    return list(dict.fromkeys(name for system in found["systems"].values() for name in system["metrics"]))


def _head(found: Comparison, names: Sequence[str]) -> str:
    return describe(found["rows"], names, corpus=found["corpus"])


def _notes(found: Comparison) -> list[str]:
    made, unit = found["correction"], found["rows"]["resampled"].removesuffix("s")
    pairs = "1 pair" if made["pairs"] == 1 else f"{made['pairs']} pairs"
    notes = [
        f"p: two-sided, of {made['samples']:,} bootstrap resamples of {unit}s; for Distinct, Sent-Std and Top-5 it is "
        f"p rand. p rand: approximate randomisation, outputs swapped {unit} by {unit}. "
        f"p Holm: p corrected over {made['tests']} tests ({pairs}, {made['metrics']} metrics)."
    ]
    if any(system["rows"] < found["rows"]["rows"] for system in found["systems"].values()):
        notes.append(
            "Metrics that depend on the number of rows (Distinct, Sent-Std, Top-5) are left out of the table for "
            "systems that lack rows; the tables of pairs are over the rows that both have."
        )
    return notes + [f"{label} is absent: {reason}." for label, reason in found["absent"].items()]


def _rows(found: Comparison) -> list[Row]:
    return [
        (
            "peer" if label in found["peers"] else "ours",
            f"{label}, {system['rows']:,} rows",
            intervals(system["metrics"]),
        )
        for label, system in found["systems"].items()
    ]


def _title(pair: Mapping[str, Any]) -> str:
    return f"{pair['first']} - {pair['second']}, {pair['rows']:,} rows"


def _pair_table(pair: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["metric", pair["first"], pair["second"], "difference", "p", "p Holm", "p rand"]
    rows = [
        [
            name,
            format_interval(name, cell["first"]),
            format_interval(name, cell["second"]),
            format_difference(name, cell),
            f"{cell['p_value']:.4f}",
            f"{cell['p_holm']:.4f}",
            f"{cell['p_randomisation']:.4f}",
        ]
        for name, cell in pair["metrics"].items()
    ]
    return head, rows


def _left_out(pair: Mapping[str, Any]) -> list[str]:
    return [f"{name} is not compared: {reason}." for name, reason in pair["left_out"].items()]


def _value(name: str, found: Mapping[str, float] | None) -> str:
    return "–" if found is None else format_interval(name, found)
