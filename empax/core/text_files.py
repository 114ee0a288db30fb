"""Reads text files: lines, JSON, JSON lines, gzip. Every problem is a DataError that names the place.

UTF-8 may begin with a byte order mark; lines end in LF or CR LF. Rejected are other encodings, NUL, a CR inside a line,
numbers outside JSON or 64 bits, lone surrogates, deep nesting, texts of more than MAX_TEXT_CHARACTERS, damaged gzip
files, those that expand more than MAX_EXPANSION times, and anything but regular files.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from empax.core.config import UserError

T = TypeVar("T")

MAX_TEXT_CHARACTERS = 100_000
"""Limit for a text in a line, such as an utterance: longer texts are damage, and some metrics are quadratic in it."""

MAX_LINE_BYTES = 64 << 20

MAX_FILE_BYTES = 1 << 30
"""Limit for a file that is read whole, decompressed."""

MAX_EXPANSION = 200
"""Limit for the decompressed bytes of lines, in sizes of their file; the first MAX_LINE_BYTES are always read.

Text expands several times, zeros about a thousand times.
"""

MAX_DEPTH = 64
"""Limit for the nesting depth of lists and objects in JSON."""

_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = ((b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"))
_OTHER_BOMS += ((b"\xfe\xff", "UTF-16"),)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_WHOLE = 2**63
_COMPRESSION_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


class DataError(UserError, ValueError):
    """An invalid file; the message names the file, the place and the remedy."""


class MissingFileError(DataError, FileNotFoundError):
    """The file does not exist."""


class SystemFileError(DataError, OSError):
    """The system refuses access to a file: full disk, missing permissions, name too long."""


@contextlib.contextmanager
def system_errors(path: Path, done: str) -> Iterator[None]:
    """Turns system errors of `path`, which cannot be `done` ("read", "written"), into one line that names it."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        # For an error of another file, the message names it; files beside `path` are temporary.
        elsewhere = isinstance(error.filename, str) and Path(error.filename).parent != path.parent
        reason = f"{error.filename}: {reason_of(error)}" if elsewhere else reason_of(error)
        raise SystemFileError(f"{path} cannot be {done} ({reason}).") from error


def reason_of(error: OSError) -> str:
    """Returns the system's message: "No space left on device"."""
    return error.strerror or str(error) or type(error).__name__


def message_of(error: Exception) -> str:
    """Formats an error as one line, as commands print it; a system error with its file and reason."""
    if isinstance(error, DataError) or not isinstance(error, OSError):
        return visible(str(error))
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return visible(f"{', '.join(names) or type(error).__name__}: {reason_of(error)}.")


def read_text(path: Path) -> str:
    """Reads a whole file as text, gzipped if its name ends in .gz; keeps line ends."""
    with _opened(path) as file:
        raw = _guarded(path, lambda: file.read(MAX_FILE_BYTES + 1))
    if len(raw) > MAX_FILE_BYTES:
        raise DataError(f"{path} holds more than {MAX_FILE_BYTES >> 20} MiB; it cannot be the right file.")
    return decode(raw, str(path))


def decode(raw: bytes, name: str) -> str:
    """Decodes the bytes of a whole file; errors call it `name`."""
    _check_encoding(raw, name)
    raw = raw.removeprefix(_BOM)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}, line {line}: {_not_utf8(error)}.") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(f"{name}, line {line}: a NUL byte; it is not a text file.")
    return text


def split_lines(raw: bytes, name: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a file's contents with their numbers, without line ends.

    Unlike `str.splitlines`, it does not split at the rarer line separators, which texts may contain.
    """
    _check_encoding(raw, name)
    for number, line in enumerate(raw.removeprefix(_BOM).split(b"\n"), start=1):
        yield number, located(decode_line, line, place=f"{name}, line {number}")


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file, gzipped if its name ends in .gz, with their numbers; `decode_line` decodes them.

    A damaged file raises DataError when the damage is reached; for a gzip checksum that may be at its end.
    """
    with _opened(path) as file:
        number, left = 0, max(MAX_LINE_BYTES, MAX_EXPANSION * path.stat().st_size)
        while line := _guarded(path, lambda: file.readline(MAX_LINE_BYTES + 1)):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, line {number}: more than {MAX_LINE_BYTES >> 20} MiB; it is not a file of lines."
                )
            left -= len(line)
            if left < 0:
                raise DataError(
                    f"{path}, line {number}: more than {MAX_EXPANSION} times the size of the file, unlike text; unpack "
                    "it if you trust it."
                )
            if number == 1:
                _check_encoding(line, str(path))
                line = line.removeprefix(_BOM)
            yield number, line


def decode_line(raw: bytes) -> str:
    """Decodes a line, without its end; the DataError describes the problem and leaves the place to the caller."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(error)) from error
    text = text.removesuffix("\n").removesuffix("\r")
    if "\0" in text:
        raise DataError("a NUL byte; it is not a text file")
    if "\r" in text:
        raise DataError("a carriage return inside the line; lines must end in LF or CR LF")
    return text


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a file as text, with their numbers; raises DataError with file and line for a bad one."""
    for number, raw in raw_lines(path):
        yield number, located(decode_line, raw, place=f"{path}, line {number}")


def read_json(path: Path) -> Any:
    """Reads a file with one JSON value."""
    return located(parse_json, read_text(path), place=str(path))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; raises DataError with the number of a bad line."""
    return (row for _, row in parse_jsonl(read_lines(path), name=str(path)))


def parse_jsonl(lines: Iterable[tuple[int, str]], *, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the objects of JSON lines with their numbers; errors call the file `name`."""
    for number, line in lines:
        if line.strip():
            yield number, located(parse_object, line, place=f"{name}, line {number}")


def parse_object(line: str) -> dict[str, Any]:
    """Parses the JSON object of a line; the DataError leaves the place to the caller."""
    value = parse_json(line)
    if not isinstance(value, dict):
        raise DataError(f"must be a JSON object, not a {type(value).__name__}")
    if len(line) > MAX_TEXT_CHARACTERS:
        check_length(*_texts(value))
    return value


def check_length(*texts: str) -> None:
    """Raises DataError, without a place, for a text that is too long for a corpus."""
    for text in texts:
        if len(text) > MAX_TEXT_CHARACTERS:
            raise DataError(f"a text of {len(text)} characters; at most {MAX_TEXT_CHARACTERS} are allowed")


def parse_json(text: str) -> Any:
    """Parses a JSON value; the DataError leaves the place to the caller."""
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_real, parse_constant=_constant)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        raise DataError(f"not valid JSON ({error.msg} at {line}column {error.colno})") from error
    except RecursionError as error:
        raise DataError(f"JSON nested more than {MAX_DEPTH} deep") from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise DataError(f"JSON nested more than {MAX_DEPTH} deep")
    if _ESCAPED_SURROGATE.search(text) and any(map(_SURROGATE.search, _texts(value))):
        raise DataError("half of a surrogate pair (\\ud800 to \\udfff), which is not a character")
    return value


def _whole(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= _MAX_WHOLE:
        raise DataError(f"a number of {len(digits)} digits; whole numbers must fit in 64 bits")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise DataError(f"the number {digits[:20]} is too large")
    return value


def _constant(name: str) -> float:
    raise DataError(f"{name} is not a JSON number")


def _depth(value: Any) -> int:
    """Returns the nesting depth of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, (dict, list))]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _texts(value: Any) -> Iterator[str]:
    """Yields all keys and texts in a JSON value."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            yield from one
            left += one.values()
        elif isinstance(one, list):
            left += one


def located(read: Callable[..., T], *values: Any, place: str) -> T:
    """Calls `read` and puts the place in front of its DataError."""
    try:
        return read(*values)
    except DataError as error:
        raise DataError(f"{place}: {error}.") from error


def check_regular(path: Path) -> None:
    """Raises DataError unless `path` is a regular file."""
    with system_errors(path, "read"):
        exists = path.exists()
    if not exists:
        raise MissingFileError(f"there is no file {path}.")
    if not path.is_file():
        raise DataError(f"{path} is {'a folder' if path.is_dir() else 'a pipe or a device'}, not a file.")


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    check_regular(path)
    with system_errors(path, "read"):
        return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _guarded(path: Path, read: Callable[[], bytes]) -> bytes:
    with system_errors(path, "read"):
        try:
            return read()
        except _COMPRESSION_ERRORS as error:
            raise DataError(f"{path} is cut short, damaged, or not gzipped ({error}); copy it again.") from error


def _check_encoding(start: bytes, name: str) -> None:
    for mark, encoding in _OTHER_BOMS:
        if start.startswith(mark):
            raise DataError(f"{name}, line 1: {encoding}, must be UTF-8; save it as UTF-8.")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start + 1})"


_SIGNS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_SIGNS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """Replaces control characters other than tab and newline by symbols: ESC by U+241B, NUL by U+2400."""
    return text.translate(_SIGNS)
