"""Statistics that count distinct things, against counting by hand."""

import numpy as np

from empax.evaluation.statistics import CountStatistic, DistinctStatistic, take_rows

ITEMS, ROWS = np.array([0, 7, 0, 9, 7]), np.array([0, 0, 2, 2, 4])  # rows 1 and 3 have none


def test_distinct_is_the_share_of_items_that_differ():
    statistic = DistinctStatistic(ITEMS, ROWS, 5)
    weights = np.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 1], [0, 0, 2, 0, 0], [1, 0, 1, 0, 0]], float)
    np.testing.assert_allclose(statistic(weights), [60.0, 200 / 3, 50.0, 75.0])


def test_rows_without_items_count_nothing():
    whole, some = DistinctStatistic(ITEMS, ROWS, 5), np.array([[0, 1, 0, 1, 0], [1, 1, 0, 0, 0]], float)
    np.testing.assert_allclose(whole(some), [0.0, 100.0])
    none = np.array([], int)
    np.testing.assert_array_equal(DistinctStatistic(none, none, 3)(np.ones((2, 3))), [0.0, 0.0])
    counted = CountStatistic(none, none, 3, lambda counts: counts.sum(axis=1), (0.0, 1.0))
    np.testing.assert_array_equal(counted(np.ones((2, 3))), [0.0, 0.0])


def test_counts_are_of_every_item_in_each_resample():
    statistic = CountStatistic(ITEMS, ROWS, 5, lambda counts: counts @ [1.0, 10.0, 100.0], (0.0, np.inf))
    weights = np.array([[1, 1, 1, 1, 1], [3, 0, 0, 0, 0], [0, 0, 1, 0, 2]], float)
    np.testing.assert_allclose(statistic(weights), [2 + 20 + 100, 3 + 30, 1 + 20 + 100])
    assert statistic.bounds == (0.0, np.inf)


def test_a_row_that_is_taken_twice_comes_twice():
    items, rows = take_rows(ITEMS, ROWS, 5, np.array([2, 1, 2, 0]))
    np.testing.assert_array_equal(items, [0, 9, 0, 9, 0, 7])
    np.testing.assert_array_equal(rows, [0, 0, 2, 2, 3, 3])
