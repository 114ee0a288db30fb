"""What answers show: against worked numbers, statsmodels, and simulated raters whose truth is known."""

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.stats import norm

from empax.core.config import ConfigError
from empax.core.types import Prediction
from empax.rating import scores
from empax.rating.answers import Answer, Key
from empax.rating.scores import agreement, needed_ratings, raters, score, strengths, text
from empax.rating.study import ASPECTS, Item, StudySettings, make_study

NAMES = ("good", "fair", "poor")
TRUTH = {"good": 1.0, "fair": 0.0, "poor": -1.0}


def studied(form="pairs", rows=120, **more):
    def system(name):
        return [Prediction((f"c {i}",), f"{name} {i}", f"gold {i}", id=f"d{i}#2") for i in range(rows)]

    study = make_study({name: system(name) for name in NAMES}, StudySettings(form=form, rows=rows, **more))
    return Key("s", form, NAMES, {item.number: item for item in study.items})


def rated(key, seed=0, people=("ann", "bob", "cy"), noise=1.0):
    """Answers of raters who see each system's worth with noise; ties where the difference is small."""
    rng, answers = np.random.default_rng(seed), []
    for rater in people:
        for item in key.items.values():
            worth = [TRUTH.get(name, 3.0 if name == "reference" else -3.0) for name in item.systems]
            values = {}
            for aspect in ASPECTS:
                seen = np.array(worth) + noise * rng.logistic(size=len(worth)) / 2
                if key.form == "pairs":
                    gap = seen[0] - seen[1]
                    values[aspect] = 0 if abs(gap) < 0.1 else int(np.sign(gap))
                else:
                    values[aspect] = int(np.clip(np.round(3 + seen[0]), 1, 5))
            answers.append(Answer(rater, item, values))
    return answers


def test_the_better_system_wins_more_and_is_stronger():
    key = studied(comparisons=3)
    found = score(key, rated(key), samples=20)["empathy"]
    rates = {pair: value[0] for pair, value in found["win_rates"].items()}
    assert rates["good : poor"] > rates["good : fair"] > 0.5 < rates["fair : poor"]
    strong = {name: value[0] for name, value in found["strengths"].items()}
    assert strong["good"] > strong["fair"] > strong["poor"]
    assert sum(strong.values()) == pytest.approx(0, abs=1e-6)
    for value, low, high in found["win_rates"].values():
        assert 0 <= low <= value <= high <= 1


@pytest.mark.filterwarnings("error")
def test_who_was_not_rated_has_no_strength_yet():
    key = studied()
    known = [answer for answer in rated(key) if set(answer.item.systems) == {"good", "poor"}]
    found = score(key, known, samples=20)["empathy"]
    assert np.isnan(found["strengths"]["fair"]).all()
    assert found["strengths"]["good"][0] > 0 > found["strengths"]["poor"][0]
    assert np.isnan(found["win_rates"]["good : fair"]).all()
    assert 0 <= found["win_rates"]["good : poor"][1] <= found["win_rates"]["good : poor"][2] <= 1


def test_a_win_rate_of_worked_numbers_with_a_tie_as_half():
    items = [Item(n, (), (), f"d{n}", pair) for n, pair in
             enumerate((("good", "poor"), ("good", "poor"), ("poor", "good"), ("good", "poor")), 1)]  # fmt: skip
    said = [1, 0, 1, -1]  # a win, a tie, a loss on the other side, a loss
    answers = [Answer("ann", item, dict.fromkeys(ASPECTS, v)) for item, v in zip(items, said, strict=True)]
    key = Key("s", "pairs", ("good", "poor"), {item.number: item for item in items})
    assert score(key, answers, samples=10)["relevance"]["win_rates"]["good : poor"][0] == pytest.approx(1.5 / 4)


def test_strengths_are_those_of_a_logistic_regression():
    wins = np.array([[0, 12, 9.5], [5, 0, 7], [2.5, 6, 0]])
    rows, shares, counts = [], [], []
    for i in range(3):
        for j in range(i + 1, 3):
            row = np.zeros(3)
            row[i], row[j] = 1, -1
            won, both = wins[i, j] + 0.5, wins[i, j] + wins[j, i] + 1
            rows.append(row), shares.append(won / both), counts.append(both)
    given = np.array(shares), np.array(rows)[:, 1:]
    model = sm.GLM(*given, family=sm.families.Binomial(), freq_weights=np.array(counts))
    expected = np.concatenate([[0.0], model.fit().params])
    np.testing.assert_allclose(strengths(wins), expected - expected.mean(), atol=1e-4)
    assert np.isfinite(strengths(np.array([[0.0, 9], [0, 0]]))).all()  # who always wins is not infinitely strong


def test_agreement_is_one_where_all_agree_and_near_zero_by_chance():
    key = studied()
    same = rated(key, people=("ann",))
    copied = [Answer(rater, a.item, a.values) for rater in ("ann", "bob") for a in same]
    assert list(agreement(key, copied, "empathy").values()) == [pytest.approx(1), pytest.approx(1)]
    rng = np.random.default_rng(0)
    chance = [Answer(a.rater, a.item, {x: int(rng.integers(-1, 2)) for x in ASPECTS}) for a in rated(key)]
    found = agreement(key, chance, "empathy")
    assert abs(found["fleiss_kappa"]) < 0.15
    assert abs(found["krippendorff_alpha"]) < 0.15
    alone = agreement(key, same, "empathy")
    assert alone == {"fleiss_kappa": None, "krippendorff_alpha": None}


def test_fleiss_own_example():
    """Fleiss 1971's table in the form of Wikipedia: 10 items, 14 raters, 5 categories, kappa 0.210."""
    table = [[0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1], [7, 7, 0, 0, 0],
             [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7]]  # fmt: skip
    key, answers = Key("s", "likert", ("good",), {}), []
    for number, row in enumerate(table, 1):
        said = [level for level, count in enumerate(row, 1) for _ in range(count)]
        item = Item(number, (), (), f"d{number}", ("good",))
        answers += [Answer(f"r{i}", item, dict.fromkeys(ASPECTS, v)) for i, v in enumerate(said)]
    assert agreement(key, answers, "fluency")["fleiss_kappa"] == pytest.approx(0.210, abs=5e-4)


def test_raters_are_told_by_repeats_and_checks():
    key = studied(repeats=0.3, checks=0.2)
    careful = rated(key, people=("ann",), noise=1e-6)
    asleep = [Answer("bob", answer.item, dict.fromkeys(ASPECTS, 1)) for answer in careful]
    found = raters(key, [*careful, *asleep])
    assert found["ann"]["repeats_alike"] == found["ann"]["checks_passed"] == 1.0
    assert found["bob"]["repeats_alike"] == 0.0  # the same side of swapped replies
    assert 0.1 < found["bob"]["checks_passed"] < 0.9
    assert "ann: 120 items, repeats alike 100%, checks passed 100%" in text(score(key, careful, samples=5))


def test_scales_have_means():
    key = studied("likert", rows=60, checks=0.1)
    answers = rated(key)
    found = score(key, answers, samples=20)["empathy"]["means"]
    own = [a.values["empathy"] for a in answers if a.item.systems == ("good",) and a.item.kind == "rated"]
    assert found["good"][0] == pytest.approx(np.mean(own))
    assert found["good"][1] > found["poor"][2]


def test_on_a_scale_the_middle_passes_a_check_and_a_repeat_must_have_the_same_value():
    kinds = {1: ("rated", 0), 2: ("repeat", 1), 3: ("check", 0), 4: ("check", 0), 5: ("repeat", 9)}
    items = {number: Item(number, (), (), f"d{number}", ("good",), *kind) for number, kind in kinds.items()}
    said = {1: 2, 2: 2, 3: 3, 4: 4, 5: 1}
    answers = [Answer("ann", items[number], dict.fromkeys(ASPECTS, value)) for number, value in said.items()]
    answers[1] = Answer("ann", items[2], dict.fromkeys(ASPECTS, 2) | {"fluency": 4})
    found = raters(Key("s", "likert", ("good",), items), answers)
    assert found == {"ann": {"items": 1, "repeats_alike": 2 / 3, "checks_passed": 0.5}}


def test_raters_are_resampled_if_there_are_several():
    """Ann gives 1 and Bob 5 to everything: half of the resamples have one of them alone."""
    items = {n: Item(n, (), (), f"d{n}", ("good",)) for n in range(1, 21)}
    answers = [
        Answer(rater, item, dict.fromkeys(ASPECTS, value))
        for rater, value in (("ann", 1), ("bob", 5))
        for item in items.values()
    ]
    key = Key("s", "likert", ("good",), items)
    assert score(key, answers, samples=50)["empathy"]["means"]["good"] == [3.0, 1.0, 5.0]
    assert score(key, answers[:20], samples=50)["empathy"]["means"]["good"] == [1.0, 1.0, 1.0]


@pytest.mark.slow
def test_intervals_hold_for_other_contexts_and_raters(monkeypatch):
    """Of 95% intervals of a win rate about 95 of 100 hold the rate that endless contexts and raters would give."""
    monkeypatch.setattr(scores, "ASPECTS", ("empathy",))  # the others and the strengths are fits beside it: minutes
    monkeypatch.setattr(scores, "strengths", lambda wins: np.zeros(len(wins)))
    key = studied(rows=90, comparisons=3, repeats=0, checks=0)
    truth = np.mean([score(key, rated(key, seed=s), samples=1)["empathy"]["win_rates"]["good : fair"][0]
                     for s in range(1000, 1100)])  # fmt: skip
    held = 0
    for seed in range(100):
        _, low, high = score(key, rated(key, seed=seed), samples=200, seed=seed)["empathy"]["win_rates"]["good : fair"]
        held += low <= truth <= high
    assert held >= 88


def test_needed_ratings_of_a_worked_number_and_by_simulation():
    assert needed_ratings(0.6) == 194  # (1.96 x 0.5 + 0.84 x sqrt(0.24))^2 / 0.1^2
    assert needed_ratings(0.6, design_effect=2) == 388
    wins = np.random.default_rng(0).binomial(194, 0.6, 20_000) / 194
    shown = np.abs(wins - 0.5) / np.sqrt(0.25 / 194) > norm.ppf(0.975)
    assert shown.mean() == pytest.approx(0.8, abs=0.02)
    for wrong in (
        {"win_rate": 0.5},
        {"win_rate": 0.6, "power": 0.05},  # that of the level
        {"win_rate": 0.6, "design_effect": 0.5},
        {"win_rate": 0.6, "design_effect": np.nan},
        {"win_rate": 0.6, "design_effect": np.inf},
    ):
        with pytest.raises(ConfigError, match="must lie"):
            needed_ratings(**wrong)
