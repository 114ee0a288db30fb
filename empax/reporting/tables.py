"""Tables of metrics: the format of values, intervals and differences, for terminal, Markdown and page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from empax.evaluation.normalisation import NORMALISATIONS, normalisation
from empax.evaluation.scoring import BART_DIRECTIONS, LOWER_IS_BETTER, is_own
from empax.evaluation.text import SAMPLED, SAMPLED_VARIANT

Row: TypeAlias = tuple[str, str, Mapping[str, tuple[str, str]]]
"""A row of a results table: one of KINDS, a name, and metric → (value, interval or "")."""

KINDS = {"ours": "this run", "peer": "released outputs, our code", "paper": "as published", "own": "as published"}
"""Kinds of rows of a results table, and the source that the page names for each."""

TITLES: dict[str, str] = {
    "perplexity": "PPL / token",
    "perplexity_per_word": "PPL / word",
    "bits_per_byte": "Bits / byte",
    "bleu_1": "BLEU-1",
    "bleu_2": "BLEU-2",
    "bleu_3": "BLEU-3",
    "bleu_4": "BLEU-4",
    "bleu_2_precision": "BLEU-2 precision",
    "brevity_penalty": "Brevity penalty",
    "length_ratio": "Length ratio",
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
    "token_f1": "Token F1",
    "bart_score_faithfulness": "BARTScore faithfulness",
    "bart_score_precision": "BARTScore precision",
    "bart_score_recall": "BARTScore recall",
}
"""Titles of metrics in column headers; `metric_title` makes those of variants."""

_FRACTIONS = frozenset(
    {
        *("rouge_l", "sentiment_mae", "bits_per_byte", "brevity_penalty", "length_ratio"),
        *(f"bart_score_{name}" for name in BART_DIRECTIONS),
    }
)
NO_DIRECTION: frozenset[str] = frozenset({"length_ratio"})
"""Metrics for which neither higher nor lower is better."""

_VARIANT_TITLES = {SAMPLED_VARIANT: f"of {SAMPLED:,} n-grams"}

_FEW_DIALOGUES = 40
"""With fewer dialogues, not every metric has a reliable interval."""


def format_value(name: str, value: float) -> str:
    """Formats a value with two decimals, three for fractions; the name may have a variant."""
    return f"{value:.{_digits(name)}f}"


def _digits(name: str) -> int:
    return 3 if name.partition(":")[0] in _FRACTIONS else 2


def metric_title(name: str) -> str:
    """Returns a metric's column header: its name, its variant, and which direction is better."""
    base, _, variant = name.partition(":")
    if is_own(name):
        return variant
    arrow = "" if base in NO_DIRECTION else " ↓" if base in LOWER_IS_BETTER else " ↑"
    return f"{TITLES[base]}{f' ({_VARIANT_TITLES.get(variant, variant)})' if variant else ''}{arrow}"


def describe(rows: Mapping[str, Any], names: Iterable[str], *, corpus: str = "", over: str = "") -> str:
    """Returns the text above a table: corpus, rows, resampling unit, and each metric's text normalisation.

    Args:
      rows: as from `pairing.describe_rows`.
      names: the table's metrics.
      corpus: name of the corpus; empty = unknown.
      over: the unit of the intervals, if other than in `rows`.
    """
    of_dialogues = f" of {rows['dialogues']:,} dialogues" if rows["dialogues"] else ""
    parts = [
        f"Corpus: {corpus or 'unknown'}",
        f"{rows['rows']:,} rows{of_dialogues} (sha256 {rows['sha256']})",
        f"95% intervals over {over or rows['resampled']}",
    ]
    note = "" if over else few_note(rows)
    return f"{'; '.join(parts)}. {f'{note} ' if note else ''}Text: {text_note(names)}."


def few_note(rows: Mapping[str, Any]) -> str:
    """Returns a caveat on intervals and tests of few dialogues, by `pairing.describe_rows`; empty if there are many."""
    unit = rows["resampled"]
    count = rows["dialogues"] if unit == "dialogues" else rows["rows"]
    if count >= _FEW_DIALOGUES:
        return ""
    if count < 2:
        name = (
            "All rows are of one dialogue, by their ids (DIALOGUE#TURN)" if unit == "dialogues" else "There is one row"
        )
        return f"{name}: intervals have no width, and no difference is significant."
    note = (
        f"With {count} {unit} intervals are widened by Student's t; those of BLEU-3, BLEU-4, Sent-Std and perplexity "
        "per word are too narrow."
    )
    least = 2.0 ** (1 - count)
    return f"{note} No p is below {least:.4f}." if least > 0.0005 else note


def text_note(names: Iterable[str]) -> str:
    """Describes the metrics' text normalisations, grouped by normalisation, n-grams of all n as one."""
    groups: dict[str, dict[str, None]] = {}
    for name in names:
        if is_own(name):
            groups.setdefault("raw", {})[metric_title(name)] = None
        elif key := normalisation(name):
            groups.setdefault(key, {})[re.sub(r"^(BLEU|Dist)-\d$", r"\1", TITLES[name.partition(":")[0]])] = None
    return "; ".join(f"{NORMALISATIONS[key]} ({', '.join(group)})" for key, group in groups.items()) or "not used"


def intervals(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[str, str]]:
    """Formats metrics as cells: value and interval."""
    return {
        name: (format_value(name, m["value"]), f"{format_value(name, m['low'])}–{format_value(name, m['high'])}")
        for name, m in metrics.items()
    }


def text_table(metrics: Mapping[str, Mapping[str, float]]) -> str:
    """Formats metrics as aligned lines for a terminal: name, value, interval."""
    lines = [
        f"{name:<34} {format_value(name, m['value']):>9}   "
        f"[{format_value(name, m['low'])}, {format_value(name, m['high'])}]"
        for name, m in metrics.items()
    ]
    return "\n".join(lines)


def format_interval(name: str, found: Mapping[str, float]) -> str:
    """Formats a value with its interval."""
    value, low, high = (format_value(name, found[key]) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table for a terminal: the first column left-aligned, the others right-aligned."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for name, *cells in (head, *rows):
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return lines


def format_difference(name: str, compared: Mapping[str, float]) -> str:
    """Formats a signed difference with its interval."""
    digits = _digits(name)
    low, high = compared["low"], compared["high"]
    return f"{compared['difference']:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def markdown_results(names: Sequence[str], rows: Iterable[Row]) -> list[str]:
    """Returns the lines of a results table with the metrics `names` as columns."""
    return markdown_table(
        ["", "source", *map(metric_title, names)],
        [
            [f"**{name}**" if kind in ("ours", "own") else name, KINDS[kind], *(cell(cells, m) for m in names)]
            for kind, name, cells in rows
        ],
    )


def cell(cells: Mapping[str, tuple[str, str]], metric: str) -> str:
    """Returns a metric's value with its interval; a dash if it is absent."""
    value, interval = cells.get(metric, ("–", ""))
    return f"{value} ({interval})" if interval else value


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
