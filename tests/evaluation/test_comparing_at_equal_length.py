"""Distinct-n and BLEU-2 precision of systems of which one says more than the other."""

import dataclasses

import numpy as np
import pytest
from nltk.translate.bleu_score import SmoothingFunction, corpus_bleu
from scipy.stats import hypergeom

from empax.core.config import ConfigError
from empax.evaluation.comparing import at_equal_length, check_compared, compare_systems, unit_of
from empax.evaluation.scoring import ScoringSettings, make_statistics, score
from empax.evaluation.statistics import estimate
from empax.reporting import comparisons
from empax.reporting.tables import metric_title
from tests.evaluation.values import distinct, rows_of

FAST = ScoringSettings(bootstrap_samples=40, variants=())


def says(length, seed, count=60):
    """Replies of `length` words on average, all from one vocabulary."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(length - 2, length + 3, size=count)
    said = [" ".join(f"w{w}" for w in np.minimum(rng.zipf(1.5, size=n), 300)) for n in sizes]
    return rows_of(said, [f"w1 w2 w3 w4 w{5 + i}" for i in range(count)])


@pytest.mark.oracle
@pytest.mark.parametrize("n", [1, 2])
def test_distinct_of_a_count_is_rarefaction(n):
    """Its mean over draws is the expectation, which is hypergeometric."""
    responses = [row.response for row in says(9, 0)]
    grams = [tuple(words[i : i + n]) for words in map(str.split, responses) for i in range(len(words) - n + 1)]
    counts = np.unique([" ".join(gram) for gram in grams], return_counts=True)[1]
    count = len(grams) // 3
    expected = 100.0 * np.sum(1.0 - hypergeom.pmf(0, len(grams), counts, count)) / count
    found = [distinct(responses, n, count=count, seed=seed) for seed in range(60)]
    assert np.mean(found) == pytest.approx(expected, abs=4 * np.std(found) / 60**0.5)
    assert distinct(responses, n) < expected
    assert distinct(responses, n, count=count, seed=1) == found[1] != found[2]
    assert distinct(responses, n, count=len(grams)) == pytest.approx(distinct(responses, n))
    with pytest.raises(ValueError, match=f"{len(grams) + 1} items are wanted, but there are only {len(grams)}"):
        distinct(responses, n, count=len(grams) + 1)


def test_the_same_words_in_longer_replies_are_as_distinct():
    plain, equal = [], []
    for seed in range(10):
        rows = [*says(6, seed), *says(18, 100 + seed)]
        both = make_statistics(rows, ["distinct_2"])["distinct_2"]
        found = at_equal_length("distinct_2", both, (rows[:60], rows[60:]))
        assert found is not None
        about = found.about()
        equal.append(about["first"] - about["second"])
        sides = (np.arange(60), np.arange(60, 120))
        plain.append(estimate(both.take(sides[0])) - estimate(both.take(sides[1])))
    assert np.mean(plain) > 5.0
    assert abs(np.mean(equal)) < 3 * np.std(equal) / 10**0.5 < 0.9 * np.mean(plain)


def test_a_pair_is_tested_at_equal_counts():
    brief, long = says(6, 1), says(18, 2)
    cell = compare_systems({"brief": brief, "long": long}, settings=FAST, names=["distinct_2"])["pairs"][0]["metrics"]
    found = cell["distinct_2"]
    plain = [distinct([row.response for row in rows], 2) for rows in (brief, long)]
    assert (found["first"]["value"], found["second"]["value"]) == pytest.approx(plain)
    bigrams = sum(len(row.response.split()) - 1 for row in brief)
    assert (found["equal"]["count"], found["equal"]["unit"]) == (bigrams, "bigrams")
    assert found["equal"]["first"] == pytest.approx(plain[0])  # the briefer system's is what it was
    assert found["difference"] == pytest.approx(found["equal"]["first"] - found["equal"]["second"])
    assert found["low"] < found["difference"] < found["high"]
    assert found["low"] < plain[0] - plain[1] != pytest.approx(found["difference"], abs=1.0)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["bleu_2_precision", "bleu_2_precision:moel"])
def test_precision_is_of_replies_cut_to_the_briefer(name):
    first, second = says(6, 1), says(9, 2)
    second[3] = dataclasses.replace(second[3], response="")
    both = make_statistics([*first, *second], [name])[name]
    equal = at_equal_length(name, both, (first, second))
    assert equal is not None
    about = equal.about()
    pairs = [(a.response.split(), b.response.split()) for a, b in zip(first, second, strict=True)]
    shorter = [min(len(a), len(b)) for a, b in pairs]
    assert (about["count"], about["unit"]) == (sum(shorter), "words")
    for side, key in enumerate(("first", "second")):
        cut = [pair[side][:size] for pair, size in zip(pairs, shorter, strict=True)]
        references = [[row.reference.split()] for row in first]
        sizes = [sum(map(len, texts)) for texts in (cut, [one for (one,) in references])]
        penalty = np.exp(min(0.0, 1 - sizes[1] / sizes[0]))
        wanted = 100 * corpus_bleu(references, cut, (0.5, 0.5), SmoothingFunction(0.0).method1) / penalty
        # NLTK counts a bigram for a reply of one word or none.
        assert about[key] == pytest.approx(wanted, rel=0.02)
    assert about["first"] != pytest.approx(estimate(both.take(np.arange(60))))


def test_other_metrics_are_compared_as_they_are():
    rows = says(6, 1), says(9, 2)
    for name in ("bleu_2", "rouge_l", "length_ratio", "top5_share"):
        assert unit_of(name) == ""
        assert at_equal_length(name, make_statistics([*rows[0], *rows[1]], [name])[name], rows) is None
    assert unit_of("distinct_1:cased") == "words"


def test_a_table_has_distinct_at_the_count_of_the_briefest():
    systems = {"a": says(9, 1), "b": says(6, 2), "c": says(12, 3)}
    names = ["distinct_2", "bleu_2", "bleu_2_precision"]
    found = compare_systems(systems, settings=FAST, names=names)
    assert list(found["equal"]) == ["distinct_2"]
    equal = found["equal"]["distinct_2"]
    assert equal["count"] == sum(len(row.response.split()) - 1 for row in systems["b"])
    responses = [row.response for row in systems["c"]]
    assert equal["values"]["c"] == pytest.approx(distinct(responses, 2, count=equal["count"]))
    printed = comparisons.text({**found, "corpus": "", "peers": [], "verdicts": {}})
    assert f"distinct_2 of {equal['count']:,} bigrams each: a {equal['values']['a']:.2f}, b " in printed
    assert "differences and p are at equal length" in printed
    assert f"\ndistinct_2, {equal['count']:,} bigrams each " in printed
    assert "\nbleu_2_precision, " in printed
    assert "\nbleu_2, " not in printed


def test_a_number_for_tables_is_of_ten_thousand_and_compares_with_nothing():
    name = "distinct_2:of_10000"
    settings = ScoringSettings(bootstrap_samples=2, variants=(name,))
    many = says(12, 0, count=1200)
    assert score(says(12, 0), settings=settings).variants == {}  # fewer
    value = score(many, settings=settings).variants[name]["value"]
    assert value == pytest.approx(distinct([row.response for row in many], 2, count=10_000))
    assert metric_title(name) == "Dist-2 (of 10,000 n-grams) ↑"
    for check in (check_compared, lambda names: compare_systems({"a": many, "b": many}, names=names)):
        with pytest.raises(ConfigError, match="compare by distinct_2, at an equal count"):
            check([name])
