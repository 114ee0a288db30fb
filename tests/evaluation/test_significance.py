import dataclasses
import functools
import time

import numpy as np
import pytest
from scipy import stats

from empax.core.files import DataError
from empax.core.types import Prediction
from empax.evaluation import scoring, significance, text


def rows_of(responses, references=None, ids=True):
    references = references or [f"word{i % 7} and word{i % 3} ." for i in range(len(responses))]
    return [
        Prediction(context=(f"turn {i}",), response=response, reference=reference, id=f"d{i}#2" if ids else "")
        for i, (response, reference) in enumerate(zip(responses, references, strict=True))
    ]


def metric(name):
    return functools.partial(lambda rows: scoring.make_statistics(rows, (name,))[name])


def mean_statistic(values):
    return significance.ratio_statistic(values, np.ones(len(values)))


def test_interval_of_a_mean_is_the_normal_one():
    values = np.random.default_rng(0).normal(5.0, 2.0, size=400)
    low, high = significance.bootstrap_interval(mean_statistic(values), samples=2000, seed=1)
    error = 1.96 * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - error, abs=0.05)
    assert high == pytest.approx(values.mean() + error, abs=0.05)
    assert (low, high) == significance.bootstrap_interval(mean_statistic(values), samples=2000, seed=1)
    assert (low, high) != significance.bootstrap_interval(mean_statistic(values), samples=2000, seed=2)


@pytest.mark.parametrize("name", [*scoring.METRICS[3:10], "sentence_std", "top5_share"])
def test_weights_are_repetitions_of_rows(name):
    """The sufficient statistics of a resample give what the metric gives on the resampled rows."""
    rng = np.random.default_rng(0)
    rows = rows_of(
        [" ".join(rng.choice(["word1", "word2", "and", ".", "oh"], size=rng.integers(0, 9))) for _ in range(30)]
    )
    drawn = rng.integers(30, size=30)
    weights = np.bincount(drawn, minlength=30).astype(np.float64)[None]
    resampled = significance.estimate(metric(name)([rows[i] for i in drawn]))
    assert metric(name)(rows)(weights)[0] == pytest.approx(resampled, rel=1e-9)


def test_types_have_an_interval_around_the_estimate_within_bounds():
    # Every response different: a resample repeats rows and so has fewer distinct words.
    statistic = text.distinct_statistic([f"a{i} b{i} c{i}" for i in range(50)], 1)
    assert significance.estimate(statistic) == 100.0
    raw = significance.resampled_values({"": statistic}, samples=100, seed=0)[""]
    assert raw.max() < 90.0
    low, high = significance.bootstrap_interval(statistic, samples=100)
    assert 80.0 < low <= 100.0
    assert high == 100.0


def test_interval_edge_cases():
    one = mean_statistic(np.asarray([3.0]))
    assert significance.bootstrap_interval(one, samples=5) == (3.0, 3.0)
    rare = significance.ratio_statistic(np.asarray([1.0] + [0.0] * 3), np.asarray([1.0] + [0.0] * 3))
    assert significance.bootstrap_interval(rare, samples=50) == (1.0, 1.0)  # resamples without the row say nothing
    with pytest.raises(ValueError, match="at least one sample"):
        significance.bootstrap_interval(one, samples=0)
    with pytest.raises(ValueError, match=r"same rows; found \[1, 4\]"):
        significance.resampled_values({"a": one, "b": rare}, samples=1, seed=0)


def test_pairs_by_id_or_by_context_and_reference():
    rows = rows_of(["a", "b", "c"])
    first, second = significance.pair_rows(rows, rows[::-1])
    assert [row.id for row in first] == [row.id for row in second] == ["d0#2", "d1#2", "d2#2"]
    unnamed = rows_of(["a", "b", "c"], ids=False)
    first, second = significance.pair_rows(rows, unnamed[::-1])
    assert [row.response for row in second] == ["a", "b", "c"]
    twice = [unnamed[0], dataclasses.replace(unnamed[0], response="again")]
    assert significance.pair_rows(twice, twice)[1] == twice
    with pytest.raises(DataError, match=r"1 rows are only in the first \(3 rows\), 0 only in the second"):
        significance.pair_rows(rows, rows[:2])
    with pytest.raises(DataError, match="ids must be unique"):
        significance.pair_rows([rows[0], rows[0]], rows)
    with pytest.raises(DataError, match="different references"):
        significance.pair_rows(rows[:1], [dataclasses.replace(rows[0], reference="other")])


@pytest.mark.parametrize("name", ["bleu_2", "distinct_1", "rouge_l"])
def test_a_better_system_is_found_and_an_equal_one_is_not(name):
    rng = np.random.default_rng(0)
    references = [" ".join(rng.choice([f"w{i}" for i in range(400)], size=8)) for _ in range(80)]

    def noisy(share, seed):
        own = np.random.default_rng(seed)
        return [" ".join(w if own.random() < share else "the" for w in r.split()) for r in references]

    better, worse, equal = (rows_of(noisy(s, seed), references) for s, seed in ((0.9, 1), (0.4, 2), (0.9, 3)))
    found = significance.paired_bootstrap(better, worse, metric(name), samples=200)
    swapped = significance.approximate_randomisation(better, worse, metric(name), samples=200)
    values = [significance.estimate(metric(name)(rows)) for rows in (better, worse)]
    assert found["difference"] == swapped["difference"] == pytest.approx(values[0] - values[1])
    assert 0 < found["low"] < found["difference"] < found["high"]
    assert found["p_value"] == swapped["p_value"] == pytest.approx(1 / 201)
    back = significance.paired_bootstrap(worse, better, metric(name), samples=200)
    assert back["difference"] == pytest.approx(-found["difference"])
    same = significance.paired_bootstrap(better, equal, metric(name), samples=200)
    assert same["p_value"] > 0.05
    assert same["low"] < 0 < same["high"]
    assert significance.approximate_randomisation(better, equal, metric(name), samples=200)["p_value"] > 0.05
    itself = significance.paired_bootstrap(better, better[::-1], metric(name), samples=20)
    assert itself == {"difference": 0.0, "low": 0.0, "high": 0.0, "p_value": 1.0}


def test_p_values_are_uniform_where_nothing_differs():
    rng = np.random.default_rng(0)
    below = 0
    for _ in range(60):
        a, b = rng.normal(size=(2, 40))
        both = mean_statistic(np.concatenate([a, b]))
        rows = rows_of(["x"] * 40)
        test = significance.approximate_randomisation(
            rows, rows, lambda _, s=both: s, samples=99, seed=int(rng.integers(99))
        )
        below += test["p_value"] <= 0.2
    assert 4 <= below <= 22  # 12 expected; within 3 standard deviations


def test_resamples_of_a_whole_test_set_are_cheap():
    rng = np.random.default_rng(0)
    words = np.asarray([f"w{i}" for i in range(800)])
    texts = [" ".join(words[rng.pareto(0.6, size=12).astype(int) % 800]) for _ in range(5249)]
    names = ("bleu_2:moses", "bleu_4:moses", "distinct_1:whitespace", "distinct_2:whitespace", "top5_share")
    statistics = scoring.make_statistics(rows_of(texts, texts[::-1]), names)
    begin = time.process_time()
    significance.resampled_values(statistics, samples=100, seed=0)
    assert time.process_time() - begin < 2.0  # a thousand resamples of everything must stay a matter of seconds


@pytest.mark.oracle
def test_t_quantiles_and_mean_intervals_match_scipy():
    for degrees in (*range(1, 40), 100, 1000):
        assert significance.t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-5)
    values = [3.0, 4.5, 3.75, 9.0]
    found = significance.mean_interval(values)
    low, high = stats.t.interval(0.95, df=3, loc=np.mean(values), scale=stats.sem(values))
    assert (found["low"], found["high"]) == pytest.approx((low, high), rel=1e-5)
    assert (found["mean"], found["std"]) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert significance.mean_interval([2.0, 2.0]) == {"mean": 2.0, "std": 0.0, "low": 2.0, "high": 2.0}
    with pytest.raises(ValueError, match="at least two values, got 1"):
        significance.mean_interval([1.0])
    with pytest.raises(ValueError, match="at least 1 degree"):
        significance.t_quantile(0)
