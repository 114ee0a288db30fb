"""A report as one self-contained HTML page (inline style and SVG, light and dark, printable)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from empax.evaluation.scoring import METRICS, VARIANTS
from empax.reporting import charts, comparisons, controls, other_corpora, swaps
from empax.reporting.content import (
    NOTE,
    REPLIES,
    Report,
    about,
    exemplar_text,
    facts,
    headline,
    levels,
    published_cells,
    recipe_of,
    results_tables,
)
from empax.reporting.tables import format_value, html_cell, html_results, intervals, metric_title

_CURVES = frozenset({"loss", "reward", "kl", "entropy", "response_tokens"})
"""Shown at once, beside every other loss; the rest of a stage's curves are folded away."""


def html(report: Report) -> str:
    """The report as one HTML page."""
    cards = "".join(
        f'<div class="card"><b>{escape(metric_title(name))}</b><span>{value}</span><small>{interval}</small>'
        f"{_beside(report, name)}</div>"
        for name, (value, interval) in intervals(headline(report)).items()
    )
    template = Template(resources.files("empax.reporting").joinpath("page.html").read_text(encoding="utf-8"))
    more = "Replies and their exemplars" if any(one["exemplars"] for one in report["examples"]) else "Replies"
    sections = [
        ("Results", _results(report)),
        ("Comparison", comparisons.section(report)),
        (swaps.TITLE, swaps.section(report)),
        ("Controls", controls.section(report)),
        ("Other test sets", other_corpora.section(report)),
        ("Ablations in the paper", _ablations(report)),
        ("Learning curves", _curves(report)),
        ("Emotion and attributes", _attributes(report)),
        ("Emotions and their intents", _intents(report)),
        ("Training, heard", "".join(map(_heard, report["replies"]))),
        (more, "".join(map(_example, report["examples"][REPLIES:]))),
        ("Intents corrected though the emotion was misread", "".join(map(_example, report["corrected"]))),
        ("Facts", _fact_tables(report)),
        ("Settings", _settings(report)),
    ]
    shown = [(title, body) for title, body in sections if body]
    anchors = {title: title.split()[0].lower() for title, _ in shown}
    return template.substitute(
        title=escape(recipe_of(report)),
        subtitle=escape(_subtitle(report)),
        verdict=_verdict(report["verdict"]),
        cards=cards,
        replies="".join(map(_example, report["examples"][:REPLIES])),
        navigation="".join(f'<a href="#{anchors[title]}">{escape(title)}</a>' for title, _ in shown),
        sections="".join(
            # A link to what is folded unfolds it.
            f"<details><summary><h2>{escape(title)}</h2></summary>"
            f'<section id="{anchors[title]}">{body}</section></details>'
            for title, body in shown
        ),
    )


def _subtitle(report: Report) -> str:
    rows = report["counts"].get("rows")
    parts = [f"{rows:,} test rows" if rows else ""]
    parts += [f"{key} {report['run'][key]}" for key in ("commit", "seed") if report["run"].get(key) is not None]
    return " · ".join(part for part in parts if part)


def _verdict(found: Mapping[str, Any]) -> str:
    checks = "".join(
        f"<li>{'✓' if check['ok'] else '✗'} {escape(check['name'])}: {escape(check['found'])}</li>"
        for check in found["checks"]
    )
    kind = "bad" if found["degenerate"] else "good"
    return f'<details class="verdict {kind}"><summary>{escape(found["line"])}</summary><ul>{checks}</ul></details>'


def _results(report: Report) -> str:
    tables = "".join(
        f'<p class="note">{escape(table.caption)}</p>{html_results(table.names, table.rows)}'
        + (f'<p class="note">{escape(table.absent)}</p>' if table.absent else "")
        for table in results_tables(report)
    )
    return f'{tables}<p class="note">{escape(NOTE)}</p>'


def _beside(report: Report, name: str) -> str:
    value = report["paper"].get(name)
    return "" if value is None else f"<small>paper: {format_value(name, value)}</small>"


def _ablations(report: Report) -> str:
    ablations = report["notes"].get("paper_ablations") or {}
    if not ablations:
        return ""
    names = [name for name in (*METRICS, *VARIANTS) if any(name in values for values in ablations.values())]
    head = "".join(f"<th>{escape(metric_title(name))}</th>" for name in names)
    rows = "".join(
        f"<tr><th>{escape(row)}</th>" + "".join(f"<td>{html_cell(cells.get(name))}</td>" for name in names) + "</tr>"
        for row, cells in ((row, published_cells(report, values)) for row, values in ablations.items())
    )
    return (
        '<p class="note">What the paper prints for the system with one part less. An ablation is a run of its own, '
        "with its own report: change one setting and compare the two prediction files with a paired "
        "test (<code>python -m empax.evaluate --compare</code>).</p>"
        f'<div class="wide"><table class="results"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _heard(row: Mapping[str, Any]) -> str:
    """What one context was answered as training went on."""
    turns = " / ".join(row["context"])
    replies = "".join(f"<tr><th>{step}</th><td>{escape(reply)}</td></tr>" for step, reply in row["replies"])
    return (
        f'<p class="note">{escape(row["stage"])}: {escape(turns)}</p>'
        f'<div class="wide"><table class="results"><tbody>{replies}</tbody></table></div>'
    )


def _curves(report: Report) -> str:
    parts = []
    for stage, names in report["history"].items():
        main = [name for name in names if name in _CURVES or name.endswith("_loss")]
        rest = [name for name in names if name not in main]
        more = f"<details><summary>other measurements</summary>{_chart_row(names, rest)}</details>" if rest else ""
        parts.append(f"<div><h3>{escape(stage)}</h3>{_chart_row(names, main)}{more}</div>")
    return f'<div class="charts">{"".join(parts)}</div>' if parts else ""


def _chart_row(names: Mapping[str, Mapping[str, charts.Points]], chosen: Sequence[str]) -> str:
    figures = (
        f"<figure>{charts.line_chart(names[name], x_label='step', y_label=name.replace('_', ' '))}</figure>"
        for name in chosen
    )
    return f'<div class="charts">{"".join(figures)}</div>'


def _attributes(report: Report) -> str:
    parts = []
    shares = report["attributes"]
    names = list(dict.fromkeys(name for levels in shares.values() for name in levels))
    if names:
        bars = {
            f"{name.replace('_', ' ')}, {whose}": shares[whose][name]
            for name in names
            for whose in shares
            if name in shares[whose]
        }
        parts.append(
            f"<h3>Attribute levels of contexts and their exemplars</h3><figure>{charts.share_bars(bars)}</figure>"
        )
    small = []
    for title, confusion in report["confusion"].items():
        large = len(confusion["labels"]) > 8
        figure = charts.heat_map(
            confusion["labels"],
            confusion["matrix"],
            row_title=confusion["rows"],
            column_title=confusion["columns"],
            cell=17 if large else 52,
        )
        block = f"<figure><figcaption>{escape(title.replace('_', ' '))}</figcaption>{figure}</figure>"
        if large:
            parts.append(f"<h3>Emotion: predicted against labelled</h3>{block}")
        else:
            small.append(block)
    if small:
        parts.append(f'<h3>Agreement of attributes</h3><div class="charts">{"".join(small)}</div>')
    if parts:
        parts.append('<p class="note">Each row of a matrix is shaded by its shares; hover for counts.</p>')
    return "".join(parts)


def _intents(report: Report) -> str:
    """The heat map of ReflectDiffu's Fig. 3, where a stage has left it."""
    shares = report["notes"].get("intents", {}).get("shares", {})
    if not shares:
        return ""
    intents = list(next(iter(shares.values())))
    percent = [[100.0 * row[intent] for intent in intents] for row in shares.values()]
    titles = {"row_title": "emotion of the dialogue", "column_title": "intent of the listener"}
    return (
        f"<figure>{charts.heat_map(list(shares), percent, **titles, columns=intents, cell=17)}</figure>"
        '<p class="note">Of the training split; each row is shaded by its shares, which show on hover.</p>'
    )


def _example(example: Mapping[str, Any]) -> str:
    turns = "".join(
        f'<p class="turn {"speaker" if (len(example["context"]) - i) % 2 else "listener"}">{escape(turn)}</p>'
        for i, turn in enumerate(example["context"])
    )
    tags = [f"emotion {example['emotion']}"] if example["emotion"] else []
    if example["emotion_prediction"]:
        tags.append(f"predicted {example['emotion_prediction']}")
    if example["intent"]:
        tags.append(f"intent {example['intent']}")
    if example["intents"]:
        tags.append(f"thought {' → '.join(example['intents'])}")
    chips = _chips([*tags, *levels(example["attributes"])])
    exemplars = "".join(
        f"<li>{escape(exemplar_text(item))}{_chips(about(item).split(', '))}</li>" for item in example["exemplars"]
    )
    found = f"<details><summary>{len(example['exemplars'])} exemplars</summary><ol>{exemplars}</ol></details>"
    reply = escape(example["response"]) or '<span class="none">(empty)</span>'
    return (
        f'<article>{chips}<div class="dialogue">{turns}</div>'
        f'<div class="replies"><div class="ours"><b>reply</b><p>{reply}</p></div>'
        f"<div><b>reference</b><p>{escape(example['reference'])}</p></div></div>"
        f"{found if exemplars else ''}</article>"
    )


def _chips(words: Sequence[str]) -> str:
    return '<div class="chips">' + "".join(f"<span>{escape(word)}</span>" for word in words) + "</div>" if words else ""


def _fact_tables(report: Report) -> str:
    tables = "".join(
        f'<div><h3>{escape(title)}</h3><table class="facts">'
        + "".join(
            f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(value)}</td></tr>" for name, value in table
        )
        + "</table></div>"
        for title, table in facts(report).items()
    )
    return f'<div class="columns">{tables}</div>' if tables else ""


def _settings(report: Report) -> str:
    if not report["config"]:
        return ""
    text = json.dumps(report["config"], indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>all settings of the run</summary><pre>{escape(text)}</pre></details>"
