"""Copied words beside said ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.models.copying import mixed_with_copies


@pytest.mark.oracle
@pytest.mark.parametrize(("slots", "backend"), [(0, "cpu"), (2, "cpu"), (2, "gpu")])
def test_the_mixture_matches_torch(slots, backend, monkeypatch):
    """Values and gradients; a word that the source has twice gets both shares, and padding none."""
    import torch

    monkeypatch.setattr(jax, "default_backend", lambda: backend)

    rng = np.random.default_rng(0)
    source = np.array([[3, 5, 3, 6 + max(slots - 1, 0), 0], [4, 2, 0, 0, 0]])
    source[0, 3] = 6 if slots else 1
    mask = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool)
    logits, scores = rng.normal(size=(2, 3, 6)).astype(np.float32), rng.normal(size=(2, 3, 5)).astype(np.float32)
    gate = rng.uniform(0.2, 0.8, (2, 3)).astype(np.float32)
    target = rng.integers(1, 5, (2, 3))

    def weigh(scores):
        return jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9))

    def loss(logits, gate, scores):
        found = mixed_with_copies(logits, gate, weigh(scores), jnp.asarray(source), slots=slots)
        return jnp.take_along_axis(found, jnp.asarray(target)[..., None], axis=2).sum(), found

    slopes = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, found), grads = slopes(*map(jnp.asarray, (logits, gate, scores)))
    given = [torch.tensor(array, requires_grad=True) for array in (logits, gate, scores)]
    weights = given[2].masked_fill(~torch.tensor(mask)[:, None], -1e9).softmax(dim=-1)
    said = torch.nn.functional.pad(given[1][..., None] * given[0].softmax(dim=-1), (0, slots))
    index = torch.tensor(source)[:, None].expand(-1, 3, -1)
    expected = said.scatter_add(2, index, (1 - given[1][..., None]) * weights).clamp(min=1e-9).log()
    expected.gather(2, torch.tensor(target)[..., None]).sum().backward()
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.exp(found).sum(axis=-1), 1.0, atol=1e-5)
    for grad, one in zip(grads, given, strict=True):
        np.testing.assert_allclose(grad, one.grad.numpy(), rtol=1e-4, atol=1e-6)
