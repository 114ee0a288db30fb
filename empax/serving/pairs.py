"""Pairs of texts: checked, and padded to few lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int

from empax.core.config import ConfigError
from empax.core.protocols import Examples
from empax.core.types import Batch
from empax.data.batches import eval_batches

Pairs: TypeAlias = Iterable[tuple[str, str] | Mapping[str, str]]
"""Sources and targets; a mapping has them as "source" and "target"."""


_LEAST_LENGTH = 16
"""Sources are padded to this many tokens or to the next power of two: few shapes, few compilations."""


def batches_of(examples: Examples, batch_size: int) -> Iterator[tuple[Int[np.ndarray, " B"], Batch]]:
    """Rows in batches for evaluation, each with its numbers (-1 = filler); none if there are no examples."""
    if not len(examples):
        return iter(())
    return eval_batches(examples, batch_size=batch_size, buckets=buckets_of(examples))


def buckets_of(*several: Examples) -> tuple[int, ...]:
    """Padded lengths of sources in tokens, ascending, up to one that the longest fits in."""
    longest = max(int(examples.lengths.reshape(len(examples), -1)[:, 0].max()) for examples in several)
    sizes = [_LEAST_LENGTH]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def checked_texts(texts: Sequence[str]) -> list[str]:
    """The texts as a list; ConfigError for a single text."""
    if isinstance(texts, str):
        raise ConfigError(f"texts is one text ({texts[:30]!r}); give a list of texts.")
    return list(texts)


def checked_pairs(pairs: Pairs, name: str) -> list[tuple[str, str]]:
    """The pairs as tuples; `name` is the caller's argument.

    Raises:
      ConfigError: names the first row that is no pair of texts.
    """
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Iterable):
        raise ConfigError(f"{name} is {_kind(pairs)}; give a list of (source, target).")
    return [_pair(row, f"{name}[{number}]") for number, row in enumerate(pairs)]


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
        raise ConfigError(f"{where} holds {len(found)} things; a pair is (source, target), two texts.")
    for side, text in zip(("source", "target"), found, strict=True):
        if not isinstance(text, str):
            raise ConfigError(f"{where}: the {side} is {_kind(text)}; it must be a text.")
    return str(found[0]), str(found[1])


def _kind(value: Any) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
    return f"{shown}, a {type(value).__name__}"


def zipped(sources: Sequence[str], targets: Sequence[str]) -> list[tuple[str, str]]:
    """Sources with their targets; ConfigError unless there is one for each."""
    if len(checked_texts(sources)) != len(checked_texts(targets)):
        raise ConfigError(f"{len(sources)} sources and {len(targets)} targets; there must be one for each.")
    return list(zip(sources, targets, strict=True))
