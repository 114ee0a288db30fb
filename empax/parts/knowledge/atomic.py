"""ATOMIC (Sap et al. 2019): everyday events with people's feelings, wants and actions because of them.

The files are the authors' `v4_atomic_{trn,dev,tst}.csv`, or gzipped; each row has an event, a column with a JSON list
for each of nine relations, and further columns that are not read.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from empax.core.command import in_one_line, interruptible
from empax.core.files import DataError, write_jsonl
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.text_files import check_length, parse_json, read_text
from empax.data.knowledge import Fact, ranked

RELATIONS: tuple[str, ...] = (
    "oEffect", "oReact", "oWant", "xAttr", "xEffect", "xIntent", "xNeed", "xReact", "xWant",
)  # fmt: skip

FOLDER = "knowledge"
"""Folder of the files inside a data folder."""

Events = Mapping[str, Sequence[Fact]]
"""Facts by event."""

_VALIDATION_EVERY = 20  # events of training

_PEOPLE = (
    (re.compile(r"\bperson ?x's\b", re.IGNORECASE), "my"),
    (re.compile(r"\bperson ?x\b", re.IGNORECASE), "I"),
    (re.compile(r"\bperson ?[yz]'s\b", re.IGNORECASE), "their"),
    (re.compile(r"\bperson ?[yz]\b", re.IGNORECASE), "them"),
)
_SUBJECT = re.compile(r"^person ?x\s+(?!and\b)(?=\S)", re.IGNORECASE)


def find_files(folder: str | Path, splits: Sequence[str] = ("trn", "dev", "tst")) -> list[Path]:
    """Returns the files of the splits, in `folder` or in `knowledge/` inside it; raises DataError if there is none."""
    root = expand(folder)
    for place in (root, root / FOLDER):
        names = [place / f"v4_atomic_{split}.csv{end}" for split in splits for end in ("", ".gz")]
        if found := [path for path in names if path.is_file()]:
            note("ATOMIC", place, found)
            return found
    wanted = " or ".join(f"v4_atomic_{split}.csv" for split in splits)
    raise DataError(f"{root} holds no {wanted} (or with .gz); name the folder of ATOMIC's files.")


def read_events(paths: Sequence[Path]) -> dict[str, list[Fact]]:
    """Reads the facts of each event, in the order of the files; events without tails are skipped.

    Raises:
      DataError: a file is not ATOMIC's; names the line.
    """
    found: dict[str, list[Fact]] = {}
    for path in paths:
        for event, facts in _rows(path):
            found.setdefault(event, []).extend(facts)
    kept = {event: ranked(facts) for event, facts in found.items()}
    return {event: facts for event, facts in kept.items() if facts}


def _rows(path: Path) -> Iterator[tuple[str, list[Fact]]]:
    rows = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = next(rows, [])
        if missing := [name for name in ("event", *RELATIONS) if name not in header]:
            raise DataError(f"{path}, line 1: the column {missing[0]!r} is missing; it is not a file of ATOMIC.")
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(header):
                raise DataError(f"{where}: {len(row)} columns, must be {len(header)}.")
            yield _event(dict(zip(header, row, strict=True)), where)
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: {error}.") from error


def _event(row: Mapping[str, str], where: str) -> tuple[str, list[Fact]]:
    event = row["event"].strip()
    if not event:
        raise DataError(f"{where}: the event is blank.")
    facts = []
    for relation in RELATIONS:
        try:
            tails = parse_json(row[relation])
            if not isinstance(tails, list) or not all(isinstance(tail, str) for tail in tails):
                raise DataError(f"{row[relation][:60]!r} must be a JSON list of texts")
            for text in (event, *tails):
                check_length(text)
        except DataError as error:
            raise DataError(f"{where}, column {relation}: {error}.") from error
        facts += [Fact(event, relation, tail) for tail in tails]
    return event, facts


def spoken(event: str) -> str:
    """Rewrites an event in the first person: "PersonX loses PersonX's dog" → "I loses my dog"."""
    for pattern, word in _PEOPLE:
        event = pattern.sub(word, event)
    return event.replace("___", "something")


def spoken_tail(tail: str) -> str:
    """Rewrites a tail in the first person, without its subject: "PersonX thanks PersonY" → "thanks them"."""
    return spoken(_SUBJECT.sub("", tail.strip()))


def prompt(text: str, relation: str) -> str:
    """Returns COMET's prompt: the text, the relation, and a mark for the answer. Source: COMET-ATOMIC 2020."""
    return f"{text} {relation} [GEN]"


def pairs(events: Events, *, first: bool = False) -> list[dict[str, str]]:
    """Returns the training data of a COMET, prompts with their tails; all tails of a prompt, or the `first`."""
    return [
        {"source": prompt(fact.head, fact.relation), "target": fact.tail}
        for facts in events.values()
        for fact in facts
        if not (first and fact.rank)
    ]


def write_pairs(folder: str | Path, output: str | Path) -> dict[str, int]:
    """Writes `train.jsonl`, `validation.jsonl` and `test.jsonl` for a COMET; returns the number of pairs of each.

    No event is in two of them. Of ATOMIC's training and dev events, every twentieth is for validation and the others
    for training; its test events are for the test.
    """
    known, held_out = (read_events(find_files(folder, splits)) for splits in (("trn", "dev"), ("tst",)))
    splits: dict[str, dict[str, list[Fact]]] = {"train": {}, "validation": {}, "test": {}}
    for number, (event, facts) in enumerate(known.items()):
        splits["validation" if number % _VALIDATION_EVERY == 0 else "train"][event] = facts
    splits["test"] = {event: facts for event, facts in held_out.items() if event not in known}
    counts = {}
    for split, events in splits.items():
        rows = pairs(events, first=split == "test")  # each test prompt is answered once
        write_jsonl(expand(output) / f"{split}.jsonl", rows)
        counts[split] = len(rows)
    return counts


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for an error that the user can correct."""
    parser = argparse.ArgumentParser(description="ATOMIC's events as pairs for configs/comet_t5.py.")
    parser.add_argument("data", help="the folder of ATOMIC's files, or the one that holds knowledge/")
    parser.add_argument("output", help="a folder for train.jsonl, validation.jsonl and test.jsonl")
    options = parser.parse_args(arguments)
    print(json.dumps(write_pairs(options.data, options.output)))
    return 0


if __name__ == "__main__":
    with interruptible():
        sys.exit(main())
