"""Neighbours of a state: distributions and their mixture against plain loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.decoding.neighbours import States, copy_probabilities, interpolated, knn_probabilities

B, W, D, V, M = 2, 3, 5, 11, 40
RNG = np.random.default_rng(0)
STATES = RNG.normal(size=(B, W, D)).astype(np.float32)
LOGITS = RNG.normal(size=(B, W, V)).astype(np.float32)


def looped(state, keys, tokens, temperature, num=None):
    """The distribution of one state, in 64 bits."""
    distances = [float(((state.astype(np.float64) - key) ** 2).mean()) for key in keys]
    order = sorted(range(len(keys)), key=distances.__getitem__)[:num]
    probs = np.zeros(V)
    for i in order:
        probs[tokens[i]] += np.exp(-distances[i] / temperature)
    return probs / probs.sum() if order else probs


@pytest.mark.oracle
@pytest.mark.parametrize(("num", "temperature"), [(1, 0.1), (4, 0.3), (40, 2.0), (100, 1.0)])
def test_the_nearest_states_of_a_corpus_say_what_came_in_them(num, temperature):
    keys, tokens = RNG.normal(size=(M, D)).astype(np.float32), RNG.integers(0, V, M).astype(np.int32)
    corpus = States(jnp.asarray(keys), jnp.asarray(tokens))
    spread = functools.partial(knn_probabilities, num=num, temperature=temperature, vocab_size=V)
    found = jax.jit(spread)(jnp.asarray(STATES), corpus)
    expected = [[looped(state, keys, tokens, temperature, num) for state in row] for row in STATES]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.oracle
def test_all_tokens_of_an_examples_own_exemplars_are_copied_from():
    keys, tokens = RNG.normal(size=(B, M, D)).astype(np.float32), RNG.integers(0, V, (B, M)).astype(np.int32)
    mask = RNG.random((B, M)) < 0.6
    mask[1] = False  # an example without exemplars
    keys = np.where(mask[..., None], keys, 1e3).astype(np.float32)
    found = copy_probabilities(
        jnp.asarray(STATES), States(*map(jnp.asarray, (keys, tokens, mask))), temperature=0.4, vocab_size=V
    )
    expected = [[looped(state, keys[b][mask[b]], tokens[b][mask[b]], 0.4) for state in STATES[b]] for b in range(B)]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.oracle
def test_a_mixture_is_a_mixture_of_probabilities_and_an_absent_part_leaves_its_weight():
    one = RNG.dirichlet(np.ones(V), (B, W))
    two = RNG.dirichlet(np.ones(V), (B, W)) * (np.arange(V) < 3)
    two = two / two.sum(axis=-1, keepdims=True)
    two[1] = 0.0
    found = interpolated(
        jnp.asarray(LOGITS), [(0.2, jnp.asarray(one, jnp.float32)), (0.5, jnp.asarray(two, jnp.float32))]
    )
    model = np.exp(LOGITS.astype(np.float64))
    model /= model.sum(axis=-1, keepdims=True)
    expected = 0.3 * model + 0.2 * one + 0.5 * two
    expected[1] = 0.8 * model[1] + 0.2 * one[1]
    np.testing.assert_allclose(np.exp(found), expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(jax.nn.logsumexp(found, axis=-1), 0.0, atol=1e-5)
