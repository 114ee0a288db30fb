"""Levels of empathy in predictions, counted for a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from empax.core.types import ATTRIBUTES, EMOTIONS, LEVELS, MECHANISMS, Prediction
from empax.evaluation.empathy import confusion_matrix


def attribute_shares(predictions: Sequence[Prediction]) -> dict[str, dict[str, dict[str, float]]]:
    """How often each level of each attribute occurs: whose ("contexts", "exemplars") → attribute → level → share."""
    sources = {
        "contexts": [row.attributes for row in predictions],
        "exemplars": [exemplar.get("attributes") or {} for row in predictions for exemplar in row.exemplars],
    }
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for whose, attributes in sources.items():
        for name in ATTRIBUTES:
            counts = Counter(levels[name] for levels in attributes if levels.get(name))
            if counts:
                order = [*LEVELS, *sorted(set(counts) - set(LEVELS))]
                shares.setdefault(whose, {})[name] = {level: counts[level] / counts.total() for level in order}
    return shares


def _level(attributes: Any, name: str) -> str:
    return (attributes or {}).get(name) or ""


def confusions(predictions: Sequence[Prediction]) -> dict[str, dict[str, Any]]:
    """Confusion matrices of whatever the rows hold: emotion, attributes of exemplars, mechanisms of responses."""
    pairs: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
        "emotion": ("emotion of the dialogue", "predicted", [(r.emotion, r.emotion_prediction) for r in predictions])
    }
    for name in ATTRIBUTES:
        matched = [
            (_level(row.attributes, name), _level(exemplar.get("attributes"), name))
            for row in predictions
            for exemplar in row.exemplars
        ]
        pairs[f"{name} of exemplars"] = ("context", "its exemplars", matched)
    for name in MECHANISMS:
        levels = [
            (_level(row.notes.get("reference_attributes"), name), _level(row.notes.get("response_attributes"), name))
            for row in predictions
        ]
        pairs[f"{name} of responses"] = ("reference", "response", levels)
    found = {}
    for title, (row_title, column_title, values) in pairs.items():
        known = [(label, guess) for label, guess in values if label and guess]
        if not known:
            continue
        labels, guesses = [label for label, _ in known], [guess for _, guess in known]
        usual = EMOTIONS if title == "emotion" else LEVELS
        names = [*usual, *sorted({*labels, *guesses} - set(usual))]
        matrix = confusion_matrix(labels, guesses, names).tolist()
        found[title] = {"labels": names, "matrix": matrix, "rows": row_title, "columns": column_title}
    return found
