"""Rewards, whitening, running statistics, GAE and group baselines against loops over single tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.systems.emprl.advantages import (
    ScoreStatistics,
    generalized_advantages,
    grpo_advantages,
    mask_first_token,
    response_mask,
    token_rewards,
    whiten,
)

B, T = 6, 7
LENGTHS = np.array([7, 4, 2, 1, 0, 3])  # the fifth row is a filler
MASK = np.arange(T)[None] < LENGTHS[:, None]
POISON = np.array([np.nan, np.inf, -np.inf, 1e30, np.nan, -1e30, np.nan], np.float32)[None]


def example(seed=0):
    """Rewards and values [B, T]."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(B, T)).astype(np.float32) for _ in range(2))


def poisoned(values, mask=MASK):
    return jnp.asarray(np.where(mask, values, POISON))


# --- masks and scores


def test_a_response_ends_with_its_first_end_token():
    tokens = jnp.asarray([[5, 1, 1, 1], [5, 0, 0, 7], [1, 5, 1, 0], [0, 0, 0, 1], [5, 1, 0, 0]])  # 0 was sampled, too
    expected = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    np.testing.assert_array_equal(response_mask(tokens, eos_id=1), np.array(expected, bool))
    valid = jnp.asarray([True, True, True, True, False])
    expected[4] = [0, 0, 0, 0]
    np.testing.assert_array_equal(response_mask(tokens, valid, eos_id=1), np.array(expected, bool))


def test_dropping_the_first_token_drops_nothing_else():
    found = mask_first_token(jnp.asarray(MASK))
    np.testing.assert_array_equal(found[:, 1:], MASK[:, 1:])
    assert not found[:, 0].any()


@pytest.mark.parametrize("first", [0, 1])
def test_rewards_follow_equation_8(first):
    kl, _ = example()
    scores = np.arange(1.0, B + 1, dtype=np.float32)
    mask = MASK & (np.arange(T) >= first)[None]
    expected = np.zeros((B, T))
    for b in range(B):
        for t in range(T):
            if mask[b, t]:
                expected[b, t] = -0.3 * kl[b, t] + (scores[b] if t == LENGTHS[b] - 1 else 0.0)
    scores[4] = np.nan  # of the filler
    found = token_rewards(jnp.asarray(scores), poisoned(kl, mask), jnp.asarray(mask), beta=jnp.float32(0.3))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_teaches_is_not_taught():
    rewards, values = map(jnp.asarray, example())
    mask = jnp.asarray(MASK)

    @jax.jit
    @jax.grad
    def gradient(x):
        kl, scores = x, x[:, 0]
        parts = [
            token_rewards(scores, kl, mask, beta=0.2),
            *generalized_advantages(kl, values + x, mask, gamma=1.0, lam=0.9),
            whiten(x, mask),
            grpo_advantages(scores, jnp.any(mask, axis=1), group_size=2),
            ScoreStatistics.empty().normalise(scores),
        ]
        return sum(jnp.sum(jnp.square(part)) for part in parts)

    np.testing.assert_array_equal(gradient(rewards), 0.0)


# --- whitening


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_follows_a_loop(shift_mean):
    values, _ = example()
    real = [float(values[b, t]) for b in range(B) for t in range(T) if MASK[b, t]]
    mean = sum(real) / len(real)
    std = (sum((x - mean) ** 2 for x in real) / (len(real) - 1) + 1e-8) ** 0.5
    expected = np.where(MASK, (values.astype(np.float64) - mean) / std + (0.0 if shift_mean else mean), 0.0)
    found = whiten(poisoned(values), jnp.asarray(MASK), shift_mean=shift_mean)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_whitening_what_does_not_vary_gives_numbers(count):
    mask = jnp.arange(6) < count
    values = jnp.full(6, 0.7)
    np.testing.assert_allclose(whiten(values, mask), 0.0, atol=1e-2)  # up to rounding over 1e-4
    np.testing.assert_allclose(whiten(values, mask, shift_mean=False), jnp.where(mask, 0.7, 0.0), atol=1e-2)


# --- running statistics


def test_running_statistics_are_those_of_all_scores_so_far():
    rng = np.random.default_rng(0)
    statistics, seen = ScoreStatistics.empty(), []
    for _ in range(5):
        scores = (0.7 + 0.05 * rng.normal(size=B)).astype(np.float32)
        valid = rng.random(B) < 0.7
        statistics = statistics.update(jnp.asarray(np.where(valid, scores, np.nan)), jnp.asarray(valid))
        seen += [float(s) for s, real in zip(scores, valid, strict=True) if real]
        mean = sum(seen) / len(seen)
        std = (sum((x - mean) ** 2 for x in seen) / (len(seen) - 1)) ** 0.5
        assert statistics.count == len(seen)
        assert float(statistics.mean) == pytest.approx(mean, rel=1e-5)
        assert float(statistics.std()) == pytest.approx(std, rel=1e-4)
    np.testing.assert_allclose(statistics.normalise(jnp.asarray(scores)), (scores - mean) / std, rtol=1e-3, atol=1e-4)


def test_a_batch_of_fillers_changes_no_statistics():
    start = ScoreStatistics.empty().update(jnp.asarray([0.2, 0.4]), jnp.ones(2, bool))
    after = start.update(jnp.full(2, jnp.nan), jnp.zeros(2, bool))
    jax.tree.map(np.testing.assert_array_equal, after, start)
    nothing = ScoreStatistics.empty().update(jnp.full(2, jnp.nan), jnp.zeros(2, bool))
    jax.tree.map(np.testing.assert_array_equal, nothing, ScoreStatistics.empty())


def test_equal_scores_do_not_become_huge_rewards():
    statistics = ScoreStatistics.empty().update(jnp.full(5, 0.7), jnp.ones(5, bool))
    np.testing.assert_allclose(statistics.normalise(jnp.full(5, 0.7)), 0.0, atol=1e-6)
    np.testing.assert_allclose(statistics.normalise(jnp.full(5, 0.9)), 0.2, rtol=1e-5)


# --- GAE


def naive_gae(rewards, values, gamma, lam, form):
    """Of one response without padding, by the sums as they are printed; t = 1 .. T."""
    T = len(rewards)
    r, V = dict(enumerate(rewards, 1)), dict(enumerate(values, 1))
    V[T + 1] = 0.0
    delta = {t: r[t] + gamma * V[t + 1] - V[t] for t in r}
    advantages = []
    for t in range(1, T + 1):
        if form == "sound":
            total = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, T + 1))
        elif t == T:
            total = 0.0
        elif t == T - 1:
            total = delta[T - 1]
        else:
            total = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, T - 1))
            total += (gamma * lam) ** (T - t + 1) * delta[T - 1]
        advantages.append(total)
    return advantages


def gae(rewards, values, mask=MASK, **settings):
    rewards, values, mask = map(jnp.asarray, (rewards, values, mask))
    return [np.asarray(x) for x in generalized_advantages(rewards, values, mask, **settings)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)])
@pytest.mark.parametrize("form", ["sound", "paper_literal"])
def test_gae_follows_the_printed_sums(form, gamma, lam):
    rewards, values = example()
    advantages, returns = gae(poisoned(rewards), poisoned(values), gamma=gamma, lam=lam, form=form)
    for b, length in enumerate(LENGTHS):
        expected = naive_gae(rewards[b, :length].tolist(), values[b, :length].tolist(), gamma, lam, form)
        np.testing.assert_allclose(advantages[b, :length], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(returns[b, :length], values[b, :length] + expected, rtol=1e-5, atol=1e-6)
    assert not advantages[~MASK].any()
    assert not returns[~MASK].any()


@pytest.mark.parametrize("form", ["sound", "paper_literal"])
def test_tokens_that_do_not_count_are_not_there(form):
    rewards, values = example()
    mask = MASK & ~np.isin(np.arange(T), [0, 3])[None]
    found = gae(poisoned(rewards, mask), poisoned(values, mask), mask, gamma=0.9, lam=0.8, form=form)[0]
    row = mask[0]
    alone = gae(rewards[:1, row], values[:1, row], mask[:1, row], gamma=0.9, lam=0.8, form=form)[0]
    np.testing.assert_allclose(found[0, row], alone[0], rtol=1e-6)


def test_the_printed_sum_never_sees_the_empathy_reward():
    rewards, values = example()
    last = np.arange(T)[None] == LENGTHS[:, None] - 1
    changed = np.where(last, rewards + 100.0, rewards).astype(np.float32)
    for form, moves in (("sound", True), ("paper_literal", False)):
        both = (gae(x, values, gamma=1.0, lam=0.95, form=form) for x in (rewards, changed))
        for before, after in zip(*both, strict=True):  # of the advantages, and of the value's targets
            assert np.array_equal(before, after) != moves
            assert (before != after)[MASK].all() == moves


# --- group baselines


@pytest.mark.parametrize("scale_rewards", [True, False])
def test_group_advantages_follow_a_loop(scale_rewards):
    scores = np.random.default_rng(0).random(12).astype(np.float32)
    valid = np.ones(12, bool)
    valid[[4, 8, 9, 10, 11]] = False  # one of the second group, all of the third
    expected = np.zeros(12)
    for start in (0, 4, 8):
        group = [i for i in range(start, start + 4) if valid[i]]
        for i in group:
            mean = sum(float(scores[j]) for j in group) / len(group)
            expected[i] = (scores[i] - mean) / (np.std(scores[group], ddof=1) + 1e-4 if scale_rewards else 1.0)
    found = grpo_advantages(
        jnp.asarray(np.where(valid, scores, np.nan)), jnp.asarray(valid), group_size=4, scale_rewards=scale_rewards
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_group_of_equals_teaches_nothing():
    np.testing.assert_allclose(grpo_advantages(jnp.full(8, 0.3), jnp.ones(8, bool), group_size=4), 0.0, atol=1e-3)
