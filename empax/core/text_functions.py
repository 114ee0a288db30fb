"""Users' functions of texts: called with the fields that they name; they must return one number per row."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from empax.core.config import ConfigError
from empax.core.plugins import blamed
from empax.core.types import Instance, Prediction

LARGEST_SCORE = 1e15
"""Limit for the score of a row: the square of a larger one overflows float32 when scores are standardised."""


TWO_ROWS = (
    Instance("one#2", ("I lost my keys today.",), "Oh no, did you find them?", ""),
    Instance("two#4", ("I got the job!", "Great!", "Thank you."), "You must be so proud.", ""),
)
"""Rows to test functions on."""


Noted: TypeAlias = Instance | Prediction
"""A row with fields."""


def call_on_texts(
    function: Callable[..., Any],
    what: str,
    contexts: Sequence[Sequence[str]],
    responses: Sequence[str],
    references: Sequence[str],
    rows: Sequence[Noted],
    known: Iterable[str] = (),
) -> Float[np.ndarray, " N"]:
    """Calls `function(contexts, responses, references, **fields)` and returns its numbers for N responses.

    As in TRL, the function receives the fields of the rows that it names as keyword arguments, or all of them if it
    takes any: `id`, `emotion` and the notes, lists of N; None for rows without the note.

    Messages call the function `what`: "the reward my_rewards:short". Notes in `known`, which other rows have, are
    fields too.

    Raises:
      ConfigError: the function raised an error, names a field that no row has, or did not return one finite number per
        row.
    """
    named, takes_any = wanted_fields(function)
    fields = row_fields(rows, known) if named or takes_any else {}
    if missing := [field for field in named if named[field] and field not in fields]:
        raise ConfigError(
            f"{what} asks for {', '.join(missing)}; the fields of its rows are {', '.join(sorted(fields))}."
        )
    # A field may share its name with one of the function's texts ("references").
    asked = fields.keys() - set(_texts_of(function)) if takes_any else named
    given = {field: fields[field] for field in fields if field in asked}
    with blamed(what):
        found = function(list(contexts), list(responses), list(references), **given)
    return checked_numbers(found, what, len(rows))


def row_fields(rows: Sequence[Noted], known: Iterable[str] = ()) -> dict[str, list[Any]]:
    """Returns the fields of rows as lists: `id`, `emotion`, every note of any row, and those in `known`.

    The entries of a note "fields" are fields too (`data.dialogues.own_fields` of a prediction).
    """
    own = [row.notes.get("fields") for row in rows]
    notes = [{**(o if isinstance(o, Mapping) else {}), **row.notes} for o, row in zip(own, rows, strict=True)]
    names = dict.fromkeys(key for row in notes for key in row if key.isidentifier() and key != "fields")
    fields: dict[str, list[Any]] = {key: [row.get(key) for row in notes] for key in dict.fromkeys((*names, *known))}
    return {**fields, "id": [row.id for row in rows], "emotion": [row.emotion for row in rows]}


def wanted_fields(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Returns the fields that a function names, whether each is required, and whether it takes all others."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a C function
        return {}, False
    texts, by_name = _texts_of(function), (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in parameters if p.name not in texts and p.kind in by_name]
    takes_any = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
    return {p.name: p.default is inspect.Parameter.empty for p in named}, takes_any


def _texts_of(function: Callable[..., Any]) -> list[str]:
    """Returns a function's own names for contexts, responses and references; its signature must be known."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in positional][:3]


def needed_fields(function: Callable[..., Any]) -> set[str]:
    """Returns the required fields of a function of texts."""
    return {field for field, needs in wanted_fields(function)[0].items() if needs}


def can_be_tried(function: Callable[..., Any], rows: Sequence[Noted]) -> bool:
    """Whether `rows` have every required field of the function."""
    return needed_fields(function) <= set(row_fields(rows))


def checked_numbers(found: Any, what: str, count: int) -> Float[np.ndarray, " N"]:
    """Returns a function's result as float64; True counts as 1.

    Raises:
      ConfigError: the result is not one finite number for each of `count` responses.
    """
    if not isinstance(found, (list, tuple)) and not hasattr(found, "__array__"):
        problem = f"a {type(found).__name__}"
    elif not hasattr(found, "__array__") and (other := [x for x in found if not _is_number(x)]):
        problem = f"a {type(found).__name__} with {other[0]!r} in it"
    else:
        scores = np.asarray(found)
        if scores.dtype.kind not in "biuf":
            problem = f"an array of {scores.dtype}"
        elif scores.shape != (count,):
            problem = f"numbers of shape {scores.shape}"
        elif not (np.abs(scores.astype(np.float64)) <= LARGEST_SCORE).all():
            wrong = scores[~(np.abs(scores.astype(np.float64)) <= LARGEST_SCORE)]
            problem = f"{float(wrong[0])}"
        else:
            return scores.astype(np.float64)
    raise ConfigError(
        f"{what} returned {problem} for {count} responses; it must return a list or an array of {count} "
        f"numbers, one for each, between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}."
    )


def _is_number(value: Any) -> bool:
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "__float__")
    return isinstance(value, (numbers.Real, np.bool_)) or is_scalar
