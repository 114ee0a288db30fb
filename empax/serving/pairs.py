"""Pairs of texts: checked, and padded to few lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Int

from empax.core.config import ConfigError
from empax.core.protocols import Examples
from empax.core.types import Batch
from empax.data.batches import eval_batches

Pairs: TypeAlias = Sequence[tuple[str, str]]
"""Sources and targets."""


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


def zipped(sources: Sequence[str], targets: Sequence[str]) -> Pairs:
    """Sources with their targets; ConfigError unless there is one for each."""
    if len(checked_texts(sources)) != len(checked_texts(targets)):
        raise ConfigError(f"{len(sources)} sources and {len(targets)} targets; there must be one for each.")
    return list(zip(sources, targets, strict=True))
