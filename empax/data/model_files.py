"""Small files in a model's folder, written by other programs: read whole and checked, or refused by name.

Each supported field is on a list; a field that is not is never dropped silently.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import DataError, system_errors
from empax.core.text_files import MAX_FILE_BYTES, check_regular, reason_of

log = logging.getLogger("empax")

_POINTER = b"version https://git-lfs.github.com/spec/"


def is_listed(path: Path) -> bool:
    """Whether a folder lists `path`, even as a broken link, as in an incomplete cache.

    Reading a broken link raises an error that names it, whereas `path.is_file()` would treat it as absent.
    """
    return os.path.lexists(path)


def check_whole(path: Path) -> None:
    """Raises DataError if `path` is not a file, cannot be read, is empty, or is a Git LFS pointer."""
    check_regular(path)
    with system_errors(path, "read"), path.open("rb") as stream:
        start = stream.read(len(_POINTER))
    if not start:
        raise DataError(f"{path} is empty; fetch the model again.")
    if start == _POINTER:
        raise DataError(
            f"{path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in its folder, or fetch the "
            "model with `hf download`."
        )


def read_model_json(path: Path, *, kind: type[dict[str, Any]] | type[list[Any]] = dict) -> Any:
    """Reads the JSON object (or list, by `kind`) in a file of a model.

    Raises:
      DataError: if the file cannot be read, is empty, a Git LFS pointer, not UTF-8, not JSON, or JSON of another kind.
    """
    check_whole(path)
    with system_errors(path, "read"):
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB; fetch the model again.")
        content = path.read_bytes()
    if content.startswith(codecs.BOM_UTF8):
        raise DataError(f"{path} begins with a byte-order mark; save it as UTF-8 without one.")
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise DataError(f"{path} is not valid JSON ({error}); fetch the model again.") from error
    if not isinstance(value, kind):
        kinds = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
        wanted = "object" if kind is dict else "list"
        raise DataError(f"{path} must hold a JSON {wanted}, but is {kinds.get(type(value), repr(value))}.")
    return value


def named_path(path: Path, name: Any) -> Path:
    """Returns the path of `name`, as referred to in the file `path`, in the same folder as that file.

    Raises DataError if it is not a file name, or leads out of the folder.
    """
    try:
        place = path.parent / name
        inside = place.resolve().is_relative_to(path.parent.resolve())
        place.exists()
    except (TypeError, ValueError, OSError, RuntimeError) as error:  # not a text, an impossible name, a loop of links
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise DataError(f"{path} names {short(name)}, which cannot be looked up ({reason}).") from error
    if not inside:
        raise DataError(f"{path} names {short(name)}, which is outside the folder.")
    return place


@contextlib.contextmanager
def rust_errors(path: Path, kind: type[ValueError], advice: str) -> Iterator[None]:
    """Turns errors of the tokenizers library on a broken file into an error of `kind` that names `path`."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except BaseException as error:
        # The library has no error types: it raises plain Exception, or a Rust panic, which is only a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise kind(f"{path} holds no tokenizer that can be read ({reason}); {advice}.") from error


def refuse_unknown(said: Mapping[str, Any], known: Collection[str], file: Path) -> None:
    """Raises ConfigError for unknown fields, which could change the computation."""
    if unknown := unknown_fields(said, known):
        raise ConfigError(
            f"{file} sets {shown(said, unknown)}, which is unknown here and could change what the model computes; "
            "remove it if it does not."
        )


def warn_of_unknown(said: Mapping[str, Any], known: Collection[str], file: Path, why: str) -> None:
    """Warns once per file of unknown fields, which are ignored; `why` they cannot change the computation."""
    if unknown := unknown_fields(said, known):
        warn_once(f"{file} sets {shown(said, unknown)}, which is unknown here and ignored: {why}.")


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning the first time it occurs."""
    log.warning("%s", message)


def unknown_fields(said: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Returns the names of fields that are neither `known` nor null or empty."""
    return sorted(name for name, value in said.items() if name not in known and value not in (None, [], {}))


def shown(said: Mapping[str, Any], names: Collection[str]) -> str:
    """Formats the named fields with their values, shortened."""
    return ", ".join(f"{name} = {short(said[name])}" for name in names)


def short(value: Any) -> str:
    """Formats a value in at most 43 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
