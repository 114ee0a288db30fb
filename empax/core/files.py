"""Files of a run: atomic writes, JSON lines, hashes, and the layout of the work directory."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Re-exported: most callers both write and read.
from empax.core.paths import expand
from empax.core.text_files import DataError as DataError
from empax.core.text_files import message_of as message_of
from empax.core.text_files import parse_jsonl as parse_jsonl
from empax.core.text_files import read_json as read_json
from empax.core.text_files import read_jsonl as read_jsonl
from empax.core.text_files import system_errors as system_errors

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}(\.[^.]+)?")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file beside `path` to write to, and then renames it, so `path` is complete or absent.

    Afterwards, file and name are on disk and survive a power failure.

    Raises:
      DataError: the file cannot be written; the message gives the reason.
    """
    with system_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
        temporary.touch(exist_ok=False)  # with default permissions; tempfile would deny the group access
        try:
            yield temporary
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
    """Whether `path` may be the remainder of a process killed inside `replacing`."""
    return _TEMPORARY.fullmatch(path.name) is not None


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_together(folder: Path, texts: Mapping[str, str]) -> None:
    """Writes several files by name: all of them, or none if one cannot be written."""
    raw = {folder / name: text.encode("utf-8") for name, text in texts.items()}
    with contextlib.ExitStack() as stack:  # at its end, the files are renamed, the last one first
        for path, data in raw.items():
            stack.enter_context(replacing(path)).write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Returns the text of a JSON file; nan and infinity, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, default=_plain) + "\n"


def _finite(value: Any) -> Any:
    value = _plain(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Writes one JSON object per line, gzipped if the name ends in .gz; dataclasses become objects of their fields.

    Raises:
      DataError: a row holds nan or infinity, which JSON lacks.
    """

    def line(number: int, row: Any) -> str:
        try:
            return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False, default=_plain) + "\n"
        except ValueError as error:
            raise DataError(f"{path}, line {number} cannot be written: it holds nan or infinity.") from error

    lines = (line(number, row) for number, row in enumerate(rows, start=1))
    with replacing(path) as temporary:
        if path.suffix == ".gz":
            temporary.write_bytes(gzip.compress("".join(lines).encode("utf-8"), mtime=0))  # no date: identical bytes
        else:
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(lines)


def metric_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Reads the rows of a metrics.jsonl, each with its line; skips incomplete lines of a killed or running process."""
    found = []
    for line in path.read_bytes().decode("utf-8", "replace").split("\n") if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"stage", "step"} <= row.keys():
            found.append((line, row))
    return found


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
    """Returns a short, stable hash of plain values: the same settings give the same name on any machine."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hex."""
    with system_errors(path, "read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class WorkDir:
    """The layout of a run's work directory."""

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", expand(self.root))

    def stage(self, name: str) -> Path:
        return self.root / name

    def done(self, name: str) -> Path:
        """Returns the file that exists once stage `name` is finished."""
        return self.root / name / "DONE"

    def begun(self, name: str) -> Path:
        """Returns the file that exists once stage `name` has begun."""
        return self.root / name / "BEGUN"

    @property
    def lock(self) -> Path:
        """File that names the process writing here."""
        return self.root / "LOCK"

    @property
    def checksums(self) -> Path:
        """Checksums of config.json and run.json, which belong to no stage."""
        return self.root / "CHECKSUMS"

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def provenance(self) -> Path:
        """Versions, commit, seed, devices and command of the run."""
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
        """The predictions without the corpus texts."""
        return self.root / "outputs.jsonl.gz"

    def evaluation(self, stage: str) -> Path:
        """Returns the predictions of an additional evaluation stage; `evaluate.json` beside them describes it."""
        return self.root / stage / "predictions.jsonl"

    def instances(self, split: str) -> Path:
        return self.root / "prepare" / f"{split}.jsonl"

    def index(self, stage: str) -> Path:
        """Returns the index that stage `stage` built; the candidates found in it are beside it."""
        return self.root / stage / "store"

    @property
    def tokenizer(self) -> Path:
        return self.root / "prepare" / "tokenizer"

    def notes(self, stage: str, split: str) -> Path:
        """Returns the annotations that a stage makes for the instances of a split."""
        return self.root / stage / f"{split}.jsonl"
