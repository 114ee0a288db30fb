import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.models.feed_forward import ConvFeedForward

B, T, D, F = 2, 6, 5, 7


def make(kernel, causal):
    """The layer, parameters, and rows of which the second has padding that is no zeros."""
    layer = ConvFeedForward(D, F, kernel, "relu", True, 0.0, causal)
    rng = np.random.default_rng(0)
    states = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    mask = jnp.asarray([[1] * 6, [1] * 4 + [0] * 2], bool)
    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), states, mask, deterministic=True))["params"]
    params = {name: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for name, leaf in shapes.items()}
    return layer, params, states, mask


@pytest.mark.oracle
@pytest.mark.parametrize(("kernel", "causal"), [(3, True), (3, False), pytest.param(4, True, marks=pytest.mark.slow)])
def test_values_and_gradients_match_torch(kernel, causal):
    layer, params, states, mask = make(kernel, causal)
    before = kernel - 1 if causal else (kernel - 1) // 2
    weights = {name: torch.tensor(np.asarray(leaf), requires_grad=True) for name, leaf in params.items()}
    inputs = torch.tensor(np.asarray(states), requires_grad=True)
    hidden = inputs
    for name in ("conv_in", "conv_out"):
        hidden = torch.nn.functional.pad(
            (hidden * torch.tensor(np.asarray(mask))[..., None]).mT, (before, kernel - 1 - before)
        )
        hidden = torch.nn.functional.conv1d(hidden, weights[name].permute(2, 1, 0), weights[f"{name}_bias"]).mT.relu()
    direction = np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)
    (hidden * torch.tensor(direction)).sum().backward()

    def value(params, states):
        return jnp.sum(layer.apply({"params": params}, states, mask, deterministic=True) * direction)

    found = layer.apply({"params": params}, states, mask, deterministic=True)
    np.testing.assert_allclose(found, hidden.detach().numpy(), rtol=1e-5, atol=1e-5)
    by_params, by_states = jax.jit(jax.grad(value, argnums=(0, 1)))(params, states)
    np.testing.assert_allclose(by_states, inputs.grad.numpy(), rtol=1e-5, atol=1e-4)
    for name, gradient in by_params.items():
        np.testing.assert_allclose(gradient, weights[name].grad.numpy(), rtol=1e-5, atol=1e-4)
