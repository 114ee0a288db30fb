"""Counters of a run."""

import pytest

from empax.training.accumulation import Counters


def test_the_rate_is_that_since_the_last_row():
    counters = Counters(examples=30, seconds=6.0, logged_examples=10, logged_seconds=1.0)
    assert counters.rate_since_row() == 4.0
    assert (counters.logged_examples, counters.logged_seconds) == (30, 6.0)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_equal_value_is_no_improvement(mode):
    counters = Counters()
    assert counters.improves(0.5, 2, mode)
    assert not counters.improves(0.5, 4, mode)
    assert not counters.improves(0.6 if mode == "min" else 0.4, 6, mode)
    assert (counters.best_value, counters.best_step, counters.evaluations_without_improvement) == (0.5, 2, 2)
    assert counters.improves(0.4 if mode == "min" else 0.6, 8, mode)
    assert (counters.best_step, counters.evaluations_without_improvement) == (8, 0)
