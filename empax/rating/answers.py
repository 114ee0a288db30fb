"""Raters' answers, joined with the key's information on each item."""

from __future__ import annotations

import collections
import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.files import DataError, read_json
from empax.core.types import Prediction
from empax.rating.study import ASPECTS, SCALE, STUDY_COLUMN, Item, aligned

CHOICES = {"1": 1, "2": -1, "tie": 0}
"""The choices for a pair, and their values."""


@dataclasses.dataclass(frozen=True)
class Key:
    """The key of a study: items without texts."""

    study: str
    form: str
    systems: tuple[str, ...]
    items: Mapping[int, Item]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One rater's answer to one item.

    Attributes:
      values: value by aspect; for pairs 1 if the first reply is better, 0 for a tie, -1 if the second is; else 1 to
        SCALE.
    """

    rater: str
    item: Item
    values: Mapping[str, int]


def read_key(path: Path) -> Key:
    """Reads `Study.key` from a file.

    Raises:
      DataError: the file is not the key of a study.
    """
    value = read_json(path)
    try:
        items = {
            int(row["number"]): Item(
                int(row["number"]), (), (), row["id"], tuple(row["systems"]), row["kind"], int(row["of"])
            )
            for row in value["items"]
        }
        return Key(value["study"], value["settings"]["form"], tuple(value["systems"]), items)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not the key of a study; give the key.json that `empax rate make` wrote.") from error


def read_answers(paths: Sequence[Path], key: Key) -> list[Answer]:
    """Reads the answers of all raters: JSON files of the page, or filled sheets (CSV), each from one rater.

    Items without an answer to every aspect are left out.

    Raises:
      DataError: a file is from another study, has an item twice or lacks a column, or an item, a value or a repeated
        rater is invalid.
    """
    answers: list[Answer] = []
    seen: dict[str, Path] = {}
    for path in paths:
        rater, given = (_read_sheet if path.suffix.lower() == ".csv" else _read_page)(path, key)
        if rater in seen:
            raise DataError(f"{path} and {seen[rater]} are both from the rater {rater!r}; give each a name of its own.")
        seen[rater] = path
        for number, count in collections.Counter(number for number, _ in given).items():
            if count > 1:
                raise DataError(f"{path} answers item {number} {count} times; keep one of the answers.")
        for number, values in given:
            if number not in key.items:
                raise DataError(f"{path} answers item {number}, which the study does not have.")
            found = {aspect: _value(path, number, key.form, values.get(aspect)) for aspect in ASPECTS}
            if all(value is not None for value in found.values()):
                answers.append(Answer(rater, key.items[number], found))  # type: ignore[arg-type]
    return answers


def preferred(
    key: Key, answers: Sequence[Answer], systems: Mapping[str, Sequence[Prediction]], aspect: str
) -> list[dict[str, Any]]:
    """Returns preference pairs, `context`, `chosen`, `rejected`, by the majority of raters.

    Args:
      key: key of a study of pairs.
      answers: answers of all raters; ties, repeats and checks are left out.
      systems: predictions for the same contexts by name of the system, since the key has no texts.
      aspect: the aspect that decides.

    Raises:
      DataError: the study is not of pairs, or predictions of a system are missing or for other contexts.
    """
    if key.form != "pairs":
        raise DataError(f"the study {key.study!r} has form {key.form!r}, but only 'pairs' says which reply is better.")
    known = {name: systems[name] for name in key.systems if name in systems}  # in the study's order
    columns = aligned(known) if known else {}
    votes = collections.Counter[int]()
    for answer in answers:
        if answer.item.kind == "rated":
            votes[answer.item.number] += answer.values[aspect]
    found = []
    for number, sum_of_votes in sorted(votes.items()):
        item = key.items[number]
        for name in item.systems:
            if name not in known or item.id not in columns:
                raise DataError(
                    f"item {number} shows the reply of {name!r} to {item.id!r}, which the predictions lack; give those "
                    "that the study was made from. Votes of `empax serve` keep no texts."
                )
        first, second = (columns[item.id][name] for name in item.systems)
        if sum_of_votes:
            chosen, rejected = (first, second) if sum_of_votes > 0 else (second, first)
            found.append({"context": list(first.context), "chosen": chosen.response, "rejected": rejected.response})
    return found


def _read_page(path: Path, key: Key) -> tuple[str, list[tuple[int, Mapping[str, Any]]]]:
    value = read_json(path)
    value = value if isinstance(value, dict) else {}
    _check_study(path, value.get("study"), key)
    answers = value.get("answers")
    if not isinstance(answers, dict) or not all(isinstance(v, dict) and k.isdecimal() for k, v in answers.items()):
        raise DataError(f"{path}: 'answers' must have an object for each item's number.")
    return str(value.get("rater") or path.stem), [(int(number), values) for number, values in answers.items()]


def _check_study(path: Path, found: Any, key: Key) -> None:
    if found != key.study:
        raise DataError(
            f"{path} is from the study {found!r}, the key from {key.study!r}; give the key that belongs to it."
        )


def _read_sheet(path: Path, key: Key) -> tuple[str, list[tuple[int, Mapping[str, Any]]]]:
    given = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            studies = [name.strip() for name in reader.fieldnames or () if name.startswith(STUDY_COLUMN)]
            if not studies:
                raise DataError(
                    f"{path} has no column '{STUDY_COLUMN}{key.study}', which names its study; fill in a copy of "
                    "sheet.csv with all its columns, separated by commas."
                )
            _check_study(path, studies[0].removeprefix(STUDY_COLUMN), key)
            if missing := [name for name in ("number", *ASPECTS) if name not in (reader.fieldnames or ())]:
                raise DataError(f"{path} lacks the columns {', '.join(missing)} of its study's sheet.csv.")
            for row in reader:
                number = (row.get("number") or "").strip()
                if not any(str(cell or "").strip() for cell in row.values()):  # spreadsheets leave such rows
                    continue
                if not number.isdecimal():
                    raise DataError(
                        f"{path}, line {reader.line_num}: {number[:40]!r} in the column 'number' must be an item's "
                        "number."
                    )
                given.append((int(number), row))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8 ({error}).") from error
    return path.stem, given


def _value(path: Path, number: int, form: str, value: Any) -> int | None:
    """Returns the value of one cell; None if it is empty."""
    text = "" if value is None else str(value).strip().lower()
    if not text:
        return None
    if form == "pairs":
        if text not in CHOICES:
            raise DataError(f"{path}, item {number}: {text[:40]!r} must be one of {', '.join(CHOICES)}.")
        return CHOICES[text]
    if not text.isdecimal() or not 1 <= int(text) <= SCALE:
        raise DataError(f"{path}, item {number}: {text[:40]!r} must be a whole number from 1 to {SCALE}.")
    return int(text)
