"""What contexts let expect, and what that is worth: scikit-learn's F1 as the oracle, and that no gold level leaks.

Novelty is held against finite differences of Distinct-2.
"""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score

from empax.core.config import ConfigError
from empax.core.types import Instance
from empax.systems.emprl.expectations import FOLDS, Novelty, balanced_gains, expected_levels, f1_gains
from empax.systems.emprl.rewards import make_reward
from empax.systems.emprl.settings import RewardSettings

ROWS, SIZE = 400, 6


def corpus(seed=0):
    """Unit vectors, and levels of three mechanisms that depend on them; one level of the second never occurs."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(ROWS, SIZE))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    logits = 4.0 * vectors @ rng.normal(size=(SIZE, 9)) + rng.gumbel(size=(ROWS, 9))
    levels = logits.reshape(ROWS, 3, 3).argmax(axis=2)
    levels[:, 1] = np.where(levels[:, 1] == 1, 0, levels[:, 1])
    return vectors, levels.astype(np.int32)


def test_contexts_of_one_dialogue_are_refused_with_advice():
    vectors, levels = corpus()
    with pytest.raises(ConfigError, match="two dialogues or more; raise max_examples, or set goal = 'gold'"):
        expected_levels(vectors, levels, ["d"] * ROWS)


def test_one_level_that_all_others_have_is_certain():
    vectors, levels = corpus()
    levels[:, 1] = 2
    found = expected_levels(vectors, levels, [f"d{row}" for row in range(ROWS)])
    np.testing.assert_array_equal(found[:, 1], np.eye(3)[levels[:, 1]])
    assert 0.0 < found[:, 0].max() < 1.0


def test_expectations_follow_the_contexts_and_never_the_own_dialogue():
    vectors, levels = corpus()
    dialogues = [f"d{row // 2}" for row in range(ROWS)]
    found = expected_levels(vectors, levels, dialogues)
    np.testing.assert_allclose(found.sum(axis=2), 1.0, rtol=1e-5)
    assert found[:, 1, 1].max() < 0.02
    hit = (found.argmax(axis=2) == levels).mean(axis=0)
    assert (hit > np.array([(levels == 0).mean(axis=0), (levels == 2).mean(axis=0)]).max(axis=0)).all()
    # The gold levels of the first dialogue change: what is expected of it does not, of other folds it does.
    changed = levels.copy()
    changed[:2] = 2 - changed[:2]
    other = expected_levels(vectors, changed, dialogues)
    same_fold = np.array([row // 2 % FOLDS == 0 for row in range(ROWS)])
    np.testing.assert_array_equal(found[same_fold], other[same_fold])
    assert (np.abs(found - other)[~same_fold].max(axis=(1, 2)) > 1e-6).any()


@pytest.mark.oracle
def test_gains_are_what_single_responses_add_to_scikit_learns_weighted_f1():
    """Each context stands there once with every level as the gold one, with the level's probability as its weight."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, 3, 3)) * 1.5 + np.array([[1.0, 0.0, -1.0], [1.5, -20.0, -1.0], [0.0, -2.0, 0.0]])
    expected = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    gains = f1_gains(expected)
    for m in range(3):
        best = gains[:, m].argmax(axis=1)
        gold, weights = np.tile(np.arange(3), ROWS), expected[:, m].ravel()

        def weighted_f1(said, gold=gold, weights=weights):
            said = np.repeat(said, 3)
            return ROWS * f1_score(gold, said, average="weighted", sample_weight=weights, zero_division=0.0)

        whole, missed = weighted_f1(best), []
        for row, level in itertools.product(range(0, ROWS, 20), range(3)):
            if level == best[row] or expected[:, m, level].sum() < 1e-3:
                continue
            other = best.copy()
            other[row] = level
            added = weighted_f1(other) - whole
            missed.append(added - (gains[row, m, level] - gains[row, m, best[row]]))
            assert added < 0.01  # nobody can do better alone
        assert len(missed) >= ROWS // 20
        np.testing.assert_allclose(missed, 0.0, atol=0.03)  # of gains around 0.5; a step is not a derivative


def test_balanced_gains_are_worth_the_same_to_whoever_knows_nothing():
    levels = np.random.default_rng(0).choice(3, p=[0.7, 0.25, 0.05], size=(400, 3))
    gains = balanced_gains(levels)
    np.testing.assert_allclose(gains.mean(axis=0), 1 / 3, rtol=1e-5)  # any level that is shown to all
    known = np.take_along_axis(gains, levels[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(known.mean(axis=0), 1.0, rtol=1e-5)  # the gold ones
    for m in range(3):  # weighted accuracy is scikit-learn's balanced accuracy
        guessed = np.random.default_rng(m).choice(3, size=400)
        earned = gains[np.arange(400), m, guessed].mean()
        assert earned == pytest.approx(balanced_accuracy_score(levels[:, m], guessed), rel=1e-5)
    assert not balanced_gains(np.zeros((5, 3), int))[:, :, 1:].any()


def test_a_level_that_hardly_ever_occurs_does_not_outweigh_all_others():
    levels = np.zeros((9600, 3), np.int32)
    levels[:5, 1] = 1
    assert balanced_gains(levels).max() == pytest.approx(1 / 0.03)


# --- novelty

EOS, OUTPUTS = 1, 40


def said(count, seed=0):
    """Responses in which low ids are frequent, as words are; they end with EOS."""
    rng = np.random.default_rng(seed)
    return [[*np.minimum(rng.zipf(1.6, rng.integers(1, 9)) + 1, 60).tolist(), EOS] for _ in range(count)]


def pair_rates(responses):
    """How often OUTPUTS of them have each pair, on average."""
    rates = {}
    for ids in responses:
        for pair in itertools.pairwise(ids):
            rates[pair] = rates.get(pair, 0.0) + OUTPUTS / len(responses)
    return rates


def distinct_2(rates):
    """Of responses whose pairs come as often as these rates say, independently (Poisson)."""
    values = np.array(list(rates.values()))
    return (1.0 - np.exp(-values)).sum() / values.sum()


def test_it_is_the_derivative_of_distinct_2():
    gold, answers = [ids[:-1] for ids in said(300)], said(40, seed=1)
    rates = pair_rates(gold)
    answers = [ids for ids in answers if set(itertools.pairwise(ids[:-1])) <= set(rates)]
    assert len(answers) > 5
    share = distinct_2(rates)
    novelty = Novelty.of(gold, outputs=OUTPUTS, share=share, eos_id=EOS)
    tokens = np.zeros((len(answers) + 1, 10), np.int32)  # the last row is a filler
    for row, ids in zip(tokens, answers, strict=False):
        row[: len(ids)] = ids
    rollout = types.SimpleNamespace(tokens=jnp.asarray(tokens), mask=jnp.asarray(tokens > 0))
    found = jax.jit(lambda params: novelty(params, rollout))(novelty.params)
    step, scale = 1e-6, sum(rates.values()) / (sum(map(len, gold)) / len(gold) - 1)
    for ids, gained in zip(answers, found, strict=False):
        more = dict(rates)
        for pair in itertools.pairwise(ids[:-1]):
            more[pair] = more.get(pair, 0.0) + step
        np.testing.assert_allclose(gained, scale * (distinct_2(more) - share) / step, atol=2e-4)
    assert np.ptp(found) > 0.1
    assert found[-1] == 0.0


def test_an_end_is_no_novelty_whatever_word_it_follows(toy):
    gold = [[5, 6, 9]] * 40 + [[5, 6]]  # only one leaves the full stop, 9, out
    novelty = Novelty.of(gold, outputs=OUTPUTS, share=0.05, eos_id=EOS)
    rollout = toy.saying([[5, 6, EOS, 0], [5, 6, 0, 0], [5, 6, 9, EOS], [5, 6, 9, 0]])
    bare, cut, whole, cut_whole = np.asarray(novelty(novelty.params, rollout))
    assert bare == cut
    assert whole == cut_whole
    assert bare - whole < 0.06  # the share of one pair, as in Distinct-2, not that of a pair that nobody else has


def test_a_part_of_the_reward_counts_gold_responses(toy, monkeypatch):
    gold = [Instance(f"{i}#2", (), text, "") for i, text in enumerate(["w20 w20", *["w5 w6"] * 4_999])]
    monkeypatch.setattr("empax.systems.emprl.rewards.load_instances", lambda run, split: gold)
    reward = make_reward([RewardSettings("novelty", 0.5)], None, toy.Words(), [])
    assert not reward.on_host
    rollout = toy.saying([[20, EOS, 0, 0], [20, 20, EOS, 0], [20, 20, 21, EOS]])
    # One in 5,000 has said "w20 w20", nobody "w20 w21".
    rated = reward.total(reward.rate(reward.frozen(), rollout))
    np.testing.assert_allclose(rated, 0.5 * np.array([0.0, np.exp(-1.0) - 0.05, np.exp(-1.0) - 0.10]), rtol=1e-5)
