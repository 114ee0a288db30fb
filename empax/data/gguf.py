"""GGUF, the one-file format of llama.cpp: reads its metadata, its tokenizer, and the offsets of its tensors.

Source: the specification, github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers as rust
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from empax.core.files import DataError
from empax.data.chat import default_template
from empax.data.model_files import check_whole, rust_errors, short

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 20  # metadata entries, and tensors
_MOST_ITEMS = 1 << 22  # items of a list; the longest are merges, half a million
_MOST_BYTES = 1 << 26  # bytes of a text
_LARGEST = 1 << 48  # numbers of a tensor
_TEMPLATE = "tokenizer.chat_template"
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens that are never split; decoding skips control tokens


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file: its axes, outermost first, ggml's number of its type, and its offset in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The contents of a GGUF file before the tensor data."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    def require(self, key: str) -> Any:
        """Returns the metadata under `key`; DataError if it is missing."""
        if key not in self.metadata:
            raise DataError(f"{self.path} has no {key} in its metadata; fetch or convert the model again.")
        return self.metadata[key]

    def text(self, key: str, default: str | None = None) -> str:
        """Returns the text under `key`, or `default` if given; DataError if it is missing or not a text."""
        return self._checked(key, default, lambda value: isinstance(value, str), "a text")

    def size(self, key: str, default: int | None = None) -> int:
        """Returns the number under `key`, at least 1; otherwise like `text`."""
        fits = lambda value: type(value) is int and 1 <= value < 1 << 31  # noqa: E731
        return self._checked(key, default, fits, "a whole number of at least 1")

    def real(self, key: str, default: float | None = None) -> float:
        """Returns the number under `key`, above 0; otherwise like `text`."""
        fits = lambda value: type(value) in (int, float) and 0 < value < 1e30  # noqa: E731
        return float(self._checked(key, default, fits, "a number above 0"))

    def texts(self, key: str) -> list[str]:
        """Returns the texts under `key`; otherwise like `text`, without a default."""
        fits = lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value)  # noqa: E731
        return self._checked(key, None, fits, "a list of texts")

    def _checked(self, key: str, default: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
        value = self.require(key) if default is None else self.metadata.get(key, default)
        if not fits(value):
            raise DataError(f"{self.path}: {key} = {short(value)} must be {wanted}; fetch or convert the model again.")
        return value


def is_gguf(path: Path) -> bool:
    """Whether the name of `path` is that of a GGUF file."""
    return path.suffix.lower() == ".gguf"


def find_gguf(path: Path) -> Path | None:
    """Returns `path` if it is a GGUF file, or the GGUF file in the folder `path`; None if there is none.

    Raises DataError if the folder holds several.
    """
    if path.is_file():
        return path if is_gguf(path) else None
    files = sorted(path.glob("*.[gG][gG][uU][fF]"))
    if len(files) > 1:
        raise DataError(f"{path} holds {', '.join(file.name for file in files)}; give the path of one of them.")
    return files[0] if files else None


def read_gguf(path: Path) -> GgufFile:
    """Reads the metadata and the table of tensors, but not the tensors themselves.

    Raises DataError if it is not a GGUF file of version 2 or 3, is truncated, or is one part of several.
    """
    check_whole(path)
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8 or head[:4] != b"GGUF":
            raise DataError(f"{path} is not a GGUF file; fetch the model again.")
        version = int.from_bytes(head[4:], "little")
        if version not in (2, 3):
            raise DataError(f"{path} is GGUF version {version} (or big-endian); only 2 and 3 are read.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, _Cursor(data))
            except (struct.error, EOFError) as error:
                raise DataError(f"{path} is cut short; fetch the model again.") from error
            except OverflowError as error:
                raise DataError(f"{path} claims {error}, more than any model has; fetch it again.") from error
            except UnicodeDecodeError as error:
                raise DataError(f"{path} has a string that is not UTF-8 ({error}); fetch the model again.") from error


class _Cursor:
    """A position in the file that advances with each read."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.place = 8

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.place)
        self.place += struct.calcsize(code)
        return value

    def numbers(self, code: str, count: int) -> list[Any]:
        # Checked before anything of that size is allocated: a broken file may claim any count.
        _check_most(count, _MOST_ITEMS, "items of a list")
        if count * struct.calcsize(code) > len(self.data) - self.place:
            raise EOFError
        values = struct.unpack_from(f"<{count}{code}", self.data, self.place)
        self.place += count * struct.calcsize(code)
        return list(values)

    def string(self) -> str:
        length = self.number("Q")
        if length > len(self.data) - self.place:
            raise EOFError
        _check_most(length, _MOST_BYTES, "bytes of a text")
        text = self.data[self.place : self.place + length]
        self.place += length
        return text.decode()

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise EOFError  # no such kind: the bytes before it were misread
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], count)
        if kind != _STRING:
            raise EOFError  # lists of lists are not needed, and could be nested as deep as the file is long
        _check_most(count, _MOST_ITEMS, "items of a list")
        return [self.string() for _ in range(count)]


def _check_most(count: int, most: int, what: str) -> None:
    if count > most:
        raise OverflowError(f"{count} {what}")


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    num_tensors, num_entries = cursor.numbers("Q", 2)
    _check_most(num_entries, _MOST_ENTRIES, "entries of metadata")
    _check_most(num_tensors, _MOST_ENTRIES, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        if key in metadata:
            raise DataError(f"{path} has {key[:80]!r} twice in its metadata; fetch the model again.")
        metadata[key] = cursor.value(cursor.number("I"))
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise DataError(f"{path} is one of {parts} parts; join them (llama-gguf-split --merge).")
    table: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(reversed(cursor.numbers("Q", cursor.number("I"))))
        if not 1 <= len(shape) <= 4 or math.prod(size or 1 for size in shape) >= _LARGEST:
            raise DataError(f"{path}: the tensor {name[:80]!r} has the shape {list(shape[:8])}; fetch the model again.")
        if name in table:
            raise DataError(f"{path} has two tensors {name[:80]!r}; fetch the model again.")
        kind, offset = cursor.number("I"), cursor.number("Q")
        if offset > len(cursor.data):
            raise EOFError
        table[name] = GgufTensor(name, shape, kind, offset)
    file = GgufFile(path, metadata, ())
    alignment = file.size("general.alignment", 32)
    start = -(-cursor.place // alignment) * alignment
    tensors = tuple(dataclasses.replace(row, offset=start + row.offset) for row in table.values())
    return dataclasses.replace(file, tensors=tensors)


def gguf_tokenizer(file: GgufFile) -> tuple[rust.Tokenizer, dict[str, str], str | None]:
    """Builds the tokenizer from the vocabulary and the merges in the metadata.

    For a model without a padding token, the end-of-sequence token pads.

    Returns:
      The tokenizer as if from a tokenizer.json; texts of the special tokens, by "pad_token", "eos_token", "bos_token"
      and "unk_token"; the Jinja source of the chat template, None if the model has none.

    Raises DataError if the tokenizer is not a byte-level BPE, or its pre-tokenizer is unknown.
    """
    kind = file.text("tokenizer.ggml.model")
    advice = "put the model's tokenizer.json beside the file."
    if kind != "gpt2":
        raise DataError(
            f"{file.path} has a tokenizer {kind!r}; only 'gpt2', a byte-level BPE, is read. Otherwise {advice}"
        )
    cut = file.text("tokenizer.ggml.pre", "gpt-2")
    if cut not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise DataError(f"{file.path} splits text as {cut!r} (tokenizer.ggml.pre); known: {known}. Otherwise {advice}")
    tokens = file.texts("tokenizer.ggml.tokens")
    merges = file.texts("tokenizer.ggml.merges")
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    if not all(second for _, second in pairs):
        raise DataError(f"{file.path}: tokenizer.ggml.merges holds a merge of one part; fetch or convert it again.")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    with rust_errors(file.path, DataError, "fetch or convert the model again"):
        bpe = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=_PRE_TOKENIZERS[cut] is _LLAMA3)
        backend = rust.Tokenizer(bpe)
        backend.pre_tokenizer = _PRE_TOKENIZERS[cut]
        if cut in _COMPOSED:
            backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
        backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        kinds = file.metadata.get("tokenizer.ggml.token_type")
        kinds = kinds if isinstance(kinds, list) else []
        for number, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            added = [token for token, kind in zip(tokens, kinds, strict=False) if kind == number]
            add = backend.add_special_tokens if special else backend.add_tokens
            add([AddedToken(token, normalized=False, special=special) for token in added])
    names, says = _special_names(file, tokens), file.metadata.get
    first, last = (
        [role] if says(f"tokenizer.ggml.add_{role}_token", usual) and f"{role}_token" in names else []
        for role, usual in (("bos", _PRE_TOKENIZERS[cut] is _LLAMA3), ("eos", False))  # defaults: llama.cpp's
    )
    if first or last:
        # By their roles: the library would read a text such as "$A" or "x:1" as part of its syntax.
        texts = {role: names[f"{role}_token"] for role in (*first, *last)}
        special = [{"id": role, "ids": [vocabulary[text]], "tokens": [text]} for role, text in texts.items()]
        frame = processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=special)
        backend.post_processor = frame  # pyright: ignore[reportAttributeAccessIssue]
    return backend, names, _chat_template(file)


def _chat_template(file: GgufFile) -> str | None:
    """Returns the chat template of a file, or the default of several named ones."""
    if _TEMPLATE in file.metadata:
        return file.text(_TEMPLATE)
    named = file.texts(f"{_TEMPLATE}s") if f"{_TEMPLATE}s" in file.metadata else []
    return default_template({name: file.text(f"{_TEMPLATE}.{name}") for name in named}, str(file.path))


def _special_names(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """Returns the texts of the special tokens, whose ids are in the metadata."""
    names = {}
    for role, key in (("pad", "padding"), ("eos", "eos"), ("bos", "bos"), ("unk", "unknown")):
        key = f"tokenizer.ggml.{key}_token_id"
        if key not in file.metadata:
            continue
        number = file.metadata[key]
        if type(number) is not int or not 0 <= number < len(tokens):
            raise DataError(
                f"{file.path}: {key} = {number!r} is not one of the {len(tokens)} tokens; fetch or convert it again."
            )
        names[f"{role}_token"] = tokens[number]
    if "eos_token" in names:
        names.setdefault("pad_token", names["eos_token"])
    return names


def _byte_level(*before: Any, regex: bool) -> Any:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)])


def _pieces(digits: str) -> Any:
    """Splits text into contractions, words, numbers as `digits` matches them, signs, blanks."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return _byte_level(pre_tokenizers.Split(Regex(pattern), behavior="isolated"), regex=False)


_LLAMA3 = _pieces(r"\p{N}{1,3}")

_PRE_TOKENIZERS: dict[str, Any] = {
    "gpt-2": _byte_level(regex=True),
    "smollm": _byte_level(pre_tokenizers.Digits(individual_digits=True), regex=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _pieces(r"\p{N}"),
}
"""Pre-tokenizers, by llama.cpp's names.

Source: the tokenizer.json of GPT-2, SmolLM2, Llama 3 and Qwen2.
"""

_COMPOSED = ("qwen2",)
"""Pre-tokenizers whose tokenizers first compose letters and accents (NFC)."""
