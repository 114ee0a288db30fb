import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.losses.cross_entropy import cross_entropy, fused_cross_entropy, token_log_probs

B, T, D, V = 3, 7, 5, 13


def example():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    embedding = (2 * rng.normal(size=(V, D))).astype(np.float32)
    target = rng.integers(0, V, size=(B, T))
    mask = rng.random((B, T)) < 0.6
    mask[:, 0] = True
    return hidden, embedding, target, mask


def torch_loss(hidden, embedding, target, mask, label_smoothing):
    hidden, embedding = torch.tensor(hidden, requires_grad=True), torch.tensor(embedding, requires_grad=True)
    logits = (hidden @ embedding.T)[torch.tensor(mask)]
    loss = torch.nn.functional.cross_entropy(
        logits, torch.tensor(target)[torch.tensor(mask)], label_smoothing=label_smoothing
    )
    loss.backward()
    return loss.item(), hidden.grad.numpy(), embedding.grad.numpy()


@pytest.mark.oracle
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
def test_value_and_gradients_match_torch(chunk, label_smoothing):
    hidden, embedding, target, mask = example()
    expected, hidden_grad, embedding_grad = torch_loss(hidden, embedding, target, mask, label_smoothing)

    def loss(hidden, embedding):
        if chunk is None:
            return cross_entropy(hidden @ embedding.T, target, mask, label_smoothing=label_smoothing).value()
        fused = fused_cross_entropy(hidden, embedding, target, mask, chunk=chunk, label_smoothing=label_smoothing)
        return fused.value()

    target, mask = jnp.asarray(target), jnp.asarray(mask)
    arrays = jnp.asarray(hidden), jnp.asarray(embedding)
    np.testing.assert_allclose(loss(*arrays), expected, rtol=1e-5)
    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arrays)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads[0], hidden_grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads[1], embedding_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.oracle
def test_token_log_probs_match_torch():
    hidden, embedding, target, _ = example()
    logits = 30 * hidden @ embedding.T  # large: a naive exponential overflows
    expected = torch.log_softmax(torch.tensor(logits), -1).gather(-1, torch.tensor(target)[..., None])[..., 0]
    np.testing.assert_allclose(token_log_probs(jnp.asarray(logits), jnp.asarray(target)), expected, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_masked_positions_change_nothing_even_when_broken(fused):
    hidden, embedding, target, mask = example()

    def loss(hidden, target):
        if fused:
            return fused_cross_entropy(hidden, jnp.asarray(embedding), target, jnp.asarray(mask), chunk=2).value()
        return cross_entropy(hidden @ embedding.T, target, jnp.asarray(mask)).value()

    clean, clean_grad = jax.value_and_grad(loss)(jnp.asarray(hidden), jnp.asarray(target))
    wild = np.where(mask[..., None], hidden, 1e6).astype(np.float32)
    value, grad = jax.value_and_grad(loss)(jnp.asarray(wild), jnp.asarray(np.where(mask, target, 9999)))
    np.testing.assert_allclose(value, clean, rtol=1e-6)
    np.testing.assert_allclose(grad, clean_grad, rtol=1e-5, atol=1e-7)
    assert not np.any(np.asarray(grad)[~mask])


def test_nothing_to_count_is_zero():
    hidden, embedding, target, mask = example()
    arrays = jnp.asarray(hidden), jnp.asarray(embedding), jnp.asarray(target), jnp.zeros(mask.shape, bool)
    loss, grad = jax.value_and_grad(lambda h: fused_cross_entropy(h, *arrays[1:], chunk=4).value())(arrays[0])
    assert loss == 0.0
    assert not np.any(np.asarray(grad))


def test_gradient_is_scaled_by_what_follows():
    hidden, embedding, target, mask = map(jnp.asarray, example())

    def loss(hidden, factor):
        return factor * fused_cross_entropy(hidden, embedding, target, mask, chunk=4).value() ** 2

    value = fused_cross_entropy(hidden, embedding, target, mask, chunk=4).value()
    plain = jax.grad(lambda h: cross_entropy(h @ embedding.T, target, mask).value())(hidden)
    np.testing.assert_allclose(jax.grad(loss)(hidden, 3.0), 6.0 * value * plain, rtol=1e-4, atol=1e-6)


def test_never_holds_all_logits():
    hidden = jax.ShapeDtypeStruct((4, 64, 16), jnp.float32)
    embedding = jax.ShapeDtypeStruct((5000, 16), jnp.float32)
    target, mask = jax.ShapeDtypeStruct((4, 64), jnp.int32), jax.ShapeDtypeStruct((4, 64), jnp.bool_)

    def loss(hidden, embedding, target, mask):
        return fused_cross_entropy(hidden, embedding, target, mask, chunk=8).value()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, embedding, target, mask).compile()
    all_logits = 4 * 64 * 5000 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < all_logits


def test_chunk_must_be_positive():
    hidden, embedding, target, mask = map(jnp.asarray, example())
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        fused_cross_entropy(hidden, embedding, target, mask, chunk=0)
