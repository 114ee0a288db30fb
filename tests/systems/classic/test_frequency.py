"""Weights of words by their frequency, and the loss with them."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.systems.classic.frequency import frequency_weights, weighted_cross_entropy


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([0, 5, 3, 2], [2.0, 0.0, 0.8, 1.2]), ([0, 0], [1.0, 1.0]), ([4, 4], [1.0, 1.0]), ([7, 0], [0.0, 2.0])],
)
def test_weights_of_worked_numbers(counts, expected):
    np.testing.assert_allclose(frequency_weights(np.array(counts)), expected, rtol=1e-6)


@pytest.mark.oracle
def test_the_loss_is_torchs_with_weights_of_words():
    rng = np.random.default_rng(0)
    logits, target = rng.normal(size=(2, 4, 6)).astype(np.float32), rng.integers(0, 6, (2, 4))
    weights, mask = rng.uniform(size=6).astype(np.float32), np.array([[True] * 4, [True, True, False, False]])
    found = weighted_cross_entropy(
        jnp.asarray(logits), jnp.asarray(target, jnp.int32), jnp.asarray(mask), jnp.asarray(weights)
    )
    wanted = torch.nn.functional.cross_entropy(
        torch.tensor(logits[mask]), torch.tensor(target[mask]), weight=torch.tensor(weights), reduction="sum"
    )
    np.testing.assert_allclose(found.total, wanted.numpy(), rtol=1e-5)
    assert found.weight == 6
