"""A report as Markdown and as one self-contained HTML page (inline style and SVG, light and dark, printable)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from empax.evaluation.scoring import LOWER_IS_BETTER, METRICS
from empax.pipeline import charts

Report = Mapping[str, Any]

TITLES: dict[str, str] = {
    "perplexity": "PPL / token",
    "perplexity_per_word": "PPL / word",
    "bits_per_byte": "Bits / byte",
    "bleu_1": "BLEU-1",
    "bleu_2": "BLEU-2",
    "bleu_3": "BLEU-3",
    "bleu_4": "BLEU-4",
    "rouge_l": "ROUGE-L",
    "distinct_1": "Dist-1",
    "distinct_2": "Dist-2",
    "emotion_accuracy": "Emotion acc.",
    "intent_accuracy": "Intent acc.",
    "empathy_f1": "Emp-F1",
    "emotional_reaction_f1": "Em. reaction F1",
    "interpretation_f1": "Interpretation F1",
    "exploration_f1": "Exploration F1",
    "sentiment_mae": "Sentiment MAE",
    "sentence_std": "Sent-Std",
    "top5_share": "Top-5",
    "exemplar_emotion_match": "Exemplar match",
}

NOTE = (
    "Values with 95% bootstrap intervals over test rows. BLEU, Dist, accuracies, F1, Top-5 and exemplar match in "
    "percent, ROUGE-L and sentiment MAE as fractions. “As published” rows are copied from the papers, which do not all "
    "state the unit of their perplexities. “Released outputs” are scored by this code on the rows that their authors "
    "published."
)

_CURVES = frozenset({"loss", "reward", "kl", "entropy", "response_tokens"})
"""Shown at once, beside every other loss; the rest of a stage's curves are folded away."""

_FRACTIONS = frozenset({"rouge_l", "sentiment_mae", "bits_per_byte"})


def format_value(name: str, value: float) -> str:
    """Two decimals, three for fractions."""
    return f"{value:.{3 if name in _FRACTIONS else 2}f}"


def _title(name: str) -> str:
    return f"{TITLES[name]} {'↓' if name in LOWER_IS_BETTER else '↑'}"


def _shown_metrics(report: Report) -> list[str]:
    """Every metric that we or a peer have, in the fixed order; the paper prints no others."""
    found = {*report["metrics"], *(name for peer in report["peers"].values() for name in peer)}
    return [name for name in METRICS if name in found]


def _rows(report: Report) -> list[tuple[str, str, dict[str, tuple[str, str]]]]:
    """Rows of the results table: kind, name, metric → (value, interval)."""
    rows = [("ours", report["system"], _intervals(report["metrics"]))]
    published = [
        (name, {metric: (format_value(metric, value), "") for metric, value in values.items()})
        for name, values in report["published"].items()
    ]
    # What this run wants to reproduce stands directly under it.
    rows += [("own", name, cells) for name, cells in published if name == report["paper_row"]]
    rows += [("peer", name, _intervals(values)) for name, values in report["peers"].items()]
    rows += [("paper", name, cells) for name, cells in published if name != report["paper_row"]]
    return rows


def _intervals(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[str, str]]:
    return {
        name: (format_value(name, m["value"]), f"{format_value(name, m['low'])}–{format_value(name, m['high'])}")
        for name, m in metrics.items()
    }


_KINDS = {"ours": "this run", "peer": "released outputs, our code", "paper": "as published", "own": "as published"}


def text_table(metrics: Mapping[str, Mapping[str, float]]) -> str:
    """Metrics as aligned lines for a terminal: name, value, interval."""
    lines = [
        f"{name:<34} {format_value(name.split(':')[0], m['value']):>9}   "
        f"[{format_value(name.split(':')[0], m['low'])}, {format_value(name.split(':')[0], m['high'])}]"
        for name, m in metrics.items()
    ]
    return "\n".join(lines)


def comparison_table(compared: Mapping[str, Mapping[str, float]]) -> str:
    """Paired tests as aligned lines for a terminal."""
    return "\n".join(
        f"{name:<34} {format_difference(name, c)}   p {c['p_value']:.4f} (randomisation {c['p_randomisation']:.4f})"
        for name, c in compared.items()
    )


def format_difference(name: str, compared: Mapping[str, float]) -> str:
    """A signed difference with its interval."""
    digits = 3 if name in _FRACTIONS else 2
    low, high = compared["low"], compared["high"]
    return f"{compared['difference']:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def markdown(report: Report) -> str:
    """The report as Markdown: results, data, speed, examples, the run."""
    names = _shown_metrics(report)
    lines = [f"# {report['system']}: report", "", "## Results", ""]
    lines += _markdown_table(
        ["", "source", *map(_title, names)],
        [
            [f"**{name}**" if kind in ("ours", "own") else name, _KINDS[kind], *(_cell(cells, m) for m in names)]
            for kind, name, cells in _rows(report)
        ],
    )
    lines += ["", NOTE, ""]
    for title, table in _facts(report).items():
        lines += [f"## {title}", "", *_markdown_table(["name", "value"], table), ""]
    for row in report["replies"]:
        lines += [f"## Training, heard: {row['stage']}", "", _plain(" / ".join(row["context"])), ""]
        lines += [*_markdown_table(["step", "reply"], [[str(step), _plain(r)] for step, r in row["replies"]]), ""]
    if report["examples"]:
        lines += ["## Replies", ""]
    for example in report["examples"]:
        lines += [f"- **{_plain(example['emotion'] or 'context')}**: " + " / ".join(map(_plain, example["context"]))]
        lines += [f"  - exemplar ({_about(item)}): {_plain(_exemplar_text(item))}" for item in example["exemplars"]]
        lines += [f"  - reply: {_plain(example['response'])}", f"  - reference: {_plain(example['reference'])}"]
    return "\n".join(lines).rstrip() + "\n"


def _cell(cells: Mapping[str, tuple[str, str]], metric: str) -> str:
    value, interval = cells.get(metric, ("–", ""))
    return f"{value} ({interval})" if interval else value


def _plain(text: str) -> str:
    """Text that cannot be taken for Markdown."""
    text = " ".join(text.split())
    for sign in "\\`*_[]<>|#":
        text = text.replace(sign, "\\" + sign)
    return text


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _facts(report: Report) -> dict[str, list[tuple[str, str]]]:
    """Short tables of names and values: counts, data, speed, index, the run."""
    tables = {
        "Rows scored": _flatten(report["counts"]),
        "Data": _flatten(report["data"]),
        "Speed": _flatten(report["speed"]),
        "Index": _flatten(report["notes"].get("indexes", {})),
        "Emotion heads": _flatten(report["notes"].get("evaluate", {})),
        "Attribute classifiers, held out": [
            (
                mechanism,
                f"accuracy {found['accuracy']:.1f}, weighted F1 {found['weighted_f1']:.1f}, {found['pairs']} pairs",
            )
            for mechanism, found in report["notes"].get("classifiers", {}).items()
        ],
        "Paired comparison": [
            (name, f"{format_difference(name, c)}, p {c['p_value']:.4f}")
            for name, c in report["notes"].get("comparison", {}).items()
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


def page(report: Report) -> str:
    """The report as one HTML page."""
    template = Template(resources.files("empax.pipeline").joinpath("report.html").read_text(encoding="utf-8"))
    sections = [
        ("Results", _results(report)),
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


def _results(report: Report) -> str:
    names = _shown_metrics(report)
    cards = "".join(
        f'<div class="card"><b>{escape(_title(name))}</b><span>{value}</span><small>{interval}</small>'
        f"{_beside(report, name)}</div>"
        for name, (value, interval) in _intervals(report["metrics"]).items()
    )
    body, group = [], ""
    for kind, name, cells in _rows(report):
        if kind in ("peer", "paper") and kind != group:
            body.append(f'<tr class="group"><th>{_KINDS[kind]}</th><td colspan="{len(names)}"></td></tr>')
            group = kind
        source = f"<small>{_KINDS[kind]}</small>" if kind in ("ours", "own") else ""
        row = "".join(f"<td>{_html_cell(cells.get(metric))}</td>" for metric in names)
        body.append(f'<tr class="{kind}"><th>{escape(name)}{source}</th>{row}</tr>')
    head = "".join(f"<th>{escape(_title(name))}</th>" for name in names)
    table = f'<table class="results"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    return f'<div class="cards">{cards}</div><div class="wide">{table}</div><p class="note">{escape(NOTE)}</p>'


def _beside(report: Report, name: str) -> str:
    value = report["paper"].get(name)
    return "" if value is None else f"<small>paper: {format_value(name, value)}</small>"


def _html_cell(cell: tuple[str, str] | None) -> str:
    if cell is None:
        return '<span class="none">–</span>'
    value, interval = cell
    return f"{value}<small>{interval}</small>" if interval else value


def _ablations(report: Report) -> str:
    ablations = report["notes"].get("paper_ablations") or {}
    if not ablations:
        return ""
    names = [name for name in METRICS if any(name in values for values in ablations.values())]
    head = "".join(f"<th>{escape(_title(name))}</th>" for name in names)
    rows = "".join(
        f"<tr><th>{escape(row)}</th>"
        + "".join(f"<td>{_html_cell((format_value(n, values[n]), '') if n in values else None)}</td>" for n in names)
        + "</tr>"
        for row, values in ablations.items()
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
