"""Controls: scores of replies that need no model, by the same metrics as the system's."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from empax.core.types import LEVELS, MECHANISMS, Instance, Prediction
from empax.evaluation import text
from empax.evaluation.empathy import cohens_kappa, confusion_matrix, f1_of_confusion, kappa_of_confusion
from empax.evaluation.scoring import make_statistics
from empax.evaluation.statistics import estimate

CANNED = "oh no, i am so sorry to hear that. what did you do about it?"
"""One reply for every context."""

NAMES = (
    "bleu_1", "bleu_2", "bleu_3", "bleu_4", "bleu_2_precision", "token_f1", "distinct_1", "distinct_2", "length_ratio",
    "brevity_penalty",
)  # fmt: skip
"""The metrics of the controls, in order."""

_SHUFFLES = 20


@dataclasses.dataclass(frozen=True)
class Control:
    """A description, and the test set with the control's replies instead of the system's."""

    about: str
    rows: list[Prediction]


def make_controls(
    rows: Sequence[Prediction], training: Sequence[Instance] = (), *, seed: int = 0
) -> tuple[dict[str, Control], dict[str, str]]:
    """Returns replies that need no model by name of the control, and the reasons for absent controls by name.

    `training` is the system's training data, empty if unknown; `seed` is that of the random controls.
    """
    replies = {"canned": ([CANNED] * len(rows), f"The same reply to every context: “{CANNED}”")}
    absent: dict[str, str] = {}
    rng = np.random.default_rng(seed)
    if len(rows) > 1:
        said = [row.response for row in rows]
        replies["shuffled"] = [said[i] for i in _moved(len(rows), rng)], "The system's own replies, to other contexts"
    else:
        absent["shuffled"] = "there is one row"
    if training:
        drawn = rng.integers(len(training), size=len(rows))
        replies["random_training"] = [training[i].response for i in drawn], "A random reply of the training split"
    else:
        absent["random_training"] = "the training split is not known"
    found, reason = _same_emotion(rows, training, rng)
    if found:
        replies["same_emotion"] = found, "A random reply of a training dialogue of the same emotion"
    else:
        absent["same_emotion"] = reason
    if any(map(_answers, rows)):
        first = [next(iter(_answers(row)), "") for row in rows]
        replies["first_exemplar"] = first, "The reply of the first exemplar, copied"
        most = max(len(_answers(row)) for row in rows)
        about = f"The best of up to {most} exemplars' replies, by token F1 with the reference, which no system knows"
        replies["oracle_exemplar"] = [_oracle(row) for row in rows], about
    else:
        absent |= dict.fromkeys(("first_exemplar", "oracle_exemplar"), "no row has an exemplar with a reply")
    made = {
        name: Control(about, [dataclasses.replace(row, response=t) for row, t in zip(rows, texts, strict=True)])
        for name, (texts, about) in replies.items()
    }
    return made, absent


def _moved(count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns a permutation without fixed points."""
    order = rng.permutation(count)
    moved = np.empty(count, np.int64)
    moved[order] = np.roll(order, 1)
    return moved


def _same_emotion(
    rows: Sequence[Prediction], training: Sequence[Instance], rng: np.random.Generator
) -> tuple[list[str], str]:
    """Returns a training reply with each row's emotion; or none, and why."""
    if not training:
        return [], "the training split is not known"
    by_emotion: defaultdict[str, list[str]] = defaultdict(list)
    for instance in training:
        by_emotion[instance.emotion].append(instance.response)
    if missing := sum(not row.emotion or row.emotion not in by_emotion for row in rows):
        return [], f"{missing} of {len(rows)} rows have no emotion that a training dialogue has"
    return [by_emotion[row.emotion][rng.integers(len(by_emotion[row.emotion]))] for row in rows], ""


def _answers(row: Prediction) -> list[str]:
    return [str(exemplar["response"]) for exemplar in row.exemplars if exemplar.get("response")]


def _oracle(row: Prediction) -> str:
    answers = _answers(row)
    scores = text.token_f1_rows(answers, [row.reference] * len(answers))
    return answers[int(np.argmax(scores))] if answers else ""


def score_controls(
    rows: Sequence[Prediction], training: Sequence[Instance] = (), *, seed: int = 0, variants: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the values of every control, without intervals: by NAMES and `variants` (`evaluation.scoring.VARIANTS`).

    Returns:
      `system` (metric → value, computed by the same code), `controls` (name → `about` and `metrics`) and `absent`
      (name → reason).
    """
    made, absent = make_controls(rows, training, seed=seed)
    names = (*NAMES, *variants)
    found = {name: {"about": control.about, "metrics": _values(control.rows, names)} for name, control in made.items()}
    return {"system": _values(rows, names), "controls": found, "absent": absent}


def _values(rows: Sequence[Prediction], names: Sequence[str]) -> dict[str, float]:
    return {name: estimate(statistic) for name, statistic in make_statistics(rows, names).items()}


def empathy_agreement(rows: Sequence[Prediction], judge: str = "", *, seed: int = 0) -> dict[str, Any]:
    """Returns the agreement of mechanism levels in replies and references, with controls that ignore the context.

    The rows have the notes of a judge: `reference_attributes` and `response_attributes`, mechanism → level, with the
    prefix `judge` and an underscore (empty = the first judge). `seed` is that of the shuffles.

    Returns:
      `weighted_f1`, `macro_f1` (percent) and `kappa` (in [-1, 1]), means over the mechanisms; the same for `majority`
      (every reply at the references' most frequent level) and `shuffled` (the replies' levels shuffled over the rows,
      the mean of 20 shuffles); and in `mechanisms` all of these for each mechanism, with the shares of every level in
      `replies` and `references`. Empty without the judge's notes.
    """
    prefix = f"{judge}_" if judge else ""
    rng = np.random.default_rng(seed)
    mechanisms: dict[str, dict[str, Any]] = {}
    for name in MECHANISMS:
        pairs = [
            (row.level(f"{prefix}reference_attributes", name), row.level(f"{prefix}response_attributes", name))
            for row in rows
        ]
        known = [(gold, guess) for gold, guess in pairs if gold in LEVELS and guess in LEVELS]
        if known:
            golds, guesses = [gold for gold, _ in known], [guess for _, guess in known]
            mechanisms[name] = _one_mechanism(golds, guesses, rng)
    if not mechanisms:
        return {}
    controls = {name: _means([one[name] for one in mechanisms.values()]) for name in ("majority", "shuffled")}
    return {**_means(list(mechanisms.values())), **controls, "mechanisms": mechanisms}


def _means(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {key: float(np.mean([part[key] for part in parts])) for key in ("weighted_f1", "macro_f1", "kappa")}


def _one_mechanism(golds: list[str], guesses: list[str], rng: np.random.Generator) -> dict[str, Any]:
    count = len(golds)
    gold_counts, guess_counts = (np.asarray([levels.count(level) for level in LEVELS]) for levels in (golds, guesses))
    most = LEVELS[int(gold_counts.argmax())]
    return {
        **_agreement(golds, [guesses]),
        "rows": count,
        "majority_level": most,
        "majority": _agreement(golds, [[most] * count]),
        "shuffled": _agreement(golds, [rng.permutation(guesses).tolist() for _ in range(_SHUFFLES)]),
        "replies": dict(zip(LEVELS, (100.0 * guess_counts / count).tolist(), strict=True)),
        "references": dict(zip(LEVELS, (100.0 * gold_counts / count).tolist(), strict=True)),
    }


def _agreement(golds: list[str], several: Sequence[list[str]]) -> dict[str, float]:
    """Returns means over several lists of guesses."""
    matrices = np.stack([confusion_matrix(golds, guesses, LEVELS) for guesses in several]).astype(np.float64)
    return {
        "weighted_f1": float(f1_of_confusion(matrices, "weighted").mean()),
        "macro_f1": float(f1_of_confusion(matrices, "macro").mean()),
        "kappa": float(kappa_of_confusion(matrices).mean()),
    }


def judges_agreement(rows: Sequence[Prediction], one: str, other: str) -> dict[str, dict[str, float]]:
    """Returns the agreement of two judges on replies: by mechanism `share` (percent) and Cohen's `kappa`."""
    notes = [f"{judge}_response_attributes" if judge else "response_attributes" for judge in (one, other)]
    found: dict[str, dict[str, float]] = {}
    for name in MECHANISMS:
        pairs = [(row.level(notes[0], name), row.level(notes[1], name)) for row in rows]
        known = [(a, b) for a, b in pairs if a and b]
        if known:
            first, second = [a for a, _ in known], [b for _, b in known]
            share = 100.0 * sum(a == b for a, b in known) / len(known)
            found[name] = {"share": share, "kappa": cohens_kappa(first, second)}
    return found
