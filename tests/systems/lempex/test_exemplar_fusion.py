"""LEMPEx' exemplars beside the states of the context (Eq. 4 to 6), and the sizes of its models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.core.tree import count_params
from empax.models.t5 import T5Encoder, encoder_alone, t5_from_scratch
from empax.models.transformer import EncoderDecoder
from empax.systems.lempex.exemplar_fusion import ExemplarFusion
from tests.systems.learning import random_like

V, D, K, P = 19, 8, 3, 5
CONFIG = t5_from_scratch(V, d_model=D, num_heads=2, head_dim=4, d_ff=12, num_encoder_layers=1, num_decoder_layers=1)
MODEL = ExemplarFusion(CONFIG)
RNG = np.random.default_rng(0)
STATES = jnp.asarray(RNG.normal(size=(2, 4, D)), jnp.float32)
EXEMPLARS = jnp.asarray(RNG.integers(1, V, (2, K, P)))
MASK = jnp.asarray(np.arange(P) < np.array([[[5], [2], [1]], [[3], [0], [0]]]))


@pytest.fixture(scope="module")
def params():
    return random_like(jax.eval_shape(MODEL.init, jax.random.key(0), STATES, EXEMPLARS, MASK)["params"], scale=0.5)


@jax.jit
def fused(params, states, exemplars, mask):
    return MODEL.apply({"params": params}, states, exemplars, mask)


def test_each_state_is_joined_to_the_mean_of_means(params):
    encoder = T5Encoder(encoder_alone(CONFIG))

    def loss(params, states, weights):
        return (fused(params, states, EXEMPLARS, MASK) * weights).sum()

    weights = jnp.asarray(RNG.normal(size=STATES.shape), jnp.float32)
    value, (grads, state_grads) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, STATES, weights)
    # The exemplars' states are ours; what becomes of them is torch's.
    read = jax.jit(encoder.apply)
    encoded = read({"params": params["encoder"]}, EXEMPLARS.reshape(-1, P), MASK.reshape(-1, P))
    encoded = torch.tensor(np.array(encoded).reshape(2, K, P, D))
    kernel, bias, states = (
        torch.tensor(np.array(x), requires_grad=True) for x in (params["kernel"], params["bias"], STATES)
    )
    lengths = [[5, 2, 1], [3]]
    means = [[encoded[b, k, :n].mean(0) for k, n in enumerate(row)] for b, row in enumerate(lengths)]
    chi = torch.stack([torch.stack(row).mean(0) for row in means])
    joined = torch.cat([states, chi[:, None].expand(-1, 4, -1)], dim=-1)
    expected = ((joined @ kernel + bias) * torch.tensor(np.array(weights))).sum()
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(grads["kernel"], kernel.grad, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads["bias"], bias.grad, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state_grads, states.grad, rtol=1e-4, atol=1e-5)
    # ... and that mean is not the one over all tokens at once.
    tokens = torch.cat([encoded[0, k, :n] for k, n in enumerate(lengths[0])])
    assert not np.allclose(chi[0], tokens.mean(0), atol=1e-2)


def test_order_and_padding_of_exemplars_change_nothing(params):
    expected = fused(params, STATES, EXEMPLARS, MASK)
    turned = fused(params, STATES, EXEMPLARS[:, ::-1], MASK[:, ::-1])
    np.testing.assert_allclose(turned, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(fused(params, STATES, jnp.where(MASK, EXEMPLARS, 7), MASK), expected)
    longer = [jnp.pad(part, ((0, 0), (0, 1), (0, 2))) for part in (EXEMPLARS, MASK)]
    np.testing.assert_allclose(fused(params, STATES, *longer), expected, rtol=1e-4, atol=1e-5)
    other = fused(params, STATES, EXEMPLARS[::-1], MASK[::-1])
    assert np.abs(other - expected).max() > 1e-2


def test_without_exemplars_the_layer_reads_zeros(params):
    found = fused(params, STATES, EXEMPLARS, jnp.zeros_like(MASK))
    expected = jnp.concatenate([STATES, jnp.zeros_like(STATES)], axis=-1) @ params["kernel"]
    np.testing.assert_allclose(found, expected + params["bias"][None, None], rtol=1e-5, atol=1e-5)


def test_it_begins_with_the_states_as_they_are():
    fresh = jax.jit(MODEL.init)(jax.random.key(0), STATES, EXEMPLARS, MASK)["params"]
    np.testing.assert_allclose(fused(fresh, STATES, EXEMPLARS, jnp.zeros_like(MASK)), STATES, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(fresh["kernel"])[D:]).max() > 1e-3


def sizes(model, *inputs):
    return count_params(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"])


def test_the_models_have_the_sizes_of_the_paper():
    config = t5_from_scratch(21_132)
    ids, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    generator = sizes(EncoderDecoder(config), ids, mask, ids)
    assert generator == 27_575_184  # "27.57M" (Table 2)
    fusion = sizes(ExemplarFusion(config), jnp.zeros((1, 1, 300)), ids[None], mask[None])
    # The paper counts a decoder of the exemplars' model that nothing uses; its 165.33M are these and a DPR of 110M.
    unused = generator - sizes(T5Encoder(encoder_alone(config)), ids, mask)
    speakers = 3 * 300
    assert generator + fusion + unused + speakers == 55_331_568
