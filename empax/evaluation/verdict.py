"""Checks whether a run is degenerate, for the top of a report.

The limits are ours; `reply_checks` describes the calibration of those of replies.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from empax.core.types import ATTRIBUTES, MECHANISMS, Prediction
from empax.evaluation import reply_checks
from empax.evaluation.pairing import replies_and_references
from empax.evaluation.reply_checks import MIN_ROWS, Check, share, wilson_low, words
from empax.evaluation.words import lower_tokens

_MAX_EMPTY = 0.05
_MAX_ONE_REPLY = 0.25
_MIN_DISTINCT = 0.1
_MAX_COPIED = 0.5
_SHORTEST, _LONGEST = 0.5, 2.0
_USUAL_LEVEL = 0.99
"""Assumed share of the commonest level of contexts, whose true levels are unknown. Classifiers find little exploration
in 95% of the contexts of EmpatheticDialogues."""
_NLL_NOTES = ("nll", "nll_of_other_exemplars", "num_tokens")


def verdict(rows: Sequence[Prediction], *, retrieves: bool = False) -> dict[str, Any]:
    """Checks the predictions as a whole.

    There is at least one; if the system `retrieves`, each should have exemplars. The notes `nll_of_other_exemplars`,
    `nll` and `num_tokens` show their effect.

    Returns:
      `degenerate`, `line` (one sentence for the top of a report) and `checks` (each `name`, `ok`, `found`).
    """
    checks = [check for make in _CHECKS for check in make(rows)]
    checks += _retrieval(rows, retrieves)
    failed = [check for check in checks if not check.ok]
    if failed:
        line = f"Degenerate: {'; '.join(check.found for check in failed)}."
    else:
        line = f"No degeneracy found in {len(checks)} checks."
        if len(rows) < MIN_ROWS:
            rows_ = "1 row is" if len(rows) == 1 else f"{len(rows)} rows are"
            line += f" {rows_} too few for the others."
    return {"degenerate": bool(failed), "line": line, "checks": [dataclasses.asdict(check) for check in checks]}


def _empty(rows: Sequence[Prediction]) -> list[Check]:
    checks = []
    for whose, texts in zip(("replies", "references"), replies_and_references(rows), strict=True):
        empty = sum(not text.strip() for text in texts)
        found = f"{share(empty, len(rows))} {whose} are empty"
        checks.append(Check(f"empty {whose}", empty <= _MAX_EMPTY * len(rows), found))
    return checks


def _equal(rows: Sequence[Prediction]) -> list[Check]:
    said = Counter(" ".join(words(row.response)) or row.response.strip() for row in rows)
    del said[""]  # has a separate check
    most, total = max(said.values(), default=0), said.total()
    found = f"{share(most, total)} replies are one and the same"
    if len(rows) < MIN_ROWS:
        return [Check("equal replies", most < total, found)] if total > 1 else []
    if not said:
        return []
    return [
        Check("equal replies", most <= _MAX_ONE_REPLY * total, found),
        Check(
            "distinct replies", len(said) >= _MIN_DISTINCT * total, f"{share(len(said), total)} replies are distinct"
        ),
    ]


def _length(rows: Sequence[Prediction]) -> list[Check]:
    said, wanted = (sum(len(lower_tokens(text)) for text in texts) for texts in replies_and_references(rows))
    if not said or not wanted:
        return []
    ratio = said / wanted
    found = f"replies are {ratio:.2f} times as long as the references"
    return [Check("length", _SHORTEST <= ratio <= _LONGEST, found)]


def _one_class(rows: Sequence[Prediction]) -> list[Check]:
    """Checks for predicted labels that never change, significantly more often than the gold labels have that value."""
    columns: dict[str, tuple[list[Any], list[Any]]] = {
        "emotion predictions": ([r.emotion_prediction for r in rows], [r.emotion for r in rows]),
        "intent predictions": ([r.notes.get("intent_prediction") for r in rows], [r.notes.get("intent") for r in rows]),
        **{f"{name} levels of contexts": ([r.attributes.get(name) for r in rows], []) for name in ATTRIBUTES},
        **{
            f"{name} levels of replies": (
                [r.level("response_attributes", name) for r in rows],
                [r.level("reference_attributes", name) for r in rows],
            )
            for name in MECHANISMS
        },
    }
    checks = []
    for name, (found, expected) in columns.items():
        labels, others = Counter(filter(None, found)), Counter(filter(None, expected))
        if labels.total() < MIN_ROWS or len(others) == 1:
            continue
        label, most = labels.most_common(1)[0]
        usual = others[label] / others.total() if others else _USUAL_LEVEL
        said = f"all {most:,} {name} are {label!r}" if len(labels) == 1 else f"{name} are of {len(labels)} kinds"
        checks.append(Check(f"one class: {name}", len(labels) > 1 or wilson_low(most, most) <= usual, said))
    return checks


def _chance(rows: Sequence[Prediction]) -> list[Check]:
    """Checks that the lower Wilson bound of each head's accuracy is above the share of the most frequent label."""
    pairs = {
        "emotion": [(row.emotion, row.emotion_prediction) for row in rows],
        "intent": [(row.notes.get("intent"), row.notes.get("intent_prediction")) for row in rows],
    }
    checks = []
    for name, both in pairs.items():
        known = [(gold, guess) for gold, guess in both if gold and guess]
        labels = Counter(gold for gold, _ in known)
        if len(known) < MIN_ROWS or len(labels) < 2:
            continue
        hits, chance = sum(gold == guess for gold, guess in known), max(labels.values()) / len(known)
        found = f"accuracy of the {name} head is {hits / len(known):.1%}, of the most frequent label {chance:.1%}"
        above = wilson_low(hits, len(known)) > chance
        checks.append(Check(f"chance: {name} head", above, found if above else f"{found}: at chance"))
    return checks


def _retrieval(rows: Sequence[Prediction], retrieves: bool) -> list[Check]:
    shown = [row for row in rows if row.exemplars]
    if not retrieves and not shown:
        return []
    none = len(rows) - len(shown)
    checks = [Check("exemplars", none <= _MAX_EMPTY * len(rows), f"{share(none, len(rows))} rows have no exemplar")]
    if len(shown) < MIN_ROWS:
        return checks
    texts = [tuple(_said(exemplar) for exemplar in row.exemplars) for row in shown]
    most = Counter(texts).most_common(1)[0][1]
    found = f"{share(most, len(shown))} rows have the same exemplars"
    checks.append(Check("exemplars differ", most <= _MAX_ONE_REPLY * len(shown), found))
    copied = sum(bool(row.response.strip()) and row.response in said for row, said in zip(shown, texts, strict=True))
    found = f"{share(copied, len(shown))} replies are copies of an exemplar's"
    checks.append(Check("copies of exemplars", copied <= _MAX_COPIED * len(shown), found))
    return [*checks, *_use(shown)]


def _said(exemplar: Mapping[str, Any]) -> str:
    return str(exemplar.get("response") or exemplar.get("text") or exemplar.get("id") or "")


def _use(shown: Sequence[Prediction]) -> list[Check]:
    """Checks whether exemplars help, if rows have results with other exemplars."""
    noted: list[list[Any]] = [[row.notes.get(name) for name in _NLL_NOTES] for row in shown]
    known = [numbers for numbers in noted if all(isinstance(value, (int, float)) for value in numbers)]
    tokens = sum(count for *_, count in known)
    if len(known) < MIN_ROWS or not tokens:
        return []
    used = sum(other - own for own, other, _ in known) / tokens
    found = f"exemplars lower the loss by {used:.4f} nats a token, compared with those of another context"
    return [Check("nats from exemplars", used > 0, found if used > 0 else f"{found}: retrieval is unused")]


_CHECKS: tuple[Callable[[Sequence[Prediction]], list[Check]], ...] = (
    _empty,
    _equal,
    _length,
    reply_checks.copies,
    reply_checks.openings,
    reply_checks.contradictions,
    reply_checks.shuffled,
    _one_class,
    _chance,
)
