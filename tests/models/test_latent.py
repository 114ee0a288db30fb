import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.models.latent import draw, gaussian_kl


def test_worked_number():
    found = gaussian_kl((jnp.asarray([[0.3, -0.2]]), jnp.asarray([[0.1, -0.5]])), (jnp.zeros((1, 2)),) * 2)
    assert float(found[0]) == pytest.approx(0.120851, abs=1e-6)


@pytest.mark.oracle
def test_it_is_torchs_between_any_two_and_0_between_equal_ones():
    rng = np.random.default_rng(0)
    first, second = ([rng.normal(size=(3, 4)).astype(np.float32) for _ in range(2)] for _ in range(2))
    normals = [
        torch.distributions.Normal(torch.tensor(m), torch.exp(0.5 * torch.tensor(v))) for m, v in (first, second)
    ]
    expected = torch.distributions.kl_divergence(*normals).sum(-1).numpy()
    pairs = [tuple(map(jnp.asarray, gaussian)) for gaussian in (first, second)]
    np.testing.assert_allclose(gaussian_kl(*pairs), expected, rtol=1e-5)
    np.testing.assert_allclose(gaussian_kl(pairs[0], pairs[0]), 0.0, atol=1e-6)


def test_a_draw_has_mean_and_variance_and_passes_gradients():
    mean, log_var = jnp.full((50_000, 1), 0.3), jnp.full((50_000, 1), -0.5)
    values = draw((mean, log_var), jax.random.key(0))
    assert float(values.mean()) == pytest.approx(0.3, abs=3 * np.exp(-0.25) / 50_000**0.5)
    assert float(values.var()) == pytest.approx(np.exp(-0.5), rel=3 * (2 / 50_000) ** 0.5)
    np.testing.assert_array_equal(draw((mean, log_var), None), mean)
    slope = jax.grad(lambda v: draw((mean[:1], v), jax.random.key(1)).sum())(log_var[:1])
    assert float(slope[0, 0]) != 0.0
