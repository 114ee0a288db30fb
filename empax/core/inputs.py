"""What a stage reads from outside of its work directory, known again by its contents: corpora, models, vectors.

Who finds such a file while a stage is checked says so with `note`; `noting` collects what is said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from empax.core.files import DataError, hash_file, hash_json
from empax.core.manifest import read_sealed, write_sealed
from empax.core.settings import cache_dir

_REMEMBERED_BYTES = 16 << 20
"""From this size on the hash of a file is kept across runs."""

_SETTLED_NS = 2_000_000_000
"""A file that has rested for so long cannot change without a change of its times."""


@dataclasses.dataclass(frozen=True)
class Input:
    """Files that a stage reads.

    Attributes:
      path: where they are; no part of what they are.
      files: name below `path` (empty = `path` itself) → SHA-256.
    """

    path: str
    files: Mapping[str, str]

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Input:
        """What a record has of one."""
        return cls(recorded["path"], recorded["files"])

    def difference(self, other: Input) -> str:
        """In words, how `other`, which is there now, differs from this, which was there; empty if it does not."""
        names = [name for name in sorted({*self.files, *other.files}) if self.files.get(name) != other.files.get(name)]
        if not names:
            return ""
        files = f" ({', '.join(names[:3])}{', ...' if names[3:] else ''})" if names[0] else ""
        if other.path == self.path:
            return f"{self.path} has changed{files}"
        return f"{other.path} is not what {self.path} was{files}"


Inputs = Mapping[str, Input]
"""What they are ("EmpatheticDialogues") → the files."""

_noted: ContextVar[dict[str, Input] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[dict[str, Input]]:
    """Collects what is noted within."""
    found: dict[str, Input] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note(what: str, path: Path, files: Iterable[Path] | None = None) -> None:
    """Says that `what` is read from `path`: all of that, or those `files` in it; costs nothing outside of `noting`.

    Of a folder neither hidden files nor Markdown count: nobody computes with those.
    """
    found = _noted.get()
    if found is None:
        return
    root = path.absolute()
    if files is None:
        files = [root] if root.is_file() else [file for file in root.rglob("*") if _counts(file, root)]
    names = {file: file.absolute().relative_to(root).as_posix() for file in files}
    found[what] = Input(str(root), {"" if name == "." else name: digest(file) for file, name in names.items()})


def note_known(what: str, path: str, sha256: str) -> None:
    """Says that the file `path` with these contents is read, wherever it comes from."""
    found = _noted.get()
    if found is not None:
        found[what] = Input(path, {"": sha256})


def digest(path: Path) -> str:
    """SHA-256 of a file. That of a large one is computed once, as long as inode, size and times stay the same."""
    about = path.stat()
    if about.st_size < _REMEMBERED_BYTES:
        return hash_file(path)
    signature = [about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]
    kept = cache_dir() / "digests" / f"{hash_json(str(path.absolute()))}.json"
    with contextlib.suppress(OSError, DataError):
        known = read_sealed(kept)
        if known["signature"] == signature:
            return known["sha256"]
    found = hash_file(path)
    if time.time_ns() - max(about.st_mtime_ns, about.st_ctime_ns) > _SETTLED_NS:
        with contextlib.suppress(OSError):  # the cache may be somebody else's
            write_sealed(kept, {"signature": signature, "sha256": found})
    return found


def _counts(file: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return file.is_file() and not hidden and file.suffix.lower() != ".md"
