"""KL estimators against PyTorch and against what they estimate; controllers against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.core.types import Mean
from empax.systems.emprl.kl import adapted, kl_penalty, sequence_kl

B, T = 4, 6
MASK = np.arange(T)[None] < np.array([6, 3, 1, 0])[:, None]


def example(seed=0, spread=0.8):
    """Log-probabilities [B, T] under a policy and a reference."""
    rng = np.random.default_rng(seed)
    log_probs = -rng.uniform(0.1, 5, size=(B, T)).astype(np.float32)
    return log_probs, (log_probs + spread * rng.normal(size=(B, T))).astype(np.float32)


TORCH = {"k1": lambda d: d, "k3": lambda d: torch.exp(-d) - 1 + d}


@pytest.mark.oracle
@pytest.mark.parametrize("estimator", TORCH)
def test_value_and_gradient_match_torch(estimator):
    policy, reference = example()
    weights = np.random.default_rng(1).normal(size=(B, T)).astype(np.float32)  # so that every token's gradient differs
    t_policy = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    per_token = TORCH[estimator](t_policy - torch.tensor(reference).double()) * torch.tensor(MASK)
    (per_token * torch.tensor(weights)).sum().backward()

    def total(policy, reference):
        kl = kl_penalty(policy, reference, jnp.asarray(MASK), estimator=estimator)
        return jnp.sum(kl * weights), kl

    grads, kl = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(jnp.asarray(policy), jnp.asarray(reference))
    np.testing.assert_allclose(kl, per_token.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads[0], t_policy.grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(grads[1], 0.0)  # the reference is frozen


@pytest.mark.parametrize("estimator", TORCH)
def test_masked_tokens_change_nothing_even_when_broken(estimator):
    policy, reference = example()
    poison = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0], np.float32)[None]

    @jax.jit
    def total(policy, reference):
        kl = kl_penalty(policy, reference, jnp.asarray(MASK), estimator=estimator)
        return jnp.sum(jnp.sin(kl)), kl

    found = jax.value_and_grad(total, has_aux=True)(
        *(jnp.asarray(np.where(MASK, x, sign * poison)) for x, sign in ((policy, 1), (reference, -1)))
    )
    clean = jax.value_and_grad(total, has_aux=True)(jnp.asarray(policy), jnp.asarray(reference))
    jax.tree.map(np.testing.assert_array_equal, found, clean)
    assert not np.asarray(found[1])[~MASK].any()
    assert np.abs(found[1]).max() > 0


def test_k3_keeps_its_digits_where_policies_hardly_differ():
    difference = jnp.full((1, 1), 1e-3)
    found = kl_penalty(difference, jnp.zeros((1, 1)), jnp.ones((1, 1), bool), estimator="k3")
    # 5e-7: 1 - exp(-x) - x loses 10% of it
    assert float(found[0, 0]) == pytest.approx(np.expm1(-1e-3) + 1e-3, rel=1e-3)


def test_the_kl_of_responses_is_summed_over_tokens_and_averaged_over_responses():
    kl = np.random.default_rng(3).normal(size=(B, T)).astype(np.float32)
    found = sequence_kl(jnp.asarray(np.where(MASK, kl, np.nan)), jnp.asarray(MASK))
    sums = [sum(float(kl[b, t]) for t in range(T) if MASK[b, t]) for b in range(B)]
    assert found.weight == 3.0  # the last row is a filler
    assert float(found.value()) == pytest.approx(sum(sums) / 3, rel=1e-5)


def mean_of(value, weight):
    return Mean(total=jnp.float32(value * weight), weight=jnp.float32(weight))


def test_the_adaptive_controller_follows_a_loop():
    update = jax.jit(lambda coefficient, kl: adapted(coefficient, kl, target=6.0, horizon=1000.0))
    found, expected = jnp.float32(0.2), 0.2
    for kl in (0.0, 4.7, 5.5, 6.0, 6.9, 30.0, -3.0, 7.3):
        found = update(found, mean_of(kl, 32.0))
        error = min(max(kl / 6.0 - 1.0, -0.2), 0.2)
        expected *= 1.0 + error * 32 / 1000
        assert float(found) == pytest.approx(expected, rel=1e-5)


def test_a_rollout_without_responses_changes_nothing():
    assert adapted(jnp.float32(0.3), Mean.zero(), target=6.0, horizon=10.0) == jnp.float32(0.3)


@pytest.mark.parametrize(
    ("p", "q", "steadier"),
    [((0.2, 0.3, 0.5), (0.25, 0.3, 0.45), "k3"), ((0.9, 0.05, 0.05), (0.05, 0.05, 0.9), "k1")],
)
def test_estimators_estimate_the_kl_of_two_distributions(p, q, steadier):
    p, q = np.array(p), np.array(q)
    expected = (p * np.log(p / q)).sum()
    log_p, log_q = (jnp.asarray(np.log(x), jnp.float32)[None] for x in (p, q))
    found = {
        name: np.asarray(kl_penalty(log_p, log_q, jnp.ones((1, 3), bool), estimator=name))[0] for name in ("k1", "k3")
    }
    for values in found.values():  # the expectation under the policy, exactly
        assert (p * values).sum() == pytest.approx(expected, rel=1e-4)
    assert found["k1"].min() < 0 <= found["k3"].min()
    variances = {name: (p * (values - expected) ** 2).sum() for name, values in found.items()}
    assert min(variances, key=variances.__getitem__) == steadier


def test_the_coefficient_of_an_emprl_run_with_little_kl_decays_as_noted():
    """0.2 to 0.072 in 1,600 rollouts of 32 with KL below 4.8 nats."""
    step = lambda _, beta: adapted(beta, mean_of(3.0, 32.0), target=6.0, horizon=10_000.0)  # noqa: E731
    assert float(jax.lax.fori_loop(0, 1600, step, jnp.float32(0.2))) == pytest.approx(0.072, abs=5e-4)
