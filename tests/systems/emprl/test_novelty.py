"""What responses add to Distinct-2: finite differences of the metric itself."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.systems.emprl.expectations import Novelty
from empax.systems.emprl.rewards import make_reward
from empax.systems.emprl.settings import RewardSettings

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
    gold, answers = said(300), said(40, seed=1)
    rates = pair_rates(gold)
    answers = [ids for ids in answers if set(itertools.pairwise(ids)) <= set(rates)]
    assert len(answers) > 5
    share = distinct_2(rates)
    novelty = Novelty.of(gold, outputs=OUTPUTS, share=share)
    tokens = np.zeros((len(answers) + 1, 10), np.int32)  # the last row is a filler
    for row, ids in zip(tokens, answers, strict=False):
        row[: len(ids)] = ids
    rollout = types.SimpleNamespace(tokens=jnp.asarray(tokens), mask=jnp.asarray(tokens > 0))
    found = jax.jit(lambda params: novelty(params, rollout))(novelty.params)
    step, scale = 1e-6, sum(rates.values()) / (sum(map(len, gold)) / len(gold) - 1)
    for ids, gained in zip(answers, found, strict=False):
        more = dict(rates)
        for pair in itertools.pairwise(ids):
            more[pair] = more.get(pair, 0.0) + step
        np.testing.assert_allclose(gained, scale * (distinct_2(more) - share) / step, atol=2e-4)
    assert np.ptp(found) > 0.1
    assert found[-1] == 0.0


def test_the_share_is_that_of_responses_which_are_drawn():
    """The formula stands for the metric: of so many responses drawn from the same people it is about what they have."""
    everyone = said(3000, seed=2)
    counted = []
    for start in range(0, 3000, OUTPUTS):
        pairs = [pair for ids in everyone[start : start + OUTPUTS] for pair in itertools.pairwise(ids)]
        counted.append(len(set(pairs)) / len(pairs))
    np.testing.assert_allclose(distinct_2(pair_rates(everyone)), np.mean(counted), rtol=0.02)


def test_a_part_of_the_reward_counts_gold_responses(toy):
    settings = [RewardSettings("novelty", 0.5, outputs=1, share=0.0)]
    reward = make_reward(
        settings, tokenizer=toy.Words(), instances=[], judges=lambda stage: None, responses=lambda: ["w20"] * 4
    )
    assert not reward.on_host
    tokens = jnp.asarray([[20, EOS, 0], [20, 20, EOS]])
    rollout = types.SimpleNamespace(tokens=tokens, mask=tokens > 0)
    # Nobody has said "w20 w20".
    np.testing.assert_allclose(reward.rate(reward.frozen(), rollout), [0.5 * np.exp(-1.0)] * 2, rtol=1e-6)


@pytest.mark.parametrize("changes", [{"outputs": 0}, {"share": 1.0}, {"share": -0.1}])
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError, match=r"outputs = 0 must be at least 1|share = .* must lie in \[0, 1\)"):
        RewardSettings("novelty", **changes)
