"""A report as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from empax.reporting import comparisons, controls, other_corpora, swaps
from empax.reporting.content import (
    NOTE,
    REPLIES,
    Report,
    about,
    exemplar_parts,
    facts,
    headline,
    recipe_of,
    results_tables,
)
from empax.reporting.tables import intervals, markdown_results, markdown_table, metric_title

_SIGNS = re.compile(r"[\\`*_\[\]<>|#&~$]|^(?=[-+](?:\s|$)|[-=]+$)")
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")
"""Patterns of text that Markdown interprets, in a line or at its beginning."""


def markdown(report: Report) -> str:
    """Formats the report: verdict, a few metrics and replies; then results, data, speed, all examples, the run."""
    lines = [
        f"# {_plain(recipe_of(report))}: report",
        "",
        f"**{_plain(report['verdict']['line'])}**",
        "",
        *markdown_table(
            ["metric", "value"],
            [
                (metric_title(name), f"{value} ({interval})" if interval else value)
                for name, (value, interval) in intervals(headline(report)).items()
            ],
        ),
        "",
        *(line for example in report["examples"][:REPLIES] for line in _said(example)),
        "",
        "## Results",
        "",
    ]
    for table in results_tables(report):
        rows = [(kind, _plain(name), cells) for kind, name, cells in table.rows]
        lines += [_plain(table.caption), "", *markdown_results(table.names, rows), ""]
        lines += [_plain(table.absent), ""] if table.absent else []
    lines += [
        NOTE,
        "",
        *_tables([*swaps.tables(report), *controls.tables(report)]),
        *_comparison(comparisons.parts(report)),
    ]
    for title, note, names, rows in other_corpora.tables(report):
        lines += [f"## {title}", "", *markdown_results(names, rows), "", note, ""]
    for title, table in facts(report).items():
        cells = [(_plain(name), _plain(value)) for name, value in table]
        lines += [f"## {title}", "", *markdown_table(["name", "value"], cells), ""]
    for row in report["replies"]:
        lines += [f"## Training, heard: {_plain(row['stage'])}", "", _plain(" / ".join(row["context"])), ""]
        lines += [*markdown_table(["step", "reply"], [[str(step), _plain(r)] for step, r in row["replies"]]), ""]
    if report["examples"]:
        lines += ["## Replies", ""]
    for example in report["examples"]:
        exemplars = [(about(one), " → ".join(filter(None, exemplar_parts(one)))) for one in example["exemplars"]]
        found = [f"  - exemplar ({_plain(who)}): {_plain(said)}" for who, said in exemplars]
        lines += _said(example, found)
    return "\n".join(lines).rstrip() + "\n"


def _tables(tables: Sequence[controls.Table]) -> list[str]:
    lines = []
    for table in tables:
        lines += [f"## {_plain(table.title)}", ""]
        if table.rows:
            rows = [list(map(_plain, row)) for row in table.rows]
            lines += [*markdown_table(list(map(_plain, table.head)), rows), ""]
        lines += [_plain(table.note), ""]
    return lines


def _comparison(found: comparisons.Parts | None) -> list[str]:
    if found is None:
        return []
    lines = ["## Comparison", "", *(f"- {_plain(line)}" for line in found.conclusions), ""]
    rows = [(kind, _plain(name), cells) for kind, name, cells in found.rows]
    lines += [found.head, "", *markdown_results(found.names, rows), ""]
    lines += [f"- {_plain(note)}" for note in found.notes]
    for pair in found.pairs:
        lines += ["", f"### {_plain(pair.title)}", "", *markdown_table(list(map(_plain, pair.head)), pair.rows), ""]
        lines += [f"- {_plain(note)}" for note in pair.notes]
    return [*lines, ""]


def _said(example: Mapping[str, Any], between: Sequence[str] = ()) -> list[str]:
    """Formats the context, the reply and the reference as a list."""
    return [
        f"- **{_plain(example['emotion'] or 'context')}**: " + " / ".join(map(_plain, example["context"])),
        *between,
        f"  - reply: {_plain(example['response'])}",
        f"  - reference: {_plain(example['reference'])}",
    ]


def _plain(text: Any) -> str:
    """Escapes Markdown and HTML in a text, and puts it on one line."""
    line = _SIGNS.sub(r"\\\g<0>", " ".join(str(text).split()))
    return _NUMBERED.sub(r"\1\\\2", line)
