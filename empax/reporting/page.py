"""A report as Markdown and as one self-contained HTML page (inline style and SVG, light and dark, printable)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any, NamedTuple

from empax.evaluation.scoring import METRICS, VARIANTS
from empax.reporting import charts, comparisons, controls, other_corpora
from empax.reporting.tables import (
    Row,
    format_value,
    html_cell,
    html_results,
    intervals,
    markdown_results,
    markdown_table,
    metric_title,
)

Report = Mapping[str, Any]

CLEANED = ":moel"
"""How the names of metrics end that clean both sides as MoEL's authors did."""

NOTE = (
    "Values with 95% bootstrap intervals over test rows. BLEU, Dist, accuracies, F1, Top-5 and exemplar match in "
    "percent, ROUGE-L and sentiment MAE as fractions. “As published” rows are copied from the papers, which do not all "
    "state the unit of their perplexities. “Released outputs” are scored by this code on the rows that their authors "
    "published."
)

_SIGNS = re.compile(r"[\\`*_\[\]<>|#&~$!]|^(?=[-+=])")
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")
"""What Markdown reads as more than itself, in a line or at the beginning of one."""

_CURVES = frozenset({"loss", "reward", "kl", "entropy", "response_tokens"})
"""Shown at once, beside every other loss; the rest of a stage's curves are folded away."""


AS_IT_IS = "text as it is; BLEU and Dist of lower-cased NLTK words"
APART = "†"
"""Stands behind a published number that must not be compared with ours."""

CLEANED_ALIKE = "both sides cleaned and split into words as MoEL's (“:moel”)"


class Results(NamedTuple):
    """A results table: whose rows, normalised how; its metrics and rows; and what is absent, with the reason."""

    caption: str
    names: list[str]
    rows: list[Row]
    absent: str


def results_tables(report: Report) -> list[Results]:
    """The run beside what was published of the same rows; then beside released outputs, all cleaned alike."""
    ours: Row = ("ours", str(report["system"]), intervals({**report["metrics"], **report["variants"]}))
    title = report["test_set"]["title"]
    published = [(name, _published_cells(report, values)) for name, values in report["published"].items()]
    rows = [
        ours,
        # What this run wants to reproduce stands directly under it.
        *(("own", name, cells) for name, cells in published if name == report["paper_row"]),
        *(("paper", name, cells) for name, cells in published if name != report["paper_row"]),
    ]
    absent = report["published_absent"]
    why = f"Published rows are absent: {absent}." if absent else _not_comparable(report)
    how = AS_IT_IS + ("; published rows as their authors cleaned them" if published else "")
    names = [name for name in METRICS if name in report["metrics"]]
    named = {name for values in report["published"].values() for name in values}
    names += [name for name in report["variants"] if name in named]
    tables = [Results(f"{title}; {how}.", names, rows, why)]
    if report["peers"] or report["peers_absent"]:
        tables.append(_beside_peers(report))
    return tables


def _published_cells(report: Report, values: Mapping[str, float]) -> dict[str, tuple[str, str]]:
    """Numbers of a paper as cells, with a mark where they must not be compared with ours."""
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
    return f"{APART} As published not comparable with ours. {told}." if told else ""


def _beside_peers(report: Report) -> Results:
    scored = {name for values in report["peers"].values() for name in values}
    keys = {name: f"{name}{CLEANED}" if f"{name}{CLEANED}" in scored else name for name in METRICS}
    names = [name for name, key in keys.items() if key in scored]

    def cells(values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        return intervals({name: values[keys[name]] for name in names if keys[name] in values})

    rows: list[Row] = [("ours", str(report["system"]), cells({**report["metrics"], **report["variants"]}))]
    rows += [("peer", _with_rows(report, name), cells(values)) for name, values in report["peers"].items()]
    alike = any(key.endswith(CLEANED) for key in keys.values())
    how = CLEANED_ALIKE if alike else f"{AS_IT_IS}, which the others' authors cleaned: no like beside like"
    absent = "; ".join(f"{name}: {why}" for name, why in report["peers_absent"].items())
    why = f"Released outputs are absent: {absent}." if absent else ""
    return Results(f"{report['test_set']['title']}, beside released outputs; {how}.", names, rows, why)


def _with_rows(report: Report, name: str) -> str:
    found = report["peer_sets"].get(name)
    return f"{name}, {found['rows']:,} rows" if found else name


def markdown(report: Report) -> str:
    """The report as Markdown: results, data, speed, examples, the run."""
    lines = [
        f"# {_plain(report['system'])}: report",
        "",
        f"**{_plain(report['verdict']['line'])}**",
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
        *controls.markdown(report, _plain),
        *comparisons.markdown(report),
        *other_corpora.markdown(report),
    ]
    for title, facts in _facts(report).items():
        cells = [(_plain(name), _plain(value)) for name, value in facts]
        lines += [f"## {title}", "", *markdown_table(["name", "value"], cells), ""]
    for row in report["replies"]:
        lines += [f"## Training, heard: {_plain(row['stage'])}", "", _plain(" / ".join(row["context"])), ""]
        lines += [*markdown_table(["step", "reply"], [[str(step), _plain(r)] for step, r in row["replies"]]), ""]
    if report["examples"]:
        lines += ["## Replies", ""]
    for example in report["examples"]:
        lines += [f"- **{_plain(example['emotion'] or 'context')}**: " + " / ".join(map(_plain, example["context"]))]
        lines += [
            f"  - exemplar ({_plain(_about(item))}): {_plain(_exemplar_text(item))}" for item in example["exemplars"]
        ]
        lines += [f"  - reply: {_plain(example['response'])}", f"  - reference: {_plain(example['reference'])}"]
    return "\n".join(lines).rstrip() + "\n"


def _plain(text: Any) -> str:
    """Text that cannot be taken for Markdown or HTML, on one line."""
    line = _SIGNS.sub(r"\\\g<0>", " ".join(str(text).split()))
    return _NUMBERED.sub(r"\1\\\2", line)


def _facts(report: Report) -> dict[str, list[tuple[str, str]]]:
    """Short tables of names and values: counts, data, speed, index, the run."""
    tables = {
        "Checks": [(check["name"], check["found"]) for check in report["verdict"]["checks"]],
        "Rows scored": _flatten(report["counts"]),
        "Data": _flatten(report["data"]),
        "Speed": _flatten(report["speed"]),
        "Index": _flatten(report["notes"].get("indexes", {})),
        "Emotion heads": _flatten(
            {name: note for name, note in report["notes"].get("evaluate", {}).items() if name != "linear_judge"}
        ),
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


def _exemplar_text(exemplar: Mapping[str, Any]) -> str:
    context = exemplar.get("context", "")
    if isinstance(context, (list, tuple)):
        context = " / ".join(map(str, context))
    return " → ".join(str(part) for part in (context or exemplar.get("text", ""), exemplar.get("response", "")) if part)


def _about(exemplar: Mapping[str, Any]) -> str:
    score = exemplar.get("score")
    parts = [str(exemplar.get("emotion") or "no emotion"), *_levels(exemplar.get("attributes"))]
    if isinstance(score, (int, float)):
        parts.append(f"score {score:.3f}")
    return ", ".join(parts)


def _levels(attributes: Any) -> list[str]:
    return [f"{name.replace('_', ' ')} {level}" for name, level in (attributes or {}).items()]


def html(report: Report) -> str:
    """The report as one HTML page."""
    template = Template(resources.files("empax.reporting").joinpath("page.html").read_text(encoding="utf-8"))
    sections = [
        ("Results", _results(report)),
        ("Comparison", comparisons.section(report)),
        ("Controls", controls.section(report)),
        ("Other test sets", other_corpora.section(report)),
        ("Ablations in the paper", _ablations(report)),
        ("Learning curves", _curves(report)),
        ("Emotion and attributes", _attributes(report)),
        ("Training, heard", "".join(map(_heard, report["replies"]))),
        ("Replies and the exemplars behind them", "".join(map(_example, report["examples"]))),
        ("Facts", _fact_tables(report)),
        ("Settings", _settings(report)),
    ]
    shown = [(title, body) for title, body in sections if body]
    anchors = {title: title.split()[0].lower() for title, _ in shown}
    return template.substitute(
        title=escape(f"{report['system']}: report"),
        system=escape(str(report["system"])),
        subtitle=escape(_subtitle(report)),
        verdict=_verdict(report["verdict"]),
        navigation="".join(f'<a href="#{anchors[title]}">{escape(title)}</a>' for title, _ in shown),
        sections="".join(
            f'<section id="{anchors[title]}"><h2>{escape(title)}</h2>{body}</section>' for title, body in shown
        ),
    )


def _subtitle(report: Report) -> str:
    rows = report["counts"].get("rows")
    parts = [f"{rows:,} test rows" if rows else ""]
    parts += [f"{key} {report['run'][key]}" for key in ("commit", "seed") if key in report["run"]]
    return " · ".join(part for part in parts if part)


def _verdict(found: Mapping[str, Any]) -> str:
    checks = "".join(
        f"<li>{'✓' if check['ok'] else '✗'} {escape(check['name'])}: {escape(check['found'])}</li>"
        for check in found["checks"]
    )
    kind = "bad" if found["degenerate"] else "good"
    return f'<details class="verdict {kind}"><summary>{escape(found["line"])}</summary><ul>{checks}</ul></details>'


def _results(report: Report) -> str:
    cards = "".join(
        f'<div class="card"><b>{escape(metric_title(name))}</b><span>{value}</span><small>{interval}</small>'
        f"{_beside(report, name)}</div>"
        for name, (value, interval) in intervals(report["metrics"]).items()
    )
    tables = "".join(
        f'<p class="note">{escape(table.caption)}</p>{html_results(table.names, table.rows)}'
        + (f'<p class="note">{escape(table.absent)}</p>' if table.absent else "")
        for table in results_tables(report)
    )
    return f'<div class="cards">{cards}</div>{tables}<p class="note">{escape(NOTE)}</p>'


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
        for row, cells in ((row, _published_cells(report, values)) for row, values in ablations.items())
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


def _example(example: Mapping[str, Any]) -> str:
    turns = "".join(
        f'<p class="turn {"speaker" if (len(example["context"]) - i) % 2 else "listener"}">{escape(turn)}</p>'
        for i, turn in enumerate(example["context"])
    )
    tags = [f"emotion {example['emotion']}"] if example["emotion"] else []
    if example["emotion_prediction"]:
        tags.append(f"predicted {example['emotion_prediction']}")
    chips = _chips([*tags, *_levels(example["attributes"])])
    exemplars = "".join(
        f"<li>{escape(_exemplar_text(item))}{_chips(_about(item).split(', '))}</li>" for item in example["exemplars"]
    )
    found = f"<details open><summary>{len(example['exemplars'])} exemplars</summary><ol>{exemplars}</ol></details>"
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
        for title, table in _facts(report).items()
    )
    return f'<div class="columns">{tables}</div>' if tables else ""


def _settings(report: Report) -> str:
    if not report["config"]:
        return ""
    text = json.dumps(report["config"], indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>all settings of the run</summary><pre>{escape(text)}</pre></details>"
