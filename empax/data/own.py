"""The user's own corpus: JSON-lines files of dialogues, prepared here or, for a large corpus, by Apache Beam.

One dialogue per line: `utterances`, a list of texts, the speaker's first; `id`; optionally `emotion` and `situation`.
Or one pair per line: `source` and `target`. Other fields become notes of the dialogue, for rewards. A split is all
files whose names begin with its name: `train.jsonl`, or `train-00.jsonl`, `train-01.jsonl`, ... A single file is split
by its contexts, all turns but the last: of every ten different ones, the ninth is for validation and the tenth for the
test. So the context of a test pair has no other reply in training. An earlier turn of a longer dialogue may have one.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import hash_file, hash_json
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.settings import cache_dir
from empax.core.text_files import DataError, located, parse_object, read_lines
from empax.core.types import EMOTIONS, Dialogue, Instance, Utterance
from empax.data.dialogues import STAGE_NOTES, alternate, example_of, to_instances

SPLITS = ("train", "validation", "test")

_FIELDS = ("id", "emotion", "situation", "utterances")
_PAIR = ("source", "target")
_TAKEN = (*STAGE_NOTES, "context", "response", "reference", "notes", "fields")
"""Names that a user's own field must not have."""
_FORMS = f"a pair has source and target, a dialogue {', '.join(_FIELDS)}"


def find_files(folder: str | os.PathLike[str]) -> dict[str, list[Path]]:
    """Returns the files of each split, sorted by name.

    Raises DataError if a split has no file, or only empty ones.
    """
    root = expand(folder)
    if folder and root.is_file():
        note("the corpus", root.parent, [root])
        return {split: [root] for split in SPLITS}
    there = {split: sorted(root.glob(f"{split}*.jsonl")) for split in SPLITS}
    found = {split: [path for path in paths if path.stat().st_size] for split, paths in there.items()}
    missing = [f"{split}*.jsonl" for split, paths in found.items() if not paths]
    if missing or not folder:
        filled = " with a line in it" if there != found else ""
        gone = "" if root.exists() else "does not exist: it "
        raise DataError(
            f"config.data.dir = {str(folder)!r} {gone}holds no {', '.join(missing) or 'corpus'}{filled}; "
            'with data.name = "jsonl" '
            f"it names a folder with {', '.join(f'{split}*.jsonl' for split in SPLITS)}, or one file."
        )
    note("the corpus", root, [path for paths in found.values() for path in paths])
    return found


def files_hash(folder: str | os.PathLike[str]) -> str:
    """Returns a hash of all files of a corpus and their names."""
    return hash_json({path.name: hash_file(path) for paths in find_files(folder).values() for path in paths})


def read_file(path: str | os.PathLike[str]) -> Iterator[Dialogue]:
    """Yields the dialogues of one file, in order; a pair's id is its file and line.

    Raises DataError if a line is not a dialogue; says which line, and what it must be.
    """
    number = found = 0
    for number, line in read_lines(Path(path)):
        if not line.strip():
            continue
        found += 1
        where = f"{path}, line {number}"
        row, known = located(parse_object, line, place=where), _FIELDS
        if "source" in row or "target" in row:
            row, known = _of_pair(row, where, f"{Path(path).stem}:{number}"), (*_FIELDS, *_PAIR)
        if problem := _problem(row, known):
            raise DataError(f"{where}: {problem}.")
        texts = [text.strip() for text in row["utterances"]]
        notes = {name: value for name, value in row.items() if name not in _FIELDS}
        yield Dialogue(row["id"], row.get("emotion", ""), row.get("situation", ""), alternate(texts), notes)
    if not found:
        raise DataError(
            f"{path}, line {max(number, 1)}: the file ends without a dialogue; write one per line, or delete it."
        )


def _of_pair(row: dict[str, Any], where: str, identity: str) -> dict[str, Any]:
    if "utterances" in row:
        raise DataError(
            f"{where}: utterances beside source or target; a line is a dialogue or a pair. Rename your own field."
        )
    for name in _PAIR:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise DataError(f"{where}: {name} = {row.get(name)!r} must be a text that is not blank.")
    more = {name: value for name, value in row.items() if name not in _PAIR}
    return {"id": identity, "utterances": [row["source"], row["target"]], **more}


def read_split(path: str | os.PathLike[str], split: str, *, alone: bool) -> Iterator[Dialogue]:
    """Yields the dialogues of a split in one file; `alone`: the file is the whole corpus."""
    dialogues = read_file(path)
    if not alone:
        return dialogues
    numbers: dict[tuple[Utterance, ...], int] = {}
    numbered = ((numbers.setdefault(_context(dialogue), len(numbers)), dialogue) for dialogue in dialogues)
    return (dialogue for number, dialogue in numbered if _SPLITS_OF_TEN[number % 10] == split)


_SPLITS_OF_TEN = (*["train"] * 8, "validation", "test")


def _context(dialogue: Dialogue) -> tuple[Utterance, ...]:
    return dialogue.utterances[:-1]


def check_files(folder: str | os.PathLike[str]) -> None:
    """Reads the first thousand dialogues of every file.

    Raises DataError as `find_files` and `read_file` do; also if a single file has too few contexts to be split.
    """
    alone = expand(folder).is_file()
    for path in dict.fromkeys(path for paths in find_files(folder).values() for path in paths):
        contexts: set[tuple[Utterance, ...]] = set()
        for number, dialogue in enumerate(read_file(path), start=1):
            contexts.add(_context(dialogue))
            if number >= 1000 and (not alone or len(contexts) >= len(_SPLITS_OF_TEN)):
                break
        if alone and len(contexts) < len(_SPLITS_OF_TEN):
            raise DataError(
                f"{folder} has too few different contexts ({len(contexts)}); of every ten, the ninth is for validation "
                "and the tenth for the test: give at least ten, or a folder with train.jsonl, validation.jsonl and "
                "test.jsonl."
            )


def has_emotions(folder: str | os.PathLike[str], split: str, least: int = 1) -> bool:
    """Whether the dialogues of a split with a reply have `least` different emotions; reads only as far as needed."""
    found: set[str] = set()
    for one in read_dialogues(folder, split):
        if one.emotion and len(one.utterances) > 1:
            found.add(one.emotion)
            if len(found) >= least:
                return True
    return False


def read_dialogues(folder: str | os.PathLike[str], split: str) -> Iterator[Dialogue]:
    """Yields the dialogues of a split, file by file; raises the errors of `find_files` and `read_file`."""
    alone = expand(folder).is_file()
    return (dialogue for path in find_files(folder)[split] for dialogue in read_split(path, split, alone=alone))


def example_rows(folder: str | os.PathLike[str], wanted: Iterable[str]) -> list[Instance]:
    """Returns two training instances to try a function on: the first ones with all fields in `wanted`, else the first.

    Reads to the end of the files if needed, since only some lines may have a field.
    """
    wanted = set(wanted)
    first: list[Instance] = []
    fitting: list[Instance] = []
    for dialogue in read_dialogues(folder, "train"):
        made = to_instances([dialogue])
        first += made[: 2 - len(first)]
        if made and wanted <= {*made[0].notes, "id", "emotion"}:
            fitting += made[: 2 - len(fitting)]
        if len(fitting) == 2:
            return fitting
    return (fitting + first)[:2]


def _problem(row: dict[str, Any], known: Sequence[str]) -> str:
    unknown = [name for name in row if name not in _FIELDS]
    for name in unknown:
        if close := difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8):
            return f"unknown field {name!r}; did you mean {close[0]!r}? Your own fields need other names"
    if "utterances" not in row:
        return f"it has {', '.join(map(repr, row)) or 'no fields'}; {_FORMS}"
    if taken := [name for name in unknown if name in _TAKEN]:
        return f"the field {taken[0]!r} has a reserved name; give it another one"
    if not isinstance(row.get("id"), str) or not row["id"]:
        return f"id = {row.get('id')!r} must be a text unique to this dialogue"
    if row.get("emotion", "") not in ("", *EMOTIONS):
        return f"emotion = {row['emotion']!r} must be empty or one of {', '.join(EMOTIONS)}"
    if not isinstance(row.get("situation", ""), str):
        return f"situation = {row['situation']!r} must be a text"
    turns = row.get("utterances")
    if not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        return f"utterances = {turns!r} must be a list of texts, none of them blank"
    return ""


def _examples(path: str, split: str, alone: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, dialogue in enumerate(read_split(path, split, alone=alone)):
        yield f"{Path(path).name}:{number}", example_of(dialogue, notes=True)


def _split_examples(folder: str, beam: bool) -> dict[str, Any]:
    """Returns the builder's examples of each split; with `beam`, Apache Beam reads the files, one worker per file."""
    alone, found = expand(folder).is_file(), {}
    for split, paths in find_files(folder).items():
        parts = [(str(path), split, alone) for path in paths]
        if beam:
            import apache_beam  # optional

            read = apache_beam.Create(parts) | apache_beam.Reshuffle() | apache_beam.FlatMapTuple(_examples)
        else:
            read = itertools.chain.from_iterable(itertools.starmap(_examples, parts))
        found[split] = read
    return found


def load_dialogues(folder: str, *, beam: Sequence[str] = ()) -> dict[str, list[Dialogue]]:
    """Loads the dialogues by split; prepared once in the cache, under the hash of the files.

    With options `beam`, Apache Beam prepares the corpus: ("--runner=DirectRunner",) in this process,
    ("--runner=FlinkRunner", ...) on a cluster with access to the folder and the cache. Raises DataError as
    `check_files` does; also if an id occurs twice in a split, and ConfigError if `beam` has options and Beam is not
    installed.
    """
    check_files(folder)
    prepared = cache_dir() / "tfds" / f"own-{files_hash(folder)}"
    from empax.data.builder import OwnDialogues, load

    options = None
    if beam:
        check_beam(beam)
        from apache_beam.options.pipeline_options import PipelineOptions  # optional

        options = PipelineOptions(list(beam))
    examples = functools.partial(_split_examples, str(folder), bool(beam))
    found = load(functools.partial(OwnDialogues, examples=examples), prepared, SPLITS, options)
    for split, dialogues in found.items():
        (name, times), *_ = Counter(dialogue.id for dialogue in dialogues).most_common(1)
        if times > 1:
            raise DataError(
                f"{folder}: {times} dialogues of the split {split} have the id {name!r}; ids must be unique."
            )
    return found


def check_beam(options: Sequence[str], where: str = "config.data.beam") -> None:
    """Raises ConfigError if `options` are given and Apache Beam is not installed."""
    if options and importlib.util.find_spec("apache_beam") is None:
        raise ConfigError(
            f"{where} needs Apache Beam, which is not installed; pip install 'empax[beam]', or leave it empty."
        )
