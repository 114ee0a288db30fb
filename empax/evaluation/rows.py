"""Anybody's outputs as `Prediction` rows: one JSON object a line, every bad line named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from empax.core.files import DataError
from empax.core.types import Prediction


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that is not a prediction: its 1-based number and why."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


def read_predictions(path: Path) -> tuple[list[Prediction], list[BadLine]]:
    """The rows of a JSON-lines file and the lines that are none; blank lines are neither.

    Each line holds `context` (list of turns), `response`, `reference` and, where known, `id`, `emotion`,
    `emotion_prediction`, `attributes`, `exemplars`, `notes`; null counts as not known. Other keys go into `notes`:
    `nll` (nats, end token included) with `num_tokens` gives perplexities, `intent` with
    `intent_prediction` an accuracy.

    Raises:
      DataError: there is no such file, or it is not UTF-8 text.
    """
    rows, bad = [], []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}; give a JSON-lines file of predictions.") from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise DataError(f"{path} is not a text file in UTF-8 ({error}); give a JSON-lines file.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(to_prediction(json.loads(line)))
        except json.JSONDecodeError as error:
            bad.append(BadLine(number, f"not valid JSON ({error.msg} at column {error.colno})"))
        except DataError as error:
            bad.append(BadLine(number, str(error)))
    return rows, bad


def to_prediction(value: Any) -> Prediction:
    """A JSON object as a `Prediction`.

    Raises:
      DataError: not an object, a field missing or of the wrong type.
    """
    if not isinstance(value, dict):
        raise DataError(f"a {type(value).__name__}, must be a JSON object")
    value = {key: item for key, item in value.items() if item is not None}
    missing = [name for name in ("context", "response", "reference") if name not in value]
    if missing:
        raise DataError(f"lacks {', '.join(repr(name) for name in missing)}")
    context = value.pop("context")
    if not isinstance(context, list) or not all(isinstance(turn, str) for turn in context):
        raise DataError("'context' must be a list of strings, one for each turn")
    text = {name: _pop(value, name, str, "") for name in ("response", "reference", "emotion", "emotion_prediction")}
    identity = value.pop("id", "")
    if isinstance(identity, bool) or not isinstance(identity, (str, int)):
        raise DataError(f"'id' is of type {type(identity).__name__}, must be a string or a whole number")
    attributes = _pop(value, "attributes", dict, {})
    if not all(isinstance(level, str) for level in attributes.values()):
        raise DataError("'attributes' must map names to strings")
    exemplars = _pop(value, "exemplars", list, [])
    if not all(isinstance(exemplar, dict) for exemplar in exemplars):
        raise DataError("'exemplars' must be a list of objects")
    notes = _pop(value, "notes", dict, {})
    _check_notes({**value, **notes})
    return Prediction(
        context=tuple(context),
        id=str(identity),
        attributes=attributes,
        exemplars=tuple(exemplars),
        notes={**value, **notes},
        **text,
    )


def _pop(value: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    found = value.pop(name, default)
    if not isinstance(found, kind):
        names = {str: "a string", dict: "an object", list: "a list"}
        raise DataError(f"{name!r} is of type {type(found).__name__}, must be {names[kind]}")
    return found


def _check_notes(notes: Mapping[str, Any]) -> None:
    for name in ("nll", "num_tokens"):
        number = notes.get(name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float)) or number < 0):
            raise DataError(f"{name!r} is {number!r}, must be a number of at least 0")
    for name in ("intent", "intent_prediction"):
        if notes.get(name) is not None and not isinstance(notes[name], str):
            raise DataError(f"{name!r} is of type {type(notes[name]).__name__}, must be a string")
