"""Metrics that change with how much a system says: systems are compared by them at equal length alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from empax.core.config import ConfigError
from empax.core.types import Prediction
from empax.evaluation import text
from empax.evaluation.counting import DistinctStatistic
from empax.evaluation.statistics import Statistic, estimate


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

    def values(self) -> tuple[float, float]:
        """The metric of each system."""
        num_rows = self.statistic.num_rows // 2
        first, second = np.arange(num_rows), np.arange(num_rows, 2 * num_rows)
        return estimate(self.statistic.take(first)), estimate(self.statistic.take(second))

    def about(self) -> dict[str, int | float | str]:
        """`count`, `unit`, and the values `first` and `second`."""
        first, second = self.values()
        return {"count": self.count, "unit": self.unit, "first": first, "second": second}


def unit_of(name: str) -> str:
    """What a metric is counted over, where it changes with that count; else empty."""
    return {"distinct_1": "words", "distinct_2": "bigrams", "bleu_2_precision": "words"}.get(name.partition(":")[0], "")


def at_equal_length(
    name: str, statistic: Statistic, rows: tuple[Sequence[Prediction], Sequence[Prediction]], *, seed: int = 0
) -> AtEqualLength | None:
    """A metric at equal length; None for one that does not change with it.

    Distinct-n: of the system with more n-grams as many are drawn as the other has. BLEU-2 precision: of the two
    responses to one context the longer is cut to the words of the shorter.

    Args:
      name: of the metric, maybe with a variant.
      statistic: the metric of 2N rows, as they are.
      rows: N of each system, in that order.
      seed: of the draw.
    """
    unit = unit_of(name)
    if isinstance(statistic, DistinctStatistic) and unit:
        equal, count = statistic.at_equal_counts(seed=seed)
        return AtEqualLength(equal, count, unit)
    if not unit:
        return None
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
      ConfigError: Distinct-n of a fixed count of n-grams, which is for tables.
    """
    for name in names:
        if name.endswith(f":{text.SAMPLED_VARIANT}"):
            plain = name.partition(":")[0]
            raise ConfigError(
                f"{name} is for tables of single systems; compare by {plain}, at an equal count of n-grams."
            )
