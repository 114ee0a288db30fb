"""Files cached across runs in EMPAX_CACHE_DIR, each with a checksum; a file that does not match is made anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from empax.core.files import hash_file, hash_json, read_jsonl, replacing, write_jsonl, write_text
from empax.core.settings import cache_dir
from empax.core.text_files import SystemFileError

log = logging.getLogger("empax")

T = TypeVar("T")


def enable_compilation_cache() -> None:
    """Keeps compiled programs across processes, including the small ones; a run has about a hundred.

    Does nothing if JAX has a cache already, such as that of JAX_COMPILATION_CACHE_DIR.
    """
    if jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def kept(path: Path, make: Callable[[], T], *, write: Callable[[Path, T], object], read: Callable[[Path], T]) -> T:
    """Returns the contents of `path`; makes and writes them if the file is missing or damaged.

    The file's name depends on all inputs, but not on the code: code that makes something else of the same inputs needs
    another word among those that name the file. PATH.sha256 holds its checksum. If the cache is not writable, logs a
    warning.
    """
    if is_sound(path):
        log.info("%s: taken from the cache", path)
        return read(path)
    made = make()
    try:
        write(path, made)
        seal(path)
    except SystemFileError as error:
        tell_unwritable(error)
    return made


def tell_unwritable(error: SystemFileError) -> None:
    """Logs a warning that the cache cannot be written."""
    log.warning("%s It is computed again each time; set EMPAX_CACHE_DIR to a writable folder.", error)


def is_sound(path: Path) -> bool:
    """Whether a cached file or folder matches its checksum; logs a warning if it does not."""
    if not path.exists():
        return False
    mark = mark_of(path)
    if mark.is_file() and mark.read_bytes().decode("ascii", "replace").strip() == _digest(path):
        return True
    log.warning("%s is damaged or incomplete; it is made again.", path)
    return False


def seal(path: Path, made: Path | None = None) -> None:
    """Writes the checksum of a cached file or folder beside it; `made` is its location before it is renamed."""
    write_text(mark_of(path), _digest(made or path) + "\n")


def kept_array(path: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Applies `kept` to an .npy file."""

    def write(path: Path, array: np.ndarray) -> None:
        with replacing(path) as temporary:
            np.save(temporary, array)

    return kept(path, make, write=write, read=np.load)


def kept_rows(path: Path, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Applies `kept` to a .jsonl file."""
    return kept(path, make, write=write_jsonl, read=lambda path: list(read_jsonl(path)))


def mark_of(path: Path) -> Path:
    """Returns the path of the checksum of a cached file or folder; the checksum is written last."""
    return path.with_name(f"{path.name}.sha256")


def _digest(path: Path) -> str:
    if path.is_file():
        return hash_file(path)
    names = sorted(file for file in path.rglob("*") if file.is_file())
    return hash_json({file.relative_to(path).as_posix(): hash_file(file) for file in names})
