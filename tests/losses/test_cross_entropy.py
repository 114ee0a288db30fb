import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.losses.cross_entropy import cross_entropy, token_log_probs

B, T, D, V = 3, 7, 5, 13


def example():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    embedding = (2 * rng.normal(size=(V, D))).astype(np.float32)
    target = rng.integers(0, V, size=(B, T))
    mask = rng.random((B, T)) < 0.6
    mask[:, 0] = True
    return hidden @ embedding.T, target, mask


@pytest.mark.oracle
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_value_and_gradients_match_torch(label_smoothing):
    logits, target, mask = example()
    given, real = torch.tensor(logits, requires_grad=True), torch.tensor(mask)
    expected = torch.nn.functional.cross_entropy(
        given[real], torch.tensor(target)[real], label_smoothing=label_smoothing
    )
    expected.backward()

    def loss(logits):
        return cross_entropy(logits, jnp.asarray(target), jnp.asarray(mask), label_smoothing=label_smoothing).value()

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(logits))
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, given.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.oracle
def test_token_log_probs_match_torch():
    logits, target, _ = example()
    logits = 30 * logits  # large: a naive exponential overflows
    expected = torch.log_softmax(torch.tensor(logits), -1).gather(-1, torch.tensor(target)[..., None])[..., 0]
    np.testing.assert_allclose(token_log_probs(jnp.asarray(logits), jnp.asarray(target)), expected, rtol=1e-5)


def test_masked_positions_change_nothing_even_when_broken():
    logits, target, mask = example()

    def loss(logits, target):
        return cross_entropy(logits, target, jnp.asarray(mask)).value()

    clean, clean_grad = jax.value_and_grad(loss)(jnp.asarray(logits), jnp.asarray(target))
    wild = np.where(mask[..., None], logits, 1e6).astype(np.float32)
    value, grad = jax.value_and_grad(loss)(jnp.asarray(wild), jnp.asarray(np.where(mask, target, 9999)))
    np.testing.assert_allclose(value, clean, rtol=1e-6)
    np.testing.assert_allclose(grad, clean_grad, rtol=1e-5, atol=1e-7)
    assert not np.any(np.asarray(grad)[~mask])
