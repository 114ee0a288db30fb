"""Tables of a report that calibrate scores: controls beside the system, and judges beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from empax.core.types import LEVELS
from empax.evaluation import controls
from empax.reporting.tables import aligned, format_value, metric_title

Report = Mapping[str, Any]

CONTROLS = {
    "canned": "canned reply",
    "random_training": "random training reply",
    "same_emotion": "random training reply, same emotion",
    "shuffled": "own replies, shuffled",
    "first_exemplar": "first exemplar's reply",
    "oracle_exemplar": "oracle of the exemplars",
}
"""Controls of a report, in order, and their titles."""

JUDGES = {"": "neural judge", "second_seed": "neural judge, second seed", "linear": "linear judge, reply alone"}
"""Judges of the mechanisms by the prefix of their notes; in report.json the first is called "first"."""


class Table(NamedTuple):
    """A table with a title, a note below it, a header and rows of cells, all as plain text."""

    title: str
    note: str
    head: list[str]
    rows: list[list[str]]


def key(judge: str) -> str:
    """Returns the name of a judge in report.json."""
    return judge or "first"


def tables(report: Report) -> list[Table]:
    """Returns the tables of the controls: of the text metrics, then of each judge of mechanisms."""
    made = [_text(report["controls"], str(report["system"]))] if report["controls"].get("controls") else []
    for judge, name in JUDGES.items():
        found = report["empathy"].get(key(judge))
        if found:
            made += [_agreement(name, found), _levels(name, found)]
    return [*made, *_between(report["empathy"])]


def _text(found: Mapping[str, Any], system: str) -> Table:
    names = [name for name in controls.NAMES if name in found["system"]]
    values = {str(system): found["system"]}
    values |= {
        title: found["controls"][name]["metrics"] for name, title in CONTROLS.items() if name in found["controls"]
    }
    notes = [f"{CONTROLS[name]}: {found['controls'][name]['about']}." for name in CONTROLS if name in found["controls"]]
    reasons = [f"{CONTROLS[name]}: {reason}" for name, reason in found["absent"].items()]
    note = " ".join(notes) + (f" Absent: {'; '.join(reasons)}." if reasons else "")
    rows = [[name, *(format_value(metric, metrics[metric]) for metric in names)] for name, metrics in values.items()]
    about = f"Trivial systems, scored in the same way. {note} Random draws have seed {found['seed']}."
    return Table("Controls", about, ["", *map(metric_title, names)], rows)


def _kappa(part: Mapping[str, Any]) -> str:
    return f"{round(part['kappa'], 3) + 0.0:.3f}"  # avoids "-0.000"


def _scores(part: Mapping[str, Any]) -> list[str]:
    return [f"{part['weighted_f1']:.2f}", f"{part['macro_f1']:.2f}", _kappa(part)]


def _agreement(judge: str, found: Mapping[str, Any]) -> Table:
    parts = {"this system": found, "majority level": found["majority"], "own levels, shuffled": found["shuffled"]}
    rows = [[name, *_scores(part)] for name, part in parts.items()]
    note = (
        "Means over the three mechanisms, of the levels in replies against those in references, as a judge (a "
        "classifier) sees them. Weighted F1 favours the majority level; kappa is the agreement beyond the marginals."
    )
    return Table(f"Empathy by the {judge}", note, ["", "Weighted F1 ↑", "Macro F1 ↑", "Kappa ↑"], rows)


def _levels(judge: str, found: Mapping[str, Any]) -> Table:
    rows = []
    for name, one in found["mechanisms"].items():
        shares = [f"{one['replies'][level]:.1f} ({one['references'][level]:.1f})" for level in LEVELS]
        rows.append([name.replace("_", " "), *shares, *_scores(one), f"{one['majority']['weighted_f1']:.2f}"])
    head = ["", *(f"{level} %" for level in LEVELS), "Weighted F1", "Macro F1", "Kappa", "Majority F1"]
    note = "Shares of each level among replies, in brackets among references."
    return Table(f"Levels by the {judge}", note, head, rows)


def _between(empathy: Mapping[str, Any]) -> list[Table]:
    """Returns tables of the agreement between judges, and of the linear judge on held-out posts."""
    names = {key(judge): name for judge, name in JUDGES.items()}
    rows = []
    for one, others in empathy.get("agreement", {}).items():
        for other, found in others.items():
            cells = [f"{part['share']:.1f} ({_kappa(part)})" for part in found.values()]
            rows.append([f"{names[one]} and {names[other]}", *cells])
    made = []
    if rows:
        first = next(iter(next(iter(empathy["agreement"].values())).values()))
        head = ["", *(name.replace("_", " ") for name in first)]
        note = "Replies to which two judges give the same level, in percent, in brackets Cohen's kappa."
        made.append(Table("Agreement of the judges", note, head, rows))
    about = empathy.get("linear_judge", {})
    if "absent" in about:
        made.append(Table("Linear judge", f"Absent: {about['absent']}.", [], []))
    elif about:
        rows = [[name.replace("_", " "), *_scores(one), f"{one['pairs']:,}"] for name, one in about.items()]
        note = "TF-IDF and logistic regression on the reply alone; its scores on a held-out fifth of EPITOME's posts."
        head = ["", "Weighted F1 ↑", "Macro F1 ↑", "Kappa ↑", "Pairs"]
        made.append(Table("Linear judge, held out", note, head, rows))
    return made


def text(report: Report) -> str:
    """Formats the tables for a terminal."""
    parts = []
    for table in tables(report):
        parts.append("\n".join([table.title, *(aligned(table.head, table.rows) if table.rows else [table.note])]))
    return "\n\n".join(parts)
