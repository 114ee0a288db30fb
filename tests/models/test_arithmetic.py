import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.sharding import batch_sharding, make_mesh, rows_split_as
from empax.models.arithmetic import add_bias, dropout, hashed_bits, rows_of, sums_by_id


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


@pytest.mark.parametrize("rows", [8, 300])
def test_on_a_gpu_rows_of_a_table_learn_by_products_and_as_much(rows, monkeypatch):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(rows, 3)), jnp.float32)
    ids = rng.integers(0, rows - 1, (20, 35))  # the last row is never asked for
    ids[:, 20:] = 3  # and one through several blocks
    weights = rng.normal(size=(*ids.shape, 3)).astype(np.float32)
    expected = np.zeros((rows, 3))
    np.add.at(expected, ids, weights.astype(np.float64))

    def gradient():
        own = jax.value_and_grad(lambda table: jnp.sum(rows_of(table, jnp.asarray(ids)) * weights))
        return *own(table), str(jax.make_jaxpr(own)(table))

    value, plain, program = gradient()
    assert "scatter-add" in program
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    other, found, program = gradient()
    assert "scatter" not in program
    assert other == value
    for one in (plain, found):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=2e-5)
    assert not found[-1].any()


@pytest.mark.parametrize("count", [1, 127, 128, 129, 700])
def test_sums_by_id_are_those_of_numpy(count):
    rng = np.random.default_rng(count)
    values, ids = rng.normal(size=(count, 2)).astype(np.float32), rng.integers(0, 40, count)
    ids[rng.random(count) < 0.5] = 39
    expected = np.zeros((40, 2))
    np.add.at(expected, ids, values.astype(np.float64))
    np.testing.assert_allclose(sums_by_id(jnp.asarray(values), jnp.asarray(ids), 40), expected, atol=3e-5)


@pytest.mark.multidevice
def test_where_rows_lie_on_several_devices_the_gradient_is_left_to_xla(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gradient = jax.grad(lambda table: rows_of(table, jnp.arange(9)).sum())
    for devices in (1, 2):
        with rows_split_as(batch_sharding(make_mesh(devices=jax.devices()[:devices]))):
            assert ("scatter-add" in str(jax.make_jaxpr(gradient)(jnp.ones((300, 2))))) == (devices == 2)
            jax.clear_caches()
