"""Intervals and tests: how far a number would move on another sample of test rows.

Every metric is a `Statistic`: a function from row weights to a value. A bootstrap resample is then a vector of
counts, the comparison of two systems is a pair of such vectors over the rows of both, and nothing is tokenised twice.
Letters: N rows, R resamples, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from empax.core.files import DataError
from empax.core.types import Prediction

_CHUNK = 100  # resamples held at once: 100 x 5,000 rows of float64 are 4 MB


@runtime_checkable
class Statistic(Protocol):
    """A metric of N rows as a function of how often each row counts.

    Attributes:
      num_rows: N.
      bounds: None, or the range of a metric that counts distinct things. A resample repeats rows, so it has fewer
        distinct n-grams than the sample and its values are biased; their spread is right, their place is not, and the
        interval is moved back onto the estimate within these bounds.
    """

    num_rows: int
    bounds: tuple[float, float] | None

    def __call__(self, weights: Float[np.ndarray, "R N"]) -> Float[np.ndarray, " R"]: ...


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


def resampled_values(
    statistics: Mapping[str, Statistic], *, samples: int, seed: int
) -> dict[str, Float[np.ndarray, " R"]]:
    """Values of every statistic on the same `samples` bootstrap resamples of the rows.

    Raises:
      ValueError: `samples` < 1, no rows, or statistics over different numbers of rows.
    """
    sizes = {statistic.num_rows for statistic in statistics.values()}
    if len(sizes) > 1:
        raise ValueError(f"statistics of one bootstrap must be over the same rows; found {sorted(sizes)} rows.")
    values: dict[str, list[np.ndarray]] = {name: [] for name in statistics}
    for weights in _resamples(sizes.pop(), samples, seed) if sizes else ():
        for name, statistic in statistics.items():
            values[name].append(statistic(weights))
    return {name: np.concatenate(parts) for name, parts in values.items()}


def bootstrap_interval(
    statistic: Statistic, *, samples: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """The percentile bootstrap interval of one metric (Efron and Tibshirani 1993, Sec. 13.3).

    Departure: metrics with `bounds` are re-centred on the estimate, see `Statistic`.

    Args:
      statistic: over N rows, resampled with replacement.
      samples: number of resamples, at least 1.
      seed: of the resamples; the same seed and N give the same resamples for every metric.
      level: share of the resamples inside, in (0, 1).

    Returns:
      (low, high), in the metric's unit.
    """
    values = resampled_values({"": statistic}, samples=samples, seed=seed)[""]
    return interval(values, estimate(statistic), statistic.bounds, level=level)


def interval(
    values: Float[np.ndarray, " R"],
    centre: float,
    bounds: tuple[float, float] | None = None,
    *,
    level: float = 0.95,
) -> tuple[float, float]:
    """The interval that `bootstrap_interval` describes, from resampled values; nan values are left out."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return centre, centre
    if bounds is not None:
        values = np.clip(values - np.mean(values) + centre, *bounds)
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


_T_975 = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
"""The 97.5% quantiles of Student's t with 1 to 9 degrees of freedom."""


def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t, to five significant digits.

    Source: tables up to 9 degrees of freedom, above the expansion of Abramowitz and Stegun 1964, 26.7.5.

    Raises:
      ValueError: `degrees` < 1.
    """
    if degrees < 1:
        raise ValueError(f"a t distribution has at least 1 degree of freedom, got {degrees}.")
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees ** (power + 1) for power, term in enumerate(terms))


def mean_interval(values: Sequence[float]) -> dict[str, float]:
    """`mean`, `std` (of the sample, n - 1) and the mean's 95% t-interval `low`, `high`.

    Over the runs of one recipe under several seeds it says what another seed may bring: not what another test set may,
    as the bootstrap over rows does. It takes the values to be about normal; of percentages it may leave [0, 100].

    Raises:
      ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"an interval of a mean needs at least two values, got {len(values)}.")
    mean, std = float(np.mean(values)), float(np.std(values, ddof=1))
    reach = t_quantile(len(values) - 1) * std / len(values) ** 0.5
    return {"mean": mean, "std": std, "low": mean - reach, "high": mean + reach}


def _resamples(num_rows: int, samples: int, seed: int) -> Iterator[Float[np.ndarray, "R N"]]:
    if samples < 1 or num_rows < 1:
        raise ValueError(f"a bootstrap needs at least one sample and one row, got {samples} and {num_rows}.")
    rng = np.random.default_rng(seed)
    for start in range(0, samples, _CHUNK):
        chunk = min(_CHUNK, samples - start)
        drawn = rng.integers(num_rows, size=(chunk, num_rows)) + num_rows * np.arange(chunk)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=chunk * num_rows)
        yield counts.reshape(chunk, num_rows).astype(np.float64)


def pair_rows(rows_a: Sequence[Prediction], rows_b: Sequence[Prediction]) -> tuple[list[Prediction], list[Prediction]]:
    """Both files in the order of the first, so that row i of each answers the same context.

    Rows pair by `id` where all have one, else by context and reference.

    Raises:
      DataError: a row without a partner, an id that stands twice, or one id with two references.
    """
    by_id = all(row.id for row in rows_a) and all(row.id for row in rows_b)
    keyed_a, keyed_b = _keyed(rows_a, by_id=by_id), _keyed(rows_b, by_id=by_id)
    only_a, only_b = [key for key in keyed_a if key not in keyed_b], [key for key in keyed_b if key not in keyed_a]
    if only_a or only_b:
        way = "id" if by_id else "context and reference"
        example = str((only_a or only_b)[0])
        raise DataError(
            f"the two files do not pair up by {way}: {len(only_a)} rows are only in the first ({len(rows_a)} rows), "
            f"{len(only_b)} only in the second ({len(rows_b)} rows), such as {example[:200]}. "
            "Both must hold the same test rows."
        )
    for key, row in keyed_a.items():
        if row.reference != keyed_b[key].reference:
            raise DataError(f"id {row.id!r} has different references in the two files; give both the same test rows.")
    return list(keyed_a.values()), [keyed_b[key] for key in keyed_a]


def _keyed(rows: Sequence[Prediction], *, by_id: bool) -> dict[tuple[object, ...], Prediction]:
    keyed: dict[tuple[object, ...], Prediction] = {}
    seen: dict[tuple[object, ...], int] = {}
    for row in rows:
        base: tuple[object, ...] = (row.id,) if by_id else (row.context, row.reference)
        seen[base] = seen.get(base, 0) + 1
        if by_id and seen[base] > 1:
            raise DataError(
                f"id {row.id!r} stands on {seen[base]} rows of one file; ids must be unique to pair by them."
            )
        # The same context and reference twice: the first pairs with the first, the second with the second.
        keyed[base if by_id else (*base, seen[base])] = row
    return keyed


def paired_bootstrap(
    rows_a: Sequence[Prediction],
    rows_b: Sequence[Prediction],
    metric: Callable[[Sequence[Prediction]], Statistic],
    *,
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, float]:
    r"""Is a's metric different from b's? Both are scored on the same resamples of the rows.

    .. math:: p = \frac{1 + \#\{r: |d_r - \bar d| \ge |d|\}}{R + 1}

    with d = metric(a) - metric(b) and d_r its value on resample r. Source: Koehn 2004, two-sided and centred as in
    sacrebleu, so that it also holds for metrics whose resamples are biased.

    Args:
      rows_a: predictions of one system.
      rows_b: of the other; paired by `pair_rows`.
      metric: makes the statistic of a list of rows (here: of a's rows followed by b's).
      samples: resamples, at least 1.
      seed: of the resamples.

    Returns:
      `difference` (a - b), its 95% interval `low`, `high`, and the two-sided `p_value`.

    Raises:
      DataError: the two files do not pair up.
    """
    statistic, num_pairs = _of_both(rows_a, rows_b, metric)
    values = []
    for weights in _resamples(num_pairs, samples, seed):
        values.append(_difference(statistic, weights, np.zeros_like(weights)))
    resampled = np.concatenate(values)
    difference = float(_difference(statistic, np.ones((1, num_pairs)), np.zeros((1, num_pairs)))[0])
    bounds = None if statistic.bounds is None else (-np.inf, np.inf)
    low, high = interval(resampled, difference, bounds)
    extreme = _count_extreme(resampled - np.nanmean(resampled), difference)
    return {"difference": difference, "low": low, "high": high, "p_value": (1 + extreme) / (samples + 1)}


def approximate_randomisation(
    rows_a: Sequence[Prediction],
    rows_b: Sequence[Prediction],
    metric: Callable[[Sequence[Prediction]], Statistic],
    *,
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, float]:
    """The test that swaps the two systems' outputs row by row with probability 1/2 (Riezler and Maxwell 2005).

    Args and errors as in `paired_bootstrap`.

    Returns:
      `difference` (a - b) and the two-sided `p_value`: how often swapping gives one at least as large.
    """
    statistic, num_pairs = _of_both(rows_a, rows_b, metric)
    rng = np.random.default_rng(seed)
    difference = float(_difference(statistic, np.ones((1, num_pairs)), np.zeros((1, num_pairs)))[0])
    extreme = 0
    for start in range(0, samples, _CHUNK):
        kept = rng.integers(2, size=(min(_CHUNK, samples - start), num_pairs)).astype(np.float64)
        extreme += _count_extreme(_difference(statistic, kept, 1.0 - kept), difference)
    return {"difference": difference, "p_value": (1 + extreme) / (samples + 1)}


def _of_both(
    rows_a: Sequence[Prediction],
    rows_b: Sequence[Prediction],
    metric: Callable[[Sequence[Prediction]], Statistic],
) -> tuple[Statistic, int]:
    paired_a, paired_b = pair_rows(rows_a, rows_b)
    return metric([*paired_a, *paired_b]), len(paired_a)


def _difference(
    statistic: Statistic, kept: Float[np.ndarray, "R N"], swapped: Float[np.ndarray, "R N"]
) -> Float[np.ndarray, " R"]:
    first = statistic(np.concatenate([kept, swapped], axis=1))
    return first - statistic(np.concatenate([swapped, kept], axis=1))


def _count_extreme(values: Float[np.ndarray, " R"], difference: float) -> int:
    # The slack counts ties: the same sums added in another order may differ in the last bit.
    reached: Bool[np.ndarray, " R"] = np.abs(values) >= abs(difference) * (1 - 1e-9)
    return int(np.sum(reached))


class DistinctStatistic:
    """100 times distinct items over all items, for items given as (row, id) pairs: Distinct-n."""

    def __init__(self, ids: Int[np.ndarray, " M"], rows: Int[np.ndarray, " M"], num_rows: int):
        self.num_rows = num_rows
        self.bounds: tuple[float, float] | None = (0.0, 100.0)
        self._num_items = np.bincount(rows, minlength=num_rows).astype(np.float64)
        pairs = np.unique(ids * num_rows + rows)  # by id; one row's repeats add nothing
        self._rows = pairs % max(num_rows, 1)
        self._starts = np.flatnonzero(np.diff(pairs // max(num_rows, 1), prepend=-1))  # where each id's rows begin

    def __call__(self, weights: Float[np.ndarray, "R N"]) -> Float[np.ndarray, " R"]:
        if len(self._rows) == 0:
            return np.zeros(len(weights))
        # An item is there if any of its rows is: an OR over rows, of eight resamples at a time.
        present = np.packbits((weights > 0).T, axis=1)
        seen = np.bitwise_or.reduceat(present[self._rows], self._starts, axis=0)
        num_distinct = np.unpackbits(seen, axis=1, count=len(weights)).sum(axis=0, dtype=np.float64)
        num_items = weights @ self._num_items
        return np.where(num_items > 0, 100.0 * num_distinct / np.maximum(num_items, 1.0), 0.0)
