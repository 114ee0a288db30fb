"""Reader of any system's outputs as `Prediction` rows: one JSON object per line, with a report of every bad line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.text_files import DataError, decode_line, parse_object, raw_lines
from empax.core.types import LEVELS, MECHANISMS, Instance, Prediction

_MAX_NATS = 700.0
"""Maximum mean negative log-likelihood per token of a row: exp of more overflows 64 bits."""


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that is not a prediction: its number, from 1, and why.

    `id_alone`: whether it has an `id` but neither context nor reference, and no corpus was given.
    """

    number: int
    reason: str
    id_alone: bool = False

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


def read_predictions(
    path: Path, corpus: Mapping[str, Instance] | None = None
) -> tuple[list[Prediction], list[BadLine]]:
    """Reads the rows of a JSON Lines file, which may be gzipped, and its bad lines; blank lines are ignored.

    Each line holds `context` (list of turns), `response`, `reference` and, if known, `id`, `emotion`,
    `emotion_prediction`, `attributes`, `exemplars`, `notes`; null means unknown. Other keys go into `notes`: `nll`
    (nats, including the end token) with `num_tokens` gives perplexities, `intent` with `intent_prediction` an accuracy.

    The instances of a `corpus` by id supply `context`, `reference` and `emotion` of lines that have only an `id`, and
    missing fields of exemplars with an `id`: `released` leaves them out.

    Raises DataError if the file does not exist, has another encoding, or is damaged (gzip).
    """
    rows, bad = [], []
    for number, raw in raw_lines(path):
        value: dict[str, Any] = {}
        try:
            if line := decode_line(raw).strip():
                value = parse_object(line)
                rows.append(to_prediction(value if corpus is None else _completed(value, corpus)))
        except DataError as error:
            known = {name for name in ("id", "context", "reference") if value.get(name) is not None}
            bad.append(BadLine(number, str(error), id_alone=corpus is None and known == {"id"}))
    return rows, bad


def read_all(
    path: Path, corpus: Mapping[str, Instance] | None = None, *, remedy: str = "Correct the line."
) -> list[Prediction]:
    """Reads predictions as `read_predictions` does, all of them.

    Raises DataError as there, or if a line is bad; the message names the first one and ends in `remedy`.
    """
    rows, bad = read_predictions(path, corpus)
    if bad:
        raise DataError(f"{path}, {bad[0]} (bad lines: {len(bad)}). {remedy}")
    return rows


def with_notes(rows: Sequence[Prediction], notes: Mapping[str, Sequence[Any]]) -> list[Prediction]:
    """Returns the rows, each with its value of every note added."""
    return [
        dataclasses.replace(row, notes={**row.notes, **{name: values[i] for name, values in notes.items()}})
        for i, row in enumerate(rows)
    ]


def released(row: Prediction) -> dict[str, Any]:
    """Returns a system's outputs for a row without any text of the corpus or of facts, for publication.

    `read_predictions` restores the corpus, but not the facts.
    """
    exemplars = [{"id": exemplar["id"], "score": exemplar["score"]} for exemplar in row.exemplars]
    made = {"id": row.id, "response": row.response, "emotion_prediction": row.emotion_prediction}
    notes = {name: note for name, note in row.notes.items() if name not in ("facts", "fields")}
    return {**made, "attributes": dict(row.attributes), "exemplars": exemplars, **notes}


def _completed(value: dict[str, Any], corpus: Mapping[str, Instance]) -> dict[str, Any]:
    value = {name: known for name, known in value.items() if known is not None}
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
    return {"context": list(found.context), "response": found.response, "emotion": found.emotion} | {
        name: known for name, known in exemplar.items() if known is not None
    }


def to_prediction(value: Any) -> Prediction:
    """Converts a JSON object to a `Prediction`.

    Raises DataError if the value is not an object, or a field is missing or of the wrong type.
    """
    if not isinstance(value, dict):
        raise DataError(f"must be a JSON object, not a {type(value).__name__}")
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
    attributes = value.pop("attributes", {})
    _check_levels("'attributes'", attributes)
    exemplars = _pop(value, "exemplars", list, [])
    notes = _pop(value, "notes", dict, {})
    _check_notes({**value, **notes})
    return Prediction(
        context=tuple(context),
        id=str(identity),
        attributes=attributes,
        exemplars=tuple(map(_checked_exemplar, exemplars)),
        notes={**value, **notes},
        **text,
    )


def _pop(value: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    found = value.pop(name, default)
    if not isinstance(found, kind):
        names = {str: "a string", dict: "an object", list: "a list"}
        raise DataError(f"{name!r} is of type {type(found).__name__}, must be {names[kind]}")
    return found


_EXEMPLAR_FIELDS = {
    "id": ((str, int), "a string or a whole number"),
    "context": ((list, str), "a list of strings, or one"),
    "response": ((str,), "a string"),
    "text": ((str,), "a string"),
    "emotion": ((str,), "a string"),
    "score": ((int, float), "a number"),
}
"""Fields of an exemplar that the report reads; it needs at least one other than the score."""


def _checked_exemplar(exemplar: Any) -> dict[str, Any]:
    if not isinstance(exemplar, dict):
        raise DataError("'exemplars' must be a list of objects")
    found = {key: item for key, item in exemplar.items() if item is not None}
    if not (found.keys() & _EXEMPLAR_FIELDS.keys()) - {"score"}:
        wanted = ", ".join(name for name in _EXEMPLAR_FIELDS if name != "score")
        raise DataError(f"one of 'exemplars' has none of {wanted}")
    for name, (kinds, what) in _EXEMPLAR_FIELDS.items():
        item = found.get(name, "")
        if name in found and (not isinstance(item, kinds) or isinstance(item, bool)):
            raise DataError(f"{name!r} of one of 'exemplars' is of type {type(item).__name__}, must be {what}")
        if isinstance(item, list) and not all(isinstance(turn, str) for turn in item):
            raise DataError(f"{name!r} of one of 'exemplars' must be {what}")
    _check_levels("'attributes' of one of 'exemplars'", found.get("attributes", {}))
    return exemplar


def _check_levels(name: str, levels: Any) -> None:
    if not isinstance(levels, dict) or not all(isinstance(level, str) for level in levels.values()):
        raise DataError(f"{name} must map names to strings")


def _is_log_probability(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value <= 0


def _check_notes(notes: Mapping[str, Any]) -> None:
    for name in ("nll", "num_tokens"):
        number = notes.get(name)
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise DataError(f"{name!r} is {number!r}, must be a number of at least 0")
    nll, num_tokens = notes.get("nll"), notes.get("num_tokens")
    if nll is not None and num_tokens and nll / num_tokens > _MAX_NATS:
        raise DataError(
            f"'nll' is {nll:.6g} for {num_tokens} tokens: the perplexity of more than {_MAX_NATS:.0f} nats a token "
            "overflows"
        )
    for name in ("intent", "intent_classifier", "intent_first", "intent_second", "intent_prediction"):
        if notes.get(name) is not None and not isinstance(notes[name], str):
            raise DataError(f"{name!r} is of type {type(notes[name]).__name__}, must be a string")
    scores = notes.get("bart_score")
    if scores is not None:
        if not isinstance(scores, dict) or not all(map(_is_log_probability, scores.values())):
            raise DataError("'bart_score' must map names of directions to mean log-probabilities, which are at most 0")
        if not isinstance(notes.get("bart_score_model"), str):
            raise DataError("'bart_score' needs 'bart_score_model', the name of its model")
    for name, levels in notes.items():
        # The mechanisms of EPITOME by name, from any judge.
        if name.endswith(("reference_attributes", "response_attributes")) and levels is not None:
            _check_levels(repr(name), levels)
            wrong = [levels[key] for key in MECHANISMS if levels.get(key, "") not in ("", *LEVELS)]
            if wrong:
                raise DataError(f"{name!r} holds the level {wrong[0]!r}, must be one of {', '.join(LEVELS)}")
