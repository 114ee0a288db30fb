import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from empax.models.layers import ACTIVATIONS, relative_bucket, sinusoidal_positions


@pytest.mark.oracle
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 12)])
def test_relative_buckets_are_those_of_t5(bidirectional, buckets, farthest):
    distance = np.arange(-300, 301)[None, :]
    expected = T5Attention._relative_position_bucket(torch.tensor(distance), bidirectional, buckets, farthest)
    ours = relative_bucket(
        jnp.asarray(distance), bidirectional=bidirectional, num_buckets=buckets, max_distance=farthest
    )
    np.testing.assert_array_equal(ours, expected.numpy())


@pytest.mark.oracle
def test_gelu_keeps_small_values_in_half_precision():
    values = np.linspace(-4, 4, 101, dtype=np.float32)
    half = jnp.asarray(values, jnp.bfloat16)
    given = torch.tensor(np.asarray(half, np.float32), requires_grad=True)
    expected = torch.nn.functional.gelu(given)
    expected.sum().backward()
    value, gradient = ACTIVATIONS["gelu"](half), jax.grad(lambda x: ACTIVATIONS["gelu"](x).sum())(half)
    assert (value.dtype, gradient.dtype) == (jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(value, np.float32), expected.detach().numpy(), rtol=0.005, atol=1e-6)
    np.testing.assert_allclose(np.asarray(gradient, np.float32), given.grad.numpy(), rtol=0.005, atol=1e-3)


@pytest.mark.parametrize("size", [6, 7])
def test_sinusoids_turn_as_fast_as_the_paper_or_the_code_says(size):
    places, half = np.arange(50)[:, None], size // 2
    paper = np.asarray(sinusoidal_positions(jnp.arange(50), size, "paper"))
    # Source: Vaswani et al. 2017, Sec. 3.5, feature by feature.
    alternating = [(np.cos if i % 2 else np.sin)(places / 10_000 ** (2 * (i // 2) / size)) for i in range(size)]
    np.testing.assert_allclose(paper, np.concatenate(alternating[::2] + alternating[1::2], axis=1), atol=1e-5)
    code = np.asarray(sinusoidal_positions(jnp.arange(50), size))
    np.testing.assert_allclose(code[:, half - 1], np.sin(places[:, 0] / 10_000), atol=1e-5)
    np.testing.assert_allclose(code[:, 0], np.sin(places[:, 0]), atol=1e-5)
    np.testing.assert_allclose(code[:, half], np.cos(places[:, 0]), atol=1e-5)
    assert code.shape == (50, size)
    assert np.abs(code[:, 1] - paper[:, 1]).max() > 0.01
