"""Analysis of answers: win rates, strengths, inter-rater agreement, and the ratings needed to show a difference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float
from scipy.optimize import minimize
from scipy.stats import norm

from empax.core.config import ConfigError
from empax.rating.answers import Answer, Key
from empax.rating.study import ASPECTS

Summary: TypeAlias = Callable[[Float[np.ndarray, " N"]], dict[str, dict[str, float]]]
"""A function from the weights of the answers to numbers by group and name."""

_PRIOR = 0.5
"""Wins added to both sides of every pair in Bradley-Terry, so that strengths stay finite."""


def score(key: Key, answers: Sequence[Answer], *, samples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Returns all results as JSON: `raters`, and for each aspect `agreement` and the systems' results.

    Intervals are 95% percentiles over resamples of contexts and, if there are several, of raters (Owen 2007, the
    pigeonhole bootstrap): they generalise to other contexts and raters.

    Raises:
      ConfigError: there is no answer to a rated item.
    """
    rated = [answer for answer in answers if answer.item.kind == "rated"]
    if not rated:
        raise ConfigError("no item of the study has an answer to every aspect; nothing can be scored.")
    result: dict[str, Any] = {"form": key.form, "systems": list(key.systems), "raters": raters(key, answers)}
    summary = _of_pairs if key.form == "pairs" else _of_scales
    for aspect in ASPECTS:
        result[aspect] = {
            "agreement": agreement(key, rated, aspect),
            **_with_intervals(summary(key, rated, aspect), rated, samples, seed),
        }
    return result


def raters(key: Key, answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Returns for each rater the number of items, the share of consistent repeats, and the share of passed checks.

    A check is passed if the right reply wins on relevance, or if the wrong one gets at most the middle of the scale.
    Shares are None if there is nothing to count.
    """
    found: dict[str, dict[str, Any]] = {}
    for rater in dict.fromkeys(answer.rater for answer in answers):
        own = {answer.item.number: answer for answer in answers if answer.rater == rater}
        alike, passed = [], []
        for answer in own.values():
            item = answer.item
            if item.kind == "repeat" and item.of in own:
                sign = -1 if key.form == "pairs" else 1
                alike += [answer.values[a] == sign * own[item.of].values[a] for a in ASPECTS]
            if item.kind == "check":
                said = answer.values["relevance"]
                passed.append(said <= 3 if key.form == "likert" else said == (1 if item.of == 1 else -1))
        rated = sum(answer.item.kind == "rated" for answer in own.values())
        found[rater] = {"items": rated, "repeats_alike": _share(alike), "checks_passed": _share(passed)}
    return found


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def agreement(key: Key, rated: Sequence[Answer], aspect: str) -> dict[str, float | None]:
    """Returns Fleiss' kappa and Krippendorff's alpha of the raters.

    Alpha is ordinal; kappa is nominal, over the items that all raters have answered. None if no item has two answers,
    or if all answers are the same.

    Source: Fleiss 1971 (statsmodels); Krippendorff 2011 (krippendorff).
    """
    import krippendorff  # an extra
    from statsmodels.stats.inter_rater import aggregate_raters, fleiss_kappa

    names = list(dict.fromkeys(answer.rater for answer in rated))
    numbers = list(dict.fromkeys(answer.item.number for answer in rated))
    table = np.full((len(names), len(numbers)), np.nan)
    for answer in rated:
        table[names.index(answer.rater), numbers.index(answer.item.number)] = answer.values[aspect]
    shared = (~np.isnan(table)).sum(axis=0) > 1
    values = np.unique(table[:, shared][~np.isnan(table[:, shared])])
    if len(values) < 2:
        return {"fleiss_kappa": None, "krippendorff_alpha": None}
    alpha = krippendorff.alpha(reliability_data=table[:, shared], level_of_measurement="ordinal")
    whole = table[:, ~np.isnan(table).any(axis=0)].T
    kappa = None
    if len(whole) and len(np.unique(whole)) > 1:
        kappa = float(fleiss_kappa(aggregate_raters(whole.astype(int))[0]))
    return {"fleiss_kappa": kappa, "krippendorff_alpha": float(alpha)}


def _of_pairs(key: Key, rated: Sequence[Answer], aspect: str) -> Summary:
    """Returns a summary: `win_rates` of each pair's first system, ties as half a win; `strengths` by Bradley-Terry."""
    index = {name: i for i, name in enumerate(key.systems)}
    left, right = np.array([[index[name] for name in answer.item.systems] for answer in rated]).T
    share = (np.array([answer.values[aspect] for answer in rated]) + 1) / 2

    def summary(weights: Float[np.ndarray, " N"]) -> dict[str, dict[str, float]]:
        wins = np.zeros((len(index), len(index)))
        np.add.at(wins, (left, right), weights * share)
        np.add.at(wins, (right, left), weights * (1 - share))
        rates = {}
        for (i, one), (j, two) in itertools.combinations(enumerate(key.systems), 2):
            both = wins[i, j] + wins[j, i]
            rates[f"{one} : {two}"] = float(wins[i, j] / both) if both else math.nan
        found = np.where((wins + wins.T).any(axis=1), strengths(wins), np.nan)
        return {"win_rates": rates, "strengths": dict(zip(key.systems, found.tolist(), strict=True))}

    return summary


def strengths(wins: Float[np.ndarray, "S S"]) -> Float[np.ndarray, " S"]:
    r"""Returns Bradley-Terry strengths in logits, with mean 0.

    .. math:: P(i \text{ beats } j) = \frac{1}{1 + e^{b_j - b_i}}

    Source: Bradley and Terry 1952; by penalised maximum likelihood, with _PRIOR wins on both sides of every pair.
    `wins[i, j]` is the number of wins of i against j; a tie is half a win of each.
    """
    counts = wins + _PRIOR * (1 - np.eye(len(wins)))

    def loss(b: np.ndarray) -> tuple[float, np.ndarray]:
        margin = b[:, None] - b[None]
        lost = counts * (1 / (1 + np.exp(margin)))  # minus the derivative of log P with respect to the margin
        return float((counts * np.logaddexp(0, -margin)).sum()), lost.sum(axis=0) - lost.sum(axis=1)

    found = minimize(loss, np.zeros(len(wins)), jac=True, method="L-BFGS-B").x
    return found - found.mean()


def _of_scales(key: Key, rated: Sequence[Answer], aspect: str) -> Summary:
    """Returns a summary: `means` of the systems."""
    values = np.array([answer.values[aspect] for answer in rated], float)
    own = {name: np.array([answer.item.systems[0] == name for answer in rated], float) for name in key.systems}

    def summary(weights: Float[np.ndarray, " N"]) -> dict[str, dict[str, float]]:
        totals = {name: float((weights * rows).sum()) for name, rows in own.items()}
        sums = {name: float((weights * rows * values).sum()) for name, rows in own.items()}
        return {"means": {name: sums[name] / totals[name] if totals[name] else math.nan for name in key.systems}}

    return summary


def _with_intervals(summary: Summary, rated: Sequence[Answer], samples: int, seed: int) -> dict[str, Any]:
    """Returns each number of `summary` as [value, low, high], resampling contexts and raters; NaN without ratings."""
    contexts = np.unique([answer.item.id for answer in rated], return_inverse=True)[1]
    people = np.unique([answer.rater for answer in rated], return_inverse=True)[1]
    rng, several = np.random.default_rng(seed), people.max() > 0

    def times(groups: np.ndarray) -> np.ndarray:
        size = groups.max() + 1
        return np.bincount(rng.integers(size, size=size), minlength=size)[groups].astype(float)

    drawn = [summary(times(contexts) * times(people) if several else times(contexts)) for _ in range(samples)]
    value = summary(np.ones(len(rated)))

    def interval(group: str, name: str, number: float) -> list[float]:
        if math.isnan(number):
            return [math.nan] * 3
        return [number, *np.nanpercentile([d[group][name] for d in drawn], [2.5, 97.5]).tolist()]

    return {
        group: {name: interval(group, name, number) for name, number in numbers.items()}
        for group, numbers in value.items()
    }


def needed_ratings(win_rate: float, *, power: float = 0.8, level: float = 0.05, design_effect: float = 1.0) -> int:
    """Returns the number of ratings without a tie needed to show that one system wins more often than the other.

    Source: the normal approximation of a two-sided test of one proportion against 1/2 (Fleiss et al. 2003, Sec. 2.2),
    times the design effect of ratings that share a context.

    Args:
      win_rate: win rate of the better system, above 0.5 and below 1.
      power: power of the test.
      level: significance level of the test.
      design_effect: 1 + (m - 1) r for m ratings of each context with the correlation r; 1 if every rating has a
        different context.

    Raises:
      ConfigError: a value is out of range.
    """
    if not 0.5 < win_rate < 1:
        raise ConfigError(
            f"win_rate = {win_rate} must lie between 0.5 and 1: the rate hoped for from the better system."
        )
    if not 0 < level < power < 1 or not 1 <= design_effect < math.inf:
        raise ConfigError(f"level = {level}, power = {power} and design_effect = {design_effect} must lie in (0, 1), "
                          "(level, 1) and [1, inf).")  # fmt: skip
    spread = float(norm.ppf(1 - level / 2)) * 0.5 + float(norm.ppf(power)) * math.sqrt(win_rate * (1 - win_rate))
    return math.ceil(design_effect * (spread / (win_rate - 0.5)) ** 2)


def text(found: Mapping[str, Any]) -> str:
    """Formats the scores as lines for a terminal."""
    lines = []
    for rater, own in found["raters"].items():
        shares = ((own[name], label) for name, label in _OF_RATERS.items())
        told = ", ".join(f"{label} {'-' if share is None else f'{100 * share:.0f}%'}" for share, label in shares)
        lines.append(f"{rater}: {own['items']} items, {told}")
    for aspect in ASPECTS:
        part = found[aspect]
        known = ((name.replace("_", " "), value) for name, value in part["agreement"].items())
        alike = ", ".join(f"{name} {'-' if value is None else f'{value:.2f}'}" for name, value in known)
        lines.append(f"\n{aspect} ({alike})")
        for group, label in _OF_SYSTEMS.items():
            for name, (value, low, high) in part.get(group, {}).items():
                lines.append(f"  {label:<9} {name:<40} {value:.3f} ({low:.3f} to {high:.3f})")
    return "\n".join(lines)


_OF_RATERS = {"repeats_alike": "repeats alike", "checks_passed": "checks passed"}
_OF_SYSTEMS = {"win_rates": "win rate", "strengths": "strength", "means": "mean"}
