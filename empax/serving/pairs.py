"""Pairs of texts: checked, and padded to few lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int

from empax.core.config import LARGEST_INT, ConfigError
from empax.core.protocols import Examples
from empax.core.types import Batch
from empax.data.batches import eval_batches, padded_lengths
from empax.data.english import with_plain_quotes
from empax.data.model_files import short

Texts: TypeAlias = Iterable[str]
"""A list, a tuple, a generator, a NumPy array, a pandas column, or any other iterable of texts."""

Pairs: TypeAlias = Iterable[tuple[str, str] | Mapping[str, str]]
"""Sources and targets; a mapping has the keys "source" and "target", a pandas table the columns."""

LEAST_LENGTH = 16
"""Sources are padded to at least this many tokens, so that few shapes are compiled."""


def batches_of(
    examples: Examples, batch_size: int, *, most: int | None, least: int = LEAST_LENGTH
) -> Iterator[tuple[Int[np.ndarray, " B"], Batch]]:
    """Yields batches for evaluation, each with its row numbers (-1 = padding row); see `buckets_of`.

    A single small batch has 1, 2, 4, ... rows, at most `batch_size`: few padding rows, and few programs.
    """
    if not len(examples):
        return iter(())
    rows = min(batch_size, 1 << (len(examples) - 1).bit_length())
    return eval_batches(examples, batch_size=rows, buckets=buckets_of(examples, most=most, least=least))


def buckets_of(*several: Examples, most: int | None, least: int = LEAST_LENGTH) -> tuple[int, ...]:
    """Returns `padded_lengths` of sources, for a model with positions for at most `most` tokens."""
    longest = max(int(examples.lengths.reshape(len(examples), -1)[:, 0].max()) for examples in several)
    return padded_lengths(longest, least=least, most=most)


def check_whole(name: str, value: Any, *, least: int) -> None:
    """Raises ConfigError unless the argument `name` is an integer of at least `least` that fits a device's integers."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not least <= value <= LARGEST_INT:
        raise ConfigError(f"{name} = {value!r} must be a whole number of at least {least} and at most {LARGEST_INT}.")


def checked_texts(texts: Texts, name: str, *, mend: bool = False) -> list[str]:
    """Returns the texts as a list; `name` is the caller's argument.

    `mend` turns lone surrogates into "?", and typographic quotes into plain ones.

    Raises:
      ConfigError: `texts` is not a sequence of texts; the message names it or its first invalid item.
    """
    if isinstance(texts, str):
        raise ConfigError(f"{name} is one text ({texts[:30]!r}); give a list of texts.")
    if hasattr(texts, "columns"):
        raise ConfigError(f"{name} is a {type(texts).__name__}, a table; give one of its columns.")
    return [_text(text, f"{name}[{number}]", mend=mend) for number, text in enumerate(_each(texts, name, "texts"))]


def given_turns(turns: Texts | str, name: str) -> tuple[str, ...]:
    """Returns the turns of a conversation, with plain quotes, without surrounding blanks; one text is one turn.

    Raises:
      ConfigError: there is no turn, or a turn is not a text; `name` is the caller's argument.
    """
    given = [turns] if isinstance(turns, str) else turns
    found = tuple(turn.strip() for turn in checked_texts(given, name, mend=True))
    if not found or not found[-1]:
        raise ConfigError("there is nothing to answer: the last turn is empty.")
    return found


def checked_pairs(pairs: Pairs, name: str) -> list[tuple[str, str]]:
    """Returns the pairs as tuples; `name` is the caller's argument.

    Raises:
      ConfigError: a row is not a pair of texts; the message names the first one.
    """
    columns: Any = getattr(pairs, "columns", None)
    if columns is not None:
        table: Any = pairs
        if missing := [key for key in ("source", "target") if key not in list(columns)]:
            raise ConfigError(
                f"{name} is a {type(pairs).__name__} without a column {missing[0]!r}; it must have source and target."
            )
        pairs = list(zip(table["source"], table["target"], strict=True))
    return [_pair(row, f"{name}[{number}]") for number, row in enumerate(_each(pairs, name, "(source, target)"))]


def _each(values: Any, name: str, what: str) -> Iterator[Any]:
    """Iterates over `values`.

    Raises:
      ConfigError: they are not iterable, or have no order.
    """
    try:
        if not isinstance(values, str | bytes | Mapping | set | frozenset):
            return iter(values)
    except TypeError:  # also for an array without dimensions
        pass
    raise ConfigError(f"{name} is {_kind(values)}; give a list of {what}.")


def _text(text: Any, where: str, *, mend: bool = False) -> str:
    """Returns a text as a Python string; raises ConfigError for other values."""
    if not isinstance(text, str):
        raise ConfigError(f"{where} is {_kind(text)}; it must be a text.")
    if mend:
        return with_plain_quotes(text.encode(errors="replace").decode())
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where} has half a character ({text[error.start]!a}) at position {error.start}, a sign of wrongly "
            "decoded bytes; decode them correctly, or leave it out."
        ) from error
    return str(text)


def _pair(row: Any, where: str) -> tuple[str, str]:
    if isinstance(row, Mapping):
        if missing := [key for key in ("source", "target") if key not in row]:
            raise ConfigError(
                f"{where} has {', '.join(map(repr, row)) or 'no keys'}, but no {missing[0]!r}; give mappings with "
                '"source" and "target", or tuples (source, target).'
            )
        row = (row["source"], row["target"])
    elif isinstance(row, str | bytes | set | frozenset) or not isinstance(row, Iterable):
        raise ConfigError(f"{where} is {_kind(row)}; a pair is (source, target), two texts.")
    found = tuple(row)
    if len(found) != 2:
        raise ConfigError(f"{where} has {len(found)} items; a pair is (source, target), two texts.")
    source, target = (
        _text(text, f"{where}: the {side}") for side, text in zip(("source", "target"), found, strict=True)
    )
    return source, target


def _kind(value: Any) -> str:
    return f"{short(value)}, a {type(value).__name__}"


def zipped(sources: Texts, targets: Texts) -> list[tuple[str, str]]:
    """Returns sources with their targets; raises ConfigError for invalid texts or different lengths."""
    first, second = checked_texts(sources, "sources"), checked_texts(targets, "targets")
    if len(first) != len(second):
        raise ConfigError(f"{len(first)} sources and {len(second)} targets; there must be one for each.")
    return list(zip(first, second, strict=True))
