"""Pairing of rows that answer the same context, their dialogues, and the hash that identifies a test set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from empax.core.files import DataError, hash_json
from empax.core.types import Prediction
from empax.evaluation.words import moel_tokens

_ID = re.compile(r"(.+)#\d+")  # see `core.types.Instance`

_SAME = ("context", "reference", "emotion")
"""Fields that paired rows share if both have them."""


def dialogues_of(rows: Sequence[Prediction]) -> Int[np.ndarray, " N"] | None:
    """Returns each row's dialogue number, from 0; None unless every id is a dialogue's id, "#" and a number."""
    found = [_ID.fullmatch(row.id) for row in rows]
    names = [match.group(1) for match in found if match]
    return np.unique(names, return_inverse=True)[1] if names and len(names) == len(rows) else None


def describe_rows(rows: Sequence[Prediction]) -> dict[str, Any]:
    """Describes the test set of `rows`.

    Returns:
      The numbers of `rows` and `dialogues`, None if ids do not identify them; `resampled`, "dialogues" or "rows", the
      unit of resampling; `sha256`, the first 16 digits of an order-independent hash of all contexts and references.
    """
    dialogues = dialogues_of(rows)
    return {
        "rows": len(rows),
        "dialogues": None if dialogues is None else int(dialogues.max()) + 1,
        "resampled": "rows" if dialogues is None else "dialogues",
        "sha256": hash_json(sorted([*row.context, row.reference] for row in rows)),
    }


def replies_and_references(rows: Sequence[Prediction]) -> tuple[list[str], list[str]]:
    """Returns the system's replies and the references."""
    return [row.response for row in rows], [row.reference for row in rows]


def pair_rows(
    rows_a: Sequence[Prediction], rows_b: Sequence[Prediction], names: tuple[str, str] = ("the first", "the second")
) -> tuple[list[Prediction], list[Prediction]]:
    """Returns both lists in the order of the first, so that row i of each answers the same context.

    Rows pair by `id` if all have one, else by context and reference. `names` of the two are for messages. Raises
    DataError if a row has no partner, an id occurs twice, or the contexts, references or emotions of a pair differ.
    """
    by_id = all(row.id for row in rows_a) and all(row.id for row in rows_b)
    (a, keyed_a), (b, keyed_b) = (
        (name, _keyed(rows, name, by_id=by_id)) for name, rows in zip(names, (rows_a, rows_b), strict=True)
    )
    only_a, only_b = [key for key in keyed_a if key not in keyed_b], [key for key in keyed_b if key not in keyed_a]
    if only_a or only_b:
        way = "id" if by_id else "context and reference"
        example = str((only_a or only_b)[0])
        raise DataError(
            f"{a} and {b} do not pair up by {way}: {len(only_a)} rows are only in {a} ({len(rows_a)} rows), "
            f"{len(only_b)} only in {b} ({len(rows_b)} rows), such as {example[:200]}. "
            "Both must hold the same test rows."
        )
    for key, row in keyed_a.items():
        other = keyed_b[key]
        for name in _SAME:
            one, two = getattr(row, name), getattr(other, name)
            if one != two and (one and two):
                raise DataError(
                    f"{f'id {row.id!r}' if row.id else 'one context'} has different {name}s in {a} and {b} "
                    f"({str(one)[:80]!r} and {str(two)[:80]!r}); give both the same test rows."
                )
    return list(keyed_a.values()), [keyed_b[key] for key in keyed_a]


def _keyed(rows: Sequence[Prediction], name: str, *, by_id: bool) -> dict[tuple[object, ...], Prediction]:
    keyed: dict[tuple[object, ...], Prediction] = {}
    seen: dict[tuple[object, ...], int] = {}
    for row in rows:
        base: tuple[object, ...] = (row.id,) if by_id else (row.context, row.reference)
        seen[base] = seen.get(base, 0) + 1
        if by_id and seen[base] > 1:
            raise DataError(f"id {row.id!r} stands on {seen[base]} rows of {name}; ids must be unique to pair by them.")
        # Duplicates of a context and reference pair in order of appearance.
        keyed[base if by_id else (*base, seen[base])] = row
    return keyed


def shared_rows(
    rows: Sequence[Prediction], others: Sequence[Prediction]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Returns the positions of shared rows, in the order of `rows`; the texts of `others` may have been cleaned.

    Rows pair by the letters of context and reference after `words.moel_tokens`, without quotation marks: released files
    of MoEL and its descendants hold cleaned words separated by spaces, and their data has no double quotes.
    """
    places: dict[str, list[int]] = {}
    for position, row in enumerate(others):
        places.setdefault(_letters(row), []).append(position)
    pairs = []
    for position, row in enumerate(rows):
        found = places.get(_letters(row))
        if found:
            pairs.append((position, found.pop(0)))
    first, second = np.asarray(pairs, np.int64).reshape(-1, 2).T
    return first, second


def _letters(row: Prediction) -> str:
    return "\n".join(re.sub(r"``|''|\"", "", "".join(moel_tokens(text))) for text in (*row.context, row.reference))
