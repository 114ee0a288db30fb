"""A blinded study: contexts with replies for raters, and the key with the systems of the replies."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from empax.core.config import ConfigError, check_numbers
from empax.core.files import hash_json
from empax.core.types import Prediction
from empax.data.english import as_typed, with_capitals
from empax.evaluation.pairing import pair_rows

Form: TypeAlias = Literal["pairs", "likert"]
"""Two replies side by side, one of which may be better; or one reply and a scale from 1 to SCALE."""

Kind: TypeAlias = Literal["rated", "repeat", "check"]

Column: TypeAlias = Mapping[str, Prediction]
"""The predictions for one context by name of the system, in the order of a study's systems."""

ASPECTS = ("empathy", "relevance", "fluency")
"""The rated aspects. Source: Rashkin et al. 2019, Sec. 5.2, and the papers of all systems of this library."""

SCALE = 5
REFERENCE = "reference"
"""The name of human replies if they are one of the systems."""

STUDY_COLUMN = "study "
"""Prefix of the header of a sheet's last column, so that no spreadsheet reads the study's id as a number."""

_WRONG = "another context's reply"


@dataclasses.dataclass(frozen=True)
class StudySettings:
    """Settings of a study.

    Attributes:
      form: see `Form`.
      rows: number of contexts.
      comparisons: number of pairs of systems per context, for "pairs"; all pairs are equally frequent. With "likert", a
        context is shown with the reply of every system.
      repeats: share of the items that are repeated with sides swapped, to test the consistency of raters; at most 0.5,
        since items of the first half are repeated in the second.
      checks: share of additional items with a known answer: the human reply beside one to another context, or the
        latter alone.
      seed: seed of contexts, pairs, sides and order.
    """

    form: Form = "pairs"
    rows: int = 100
    comparisons: int = 1
    repeats: float = 0.1
    checks: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.form not in ("pairs", "likert"):
            raise ConfigError(f"form = {self.form!r} must be 'pairs' or 'likert'.")
        check_numbers(self, "rows", "comparisons", least=1)
        if self.form == "likert" and self.comparisons != 1:
            raise ConfigError(
                f"comparisons = {self.comparisons} has no effect with form = 'likert', which compares nothing; "
                "leave it out."
            )
        check_numbers(self, "repeats", least=0, most=0.5)
        check_numbers(self, "checks", least=0, most=1)
        check_numbers(self, "seed", least=0)


@dataclasses.dataclass(frozen=True)
class Item:
    """An item of a study: the part that raters see, and the part that only the key holds.

    Attributes:
      number: position in the study, from 1.
      context: turns, oldest first.
      replies: two replies, or one.
      id: id of the instance.
      systems: systems of the replies.
      kind: for "repeat", `of` is the number of the repeated item; for "check", `of` is the better side (1 or 2), or 0
        if the only reply is wrong.
    """

    number: int
    context: tuple[str, ...]
    replies: tuple[str, ...]
    id: str
    systems: tuple[str, ...]
    kind: Kind = "rated"
    of: int = 0


@dataclasses.dataclass(frozen=True)
class Study:
    """The names of the systems, and the items in rating order."""

    systems: tuple[str, ...]
    settings: StudySettings
    items: tuple[Item, ...]

    def shown(self) -> dict[str, Any]:
        """Returns the raters' part as JSON: nothing in it identifies systems, repeats or checks.

        So no reply has the blanks of a tokeniser or is in lower case, by which raters would recognise systems: models
        from scratch write no capitals.
        """
        items = [
            {"number": i.number, "context": list(i.context), "replies": [with_capitals(as_typed(r)) for r in i.replies]}
            for i in self.items
        ]
        body = {"form": self.settings.form, "aspects": list(ASPECTS), "scale": SCALE, "items": items}
        return {"study": hash_json(body)[:16], **body}

    def key(self) -> dict[str, Any]:
        """Returns the key as JSON: the system of each reply; it is kept from raters."""
        items = [
            {"number": i.number, "id": i.id, "systems": list(i.systems), "kind": i.kind, "of": i.of} for i in self.items
        ]
        settings = dataclasses.asdict(self.settings)
        return {"study": self.shown()["study"], "systems": list(self.systems), "settings": settings, "items": items}


def make_study(systems: Mapping[str, Sequence[Prediction]], settings: StudySettings) -> Study:
    """Samples a study from predictions by name of the system, for the same contexts in any order.

    Raises:
      ConfigError: there are too few systems to compare, fewer contexts than `rows`, or too few items to repeat.
      DataError: the systems do not answer the same contexts.
    """
    names = tuple(systems)
    if len(names) < (2 if settings.form == "pairs" else 1):
        raise ConfigError(f"{len(names)} systems are named, but form = {settings.form!r} compares two or more.")
    columns = aligned(systems)
    if settings.rows > len(columns):
        raise ConfigError(
            f"rows = {settings.rows}, but the systems answer {len(columns)} contexts; name at most so many with --rows."
        )
    rng = np.random.default_rng(settings.seed)
    contexts = list(columns.items())
    drawn = dict(contexts[i] for i in rng.permutation(len(contexts))[: settings.rows])
    items = _pairs(names, drawn, settings, rng) if settings.form == "pairs" else _single(drawn)
    items += _checks(drawn, settings, len(items), rng)
    items = [items[i] for i in rng.permutation(len(items))]
    return Study(names, settings, _with_repeats(items, settings, rng))


def aligned(systems: Mapping[str, Sequence[Prediction]]) -> dict[str, Column]:
    """Returns the systems' predictions for each context, by a unique key of the context.

    The key is the first system's id, else a hash of the context and the reference; a number is added to duplicates.

    Raises:
      DataError: the systems do not answer the same contexts.
    """
    (named, first), *others = systems.items()
    rows = {named: first, **{name: pair_rows(first, own, (named, name))[1] for name, own in others}}
    columns: dict[str, Column] = {}
    seen = collections.Counter[str]()
    for place, row in enumerate(first):
        base = row.id or hash_json([row.context, row.reference])
        seen[base] += 1
        number = f" ({seen[base]})" if seen[base] > 1 else ""
        columns[f"{base}{number}"] = {name: own[place] for name, own in rows.items()}
    return columns


def _first(column: Column) -> Prediction:
    return next(iter(column.values()))


def _pairs(
    names: Sequence[str], drawn: Mapping[str, Column], settings: StudySettings, rng: np.random.Generator
) -> list[Item]:
    pairs = list(itertools.combinations(names, 2))
    if settings.comparisons > len(pairs):
        raise ConfigError(
            f"comparisons = {settings.comparisons}, but {len(names)} systems have {len(pairs)} pairs; lower it."
        )
    order = [pairs[int(i)] for i in rng.permutation(len(pairs))]
    turn, items = itertools.cycle(order), []
    for identity, column in drawn.items():
        for left, right in itertools.islice(turn, settings.comparisons):
            if rng.integers(2):
                left, right = right, left
            replies = column[left].response, column[right].response
            items.append(Item(0, _first(column).context, replies, identity, (left, right)))
    return items


def _single(drawn: Mapping[str, Column]) -> list[Item]:
    return [
        Item(0, row.context, (row.response,), identity, (name,))
        for identity, column in drawn.items()
        for name, row in column.items()
    ]


def _checks(drawn: Mapping[str, Column], settings: StudySettings, count: int, rng: np.random.Generator) -> list[Item]:
    """Samples items with a known answer: a reply to another context beside the human reply, or alone."""
    wanted = round(settings.checks * count)
    if not wanted:
        return []
    rows = {identity: row for identity, column in drawn.items() if (row := _first(column)).reference}
    able = [one for one in rows.items() if any(_is_wrong_for(one[1], other) for other in rows.values())]
    if not able:
        raise ConfigError("checks need two different replies of people (`reference`) in two dialogues; set checks = 0.")
    items = []
    for i in rng.integers(len(able), size=wanted):
        identity, row = able[int(i)]
        others = [other for other in rows.values() if _is_wrong_for(row, other)]
        wrong = others[int(rng.integers(len(others)))].reference
        if settings.form == "likert":
            items.append(Item(0, row.context, (wrong,), identity, (_WRONG,), "check"))
            continue
        item = Item(0, row.context, (row.reference, wrong), identity, (REFERENCE, _WRONG), "check", 1)
        items.append(_swapped(item, of=2) if rng.integers(2) else item)
    return items


def _is_wrong_for(row: Prediction, other: Prediction) -> bool:
    return _dialogue(other) != _dialogue(row) and other.reference.strip() != row.reference.strip()


def _dialogue(row: Prediction) -> str:
    return row.id.rsplit("#", 1)[0] or "".join(row.context[:1])


def _swapped(item: Item, **changes: Any) -> Item:
    return dataclasses.replace(item, replies=item.replies[::-1], systems=item.systems[::-1], **changes)


def _with_repeats(items: Sequence[Item], settings: StudySettings, rng: np.random.Generator) -> tuple[Item, ...]:
    """Numbers all items; repeats some of the first half in the second, with sides swapped."""
    first, second = list(items[: (len(items) + 1) // 2]), list(items[(len(items) + 1) // 2 :])
    rated = [i for i, item in enumerate(first) if item.kind == "rated"]
    wanted = round(settings.repeats * len(items))
    if wanted > len(rated):
        raise ConfigError(
            f"repeats = {settings.repeats} of {len(items)} items is {wanted}, but the first half has only {len(rated)} "
            "that are no checks; lower it."
        )
    again = [rated[i] for i in rng.permutation(len(rated))[:wanted]]
    second += [_swapped(first[i], kind="repeat", of=i + 1) for i in again]
    order = [*first, *(second[i] for i in rng.permutation(len(second)))]
    return tuple(dataclasses.replace(item, number=number) for number, item in enumerate(order, 1))
