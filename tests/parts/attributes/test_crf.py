"""The CRF against enumeration of all label sequences."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.parts.attributes.crf import log_likelihood, log_partition, sequence_score, viterbi

EMISSIONS = np.array([[0.13, -0.13], [0.64, 0.10], [-0.54, 0.36], [1.30, 0.95]], np.float32)
TRANSITIONS = np.array([[-0.70, -1.27], [-0.62, 0.04]], np.float32)


def test_worked_numbers():
    emissions, transitions, mask = jnp.asarray(EMISSIONS[None]), jnp.asarray(TRANSITIONS), jnp.ones((1, 4), bool)
    assert float(log_partition(emissions, transitions, mask)[0]) == pytest.approx(2.755334, abs=1e-5)
    labels = jnp.asarray([[0, 1, 1, 0]])
    assert float(log_likelihood(emissions, transitions, labels, mask)[0]) == pytest.approx(-2.715334, abs=1e-5)
    np.testing.assert_array_equal(viterbi(emissions, transitions, mask)[0], [1, 1, 1, 1])


def enumerated(emissions, transitions, labels):
    """log p(labels), and the likeliest sequence, of a row whose positions are all real; torch."""
    count = emissions.shape[1]

    def score(path):
        total = sum(emissions[t, label] for t, label in enumerate(path))
        return total + sum(transitions[a, b] for a, b in itertools.pairwise(path))

    paths = list(itertools.product(range(count), repeat=len(emissions)))
    scores = torch.stack([score(path) for path in paths])
    return score(labels) - torch.logsumexp(scores, 0), paths[int(scores.argmax())]


MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 1, 0, 0]], bool)


@jax.jit
def value_and_gradient(emissions, transitions, labels):
    def total(emissions, transitions):
        found = log_likelihood(emissions, transitions, labels, jnp.asarray(MASK))
        return found.sum(), found

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(emissions, transitions)


decode = jax.jit(lambda emissions, transitions: viterbi(emissions, transitions, jnp.asarray(MASK)))


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(6))
def test_value_path_and_gradient_are_those_of_the_enumeration(seed):
    """Of real positions alone, wherever they are."""
    rng = np.random.default_rng(seed)
    emissions = rng.normal(size=(*MASK.shape, 3)).astype(np.float32)
    transitions = rng.normal(size=(3, 3)).astype(np.float32)
    labels = rng.integers(0, 3, MASK.shape)
    t_emissions, t_transitions = (torch.tensor(values, requires_grad=True) for values in (emissions, transitions))
    rows, paths = [], []
    for b, real in enumerate(MASK):
        found, path = enumerated(t_emissions[b, np.flatnonzero(real)], t_transitions, [*map(int, labels[b, real])])
        rows.append(found)
        paths.append(path)
    expected = torch.stack(rows)
    expected.sum().backward()

    given = jnp.asarray(emissions), jnp.asarray(transitions)
    (_, found), gradients = value_and_gradient(*given, jnp.asarray(labels))
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients[0], t_emissions.grad.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[1], t_transitions.grad.numpy(), rtol=1e-4, atol=1e-5)
    decoded = np.asarray(decode(*given))
    for b, path in enumerate(paths):
        np.testing.assert_array_equal(decoded[b, MASK[b]], path)
        assert not decoded[b, ~MASK[b]].any()


def test_a_row_without_a_real_position_counts_nothing():
    emissions, mask = jnp.ones((1, 2, 2)), jnp.zeros((1, 2), bool)
    transitions, labels = jnp.asarray(TRANSITIONS), jnp.ones((1, 2), int)
    for found in (log_partition(emissions, transitions, mask), sequence_score(emissions, transitions, labels, mask)):
        assert float(found[0]) == 0.0
    np.testing.assert_array_equal(viterbi(emissions, transitions, mask), [[0, 0]])
