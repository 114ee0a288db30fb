"""Files of a run: atomic writes, JSON lines, hashes, and the layout of the work directory."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


class DataError(ValueError):
    """A file that is not what it should be; the message names the file, the place and what to do."""


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}(\.[^.]+)?")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` on a temporary neighbour of `path` and renames it, so `path` is whole or absent.

    When it returns, file and name are on disk, and survive a loss of power.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
    temporary.touch(exist_ok=False)  # with the rights of any new file, where tempfile would keep it from the group
    try:
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(path: Path) -> bool:
    """Whether a process that was killed inside `write_atomically` may have left `path`."""
    return _TEMPORARY.fullmatch(path.name) is not None


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}).") from error


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """One JSON object a line, gzipped if the name ends in .gz; dataclasses are written as their fields."""

    def write(temporary: Path) -> None:
        lines = (json.dumps(_plain(row), ensure_ascii=False, default=_plain) + "\n" for row in rows)
        if path.suffix == ".gz":
            temporary.write_bytes(gzip.compress("".join(lines).encode("utf-8"), mtime=0))  # no date: the same bytes
            return
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(lines)

    write_atomically(path, write)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; a bad line is a DataError with its number."""
    with path.open(encoding="utf-8") as file:
        yield from parse_jsonl(file, name=str(path))


def parse_jsonl(lines: Iterable[str], *, name: str) -> Iterator[dict[str, Any]]:
    """The same of lines that have been read; `name` says where, in errors."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{name}, line {number}: not valid JSON ({error}).") from error
        if not isinstance(row, dict):
            raise DataError(f"{name}, line {number}: a {type(row).__name__}, must be a JSON object.")
        yield row


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return value


def hash_json(value: Any) -> str:
    """A short, stable hash of plain values: the same settings give the same name on any machine."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class WorkDir:
    """Where everything of one run lies."""

    root: Path

    def stage(self, name: str) -> Path:
        return self.root / name

    def done(self, name: str) -> Path:
        """Exists once stage `name` is finished."""
        return self.root / name / "DONE"

    def begun(self, name: str) -> Path:
        """Exists once stage `name` has begun."""
        return self.root / name / "BEGUN"

    @property
    def lock(self) -> Path:
        """Says who is writing here."""
        return self.root / "LOCK"

    @property
    def checksums(self) -> Path:
        """Of config.json and run.json, which belong to no stage."""
        return self.root / "CHECKSUMS"

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def run(self) -> Path:
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    def tensorboard(self, stage: str) -> Path:
        return self.root / "tensorboard" / stage

    @property
    def predictions(self) -> Path:
        return self.root / "predictions.jsonl"

    @property
    def outputs(self) -> Path:
        """The same without the words of the corpus."""
        return self.root / "outputs.jsonl.gz"

    def evaluation(self, stage: str) -> Path:
        """Predictions of a stage that evaluates beside the main one; `evaluate.json`, in the same folder, says what."""
        return self.root / stage / "predictions.jsonl"

    def instances(self, split: str) -> Path:
        return self.root / "prepare" / f"{split}.jsonl"

    def index(self, stage: str) -> Path:
        """The index that stage `stage` built; beside it lie the candidates that were looked up in it."""
        return self.root / stage / "store"

    @property
    def tokenizer(self) -> Path:
        return self.root / "prepare" / "tokenizer"

    def annotations(self, split: str) -> Path:
        return self.root / "annotate" / f"{split}.jsonl"
