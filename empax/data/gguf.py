"""GGUF, the one-file format of llama.cpp: its metadata, its tokenizer, and where its tensors lie.

Source: the specification, github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers as rust
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from empax.core.files import DataError

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens that are never split; the text of control tokens is not written out


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file: its axes, outermost first, ggml's number for its type, its first byte."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """What stands in a GGUF file before the numbers of its tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    def require(self, key: str) -> Any:
        """Metadata under `key`; DataError where it is missing."""
        if key not in self.metadata:
            raise DataError(f"{self.path} has no {key} in its metadata; fetch or convert the model again.")
        return self.metadata[key]


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that the folder `path` holds; None if there is none.

    Raises:
      DataError: the folder holds several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise DataError(f"{path} holds {', '.join(file.name for file in files)}; give the path of one of them.")
    return files[0] if files else None


def read_gguf(path: Path) -> GgufFile:
    """Reads the metadata and the table of tensors; the tensors themselves stay where they are.

    Raises:
      DataError: it is no GGUF file of version 2 or 3, it is cut short, or it is one part of several.
    """
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8 or head[:4] != b"GGUF":
            raise DataError(f"{path} is not a GGUF file; fetch the model again.")
        version = int.from_bytes(head[4:], "little")
        if version not in (2, 3):
            raise DataError(f"{path} is GGUF of version {version} (or big-endian); what is read: 2 and 3.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, _Cursor(data))
            except (struct.error, EOFError) as error:
                raise DataError(f"{path} is cut short; fetch the model again.") from error
            except UnicodeDecodeError as error:
                raise DataError(f"{path} has a string that is not UTF-8 ({error}); fetch the model again.") from error


class _Cursor:
    """A place in the file that moves on with what is read."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.place = 8

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.place)
        self.place += struct.calcsize(code)
        return value

    def numbers(self, code: str, count: int) -> list[Any]:
        # Before anything of that size is asked for: a broken file may claim any count.
        if count * struct.calcsize(code) > len(self.data) - self.place:
            raise EOFError
        values = struct.unpack_from(f"<{count}{code}", self.data, self.place)
        self.place += count * struct.calcsize(code)
        return list(values)

    def string(self) -> str:
        length = self.number("Q")
        if length > len(self.data) - self.place:
            raise EOFError
        text = self.data[self.place : self.place + length]
        self.place += length
        return text.decode()

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise EOFError  # no such kind: what precedes it was not what it seemed
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], count)
        return [self.value(kind) for _ in range(count)]


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    num_tensors, num_entries = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    if metadata.get("split.count", 1) > 1:
        raise DataError(f"{path} is one of {metadata['split.count']} parts; join them (llama-gguf-split --merge).")
    table = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(reversed(cursor.numbers("Q", cursor.number("I"))))
        table.append(GgufTensor(name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.place // alignment) * alignment
    return GgufFile(path, metadata, tuple(dataclasses.replace(row, offset=start + row.offset) for row in table))


class GgufTokenizer(NamedTuple):
    """The tokenizer of a GGUF file.

    Attributes:
      backend: as a tokenizer.json would give it.
      names: texts of the special tokens, by "pad_token", "eos_token", "bos_token" and "unk_token".
      chat_template: Jinja source; None if the model has none.
    """

    backend: rust.Tokenizer
    names: dict[str, str]
    chat_template: str | None


def gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Makes the tokenizer from the vocabulary and the merges in the metadata.

    A model without a padding token gets its end of sequence for one.

    Raises:
      DataError: the tokenizer is no byte-level BPE, or cuts text in a way that is not known here.
    """
    kind = file.require("tokenizer.ggml.model")
    advice = "put the model's tokenizer.json beside the file."
    if kind != "gpt2":
        raise DataError(f"{file.path} has a tokenizer {kind!r}; what is read: 'gpt2', a byte-level BPE. Else {advice}")
    cut = file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if cut not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise DataError(f"{file.path} cuts text as {cut!r} (tokenizer.ggml.pre); known: {known}. Else {advice}")
    tokens, merges = file.require("tokenizer.ggml.tokens"), file.require("tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    bpe = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=_PRE_TOKENIZERS[cut] is _LLAMA3)
    backend = rust.Tokenizer(bpe)
    backend.pre_tokenizer = _PRE_TOKENIZERS[cut]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    for number, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, kind in zip(tokens, kinds, strict=False) if kind == number]
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(token, normalized=False, special=special) for token in added])
    keys = {"pad_token": "padding", "eos_token": "eos", "bos_token": "bos", "unk_token": "unknown"}
    ids = {name: f"tokenizer.ggml.{key}_token_id" for name, key in keys.items()}
    names = {name: tokens[file.metadata[key]] for name, key in ids.items() if key in file.metadata}
    if "eos_token" in names:
        names.setdefault("pad_token", names["eos_token"])
    return GgufTokenizer(backend, names, file.metadata.get("tokenizer.chat_template"))


def _byte_level(*before: Any, regex: bool) -> Any:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)])


_LLAMA3 = _byte_level(
    pre_tokenizers.Split(
        Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        behavior="isolated",
    ),
    regex=False,
)

_PRE_TOKENIZERS: dict[str, Any] = {
    "gpt-2": _byte_level(regex=True),
    "smollm": _byte_level(pre_tokenizers.Digits(individual_digits=True), regex=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
}
"""How text is cut before the merges, by llama.cpp's names. Source: the tokenizer.json of GPT-2, SmolLM2, Llama 3."""
