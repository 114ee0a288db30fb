"""Systems against each other: their own values, differences with intervals, and tests corrected for being several.

By metrics that change with how much a system says they are compared at equal length alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from empax.core.config import ConfigError
from empax.core.types import Prediction
from empax.evaluation import text
from empax.evaluation.comparable import OWN_ROWS, not_comparable
from empax.evaluation.pairing import describe_rows, dialogues_of, pair_rows, shared_rows
from empax.evaluation.scoring import METRICS, ScoringSettings, is_own, make_statistics, own_statistic
from empax.evaluation.significance import Interval, confidence_intervals, holm, paired_tests
from empax.evaluation.statistics import DistinctStatistic, Statistic, estimate


@dataclasses.dataclass(frozen=True)
class AtEqualLength:
    """A metric of two systems of which none says more than the other.

    Attributes:
      statistic: of 2N rows, those of one system, then those of the other.
      count: how much each says.
      unit: of what, "words" or "bigrams".
    """

    statistic: Statistic
    count: int
    unit: str

    def about(self) -> dict[str, int | float | str]:
        """`count`, `unit`, and the metric of each system, `first` and `second`."""
        rows = np.arange(self.statistic.num_rows).reshape(2, -1)
        first, second = (estimate(self.statistic.take(side)) for side in rows)
        return {"count": self.count, "unit": self.unit, "first": first, "second": second}


def unit_of(name: str) -> str:
    """What a metric is counted over, where it changes with that count; else empty."""
    return {"distinct_1": "words", "distinct_2": "bigrams", "bleu_2_precision": "words"}.get(name.partition(":")[0], "")


def at_equal_length(
    name: str, statistic: Statistic, rows: tuple[Sequence[Prediction], Sequence[Prediction]], *, seed: int = 0
) -> AtEqualLength | None:
    """A metric at equal length; None for one that does not change with it.

    Distinct-n: of the system with more n-grams as many are drawn as the other has. BLEU-2 precision: of the two
    responses to one context the longer is cut to the words of the shorter. `statistic` is the metric of the 2N rows as
    they are, those of one system behind those of the other.
    """
    unit = unit_of(name)
    if not unit:
        return None
    if isinstance(statistic, DistinctStatistic):
        return AtEqualLength(*statistic.at_equal_counts(seed=seed), unit)
    variant = name.partition(":")[2] or "nltk"
    split = text.bleu_tokens(variant)
    first, second = ([row.response for row in side] for side in rows)
    shorter = [min(len(split(a)), len(split(b))) for a, b in zip(first, second, strict=True)]
    references = [row.reference for side in rows for row in side]
    counts = text.count_matches([*first, *second], references, variant, longest=shorter * 2)
    return AtEqualLength(text.precision_statistic(counts, 2), sum(shorter), unit)


def check_compared(names: Sequence[str]) -> None:
    """Whether systems can be compared by these metrics.

    Raises:
      ConfigError: a metric that is for tables of single systems: Distinct-n of a fixed count of n-grams, or one over
        the rows that a system itself gets wrong.
    """
    for name in names:
        if name.endswith(f":{text.SAMPLED_VARIANT}"):
            plain = name.partition(":")[0]
            raise ConfigError(
                f"{name} is for tables of single systems; compare by {plain}, at an equal count of n-grams."
            )
        if name in OWN_ROWS:
            raise ConfigError(
                f"{name} is for tables of single systems: each is judged where its own emotion is wrong; compare by "
                f"{OWN_ROWS[name]}, over all rows."
            )


Comparison = dict[str, Any]

_SAMPLES_PER_TEST = 40
"""Resamples and swaps for each test that Holm's correction counts: the smallest corrected p-value is then 1 / 40."""

_SMALLEST_SHARE = 0.5
"""Of the rows, for released outputs to be compared."""


@dataclasses.dataclass(frozen=True)
class _Field:
    """All systems' rows behind each other, and where each system's are.

    Attributes:
      statistics: of all rows of all systems.
      places: of each system, by position in the first system's rows (-1 = it has no such row), the row in `statistics`.
      rows: of each system, in the order of its places without -1.
      dialogues: of the first system's rows.
      told: those rows, of the first system whose ids tell dialogues; of the first where none do.
    """

    statistics: Mapping[str, Statistic]
    places: Mapping[str, Int[np.ndarray, " N"]]
    rows: Mapping[str, Sequence[Prediction]]
    dialogues: Int[np.ndarray, " N"]
    told: Sequence[Prediction]

    def shared(self, *labels: str) -> Int[np.ndarray, " n"]:
        """Positions that all of these systems have."""
        return np.flatnonzero(np.all([self.places[label] >= 0 for label in labels], axis=0))

    def groups(self, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        return np.unique(self.dialogues[positions], return_inverse=True)[1]

    def of(self, label: str, positions: Int[np.ndarray, " n"]) -> list[Prediction]:
        numbers = np.cumsum(self.places[label] >= 0) - 1
        return [self.rows[label][number] for number in numbers[positions]]


def compare_systems(
    systems: Mapping[str, Sequence[Prediction]],
    pairs: Sequence[tuple[str, str]] | None = None,
    *,
    peers: Mapping[str, Sequence[Prediction]] | None = None,
    settings: ScoringSettings | None = None,
    names: Sequence[str] = METRICS,
) -> Comparison:
    """One table of all systems, and tests of pairs of them.

    Args:
      systems: rows by label; all must hold the same test rows.
      pairs: which to test, first minus second; None = every two of `systems`.
      peers: released outputs by label, each tested against each of `systems` on the rows that they share.
      settings: of the resamples; a test takes `bootstrap_samples` of them, or 40 for each test made if that is more, so
        that the correction leaves room for small p-values.
      names: metrics; those whose inputs a system lacks are left out of its row and its pairs.

    Returns:
      `rows`, as of `pairing.describe_rows`; `systems`, by label `rows` (how many) and `metrics`, name → interval;
      `pairs`, each with `first`, `second`, `rows`, `metrics` and `left_out` (metric → why). A metric of a pair holds
      what `significance.paired_tests` finds (`difference` is first - second), `p_holm`, the `p_value` corrected
      over all tests, and `first` and `second`, both intervals on the rows of the pair. Distinct-n and BLEU-2 precision
      are tested at equal length; `equal` then has `count`, `unit` and the values `first` and `second` that `difference`
      is of, see `at_equal_length`. `equal` of the whole, by metric: `count`, `unit` and `values`, Distinct-n of as many
      n-grams of each system that has all rows. `absent`, peers that share too few rows, and why; `correction`:
      `method`, the `test` behind the p-values, and how many `tests`, `pairs`, `metrics` and `samples`.

    Raises:
      DataError: rows of `systems` that do not pair up.
      ConfigError: a metric that is for tables of single systems.
    """
    check_compared(names)
    settings = settings or ScoringSettings()
    pairs = list(itertools.combinations(systems, 2)) if pairs is None else list(pairs)
    field, absent = _field(systems, peers or {}, names)
    pairs += [(label, peer) for label in systems for peer in peers or {} if peer not in absent]
    plans = [(pair, field.shared(*pair), *_testable(field, pair)) for pair in pairs]
    num_tests = sum(len(wanted) for *_, wanted, _ in plans)
    samples = max(settings.bootstrap_samples, _SAMPLES_PER_TEST * num_tests)
    cache: dict[tuple[str, bytes], dict[str, Interval]] = {}
    tested = [
        {
            "first": pair[0],
            "second": pair[1],
            "rows": len(positions),
            "metrics": _compare_pair(field, pair, positions, wanted, settings, samples, cache),
            "left_out": left_out,
        }
        for pair, positions, wanted, left_out in plans
    ]
    cells = [cell for one in tested for cell in one["metrics"].values()]
    for cell, corrected in zip(cells, holm([cell["p_value"] for cell in cells]), strict=True):
        cell["p_holm"] = corrected
    shown = {label: field.shared(label) for label in field.places}
    return {
        "rows": describe_rows(field.told),
        "systems": {
            label: {"rows": len(at), "metrics": _own(field, label, at, _comparable(field, label), settings, cache)}
            for label, at in shown.items()
        },
        "pairs": tested,
        "equal": _equal(field, settings.seed),
        "absent": absent,
        "correction": {
            "method": "Holm",
            "test": "approximate randomisation",
            "tests": num_tests,
            "pairs": len(tested),
            "metrics": len({name for one in tested for name in one["metrics"]}),
            "samples": samples,
        },
    }


def _field(
    systems: Mapping[str, Sequence[Prediction]], peers: Mapping[str, Sequence[Prediction]], names: Sequence[str]
) -> tuple[_Field, dict[str, str]]:
    first = list(next(iter(systems.values())))
    rows: dict[str, Sequence[Prediction]] = {}
    at: dict[str, Int[np.ndarray, " n"]] = {}
    absent = {}
    for label, own in systems.items():
        rows[label] = pair_rows(first, own)[1]
        at[label] = np.arange(len(first))
    for label, released in peers.items():
        positions, theirs = shared_rows(first, released)
        if len(positions) < _SMALLEST_SHARE * len(first):
            absent[label] = f"shares {len(positions):,} of {len(first):,} rows"
            continue
        rows[label], at[label] = [released[i] for i in theirs], positions
    places, start = {}, 0
    for label, positions in at.items():
        places[label] = np.full(len(first), -1)
        places[label][positions] = start + np.arange(len(positions))
        start += len(positions)
    told = next((rows[label] for label in systems if dialogues_of(rows[label]) is not None), first)
    dialogues = dialogues_of(told)
    known = make_statistics([row for label in rows for row in rows[label]], [n for n in names if not is_own(n)])
    known |= {name: own_statistic(list(rows.values()), name) for name in names if is_own(name)}
    statistics = {name: known[name] for name in names if name in known}
    return _Field(statistics, places, rows, np.arange(len(first)) if dialogues is None else dialogues, told), absent


def _testable(field: _Field, pair: tuple[str, str]) -> tuple[list[str], dict[str, str]]:
    """Metrics that both systems have and that compare; and the others, with reasons."""
    positions = field.shared(*pair)
    rows = [field.of(label, positions) for label in pair]
    wanted, left_out = [], {}
    for name, statistic in field.statistics.items():
        sides = [statistic.take(field.places[label][positions]) for label in pair]
        if not all(math.isfinite(estimate(side)) for side in sides):
            continue
        if reason := not_comparable(name, *rows):
            left_out[name] = reason
        else:
            wanted.append(name)
    return wanted, left_out


def _comparable(field: _Field, label: str) -> list[str]:
    """Metrics of a row of the table; one that depends on the number of rows only if the system has all rows."""
    whole = bool((field.places[label] >= 0).all())
    return [name for name, statistic in field.statistics.items() if whole or statistic.bounds is None]


def _own(
    field: _Field,
    label: str,
    positions: Int[np.ndarray, " n"],
    names: Sequence[str],
    settings: ScoringSettings,
    cache: dict[tuple[str, bytes], dict[str, Interval]],
) -> dict[str, Interval]:
    """A system's own values on some of the rows; computed once for all pairs."""
    known = cache.setdefault((label, positions.tobytes()), {})
    taken = {n: field.statistics[n].take(field.places[label][positions]) for n in names if n not in known}
    known |= confidence_intervals(
        taken, dialogues=field.groups(positions), samples=settings.bootstrap_samples, seed=settings.seed
    )
    return {name: known[name] for name in names if math.isfinite(known[name]["value"])}


def _equal(field: _Field, seed: int) -> dict[str, dict[str, Any]]:
    """Distinct-n of every system with all rows, at the count of n-grams that the briefest has."""
    whole = {label: at for label, at in field.places.items() if (at >= 0).all()}
    found = {}
    for name, statistic in field.statistics.items():
        if isinstance(statistic, DistinctStatistic):
            sides = {label: statistic.take(at) for label, at in whole.items()}
            count = min(side.num_items for side in sides.values())
            values = {label: estimate(side.sample(count, seed=seed)) for label, side in sides.items()}
            found[name] = {"count": count, "unit": unit_of(name), "values": values}
    return found


def _compare_pair(
    field: _Field,
    pair: tuple[str, str],
    positions: Int[np.ndarray, " n"],
    names: Sequence[str],
    settings: ScoringSettings,
    samples: int,
    cache: dict[tuple[str, bytes], dict[str, Interval]],
) -> dict[str, dict[str, Any]]:
    dialogues = field.groups(positions)
    first, second = (field.places[label][positions] for label in pair)
    both = {name: field.statistics[name].take(np.concatenate([first, second])) for name in names}
    rows = (field.of(pair[0], positions), field.of(pair[1], positions))
    equal = {
        name: one for name, both_ in both.items() if (one := at_equal_length(name, both_, rows, seed=settings.seed))
    }
    tested = {**both, **{name: one.statistic for name, one in equal.items()}}
    found = paired_tests(tested, dialogues=dialogues, samples=samples, seed=settings.seed)
    own = [_own(field, label, positions, names, settings, cache) for label in pair]
    return {
        name: {
            **found[name],
            "first": own[0][name],
            "second": own[1][name],
            **({"equal": equal[name].about()} if name in equal else {}),
        }
        for name in names
    }
