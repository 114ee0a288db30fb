"""Values that can be recomputed with weights for rows: what the bootstrap and the tests are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int


@runtime_checkable
class Statistic(Protocol):
    """A metric of N rows as a function of how often each row counts.

    Attributes:
      num_rows: N.
      bounds: None for a smooth function of sums, whose intervals come from the bootstrap. Else the range of a metric
        that counts distinct things. A bootstrap resample repeats rows and so has fewer distinct n-grams than the
        sample: both the place and the spread of its values are wrong. Such a metric gets its interval from parts of the
        rows, see `part_interval`.
    """

    num_rows: int
    bounds: tuple[float, float] | None

    def __call__(self, weights: Float[np.ndarray, "R N"]) -> Float[np.ndarray, " R"]: ...

    def take(self, rows: Int[np.ndarray, " n"]) -> Statistic:
        """The same metric of some of the rows, in the order given."""
        ...


class SumStatistic:
    """A smooth function of column sums: corpus BLEU, perplexity, accuracy, F1."""

    def __init__(
        self,
        sums: Float[np.ndarray, "N C"],
        combine: Callable[[Float[np.ndarray, "R C"]], Float[np.ndarray, " R"]],
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
        if first.num_rows != second.num_rows:
            raise ValueError(f"{first.num_rows} and {second.num_rows} rows; paired rows must be as many on both sides.")
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
    """`scale` times the sum of numerators over the sum of denominators; nan where the latter is 0."""
    return SumStatistic(
        np.stack([numerators, denominators], axis=-1), lambda sums: scale * divide(sums[:, 0], sums[:, 1])
    )


def divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Elementwise quotient, nan where the denominator is 0, without a warning."""
    safe = np.where(denominator == 0, 1.0, denominator)
    return np.where(denominator == 0, np.nan, numerator / safe)


def estimate(statistic: Statistic) -> float:
    """The metric on the rows as they are."""
    return float(statistic(np.ones((1, statistic.num_rows)))[0])
