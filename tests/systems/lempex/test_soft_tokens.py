"""Distributions in place of tokens: what they sum to, what they see, where they are put."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.systems.lempex.losses import soft_tokens, splice

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(RNG.normal(size=(2, 4, 6)), jnp.float32)


def test_expectations_are_softmax_over_the_vocabulary():
    exps = np.exp(np.asarray(LOGITS) / 0.5)
    found = soft_tokens(LOGITS, temperature=0.5)
    np.testing.assert_allclose(found, exps / exps.sum(axis=2, keepdims=True), rtol=1e-5)


def test_the_slip_over_time_is_no_distribution_and_leaks_the_future():
    literal = soft_tokens(LOGITS, axis="time")
    np.testing.assert_allclose(literal.sum(axis=1), 1.0, rtol=1e-5)
    assert np.abs(literal.sum(axis=2) - 1.0).max() > 0.1
    np.testing.assert_allclose(soft_tokens(LOGITS).sum(axis=2), 1.0, rtol=1e-5)
    later = LOGITS.at[:, 3, 2].add(2.0)
    assert np.abs(soft_tokens(later, axis="time")[:, :3] - literal[:, :3]).max() > 0.01
    np.testing.assert_array_equal(soft_tokens(later)[:, :3], soft_tokens(LOGITS)[:, :3])


def test_samples_are_one_hot_and_pass_the_gradient_of_probabilities():
    weights = jnp.asarray(RNG.normal(size=LOGITS.shape), jnp.float32)
    rng = jax.random.key(0)

    def straight(logits):
        return (soft_tokens(logits, form="straight_through", temperature=0.7, rng=rng) * weights).sum()

    def soft(logits):
        noisy = logits + jax.random.gumbel(rng, logits.shape)
        return (jax.nn.softmax(noisy / 0.7) * weights).sum()

    found = np.asarray(soft_tokens(LOGITS, form="straight_through", rng=rng))
    np.testing.assert_allclose(found, np.eye(6)[found.argmax(axis=2)], atol=1e-6)
    slopes = (jax.jit(jax.grad(function))(LOGITS) for function in (straight, soft))
    np.testing.assert_allclose(*slopes, rtol=1e-5, atol=1e-7)
    many = jnp.broadcast_to(LOGITS[:1, :1], (4000, 1, 6))
    shares = np.asarray(soft_tokens(many, form="straight_through", rng=rng)).mean(axis=(0, 1))
    np.testing.assert_allclose(shares, jax.nn.softmax(LOGITS[0, 0]), atol=0.03)
    certain = soft_tokens(LOGITS, form="straight_through")
    np.testing.assert_array_equal(certain.argmax(axis=2), LOGITS.argmax(axis=2))


@pytest.mark.parametrize(("start", "count"), [(0, 2), (3, 4), (2, 0), (5, 4)])
def test_soft_rows_take_the_places_of_the_response(start, count):
    embedded = np.arange(7 * 3, dtype=np.float32).reshape(1, 7, 3)
    soft = -np.arange(4 * 3, dtype=np.float32).reshape(1, 4, 3)
    expected = embedded.copy()
    for t in range(count):
        if start + t < 7:
            expected[0, start + t] = soft[0, t]
    found = splice(jnp.asarray(embedded), jnp.asarray(soft), jnp.array([start]), jnp.array([count]))
    np.testing.assert_array_equal(found, expected)
