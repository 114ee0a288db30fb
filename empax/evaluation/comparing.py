"""Comparison of systems: their values, differences with intervals, and tests corrected for multiple comparisons.

Metrics that depend on the length of replies are compared only at equal length.
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
    """A metric of 2N rows of two systems, those of one before those of the other, at `count` words or bigrams each."""

    statistic: Statistic
    count: int
    unit: str

    def about(self) -> dict[str, int | float | str]:
        """Returns `count`, `unit`, and the metric of each system, `first` and `second`."""
        rows = np.arange(self.statistic.num_rows).reshape(2, -1)
        first, second = (estimate(self.statistic.take(side)) for side in rows)
        return {"count": self.count, "unit": self.unit, "first": first, "second": second}


def unit_of(name: str) -> str:
    """Returns the unit of length that a metric depends on; empty if it does not depend on length."""
    return {"distinct_1": "words", "distinct_2": "bigrams", "bleu_2_precision": "words"}.get(name.partition(":")[0], "")


def at_equal_length(
    name: str, statistic: Statistic, rows: tuple[Sequence[Prediction], Sequence[Prediction]], *, seed: int = 0
) -> AtEqualLength | None:
    """Returns a metric at equal length; None if it does not depend on length.

    Distinct-n: samples the n-grams of the system that has more, as many as the other has. BLEU-2 precision: truncates
    the longer of two responses to one context to the number of words of the shorter. `statistic` is the metric of the
    unchanged 2N rows, those of one system after those of the other.
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
    """Checks that these metrics can compare systems.

    Raises ConfigError if a metric is only for tables of single systems: Distinct-n of a fixed number of n-grams, or a
    metric over the rows that a system itself gets wrong.
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
"""Resamples and swaps per test that Holm's correction counts: the smallest corrected p-value is then 1 / 40."""

_SMALLEST_SHARE = 0.5
"""Minimum share of rows that released outputs must cover to be compared."""


@dataclasses.dataclass(frozen=True)
class _Field:
    """The concatenated rows of all systems, and the positions of each system's rows.

    Attributes:
      statistics: statistics of all rows of all systems.
      places: for each system and each row of the first system, the index in `statistics` (-1 = it lacks the row).
      rows: rows of each system, in the order of its places without -1.
      dialogues: dialogue numbers of the first system's rows.
      told: the rows of the first system whose ids identify dialogues; of the first system if none do.
      known: values by system and positions, computed once for all pairs.
    """

    statistics: Mapping[str, Statistic]
    places: Mapping[str, Int[np.ndarray, " N"]]
    rows: Mapping[str, Sequence[Prediction]]
    dialogues: Int[np.ndarray, " N"]
    told: Sequence[Prediction]
    settings: ScoringSettings
    known: dict[tuple[str, bytes], dict[str, Interval]] = dataclasses.field(default_factory=dict)

    def shared(self, *labels: str) -> Int[np.ndarray, " n"]:
        """Returns the positions of rows that all of these systems have."""
        return np.flatnonzero(np.all([self.places[label] >= 0 for label in labels], axis=0))

    def groups(self, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        return np.unique(self.dialogues[positions], return_inverse=True)[1]

    def of(self, label: str, positions: Int[np.ndarray, " n"]) -> list[Prediction]:
        numbers = np.cumsum(self.places[label] >= 0) - 1
        return [self.rows[label][number] for number in numbers[positions]]

    def values(self, label: str, positions: Int[np.ndarray, " n"], names: Sequence[str]) -> dict[str, Interval]:
        """Returns a system's values on some of the rows."""
        known, at = self.known.setdefault((label, positions.tobytes()), {}), self.places[label][positions]
        taken = {name: self.statistics[name].take(at) for name in names if name not in known}
        samples, seed = self.settings.bootstrap_samples, self.settings.seed
        known |= confidence_intervals(taken, dialogues=self.groups(positions), samples=samples, seed=seed)
        return {name: known[name] for name in names if math.isfinite(known[name]["value"])}


def compare_systems(
    systems: Mapping[str, Sequence[Prediction]],
    pairs: Sequence[tuple[str, str]] | None = None,
    *,
    peers: Mapping[str, Sequence[Prediction]] | None = None,
    settings: ScoringSettings | None = None,
    names: Sequence[str] = METRICS,
) -> Comparison:
    """Returns a table of all systems, and tests of pairs of them.

    Args:
      systems: rows by label; all systems must have the same test rows.
      pairs: pairs to test, first minus second; None = all pairs of `systems`.
      peers: released outputs by label, each tested against each of `systems` on their shared rows.
      settings: settings of the resamples; a test takes `bootstrap_samples`, or 40 per test if that is more, so that
        small p-values remain possible after the correction.
      names: metrics; a metric whose inputs a system lacks is left out of its row, and of its pairs with a reason.

    Returns:
      `rows`, as from `pairing.describe_rows`; `systems`, by label `rows` (number of rows) and `metrics`, name →
      interval; `pairs`, each with `first`, `second`, `rows`, `metrics` and `left_out` (metric → reason). A metric of a
      pair holds the results of `significance.paired_tests` (`difference` is first - second), `p_holm`, the `p_value`
      corrected over all tests, and `first` and `second`, both intervals on the rows of the pair. Distinct-n and BLEU-2
      precision are tested at equal length: `equal` then has `count`, `unit` and the values `first` and `second` of
      `difference`, see `at_equal_length`. The top-level `equal` has by metric `count`, `unit` and `values`: Distinct-n
      of the same number of n-grams of each system that has all rows. `absent`: peers that share too few rows, and why.
      `correction`: `method`, the `test` of the p-values, and the numbers of `tests`, `pairs`, `metrics` and `samples`.

    Raises DataError if rows of `systems` do not pair up, and ConfigError if a metric is only for tables of single
    systems.
    """
    check_compared(names)
    settings = settings or ScoringSettings()
    pairs = list(itertools.combinations(systems, 2)) if pairs is None else list(pairs)
    field, absent = _field(systems, peers or {}, names, settings)
    pairs += [(label, peer) for label in systems for peer in peers or {} if peer not in absent]
    plans = [(pair, field.shared(*pair), *_testable(field, pair)) for pair in pairs]
    num_tests = sum(len(wanted) for *_, wanted, _ in plans)
    samples = max(settings.bootstrap_samples, _SAMPLES_PER_TEST * num_tests)
    tested = [
        {
            "first": pair[0],
            "second": pair[1],
            "rows": len(positions),
            "metrics": _compare_pair(field, pair, positions, wanted, samples),
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
            label: {"rows": len(at), "metrics": field.values(label, at, _comparable(field, label))}
            for label, at in shown.items()
        },
        "pairs": tested,
        "equal": _equal(field),
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
    systems: Mapping[str, Sequence[Prediction]],
    peers: Mapping[str, Sequence[Prediction]],
    names: Sequence[str],
    settings: ScoringSettings,
) -> tuple[_Field, dict[str, str]]:
    base, rows_of_base = next(iter(systems.items()))
    first = list(rows_of_base)
    rows: dict[str, Sequence[Prediction]] = {}
    at: dict[str, Int[np.ndarray, " n"]] = {}
    absent = {}
    for label, own in systems.items():
        rows[label] = pair_rows(first, own, (base, label))[1]
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
    dialogues = np.arange(len(first)) if dialogues is None else dialogues
    return _Field(statistics, places, rows, dialogues, told, settings), absent


def _testable(field: _Field, pair: tuple[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns the metrics that compare both systems, and the others with reasons."""
    positions = field.shared(*pair)
    rows = [field.of(label, positions) for label in pair]
    wanted, left_out = [], {}
    for name, statistic in field.statistics.items():
        sides = {label: statistic.take(field.places[label][positions]) for label in pair}
        lacking = [label for label, side in sides.items() if not math.isfinite(estimate(side))]
        if lacking:
            if len(lacking) == 1:
                left_out[name] = f"{lacking[0]} lacks its inputs"
        elif reason := not_comparable(name, *rows):
            left_out[name] = reason
        else:
            wanted.append(name)
    return wanted, left_out


def _comparable(field: _Field, label: str) -> list[str]:
    """Returns a system's metrics for the table; those that depend on the number of rows only if it has all rows."""
    whole = bool((field.places[label] >= 0).all())
    return [name for name, statistic in field.statistics.items() if whole or statistic.bounds is None]


def _equal(field: _Field) -> dict[str, dict[str, Any]]:
    """Returns Distinct-n of every system with all rows, at the smallest of their numbers of n-grams."""
    whole = {label: at for label, at in field.places.items() if (at >= 0).all()}
    found = {}
    for name, statistic in field.statistics.items():
        if isinstance(statistic, DistinctStatistic):
            sides = {label: statistic.take(at) for label, at in whole.items()}
            count = min(side.num_items for side in sides.values())
            values = {label: estimate(side.sample(count, seed=field.settings.seed)) for label, side in sides.items()}
            found[name] = {"count": count, "unit": unit_of(name), "values": values}
    return found


def _compare_pair(
    field: _Field,
    pair: tuple[str, str],
    positions: Int[np.ndarray, " n"],
    names: Sequence[str],
    samples: int,
) -> dict[str, dict[str, Any]]:
    seed = field.settings.seed
    first, second = (field.places[label][positions] for label in pair)
    both = {name: field.statistics[name].take(np.concatenate([first, second])) for name in names}
    rows = (field.of(pair[0], positions), field.of(pair[1], positions))
    equal = {name: one for name, both_ in both.items() if (one := at_equal_length(name, both_, rows, seed=seed))}
    tested = {**both, **{name: one.statistic for name, one in equal.items()}}
    found = paired_tests(tested, dialogues=field.groups(positions), samples=samples, seed=seed)
    own = [field.values(label, positions, names) for label in pair]
    return {
        name: {
            **found[name],
            "first": own[0][name],
            "second": own[1][name],
            **({"equal": equal[name].about()} if name in equal else {}),
        }
        for name in names
    }
