"""Converts facts that other systems' authors stored as pickles to the JSON lines of `source = "file"`. Run once.

    python -m tools.convert_facts nec 'pickles/{split}.pkl' facts --data=DATA
    python -m tools.convert_facts cem dataset_preproc.p facts --data=DATA

write facts/train.jsonl, facts/validation.jsonl and facts/test.jsonl, for runs with config.data.moel_compat = True. The
pickles are read without Python's unpickler, so no code in them runs.

There are two layouts. NEC and DCKS: relation → number of the row, as text → tails. CEM and CASE (`dataset_preproc.p`):
the training, validation and test splits as dicts of columns, whose `utt_cs` has five lists of tails for each context.
Rows are in the order of the split.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.command import in_one_line
from empax.core.files import DataError, system_errors, write_jsonl
from empax.core.paths import expand
from empax.core.text_files import check_length, located
from empax.core.types import Instance
from empax.data import empathetic_dialogues
from empax.data.dialogues import to_instances
from empax.data.knowledge import Fact, ranked
from empax.data.model_files import check_whole
from empax.interop.state_dicts import BadPickleError, RefusedPickleError, Token, read_plain

_NAMES = tuple(
    Token(module, name)
    for module, name in (
        ("collections", "OrderedDict"),
        ("_codecs", "encode"),  # bytes in old pickles
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy._core.multiarray", "scalar"),
        ("src.utils.data.loader", "Lang"),  # CEM's and CASE's vocabulary, unused here
        ("utils.data.loader", "Lang"),
    )
)
_CEM_RELATIONS = ("xIntent", "xNeed", "xWant", "xEffect", "xReact")
"""Relations in the order of `utt_cs`. Source: CEM's code."""
_SPLITS = ("train", "validation", "test")
_MOST_TAILS = 1000  # of a row and relation


def read_nec(path: Path, instances: Sequence[Instance]) -> list[list[Fact]]:
    """Reads the facts of each instance from a pickle in NEC's or DCKS's layout.

    Raises:
      DataError: the file is broken, names a function or class that data do not need, or has different rows.
    """
    root = _read(path)
    if not isinstance(root, dict) or not root:
        raise DataError(f"{path} must hold a dict of relations, but is {_kind(root)}.")
    columns: dict[str, Mapping[Any, Any]] = {}
    for relation, rows in root.items():
        if not isinstance(relation, str) or not relation.isalpha() or not isinstance(rows, dict):
            raise DataError(f"{path}: {relation!r} must be a relation with a dict of rows.")
        _check_rows(path, len(rows), instances)
        if missing := [row for row in range(len(instances)) if str(row) not in rows]:
            raise DataError(f"{path}: the relation {relation} has no row {str(missing[0])!r}.")
        columns[relation] = rows
    found = []
    for row, instance in enumerate(instances):
        where = f"{path}, row {row}"
        found.append(_ranked(instance, [(name, _tails(rows[str(row)], where)) for name, rows in columns.items()]))
    return found


def read_cem(path: Path, split: str, instances: Sequence[Instance]) -> list[list[Fact]]:
    """Reads the facts of each instance of a split from CEM's or CASE's `dataset_preproc.p`.

    Raises:
      DataError: as in `read_nec`.
    """
    root = _read(path)
    number = _SPLITS.index(split)
    if not isinstance(root, (list, tuple)) or len(root) <= number or not isinstance(root[number], dict):
        raise DataError(f"{path} must hold a list with a dict for each of {', '.join(_SPLITS)}, but is {_kind(root)}.")
    column = root[number].get("utt_cs")
    if not isinstance(column, list):
        raise DataError(f"{path}: the split {split!r} has no column utt_cs; it was made without commonsense.")
    _check_rows(path, len(column), instances)
    found = []
    for row, (instance, lists) in enumerate(zip(instances, column, strict=True)):
        where = f"{path}, {split}, row {row}"
        if not isinstance(lists, list) or len(lists) != len(_CEM_RELATIONS):
            raise DataError(f"{where}: utt_cs must be {len(_CEM_RELATIONS)} lists, but is {_kind(lists)}.")
        columns = [(relation, _tails(tails, where)) for relation, tails in zip(_CEM_RELATIONS, lists, strict=True)]
        found.append(_ranked(instance, columns))
    return found


def _read(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"there is no file {path}.")
    check_whole(path)
    with system_errors(path, "read"):
        content = path.read_bytes()
    try:
        return read_plain(content, _NAMES)
    except RefusedPickleError as error:
        raise DataError(
            f"{path} {error}, which no file of facts needs and which could be an attack: refused. If you trust the "
            "file, write it as JSON lines yourself (docs/data.md)."
        ) from error
    except BadPickleError as error:
        raise DataError(f"{path} holds a broken pickle ({error}); fetch it again.") from error


def _ranked(instance: Instance, columns: Sequence[tuple[str, list[str]]]) -> list[Fact]:
    return ranked(Fact(instance.context[-1], relation, tail) for relation, tails in columns for tail in tails)


def _tails(value: Any, where: str) -> list[str]:
    """Returns tails as texts; a list of words is joined to one tail."""
    if type(value) not in (list, tuple) or len(value) > _MOST_TAILS:
        raise DataError(f"{where}: the tails must be a list of at most {_MOST_TAILS}, but are {_kind(value)}.")
    tails = []
    for one in value:
        words = type(one) in (list, tuple) and len(one) <= _MOST_TAILS and all(isinstance(w, str) for w in one)
        if not isinstance(one, str) and not words:
            raise DataError(f"{where}: a tail must be a text or a list of words, but is {_kind(one)}.")
        text = one if isinstance(one, str) else " ".join(one)
        located(check_length, text, place=where)
        tails.append(text)
    return tails


def _check_rows(path: Path, rows: int, instances: Sequence[Instance]) -> None:
    if rows != len(instances):
        raise DataError(
            f"{path} has {rows} rows, but the split has {len(instances)} instances; rows are matched by their order. "
            "Files of the MoEL lineage are of the whole corpus, cut as with config.data.moel_compat = True."
        )


def _kind(value: Any) -> str:
    # Names the type alone: the contents could be large.
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (list, tuple, dict)) else "")


def convert(layout: str, path: str, output: Path, data: str) -> None:
    """Writes a file of facts for each split.

    Raises:
      DataError: as in `read_nec`, or the corpus is missing.
    """
    dialogues = empathetic_dialogues.load_dialogues(data or None)
    source = f"pickle of {layout.upper()}'s layout {Path(path).name}"
    for split in _SPLITS:
        instances, file = to_instances(dialogues[split], moel_compat=True), expand(path.replace("{split}", split))
        rows = read_nec(file, instances) if layout == "nec" else read_cem(file, split, instances)
        pairs = zip(instances, rows, strict=True)
        lines = ({"id": i.id, "facts": [fact.row() for fact in facts], "source": source} for i, facts in pairs)
        write_jsonl(expand(output) / f"{split}.jsonl", lines)


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for an error that the user can correct."""
    parser = argparse.ArgumentParser(description="Facts from the pickles of NEC, DCKS, CEM and CASE.")
    parser.add_argument("layout", choices=("nec", "cem"))
    parser.add_argument("path", help="path of the pickle; {split} in it stands for train, validation, test")
    parser.add_argument("output", type=Path, help="folder for the three files written")
    parser.add_argument("--data", default="", help="folder with EmpatheticDialogues; empty = download")
    given = parser.parse_args(arguments)
    convert(given.layout, given.path, given.output, given.data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
