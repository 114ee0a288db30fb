import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.models.arithmetic import add_bias, dropout, hashed_bits, rows_of_few


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_the_rate(rate):
    values = jnp.ones((400, 500))
    dropped = np.asarray(dropout(values, rate, jax.random.key(0)))
    share = (dropped == 0).mean()
    assert abs(share - rate) < 5 * np.sqrt(rate * (1 - rate) / values.size) + 1e-9
    np.testing.assert_allclose(dropped[dropped != 0], 1 / (1 - rate), rtol=1e-6)


def test_hashed_bits_look_random():
    bits = np.asarray(hashed_bits(jax.random.key(0), (64, 4096)))
    flat = np.unpackbits(bits.view(np.uint8))
    assert abs(flat.mean() - 0.5) < 5 * 0.5 / np.sqrt(flat.size)
    each = np.stack([(bits >> shift) & 1 for shift in range(32)]).reshape(32, -1)  # every bit is fair
    assert np.abs(each.mean(1) - 0.5).max() < 5 * 0.5 / np.sqrt(bits.size)
    kept = bits.astype(np.float64) / 2**32 - 0.5
    for other in (np.roll(kept, 1, axis=1), np.roll(kept, 1, axis=0), np.roll(kept, 64, axis=1)):
        assert abs((kept * other).mean() * 12) < 5 / np.sqrt(bits.size)  # neighbours are uncorrelated
    assert len(np.unique(bits)) > 0.9999 * bits.size
    again = np.asarray(hashed_bits(jax.random.key(1), (64, 4096))).astype(np.float64) / 2**32 - 0.5
    assert abs((kept * again).mean() * 12) < 5 / np.sqrt(bits.size)


def test_hashed_bits_depend_on_the_index_alone_not_on_the_batch():
    whole = hashed_bits(jax.random.key(0), (8, 3, 5))
    np.testing.assert_array_equal(whole[:2], hashed_bits(jax.random.key(0), (2, 3, 5)))


@pytest.mark.parametrize("shape", [(1, 3, 1, 5), (1, 3, 40, 5), (2, 3, 40, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_is_added_and_its_gradient_summed_in_float32(dtype, shape):
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.normal(size=(2, 3, 40, 5)), dtype)
    bias = jnp.asarray(rng.normal(size=shape), jnp.float32)
    weights = jnp.asarray(rng.random(size=(2, 3, 40, 5)), dtype)  # all positive: half precision would lose the small
    found, gradients = jax.value_and_grad(
        lambda values, bias: (add_bias(values, bias) * weights).astype(jnp.float32).sum(), argnums=(0, 1)
    )(values, bias)
    wide = np.asarray(values + bias.astype(dtype), np.float64) * np.asarray(weights, np.float64)
    np.testing.assert_allclose(found, wide.sum(), atol=(1e-6 if dtype == "float32" else 1e-3) * np.abs(wide).sum())
    assert [gradient.dtype for gradient in gradients] == [jnp.dtype(dtype), jnp.float32]
    np.testing.assert_array_equal(gradients[0], weights)
    repeated = tuple(axis for axis in range(4) if shape[axis] == 1)
    expected = np.asarray(weights, np.float64).sum(axis=repeated, keepdims=True)
    np.testing.assert_allclose(gradients[1], expected, rtol=1e-6)


def test_on_a_gpu_rows_of_a_small_table_learn_by_a_product_and_as_much(monkeypatch):
    table = jax.random.normal(jax.random.key(0), (8, 3))
    ids = jax.random.randint(jax.random.key(1), (20, 30), 0, 7)  # one row is never asked for

    def loss(table):
        return jnp.sum(jnp.sin(rows_of_few(table, ids)) * jnp.arange(1.0, 4.0)[None, None])

    def gradient():
        own = jax.value_and_grad(lambda table: loss(table))
        return own(table), str(jax.make_jaxpr(own)(table))

    (value, expected), program = gradient()
    assert "scatter-add" in program
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (other, found), program = gradient()
    assert "scatter" not in program
    assert other == value
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not found[7].any()
