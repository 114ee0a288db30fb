import numpy as np
import pytest
from scipy import stats

from empax.core.types import Prediction
from empax.evaluation import scoring, significance, statistics, text
from empax.evaluation.normalisation import MOEL_METRICS
from empax.evaluation.statistics import mean_statistic
from tests.evaluation.values import rows_of


def metric(name, rows):
    return scoring.make_statistics(rows, (name,))[name]


def interval(statistic, **options):
    """The ends of the interval of one metric."""
    found = significance.confidence_intervals({"": statistic}, **options)[""]
    assert found["value"] == statistics.estimate(statistic)
    return found["low"], found["high"]


TEXT_METRICS = [*scoring.METRICS[:13], "sentence_std", "top5_share", *MOEL_METRICS]


def test_interval_of_a_mean_is_the_normal_one():
    values = np.random.default_rng(0).normal(5.0, 2.0, size=400)
    low, high = interval(mean_statistic(values), samples=2000, seed=1)
    error = 1.96 * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - error, abs=0.05)
    assert high == pytest.approx(values.mean() + error, abs=0.05)
    assert (low, high) == interval(mean_statistic(values), samples=2000, seed=1)
    assert (low, high) != interval(mean_statistic(values), samples=2000, seed=2)
    parts = significance.part_interval(mean_statistic(values), partitions=400)
    assert parts == pytest.approx((values.mean() - error, values.mean() + error), abs=0.06)


@pytest.mark.parametrize("method", ["bootstrap", "parts"])
def test_rows_of_one_dialogue_are_drawn_together(method):
    of_dialogue = np.random.default_rng(0).normal(size=300)
    dialogues = np.repeat(np.arange(300), 4)
    rows = mean_statistic(of_dialogue[dialogues])

    def width(**options):
        if method == "parts":
            low, high = significance.part_interval(rows, partitions=400, **options)
        else:
            low, high = interval(rows, **options)
        return high - low

    error = 2 * 1.96 * of_dialogue.std() / np.sqrt(300)
    assert width(dialogues=dialogues) == pytest.approx(error, rel=0.12)
    assert width() == pytest.approx(error / 2, rel=0.12)  # as if all rows were independent


@pytest.mark.parametrize("name", TEXT_METRICS)
def test_weights_are_repetitions_of_rows(name):
    """The sufficient statistics of a resample, or of some rows, give what the metric gives on those rows."""
    rng = np.random.default_rng(0)
    rows = rows_of(
        [" ".join(rng.choice(["word1", "word2", "i'm", ".", "oh"], size=rng.integers(0, 9))) for _ in range(30)]
    )
    if name.startswith(scoring.LIKELIHOODS):
        rows = [Prediction(**{**vars(row), "notes": {"nll": 5.0 + i, "num_tokens": 4}}) for i, row in enumerate(rows)]
    statistic = metric(name, rows)
    for drawn in (rng.integers(30, size=30), rng.permutation(30)[:7]):
        weights = np.bincount(drawn, minlength=30).astype(np.float64)[None]
        expected = statistics.estimate(metric(name, [rows[i] for i in drawn]))
        assert statistic(weights)[0] == pytest.approx(expected, rel=1e-9)
        assert statistics.estimate(statistic.take(drawn)) == pytest.approx(expected, rel=1e-9)


def test_intervals_of_distinct_things_are_not_of_repeated_rows():
    # Every response different: a resample repeats rows and has fewer distinct words; a part of the rows has not.
    statistic = text.distinct_statistic([f"a{i} b{i} c{i}" for i in range(50)], 1)
    assert statistics.estimate(statistic) == 100.0
    assert interval(statistic, samples=100) == (100.0, 100.0)
    drawn = np.random.default_rng(0).zipf(1.5, size=(40, 5))
    some = text.distinct_statistic([" ".join(f"w{number}" for number in row) for row in drawn], 1)
    low, high = interval(some, samples=100)
    assert 0.0 <= low < statistics.estimate(some) < high <= 100.0


def test_interval_edge_cases():
    one = mean_statistic(np.asarray([3.0]))
    assert interval(one, samples=5) == (3.0, 3.0)
    rare = statistics.ratio_statistic(np.asarray([1.0] + [0.0] * 3), np.asarray([1.0] + [0.0] * 3))
    assert interval(rare, samples=50) == (1.0, 1.0)  # resamples without the row say nothing
    for responses in (["a b"], ["a b", "a"], ["a b", "a", "a c"]):
        statistic = text.distinct_statistic(responses, 1)
        low, high = interval(statistic)
        assert 0.0 <= low <= statistics.estimate(statistic) <= high <= 100.0
    assert significance.confidence_intervals({}) == {}


def test_how_far_out_the_ends_lie_depends_on_the_number_of_dialogues(monkeypatch):
    asked = []
    monkeypatch.setattr(significance, "tails", lambda number: asked.append(number) or (0.1, 0.9))
    interval(mean_statistic(np.arange(24.0)), dialogues=np.repeat(np.arange(12), 2))
    assert asked == [12]


@pytest.mark.oracle
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_randomisation_test_is_two_sided_and_matches_scipy(sign):
    rng = np.random.default_rng(3)
    first, second = sign * rng.normal(0.4, 1.0, size=10), rng.normal(size=10)
    expected = stats.permutation_test(
        (first, second),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        n_resamples=np.inf,
        alternative="two-sided",
        vectorized=True,
    ).pvalue
    assert 0.1 < expected < 0.9  # a one-sided test would give half of it, or one minus that
    both = mean_statistic(np.concatenate([first, second]))
    found = significance.approximate_randomisation({"": both}, samples=6000)[""]
    assert found == pytest.approx(expected, abs=0.025)


def test_dialogues_are_swapped_as_wholes():
    # One dialogue holds the whole difference: either it is swapped or not, so every swap is as extreme.
    first, second = np.asarray([3.0, 3.0, 3.0, 0.0]), np.zeros(4)
    both = {"": mean_statistic(np.concatenate([first, second]))}
    assert significance.approximate_randomisation(both, dialogues=np.asarray([0, 0, 0, 1]))[""] == 1.0
    assert significance.approximate_randomisation(both)[""] == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("name", ["bleu_2", "distinct_1", "rouge_l"])
def test_a_better_system_is_found_and_an_equal_one_is_not(name):
    rng = np.random.default_rng(0)
    references = [" ".join(rng.choice([f"w{i}" for i in range(400)], size=8)) for _ in range(80)]

    def noisy(share, seed):
        own = np.random.default_rng(seed)
        return [" ".join(w if own.random() < share else "the" for w in r.split()) for r in references]

    better, worse, equal = (rows_of(noisy(s, seed), references) for s, seed in ((0.9, 1), (0.4, 2), (0.9, 3)))

    def tests(first, second, **options):
        return significance.paired_tests({"": metric(name, [*first, *second])}, samples=200, **options)[""]

    found = tests(better, worse)
    values = [statistics.estimate(metric(name, rows)) for rows in (better, worse)]
    assert found["difference"] == pytest.approx(values[0] - values[1])
    assert 0 < found["low"] < found["difference"] < found["high"]
    assert found["p_value"] == pytest.approx(1 / 201)
    back = tests(worse, better)
    assert back["difference"] == pytest.approx(-found["difference"])
    assert back["p_value"] == pytest.approx(1 / 201)  # the other way round, too
    same = tests(better, equal)
    both = {"": metric(name, [*better, *equal])}
    assert same["p_value"] == significance.approximate_randomisation(both, samples=200)[""] > 0.05
    assert same["low"] < 0 < same["high"]
    itself = tests(better, better)
    smooth = {} if name == "distinct_1" else {"p_bootstrap": 1.0}  # no bootstrap for what counts distinct things
    assert itself == {"difference": 0.0, "low": 0.0, "high": 0.0, "p_value": 1.0, **smooth}
    if smooth:
        assert found["p_bootstrap"] == back["p_bootstrap"] < 0.01 < 0.05 < same["p_bootstrap"] != same["p_value"]


@pytest.mark.parametrize("name", ["perplexity", "rouge_l"])
def test_equal_values_of_a_whole_test_set_do_not_differ(name):
    """There the sums of swapped rows differ in the last bits."""
    rng = np.random.default_rng(0)
    texts = [" ".join(words) for words in rng.choice(["oh", "no", "keys", "lost", "again"], size=(5249, 6))]
    rows = [
        Prediction(**{**vars(row), "notes": {"nll": nll, "num_tokens": 7}})
        for row, nll in zip(rows_of(texts, texts[::-1]), rng.gamma(4.0, 5.0, size=5249), strict=True)
    ]
    found = significance.paired_tests({"": metric(name, rows * 2)}, samples=100)[""]
    assert (found["p_value"], found["p_bootstrap"]) == (1.0, 1.0)


def test_no_p_is_below_that_of_all_swaps():
    both = {"": mean_statistic(np.concatenate([1.0 + np.arange(6), np.zeros(6)]))}
    found = [significance.approximate_randomisation(both, samples=100, seed=seed)[""] for seed in range(20)]
    assert min(found) == 1 / 32


@pytest.mark.oracle
@pytest.mark.parametrize("num_dialogues", [2, 12, 40, 3000])
def test_ends_of_few_dialogues_are_those_of_students_t(num_dialogues):
    """Where resamples are normal the interval is the t-interval, and p is that of the t-test."""
    values = np.random.default_rng(0).normal(0.3, 1.0, size=num_dialogues)
    mean, spread = values.mean(), values.std()  # of a resample's mean: the root of n times less, dividing by n
    ends = significance.tails(num_dialogues)
    low, high = stats.norm.ppf(ends, mean, spread / num_dialogues**0.5)
    wanted = stats.t.interval(0.95, num_dialogues - 1, mean, stats.sem(values))
    if num_dialogues > 2:  # there the ends are beyond what a float holds
        assert (low, high) == pytest.approx(wanted)
    assert ends[0] == pytest.approx(1 - ends[1])
    share = 2 * stats.norm.sf(abs(mean), scale=spread / num_dialogues**0.5)
    assert significance._of_few(share, num_dialogues) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert significance.tails(1) == (0.0, 1.0)
    assert significance._of_few(0.01, 1) == 1.0


def test_intervals_and_tests_of_twelve_dialogues_are_what_they_claim():
    """Two rows a dialogue, alike; 1,000 samples of a skewed population, without a difference between the systems."""
    rng = np.random.default_rng(0)
    dialogues = np.repeat(np.arange(12), 2)
    covered, found, without = [], [], []
    for trial in range(1000):  # shares then vary by 0.008
        own = rng.gamma(4.0, size=(2, 12))[:, dialogues] + 0.2 * rng.normal(size=(2, 24))
        low, high = interval(mean_statistic(own[0]), dialogues=dialogues, samples=200, seed=trial)
        covered.append(low <= 4.0 <= high)
        test = significance.paired_tests(
            {"": mean_statistic(own.ravel())}, dialogues=dialogues, samples=200, seed=trial
        )[""]
        found.append([test["p_value"] <= 0.05, test["p_bootstrap"] <= 0.05])
        without.append(test["low"] <= 0.0 <= test["high"])
    # Percentiles of 2.5 and 97.5% cover 89%, and find differences in 9%.
    assert 0.915 <= np.mean(covered) <= 0.96
    assert 0.912 <= np.mean(without) <= 0.96
    assert np.max(np.mean(found, axis=0)) <= 0.07
    assert np.min(np.mean(found, axis=0)) >= 0.04


def test_holm():
    assert significance.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert significance.holm([0.9, 0.5]) == [1.0, 1.0]
    assert significance.holm([]) == []


@pytest.mark.oracle
def test_mean_intervals_match_scipy():
    values = [3.0, 4.5, 3.75, 9.0]
    found = significance.mean_interval(values)
    low, high = stats.t.interval(0.95, df=3, loc=np.mean(values), scale=stats.sem(values))
    assert (found["low"], found["high"]) == pytest.approx((low, high))
    assert (found["mean"], found["std"]) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert significance.mean_interval([2.0, 2.0]) == {"mean": 2.0, "std": 0.0, "low": 2.0, "high": 2.0}
    with pytest.raises(ValueError, match="at least two values, got 1"):
        significance.mean_interval([1.0])


@pytest.mark.parametrize(("groups", "sizes"), [(7, {3}), (8, {2, 4}), (17, {4, 8})])
def test_parts_are_quarters_and_halves_or_halves_alone_of_few(groups, sizes):
    class Recorded:
        num_rows, bounds, seen = groups, (0.0, 100.0), []

        def __call__(self, weights):
            self.seen.append(weights)
            return weights @ np.arange(groups) / np.maximum(weights.sum(axis=-1), 1.0)

        def take(self, rows):
            return self

    significance.part_interval(Recorded(), partitions=3)
    whole, *parts = Recorded.seen
    assert set(whole.sum(axis=-1)) == {groups}
    assert {int(count) for weights in parts for count in weights.sum(axis=-1).ravel()} == sizes
