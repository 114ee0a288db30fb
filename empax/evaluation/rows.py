"""Anybody's outputs as `Prediction` rows: one JSON object a line, every bad line named."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from empax.core.files import DataError
from empax.core.types import Instance, Prediction


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that is not a prediction: its 1-based number and why."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


def read_predictions(
    path: Path, corpus: Mapping[str, Instance] | None = None
) -> tuple[list[Prediction], list[BadLine]]:
    """The rows of a JSON-lines file, which may be gzipped, and the lines that are none; blank lines are neither.

    Each line holds `context` (list of turns), `response`, `reference` and, where known, `id`, `emotion`,
    `emotion_prediction`, `attributes`, `exemplars`, `notes`; null counts as not known. Other keys go into `notes`:
    `nll` (nats, end token included) with `num_tokens` gives perplexities, `intent` with
    `intent_prediction` an accuracy.

    Args:
      path: the file; one whose name ends in .gz is gzipped.
      corpus: instances by their ids. From them come `context`, `reference` and `emotion` of lines with nothing but an
        `id` in their place, and what exemplars with an `id` do not say themselves: `released` leaves them out.

    Raises:
      DataError: there is no such file, or it is not UTF-8 text.
    """
    rows, bad = [], []
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.decode("utf-8").split("\n")
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}; give a JSON-lines file of predictions.") from error
    except (UnicodeDecodeError, IsADirectoryError, gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} is not a text file in UTF-8 ({error}); give a JSON-lines file.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            rows.append(to_prediction(value if corpus is None else _completed(value, corpus)))
        except json.JSONDecodeError as error:
            bad.append(BadLine(number, f"not valid JSON ({error.msg} at column {error.colno})"))
        except DataError as error:
            bad.append(BadLine(number, str(error)))
    return rows, bad


def released(row: Prediction) -> dict[str, Any]:
    """What a system made of an instance, without a word of the corpus: to be published where the corpus may not be.

    `read_predictions` puts the corpus back.
    """
    exemplars = [{"id": exemplar["id"], "score": exemplar["score"]} for exemplar in row.exemplars]
    made = {"id": row.id, "response": row.response, "emotion_prediction": row.emotion_prediction}
    return {**made, "attributes": dict(row.attributes), "exemplars": exemplars, **row.notes}


def _completed(value: Any, corpus: Mapping[str, Instance]) -> Any:
    if not isinstance(value, dict):
        return value
    if "context" not in value and "reference" not in value:
        identity = str(value.get("id", ""))
        if identity not in corpus:
            raise DataError(f"lacks 'context' and 'reference', and the corpus has no instance {identity!r}")
        found = corpus[identity]
        value = {"context": list(found.context), "reference": found.response, "emotion": found.emotion, **value}
    exemplars = value.get("exemplars")
    if isinstance(exemplars, list):
        value = {**value, "exemplars": [_completed_exemplar(exemplar, corpus) for exemplar in exemplars]}
    return value


def _completed_exemplar(exemplar: Any, corpus: Mapping[str, Instance]) -> Any:
    found = corpus.get(str(exemplar.get("id"))) if isinstance(exemplar, dict) else None
    if found is None:
        return exemplar
    return {"context": list(found.context), "response": found.response, "emotion": found.emotion, **exemplar}


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
