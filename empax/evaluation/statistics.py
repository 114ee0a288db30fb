"""Statistics as functions of row weights, for the bootstrap and the tests.

Statistics that count distinct things (Distinct-n, the evenness of clauses) depend on the number of rows; their
intervals come from parts of the rows. Letters: N rows, R resamples, M (item, row) pairs, K distinct items.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int


@runtime_checkable
class Statistic(Protocol):
    """A metric of N rows as a function of the rows' weights.

    Attributes:
      num_rows: N.
      bounds: None for a smooth function of sums, whose intervals come from the bootstrap. Else the range of a metric
        that counts distinct things. A bootstrap resample repeats rows and so has fewer distinct n-grams than the
        sample: both location and spread of its values are wrong. Such a metric gets its interval from parts of the
        rows, see `part_interval`.
    """

    num_rows: int
    bounds: tuple[float, float] | None

    def __call__(self, weights: Float[np.ndarray, "R N"]) -> Float[np.ndarray, " R"]: ...

    def take(self, rows: Int[np.ndarray, " n"]) -> Statistic:
        """Returns the same metric of some of the rows, in the given order."""
        ...


class SumStatistic:
    """A smooth function of column sums: corpus BLEU, perplexity, accuracy, F1."""

    def __init__(
        self, sums: Float[np.ndarray, "N C"], combine: Callable[[Float[np.ndarray, "R C"]], Float[np.ndarray, " R"]]
    ):
        self.num_rows = len(sums)
        self.bounds: tuple[float, float] | None = None
        self._sums = sums
        self._combine = combine

    def __call__(self, weights: Float[np.ndarray, "R N"]) -> Float[np.ndarray, " R"]:
        return self._combine(weights @ self._sums)

    def take(self, rows: Int[np.ndarray, " n"]) -> SumStatistic:
        return SumStatistic(self._sums[rows], self._combine)


class DifferenceStatistic:
    """One system's metric minus another's over N paired rows."""

    def __init__(self, first: Statistic, second: Statistic):
        self.num_rows = first.num_rows
        self.bounds: tuple[float, float] | None = None if first.bounds is None else (-np.inf, np.inf)
        self._sides = first, second

    def __call__(self, weights: Float[np.ndarray, "R N"]) -> Float[np.ndarray, " R"]:
        first, second = self._sides
        return first(weights) - second(weights)

    def take(self, rows: Int[np.ndarray, " n"]) -> DifferenceStatistic:
        first, second = self._sides
        return DifferenceStatistic(first.take(rows), second.take(rows))


def ratio_statistic(
    numerators: Float[np.ndarray, " N"], denominators: Float[np.ndarray, " N"], *, scale: float = 1.0
) -> SumStatistic:
    """Returns `scale` times the sum of numerators over the sum of denominators; NaN if the latter is 0."""
    return SumStatistic(
        np.stack([numerators, denominators], axis=-1), lambda sums: scale * divide(sums[:, 0], sums[:, 1])
    )


def mean_statistic(values: Float[np.ndarray, " N"], *, scale: float = 1.0) -> SumStatistic:
    """Returns `scale` times the mean over rows."""
    return ratio_statistic(values, np.ones(len(values)), scale=scale)


def divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Returns the elementwise quotient, NaN where the denominator is 0, without a warning."""
    safe = np.where(denominator == 0, 1.0, denominator)
    return np.where(denominator == 0, np.nan, numerator / safe)


def estimate(statistic: Statistic) -> float:
    """Returns the metric with all weights 1."""
    return float(statistic(np.ones((1, statistic.num_rows)))[0])


def take_rows(
    items: Int[np.ndarray, " M"], rows: Int[np.ndarray, " M"], num_rows: int, taken: Int[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " m"]]:
    """Returns the (item, row) pairs of the rows `taken`, renumbered in that order; a row may occur twice."""
    order = np.argsort(rows, kind="stable")
    lengths = np.bincount(rows, minlength=num_rows)
    starts = np.cumsum(lengths) - lengths
    new_lengths = lengths[taken]
    within = np.arange(new_lengths.sum()) - np.repeat(np.cumsum(new_lengths) - new_lengths, new_lengths)
    return items[order[np.repeat(starts[taken], new_lengths) + within]], np.repeat(np.arange(len(taken)), new_lengths)


class DistinctStatistic:
    """100 times distinct items over all items, for items given as (item, row) pairs: Distinct-n."""

    def __init__(self, items: Int[np.ndarray, " M"], rows: Int[np.ndarray, " M"], num_rows: int):
        self.num_rows = num_rows
        self.bounds: tuple[float, float] | None = (0.0, 100.0)
        self._pairs = items, rows
        self._num_items = np.bincount(rows, minlength=num_rows).astype(np.float64)
        order = np.lexsort((rows, items))
        self._rows = rows[order]
        self._starts = np.unique(items[order], return_index=True)[1]  # start of each item's rows

    def __call__(self, weights: Float[np.ndarray, "R N"]) -> Float[np.ndarray, " R"]:
        if len(self._rows) == 0:
            return np.zeros(len(weights))
        # An item is present if any of its rows is: an OR over rows, for eight resamples at a time.
        present = np.packbits((weights > 0).T, axis=1)
        seen = np.bitwise_or.reduceat(present[self._rows], self._starts, axis=0)
        num_distinct = np.unpackbits(seen, axis=1, count=len(weights)).sum(axis=0, dtype=np.float64)
        num_items = weights @ self._num_items
        return np.where(num_items > 0, 100.0 * num_distinct / np.maximum(num_items, 1.0), 0.0)

    def take(self, rows: Int[np.ndarray, " n"]) -> DistinctStatistic:
        return DistinctStatistic(*take_rows(*self._pairs, self.num_rows, rows), len(rows))

    @property
    def num_items(self) -> int:
        """M, the number of items in all rows."""
        return len(self._pairs[0])

    def sample(self, count: int, *, seed: int = 0) -> DistinctStatistic:
        """Returns the statistic of `count` items, sampled without replacement (rarefaction).

        Distinct-n falls as texts get longer, regardless of their content. At an equal count it does not. Raises
        ValueError if there are fewer items.
        """
        if count > self.num_items:
            raise ValueError(f"{count} items are wanted, but there are only {self.num_items}.")
        items, rows = self._pairs
        kept = np.random.default_rng(seed).permutation(self.num_items)[:count]
        return DistinctStatistic(items[kept], rows[kept], self.num_rows)

    def at_equal_counts(self, *, seed: int = 0) -> tuple[DistinctStatistic, int]:
        """Returns, for 2N rows of two systems, the statistic with equal numbers of items of each, and that number.

        Items of the system that has more are sampled without replacement.
        """
        items, rows = self._pairs
        sides = [np.flatnonzero((rows >= self.num_rows // 2) == second) for second in (False, True)]
        count, rng = min(map(len, sides)), np.random.default_rng(seed)
        kept = np.concatenate([side if len(side) == count else rng.permutation(side)[:count] for side in sides])
        return DistinctStatistic(items[kept], rows[kept], self.num_rows), count


class CountStatistic:
    """A function of the counts of distinct items, for items given as (item, row) pairs; 0 without items.

    `of_counts` takes the counts of all items, 0 for an absent one, and must depend only on counts above 0.
    """

    def __init__(
        self,
        items: Int[np.ndarray, " M"],
        rows: Int[np.ndarray, " M"],
        num_rows: int,
        of_counts: Callable[[Float[np.ndarray, "R K"]], Float[np.ndarray, " R"]],
        bounds: tuple[float, float],
    ):
        self.num_rows = num_rows
        self.bounds: tuple[float, float] | None = bounds
        self._items, self._rows = np.unique(items, return_inverse=True)[1], rows
        self._of_counts = of_counts

    def __call__(self, weights: Float[np.ndarray, "R N"]) -> Float[np.ndarray, " R"]:
        num_items = int(self._items.max(initial=-1)) + 1
        if num_items == 0:
            return np.zeros(len(weights))
        places = np.arange(len(weights))[:, None] * num_items + self._items
        counts = np.bincount(places.ravel(), weights[:, self._rows].ravel(), minlength=len(weights) * num_items)
        return self._of_counts(counts.reshape(len(weights), num_items))

    def take(self, rows: Int[np.ndarray, " n"]) -> CountStatistic:
        items, new = take_rows(self._items, self._rows, self.num_rows, rows)
        return CountStatistic(items, new, len(rows), self._of_counts, self.bounds or (-np.inf, np.inf))
