"""Facts about a dialogue: inferences from a turn (social), and properties of things in it (entities).

A file of facts has one instance per line:
`{"id": ..., "facts": [{"head": ..., "relation": ..., "tail": ..., "rank": 0, "score": 0.0}], "source": ...}`.
`source` names the origin of the facts, and appears in every report. `rank` counts the facts of one head and relation
from the best, `score` is defined by the source (higher is better); both are optional.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.text_files import DataError, parse_jsonl, read_lines
from empax.core.types import Instance
from empax.data.model_files import short

SOCIAL_RELATIONS: tuple[str, ...] = ("xReact", "xNeed", "xIntent", "xEffect", "xWant")
"""Relations of an event that NEC and CEM use, with ATOMIC's names."""

ENTITY_RELATIONS: tuple[str, ...] = ("ObjectUse", "AtLocation", "MadeUpOf", "HasProperty")
"""Relations of an entity that NEC uses, with the names of ATOMIC 2020."""

_SENTENCES: Mapping[str, str] = {
    "xReact": "As a result, I feel {tail}.",
    "xNeed": "Before that, I needed {tail}.",
    "xIntent": "I did it because I wanted {tail}.",
    "xEffect": "As a result, I {tail}.",
    "xWant": "As a result, I want {tail}.",
    "xAttr": "I am {tail}.",
    "oReact": "As a result, others feel {tail}.",
    "oWant": "As a result, others want {tail}.",
    "oEffect": "As a result, others {tail}.",
    "ObjectUse": "{head} is used for {tail}",
    "AtLocation": "{head} is located or found at {tail}",
    "MadeUpOf": "{head} is made up of {tail}",
    "HasProperty": "{head} can be characterized by being {tail}",
    "IsA": "{head} is a kind of {tail}",
    "RelatedTo": "{head} has to do with {tail}",
}
"""Sentence template of each relation. Source: NEC's code, with corrected English."""

_NOTHING = ("", "none", "n/a", "nothing", "-")
_RELATION = re.compile(r"[A-Za-z]+")
_FIELDS = ("head", "relation", "tail", "rank", "score")


@dataclasses.dataclass(frozen=True)
class Fact:
    """One fact; see the module docstring."""

    head: str
    relation: str
    tail: str
    rank: int = 0
    score: float = 0.0

    @property
    def social(self) -> bool:
        """Whether the fact is about people and what happens to them."""
        return self.relation[:1] in ("x", "o")

    @property
    def empty(self) -> bool:
        """Whether the fact is void: no tail, "none", or the head again. Source: NEC's code."""
        tail = self.tail.strip().lower()
        return tail in _NOTHING or tail == self.head.strip().lower()

    def words(self) -> str:
        """Returns the fact as a sentence."""
        pattern = _SENTENCES.get(self.relation, "{head} {relation} {tail}")
        return pattern.format(head=self.head, relation=self.relation, tail=self.tail.strip().rstrip("."))

    def triple(self) -> str:
        """Returns the fact as in NEC's Sec. 3.2, "head, relation, tail"."""
        return f"{self.head}, {self.relation}, {self.tail}"

    def row(self) -> dict[str, Any]:
        """Returns the fact as an object for a file."""
        return {**dataclasses.asdict(self), "score": round(self.score, 6)}


def distinct(facts: Iterable[Fact]) -> list[Fact]:
    """Removes empty and repeated facts."""
    found: dict[tuple[str, str, str], Fact] = {}
    for fact in facts:
        if not fact.empty:
            found.setdefault((fact.head.lower(), fact.relation, fact.tail.strip().lower()), fact)
    return list(found.values())


def ranked(facts: Iterable[Fact], *, most: int = 0) -> list[Fact]:
    """Returns the distinct facts with their ranks; keeps at most `most` per head and relation (0 = all)."""
    places: Counter[tuple[str, str]] = Counter()
    kept = []
    for fact in distinct(facts):
        rank = places[place := (fact.head.lower(), fact.relation)]
        if most and rank >= most:
            continue
        places[place] += 1
        kept.append(dataclasses.replace(fact, tail=fact.tail.strip(), rank=rank))
    return kept


def facts_of(instance: Instance) -> list[Fact]:
    """Returns the facts in an instance's notes; none if no stage has added any.

    Raises DataError if the note has another form than a stage of kind "knowledge" writes.
    """
    return facts_from(instance.notes["facts"], f"instance {instance.id!r}") if "facts" in instance.notes else []


def facts_from(value: Any, where: str) -> list[Fact]:
    """Parses the list `facts` of a line.

    Raises DataError if it is not such a list; says where, what was found and what it must be.
    """
    if not isinstance(value, list):
        raise DataError(f"{where}: facts = {short(value)} must be a list.")
    return [_fact(one, f"{where}, fact {number}") for number, one in enumerate(value, start=1)]


def _fact(value: Any, where: str) -> Fact:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {short(value)} must be an object with head, relation and tail.")
    if unknown := sorted(set(value) - set(_FIELDS)):
        raise DataError(f"{where}: unknown field {unknown[0]!r}; a fact has {', '.join(_FIELDS)}.")
    for name in ("head", "relation", "tail"):
        if not isinstance(value.get(name), str) or not value[name].strip():
            raise DataError(f"{where}: {name} = {short(value.get(name))} must be a text that is not blank.")
    if not _RELATION.fullmatch(value["relation"]):
        raise DataError(f"{where}: relation = {short(value['relation'])} must be a name of letters, such as xReact.")
    rank, score = value.get("rank", 0), value.get("score", 0.0)
    if type(rank) is not int or rank < 0:
        raise DataError(f"{where}: rank = {short(rank)} must be a whole number of at least 0.")
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise DataError(f"{where}: score = {short(score)} must be a number.")
    return Fact(value["head"], value["relation"], value["tail"], rank, float(score))


def clauses(turn: str) -> list[str]:
    """Returns the sentences of a turn; empty if there is only one. Source: CASE's code, which splits at full stops."""
    found = [text for text in re.split(r"(?<=[.!?])\s+", turn.strip()) if text]
    return found if len(found) > 1 else []


def told(facts: Iterable[Fact]) -> list[dict[str, Any]]:
    """Returns facts as predictions have them."""
    return [{**fact.row(), "words": fact.words(), "score": round(fact.score, 4)} for fact in facts]


@dataclasses.dataclass(frozen=True)
class Knowledge:
    """The facts of some instances by id, and their origin."""

    facts: Mapping[str, Sequence[Fact]]
    source: str


def read_knowledge(path: Path, instances: Sequence[Instance]) -> Knowledge:
    """Reads a file with facts for all of `instances`, and possibly others.

    Raises DataError if the file is broken, a line has no source or another source than the first, an id occurs twice,
    or an instance is missing.
    """
    found: dict[str, list[Fact]] = {}
    source = ""
    for number, row in parse_jsonl(read_lines(path), name=str(path)):
        where = f"{path}, line {number}"
        if unknown := sorted(set(row) - {"id", "facts", "source"}):
            raise DataError(f"{where}: unknown field {unknown[0]!r}; a line has id, facts and source.")
        if not isinstance(row.get("id"), str) or row["id"] in found:
            raise DataError(f"{where}: id = {short(row.get('id'))} must be a text unique to this line.")
        source = source or _source(row, where)
        if _source(row, where) != source:
            raise DataError(
                f"{where}: source = {row['source']!r}, but the first line has {source!r}; a file has only one."
            )
        if "facts" not in row:
            raise DataError(f"{where}: facts are missing; an instance without facts needs an empty list.")
        found[row["id"]] = facts_from(row["facts"], where)
    if missing := [i.id for i in instances if i.id not in found]:
        raise DataError(
            f"{path} lacks {len(missing)} of {len(instances)} instances, the first is {missing[0]}; give each a line, "
            "with an empty list where nothing is known."
        )
    return Knowledge(found, source)


def source_of(path: Path) -> str:
    """Returns the source in the first line of a file of facts; empty if it has no line.

    Raises DataError if the line is broken or has no source.
    """
    lines = parse_jsonl(read_lines(path), name=str(path))
    return next((_source(row, f"{path}, line {number}") for number, row in lines), "")


def _source(row: Mapping[str, Any], where: str) -> str:
    if not isinstance(row.get("source"), str) or not row["source"].strip():
        raise DataError(f"{where}: source = {short(row.get('source'))} must say who made the facts.")
    return row["source"]


def exchanged(instances: Sequence[Instance], rows: Sequence[Sequence[Fact]]) -> list[list[Fact]]:
    """Replaces the tail of each fact by that of another dialogue: a control that keeps the form and number of facts.

    Heads stay, since some models look for them in the context (KEMP the words, CASE the clauses). Tails with their
    scores are exchanged among the facts of one relation and rank; a dialogue with over half of these keeps some tails.
    """
    dialogues = [instance.dialogue_id for instance in instances]
    names = list(dict.fromkeys(dialogues))
    places = dict(zip(names, np.random.default_rng(0).permutation(len(names)), strict=True))
    alike: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for i in sorted(range(len(rows)), key=lambda i: places[dialogues[i]]):
        for n, fact in enumerate(rows[i]):
            alike.setdefault((fact.relation, fact.rank), []).append((i, n))
    changed = [list(facts) for facts in rows]
    for takers in alike.values():
        longest = max(Counter(dialogues[i] for i, _ in takers).values())  # facts of one dialogue stand together
        givers = [*takers[longest:], *takers[:longest]]
        for (i, n), (j, m) in zip(takers, givers, strict=True):
            changed[i][n] = dataclasses.replace(rows[i][n], tail=rows[j][m].tail, score=rows[j][m].score)
    return changed


def describe(rows: Sequence[Sequence[Fact]]) -> dict[str, Any]:
    """Counts facts of a split for reports; `with_facts` is the share of instances with facts, in [0, 1]."""
    relations = Counter(fact.relation for facts in rows for fact in facts)
    return {
        "instances": len(rows),
        "facts": relations.total(),
        "with_facts": round(sum(map(bool, rows)) / max(len(rows), 1), 4),
        "relations": dict(sorted(relations.items())),
    }
