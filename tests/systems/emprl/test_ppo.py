"""The losses of PPO and GRPO against PyTorch's autograd; what is watched, against loops over single tokens."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.systems.emprl.ppo import (
    distinct_share,
    entropy,
    explained_variance,
    kl_loss,
    near,
    policy_loss,
    value_loss,
)

B, T, V = 6, 5, 9
MASK = np.arange(T)[None] < np.array([5, 3, 1, 0, 4, 2])[:, None]  # the fourth row is a filler
REAL = [(b, t) for b in range(B) for t in range(T) if MASK[b, t]]
REDUCTIONS = ["tokens", "sequences", "sequence_means"]
POISON = np.array([np.nan, np.inf, -np.inf, 1e30, np.nan], np.float32)[None]


def example(seed=0):
    """New, old, reference log-probabilities and something like advantages, [B, T]; many ratios beyond 1 +- 0.2."""
    rng = np.random.default_rng(seed)
    old = -rng.uniform(0.5, 4, size=(B, T))
    new, reference = (old + 0.8 * rng.normal(size=(B, T)) for _ in range(2))
    return tuple(x.astype(np.float32) for x in (new, old, reference, rng.normal(size=(B, T))))


def torch_mean(per_token, reduction):
    mask = torch.tensor(MASK)
    per_token = torch.where(mask, per_token, 0.0)
    lengths = mask.sum(1)
    if reduction == "tokens":
        return per_token.sum() / lengths.sum()
    if reduction == "sequence_means":
        per_token = per_token / lengths.clamp(min=1)[:, None]
    return per_token.sum() / (lengths > 0).sum()


def torch_surrogate(new, old, advantages, clip):
    ratio = torch.exp(new - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def doubles(*arrays):
    """As float64 tensors, the first with a gradient."""
    first, *rest = (torch.tensor(np.asarray(x), dtype=torch.float64) for x in arrays)
    return first.requires_grad_(), *rest


def ours(loss, *arrays, **settings):
    """Value, gradients by every array, metrics."""
    return compiled(loss, **settings)(*map(jnp.asarray, arrays))


@functools.cache
def compiled(loss, **settings):
    @jax.jit
    def run(*arrays):
        def objective(*arrays):
            mean, metrics = loss(*arrays, jnp.asarray(MASK), **settings)
            return mean.value(), metrics

        places = tuple(range(len(arrays)))
        (value, metrics), grads = jax.value_and_grad(objective, argnums=places, has_aux=True)(*arrays)
        return value, grads, {name: mean.value() for name, mean in metrics.items()}

    return run


def check(found, expected, trained):
    expected.backward()
    value, (gradient, *others), _ = found
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, trained.grad, rtol=1e-5, atol=1e-7)
    for other in others:
        np.testing.assert_array_equal(other, 0.0)  # neither the old policy nor advantages nor targets are trained


@pytest.mark.oracle
@pytest.mark.parametrize(("reduction", "clip"), [(REDUCTIONS[0], 0.2), (REDUCTIONS[1], 0.2), (REDUCTIONS[2], 0.05)])
def test_policy_loss_matches_torch(reduction, clip):
    new, old, _, advantages = example()
    t_new, *rest = doubles(new, old, advantages)
    found = ours(policy_loss, new, old, advantages, clip=clip, reduction=reduction)
    check(found, torch_mean(torch_surrogate(t_new, *rest, clip), reduction), t_new)

    ratios = {place: math.exp(float(new[place]) - float(old[place])) for place in REAL}
    cut = [(r > 1 + clip and advantages[p] > 0) or (r < 1 - clip and advantages[p] < 0) for p, r in ratios.items()]
    gradient = np.asarray(found[1][0])
    np.testing.assert_array_equal([gradient[p] == 0.0 for p in REAL], cut)
    metrics = found[2]
    assert 0.2 < sum(cut) / len(REAL) < 0.8
    assert float(metrics["clip_fraction"]) == pytest.approx(sum(cut) / len(REAL))
    assert float(metrics["ratio"]) == pytest.approx(sum(ratios.values()) / len(REAL), rel=1e-5)
    kl = sum(r - 1 - math.log(r) for r in ratios.values()) / len(REAL)
    assert float(metrics["approximate_kl"]) == pytest.approx(kl, rel=1e-5)


OPTIONS = [
    {"epsilon_high": 0.6},
    {"importance_sampling_level": "sequence"},
    {"epsilon_high": 0.4, "importance_sampling_level": "sequence"},
]


@pytest.mark.oracle
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_grpo_match_torch(options):
    """As TRL's trainer writes them down, in doubles."""
    new, old, _, advantages = example(4)
    advantages = np.broadcast_to(advantages[:, :1], new.shape)
    t_new, t_old, t_advantages = doubles(new, old, advantages)
    mask = torch.tensor(MASK)
    log_ratio = torch.where(mask, t_new - t_old, 0.0)
    if options.get("importance_sampling_level") == "sequence":
        log_ratio = (log_ratio.sum(1) / mask.sum(1).clamp(min=1))[:, None].expand(B, T)
    coefficient = torch.exp(log_ratio)
    clipped = coefficient.clamp(1 - 0.2, 1 + options.get("epsilon_high", 0.2))
    expected = -torch.minimum(coefficient * t_advantages, clipped * t_advantages)
    found = ours(policy_loss, new, old, advantages, clip=0.2, reduction="sequence_means", **options)
    plain = ours(policy_loss, new, old, advantages, clip=0.2, reduction="sequence_means")
    check(found, torch_mean(expected, "sequence_means"), t_new)
    assert not np.allclose(found[1][0], plain[1][0])
    cut = (expected.detach() != -(coefficient * t_advantages).detach())[mask].double().mean().item()
    assert float(found[2]["clip_fraction"]) == pytest.approx(cut)


@pytest.mark.oracle
@pytest.mark.parametrize(("reduction", "clip"), [("tokens", 0.2), ("tokens", None), ("sequences", None)])
def test_value_loss_matches_torch(reduction, clip):
    values, old, _, noise = example(2)
    returns = old + noise
    t_values, t_old, t_returns = doubles(values, old, returns)
    error = (t_values - t_returns) ** 2
    share = 0.0
    if clip is not None:
        clipped = ((t_old + (t_values - t_old).clamp(-clip, clip)) - t_returns) ** 2
        share = (clipped > error)[torch.tensor(MASK)].double().mean().item()
        assert 0.1 < share < 0.9
        error = torch.maximum(error, clipped)
    found = ours(value_loss, values, old, returns, clip=clip, reduction=reduction)
    check(found, 0.5 * torch_mean(error, reduction), t_values)
    assert float(found[2]["value_clip_fraction"]) == pytest.approx(share)


@pytest.mark.oracle
@pytest.mark.parametrize("reduction", ["sequence_means", "sequences"])
def test_the_kl_of_grpo_matches_torch(reduction):
    new, _, reference, _ = example(2)
    found = ours(kl_loss, new, reference, reduction=reduction)
    t_new, t_reference = doubles(new, reference)
    k3 = torch.exp(t_reference - t_new) - 1 - (t_reference - t_new)
    check(found, torch_mean(k3, reduction), t_new)
    assert float(found[2]["token_kl"]) == pytest.approx(k3[torch.tensor(MASK)].mean().item(), rel=1e-5)


def policy(new, old, reference, other, mask, **settings):
    return policy_loss(new, old, other, mask, clip=0.2, **settings)


def clipped_value(new, old, reference, other, mask, **settings):
    return value_loss(new, old, other, mask, clip=0.2, **settings)


def plain_value(new, old, reference, other, mask, **settings):
    return value_loss(new, old, other, mask, clip=None, **settings)


def kl(new, old, reference, other, mask, reduction="sequence_means", **settings):
    return kl_loss(new, reference, mask, reduction=reduction, **settings)


def entropic(new, old, reference, other, mask, reduction="tokens"):
    return entropy(jnp.stack([new, old, reference, other], axis=2), mask, reduction=reduction), {}


LOSSES = [policy, clipped_value, plain_value, kl, entropic]


@pytest.mark.parametrize("reduction", ["tokens", "sequences"])
@pytest.mark.parametrize("loss", LOSSES)
def test_padding_and_fillers_change_nothing_even_when_broken(loss, reduction):
    arrays = example()
    clean = ours(loss, *arrays, reduction=reduction)
    wild = [np.where(MASK, x, np.roll(POISON, i, axis=1)) for i, x in enumerate(arrays)]
    jax.tree.map(np.testing.assert_array_equal, ours(loss, *wild, reduction=reduction), clean)
    assert not np.asarray(clean[1][0])[~MASK].any()
    assert np.asarray(clean[1][0])[MASK].any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_add_up(loss, reduction):
    arrays = tuple(map(jnp.asarray, example()))

    @jax.jit
    def whole(new, *rest):
        def total(new, *rest):
            mean, metrics = loss(new, *rest, reduction=reduction)
            return mean.total, {"loss": mean, **metrics}

        grad, sums = jax.grad(total, has_aux=True)(new, *rest)
        return grad, sums

    mask = jnp.asarray(MASK)
    grad, sums = whole(*arrays, mask)
    parts = [whole(*(x[rows] for x in arrays), mask[rows]) for rows in (slice(0, 2), slice(2, 4), slice(4, 6))]
    np.testing.assert_allclose(np.concatenate([part for part, _ in parts]), grad, rtol=1e-5, atol=1e-7)
    for name, mean in sums.items():
        first, second, third = (part[name] for _, part in parts)
        added = first + second + third
        np.testing.assert_allclose(added.total, mean.total, rtol=1e-5, atol=1e-6)
        assert added.weight == mean.weight


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_that_left_its_policy_contributes_nothing(loss):
    new, old, reference, other = example()
    new[0, 0] += 200.0  # the ratio is infinite
    arrays, mask = tuple(map(jnp.asarray, (new, old, reference, other))), jnp.asarray(MASK)

    @jax.jit
    def run(new):
        mean, _ = loss(new, *arrays[1:], near(new, arrays[1], mask))
        return mean.total, mean.weight

    gradient, weight = jax.grad(run, has_aux=True)(arrays[0])
    np.testing.assert_array_equal(gradient, 0.0)
    assert (run(arrays[0])[0], weight) == (0.0, 0.0)
    gentle = jnp.asarray(example()[0])
    kept, plain = run(gentle), loss(gentle, *arrays[1:], mask)[0]
    np.testing.assert_allclose(kept, (plain.total, plain.weight), rtol=1e-6)
    assert np.asarray(jax.grad(run, has_aux=True)(gentle)[0]).any()


def test_the_cap_is_on_the_mean_of_real_ratios():
    old = jnp.zeros((2, 2))
    new = jnp.log(jnp.asarray([[5.0, 22.9], [2.0, 1000.0]]))
    mask = jnp.asarray([[True, True], [True, False]])  # the mean is 9.97
    np.testing.assert_array_equal(near(new, old, mask), mask)
    assert not near(new + 0.01, old, mask).any()
    assert not near(jnp.full((2, 2), jnp.nan), old, mask).any()


def entropy_alone(logits, mask):
    return entropy(logits, mask), {}


@pytest.mark.oracle
def test_entropy_matches_torch():
    logits = 3 * np.random.default_rng(0).normal(size=(B, T, V)).astype(np.float32)
    t_logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    expected = torch.distributions.Categorical(logits=t_logits).entropy()[torch.tensor(MASK)].mean()
    expected.backward()
    found = ours(entropy_alone, logits)
    np.testing.assert_allclose(found[0], expected.item(), rtol=1e-5)
    np.testing.assert_allclose(found[1][0], t_logits.grad, rtol=1e-4, atol=1e-7)


def test_tokens_of_probability_0_have_no_entropy():
    logits = np.random.default_rng(0).normal(size=(B, T, V)).astype(np.float32)
    barred = np.concatenate([logits, np.full((B, T, 1), -np.inf, np.float32)], axis=2)
    plain, found = (ours(entropy_alone, x) for x in (logits, barred))
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(found[1][0][..., :V], plain[1][0], rtol=1e-5, atol=1e-8)
    assert not np.asarray(found[1][0])[..., V].any()


# --- what is watched


def test_explained_variance():
    values, returns, *_ = example()
    mask = jnp.asarray(MASK)
    real, targets = ([float(x[place]) for place in REAL] for x in (values, returns))
    residuals = [r - v for r, v in zip(targets, real, strict=True)]
    expected = 1 - np.var(residuals) / np.var(targets)
    poison = [jnp.asarray(np.where(MASK, x, POISON)) for x in (values, returns)]
    assert float(explained_variance(*poison, mask)) == pytest.approx(expected, rel=1e-5)
    assert explained_variance(jnp.asarray(returns) + 3.0, jnp.asarray(returns), mask) == pytest.approx(1.0, abs=1e-6)
    assert explained_variance(jnp.zeros((B, T)), jnp.asarray(returns), mask) == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(jnp.asarray(values), jnp.full((B, T), 0.5), mask) == 0.0


def test_distinct_responses_are_counted_as_python_counts_them():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2, size=(40, 3))
    mask = np.arange(3)[None] < rng.integers(0, 4, size=40)[:, None]
    rows = [tuple(row[real]) for row, real in zip(tokens, mask, strict=True) if real.any()]
    found = jax.jit(distinct_share)(jnp.asarray(tokens), jnp.asarray(mask))
    assert found.total == len(set(rows)) < len(rows)
    assert found.weight == len(rows) < 40
