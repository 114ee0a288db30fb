"""Intervals and tests: how much a number varies between samples of test dialogues.

Every metric is a `Statistic`: a function from row weights to a value. A resample is then a vector of counts, a swap of
two systems' outputs is a vector of zeros and ones over the rows of both, and nothing is tokenised twice. Whole
dialogues are resampled or swapped, since the contexts of one dialogue share their beginning. Letters: N rows, G
dialogues, R resamples, P partitions, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Int
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from empax.evaluation.statistics import DifferenceStatistic, Statistic, estimate

Name = TypeVar("Name")

Interval = dict[str, float]
"""`value` with its 95% interval `low`, `high`."""

_CHUNK = 100  # resamples held at once: 100 x 5,000 rows of float64 are 4 MB
_PARTS = 4
_PAIRINGS = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2))
"""The halves made of two quarters; consecutive halves are complementary."""


def confidence_intervals(
    statistics: Mapping[Name, Statistic],
    *,
    dialogues: Int[np.ndarray, " N"] | None = None,
    samples: int = 1000,
    seed: int = 0,
) -> dict[Name, Interval]:
    """Returns metrics of the same rows with intervals: by the bootstrap, or by `part_interval` if they have bounds.

    Source: Efron and Tibshirani 1993, Sec. 13.3 (percentiles of the bootstrap); Hesterberg 2015, Sec. 5.3 (percentiles
    further out with few dialogues, see `tails`); Davison and Hinkley 1997, Sec. 3.8 (resampling of whole clusters).

    `dialogues` has the dialogue number of each row, from 0 without gaps; None = every row is a separate dialogue. There
    are `samples` bootstrap resamples, at least 1, and a tenth as many partitions, at least 40.
    """
    if not statistics:
        return {}
    return _intervals(statistics, _groups(statistics, dialogues), samples, seed)[0]


def _intervals(
    statistics: Mapping[Name, Statistic], groups: Int[np.ndarray, " N"], samples: int, seed: int
) -> tuple[dict[Name, Interval], dict[Name, Float[np.ndarray, " R"]]]:
    """Returns values with intervals, and the smooth statistics' values on the same resamples."""
    values: dict[Name, list[np.ndarray]] = {name: [] for name, found in statistics.items() if found.bounds is None}
    for weights in _resamples(groups, samples if values else 0, seed):
        for name, parts in values.items():
            parts.append(statistics[name](weights))
    resampled = {name: np.concatenate(parts) for name, parts in values.items()}
    ends = tails(int(groups.max()) + 1)
    intervals: dict[Name, Interval] = {}
    for name, statistic in statistics.items():
        value = estimate(statistic)
        if name in resampled:
            low, high = _percentiles(resampled[name], value, ends)
        else:
            low, high = part_interval(statistic, dialogues=groups, partitions=max(40, samples // 10), seed=seed)
        intervals[name] = {"value": value, "low": low, "high": high}
    return intervals, resampled


def _groups(statistics: Mapping[Name, Statistic], dialogues: Int[np.ndarray, " N"] | None) -> Int[np.ndarray, " N"]:
    return np.arange(next(iter(statistics.values())).num_rows) if dialogues is None else dialogues


def _resamples(groups: Int[np.ndarray, " N"], samples: int, seed: int) -> Iterator[Float[np.ndarray, "R N"]]:
    num_groups = int(groups.max()) + 1
    rng = np.random.default_rng(seed)
    for start in range(0, samples, _CHUNK):
        chunk = min(_CHUNK, samples - start)
        drawn = rng.integers(num_groups, size=(chunk, num_groups)) + num_groups * np.arange(chunk)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=chunk * num_groups)
        yield counts.reshape(chunk, num_groups).astype(np.float64)[:, groups]


def tails(num_dialogues: int) -> tuple[float, float]:
    r"""Returns the quantiles of bootstrap resamples that bound a 95% interval.

    .. math:: \Phi\big(\mp \sqrt{n / (n - 1)}\; t_{n-1,\, 0.975}\big)

    with n the number of resampled dialogues. Resamples of few dialogues have too small a spread, by the root of
    (n - 1) / n, and treat it as known. The quantiles are 2.5% and 97.5% for many dialogues, 1.1% and 98.9% for 12.
    Source: Hesterberg 2015, Sec. 5.3.
    """
    if num_dialogues < 2:
        return 0.0, 1.0
    reach = (num_dialogues / (num_dialogues - 1)) ** 0.5 * float(stdtrit(num_dialogues - 1, 0.975))
    return float(ndtr(-reach)), float(ndtr(reach))


def _percentiles(values: Float[np.ndarray, " R"], centre: float, ends: tuple[float, float]) -> tuple[float, float]:
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return centre, centre
    low, high = np.quantile(values, ends)
    return float(low), float(high)


def part_interval(
    statistic: Statistic, *, dialogues: Int[np.ndarray, " N"] | None = None, partitions: int = 100, seed: int = 0
) -> tuple[float, float]:
    r"""Returns the 95% interval of a metric with an unknown rate of convergence, from parts without replacement.

    Rows are split at random into four equal parts, many times. Two parts that share no dialogue are independent, so
    their mean squared differences estimate the variance v at a quarter and at half of the rows without bias. These two
    give the rate g at which it falls, and thus the variance at all rows:

    .. math:: v(n) = v(n/2)\,2^{-g}, \quad g = \log_2 \frac{v(n/4)}{v(n/2)}

    The interval is the estimate ± Student's quantile of n - 1 times the root of that, within the metric's bounds. It is
    meant to cover the expected value of the metric on test sets of this size.

    Source: Politis and Romano 1994 (subsampling); Bertail, Politis and Romano 1999 (estimated rate). Departure: a
    t-interval from variances, not quantiles of the parts, which are biased for metrics that depend on the number of
    rows. g is clipped to [-2, 2]. With fewer than 8 dialogues only halves are used, and g is 1.
    """
    groups = _groups({"": statistic}, dialogues)
    num_groups = int(groups.max()) + 1
    centre = estimate(statistic)
    parts = _PARTS if num_groups >= 2 * _PARTS else 2
    size = num_groups // parts
    if size == 0 or not np.isfinite(centre):
        return centre, centre
    rng = np.random.default_rng(seed)
    small, large = [], []
    for start in range(0, partitions, _CHUNK // 10):
        chunk = min(_CHUNK // 10, partitions - start)
        part_of = np.full((chunk, num_groups), -1)
        order = np.argsort(rng.random((chunk, num_groups)), axis=1)[:, : parts * size]
        np.put_along_axis(part_of, order, np.repeat(np.arange(parts), size)[None], axis=1)
        inside = (part_of[:, None, groups] == np.arange(parts)[None, :, None]).astype(np.float64)
        small.append(_values(statistic, inside).var(axis=1, ddof=1))
        if parts == _PARTS:
            halves = _values(statistic, np.stack([inside[:, i] + inside[:, j] for i, j in _PAIRINGS], axis=1))
            large.append((halves[:, ::2] - halves[:, 1::2]) ** 2 / 2.0)
    variance, of_rows, rate = float(np.nanmean(np.concatenate(small))), size, 1.0
    if parts == _PARTS:
        quarter, variance, of_rows = variance, float(np.nanmean(np.concatenate(large))), 2 * size
        rate = float(np.clip(np.log2(max(quarter, 1e-300) / max(variance, 1e-300)), -2.0, 2.0))
    reach = float(stdtrit(num_groups - 1, 0.975)) * (variance * (of_rows / num_groups) ** rate) ** 0.5
    low, high = statistic.bounds or (-np.inf, np.inf)
    return max(low, centre - reach), min(high, centre + reach)


def _values(statistic: Statistic, weights: Float[np.ndarray, "P K N"]) -> Float[np.ndarray, "P K"]:
    return statistic(weights.reshape(-1, weights.shape[-1])).reshape(weights.shape[:2])


def paired_tests(
    both: Mapping[str, Statistic], *, dialogues: Int[np.ndarray, " N"] | None = None, samples: int = 1000, seed: int = 0
) -> dict[str, dict[str, float]]:
    r"""Returns an interval of the difference between two systems' metrics, and two-sided tests.

    `p_value` is that of `approximate_randomisation`, which is valid for any number of dialogues. It tests whether the
    systems are exchangeable. `p_bootstrap` tests whether the metrics are equal; only smooth functions of sums have it,
    since resamples that repeat rows are invalid for a metric that counts distinct things. From the centred bootstrap

    .. math:: q = \frac{1 + \#\{r: |d_r - \bar d| \ge |d|\}}{R + 1}

    with d the difference and d_r its value on resample r (Koehn 2004; Efron and Tibshirani 1993, Sec. 16.4), it is the
    level whose `tails` have the probability q: larger than q for few dialogues.

    Each metric in `both` is of 2N rows: those of one system, then those of the other in the same order. `dialogues` are
    of the N rows, see `confidence_intervals`. `samples` is the number R of resamples and of swaps, at least 1.

    Returns:
      By name `difference` (first - second), its 95% interval `low`, `high`, `p_value`, and for smooth metrics
      `p_bootstrap`.
    """
    if not both:
        return {}
    num_pairs = next(iter(both.values())).num_rows // 2
    first, second = np.arange(num_pairs), np.arange(num_pairs, 2 * num_pairs)
    sides = {name: (found.take(first), found.take(second)) for name, found in both.items()}
    differences = {name: DifferenceStatistic(*pair) for name, pair in sides.items()}
    swapped = approximate_randomisation(both, dialogues=dialogues, samples=samples, seed=seed)
    groups = _groups(differences, dialogues)
    intervals, resampled = _intervals(differences, groups, samples, seed)
    num_groups = int(groups.max()) + 1
    found: dict[str, dict[str, float]] = {}
    for name, interval in intervals.items():
        difference, low, high = interval.values()
        more = {}
        if name in resampled:
            reached = _count_reaching(resampled[name] - np.nanmean(resampled[name]), *map(estimate, sides[name]))
            more["p_bootstrap"] = _of_few((1 + reached) / (len(resampled[name]) + 1), num_groups)
        found[name] = {"difference": difference, "low": low, "high": high, "p_value": swapped[name], **more}
    return found


def _of_few(share: float, num_dialogues: int) -> float:
    """Returns the two-sided p whose `tails` are half of `share` on each side."""
    if num_dialogues < 2:
        return 1.0
    reach = -float(ndtri(share / 2)) * ((num_dialogues - 1) / num_dialogues) ** 0.5
    return 2.0 * float(stdtr(num_dialogues - 1, -reach))


def _count_reaching(values: Float[np.ndarray, " R"], first: float, second: float) -> int:
    """Counts the values as far from 0 as first - second; one that is equal but for rounding, or NaN, counts."""
    rounding = 1e-9 * max(abs(first), abs(second))
    return int(np.sum(~(np.abs(values) < abs(first - second) - rounding)))


def approximate_randomisation(
    both: Mapping[str, Statistic], *, dialogues: Int[np.ndarray, " N"] | None = None, samples: int = 1000, seed: int = 0
) -> dict[str, float]:
    r"""Returns two-sided tests of whether two systems differ, by random swaps of their outputs per dialogue.

    .. math:: p = \frac{1 + \#\{r: |d_r| \ge |d|\}}{R + 1}

    with d the difference of the metric and d_r its value after swap r. Exact for every metric, of sums or of distinct
    things, if the systems do not differ. Source: Riezler and Maxwell 2005.

    Arguments are as in `paired_tests`; the outputs of one dialogue are swapped together.

    Returns:
      By name the p-value, at least 1 / (R + 1), and at least that of all swaps of G dialogues, 2 ^ (1 - G).
    """
    if not both:
        return {}
    num_pairs = next(iter(both.values())).num_rows // 2
    groups = np.arange(num_pairs) if dialogues is None else dialogues
    num_groups = int(groups.max()) + 1
    observed = {name: np.ravel(_sides(statistic, np.ones((1, num_pairs)))) for name, statistic in both.items()}
    extreme = dict.fromkeys(both, 0)
    rng = np.random.default_rng(seed)
    for start in range(0, samples, _CHUNK):
        kept = rng.integers(2, size=(min(_CHUNK, samples - start), num_groups)).astype(np.float64)[:, groups]
        for name, statistic in both.items():
            first, second = _sides(statistic, kept)
            extreme[name] += _count_reaching(first - second, *observed[name])
    least = 2.0 ** (1 - num_groups)
    return {name: max((1 + count) / (samples + 1), least) for name, count in extreme.items()}


def _sides(statistic: Statistic, kept: Float[np.ndarray, "R N"]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the metric of both systems after swaps of the rows that are not kept."""
    first = statistic(np.concatenate([kept, 1.0 - kept], axis=1))
    return first, statistic(np.concatenate([1.0 - kept, kept], axis=1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrects p-values for multiple tests: any is below 0.05 with probability at most 5% if no systems differ.

    Source: Holm 1979. The k-th smallest of m is multiplied by m - k + 1, and raised to the one before it if smaller.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values, np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted.tolist()


def mean_interval(values: Sequence[float]) -> dict[str, float]:
    """Returns `mean`, `std` (of the sample, n - 1) and the mean's 95% t-interval `low`, `high`.

    Over the runs of one recipe with several seeds, it measures the variation between seeds, not between test sets, as
    the bootstrap over rows does. It assumes approximately normal values; for percentages it may leave [0, 100]. Raises
    ValueError if there are fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"an interval of a mean needs at least two values, got {len(values)}.")
    mean, std = float(np.mean(values)), float(np.std(values, ddof=1))
    reach = float(stdtrit(len(values) - 1, 0.975)) * std / len(values) ** 0.5
    return {"mean": mean, "std": std, "low": mean - reach, "high": mean + reach}
