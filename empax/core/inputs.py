"""Inputs of a stage from outside the work directory, identified by their contents: corpora, models, vectors.

Code that finds such a file while a stage is checked records it with `note`; `noting` collects the records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

from empax.core.files import DataError, hash_file, hash_json
from empax.core.manifest import read_sealed, write_sealed
from empax.core.settings import cache_dir

_REMEMBERED_BYTES = 16 << 20
"""Hashes of files of at least this size are cached across runs."""

_SETTLED_NS = 2_000_000_000
"""A file unchanged for this long cannot change without a change of its timestamps."""


@dataclasses.dataclass(frozen=True)
class Input:
    """Files that a stage reads.

    Attributes:
      path: location of the files; not part of their identity.
      files: name below `path` (empty = `path` itself) → SHA-256.
    """

    path: str
    files: Mapping[str, str]

    def difference(self, other: Input) -> str:
        """Describes how `other`, the current files, differs from this record; empty if they are equal."""
        names = [name for name in sorted({*self.files, *other.files}) if self.files.get(name) != other.files.get(name)]
        if not names:
            return ""
        files = f" ({', '.join(names[:3])}{', ...' if names[3:] else ''})" if names[0] else ""
        if other.path == self.path:
            return f"{self.path} has changed{files}"
        return f"{other.path} is not what {self.path} was{files}"


Inputs = Mapping[str, Input]
"""Name ("EmpatheticDialogues") → files."""

_noted: ContextVar[dict[str, Input] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[dict[str, Input]]:
    """Collects the inputs noted in the context."""
    found: dict[str, Input] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note(what: str, path: Path, files: Iterable[Path] | None = None) -> None:
    """Records that `what` is read from `path`: all of it, or those `files` in it; costs nothing outside of `noting`.

    In a folder, hidden files and Markdown do not count: no computation reads them.
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
    """Records that the file `path` with this hash is read, whatever its location."""
    found = _noted.get()
    if found is not None:
        found[what] = Input(path, {"": sha256})


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file. A large file is hashed again only if its inode, size or times change."""
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
        with contextlib.suppress(OSError):  # the cache may belong to another user
            write_sealed(kept, {"signature": signature, "sha256": found})
    return found


def _counts(file: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return file.is_file() and not hidden and file.suffix.lower() != ".md"
