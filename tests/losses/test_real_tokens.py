"""Losses of real tokens alone: the values and gradients of all cells, whatever their number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.machine import planned_for
from empax.core.sharding import batch_sharding, make_mesh, rows_split_as
from empax.losses import real_tokens
from empax.losses.cross_entropy import cross_entropy
from empax.losses.real_tokens import PARTS, over_real_tokens

B, T, D, V = 4, 6, 5, 13
SIZE = B * T // PARTS


@pytest.fixture(autouse=True)
def few_cells(monkeypatch):
    monkeypatch.setattr(real_tokens, "LEAST", 1)


RNG = np.random.default_rng(0)
TARGET = jnp.asarray(RNG.integers(0, V, (B, T)))
PARAMS = {
    "table": jnp.asarray(RNG.normal(size=(V, D)), jnp.float32),
    "bias": jnp.asarray(RNG.normal(size=V), jnp.float32),
    "hidden": jnp.asarray(RNG.normal(size=(B, T, D)), jnp.float32),
    "scale": jnp.asarray(RNG.normal(size=(B, T)), jnp.float32),
}


def first(count):
    """A mask with `count` cells, scattered."""
    return jnp.asarray(np.random.default_rng(1).permutation(B * T).reshape(B, T) < count)


def losses(params, mask, whole, seen=None):
    def function(mask, states, target):
        if seen is not None:
            seen.append(mask.shape)
        hidden, scale = states
        logits = jnp.einsum("BTD,VD->BTV", hidden, params["table"]) * scale[..., None] + params["bias"][None, None]
        smoothed = cross_entropy(logits, target, mask, label_smoothing=0.1)
        return smoothed, {"nll": cross_entropy(logits, target, mask)}

    given = mask, [params["hidden"], params["scale"]], TARGET
    loss, metrics = function(*given) if whole else over_real_tokens(function, *given)
    return 3.0 * loss.total, (loss, metrics)


GRADIENTS = jax.jit(jax.value_and_grad(losses, has_aux=True), static_argnums=2)


@pytest.mark.parametrize("count", [0, 1, SIZE, SIZE + 1, B * T - 1, B * T])
def test_values_and_gradients_are_those_of_all_cells(count):
    mask = first(count)
    expected, found = (GRADIENTS(PARAMS, mask, whole) for whole in (True, False))
    jax.tree.map(lambda e, f: np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5), expected, found)
    assert found[0][1][0].weight == count
    np.testing.assert_array_equal(np.abs(found[1]["hidden"]).sum(axis=2) > 0, mask)
    evaluated = jax.jit(losses, static_argnums=2)(PARAMS, mask, False)
    jax.tree.map(lambda e, f: np.testing.assert_allclose(f, e, rtol=1e-6), found[0], evaluated)


@pytest.mark.parametrize("within", [jax.jit, jax.checkpoint])
def test_a_function_that_is_traced_before_its_gradient_is_taken(within):
    mask = first(SIZE + 1)
    found = jax.grad(within(lambda params: losses(params, mask, whole=False)[0]))(PARAMS)
    expected = GRADIENTS(PARAMS, mask, True)[1]
    jax.tree.map(lambda e, f: np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5), expected, found)


def test_few_cells_are_computed_at_once(monkeypatch):
    seen = []
    monkeypatch.setattr(real_tokens, "LEAST", B * T + 1)
    jax.eval_shape(lambda: losses(PARAMS, first(1), False, seen))
    assert seen == [(B, T)]


def test_padding_is_not_computed():
    """A broken state of padding in a part without real tokens reaches not even a gradient."""
    mask = first(SIZE)
    broken = {**PARAMS, "hidden": jnp.where(mask[..., None], PARAMS["hidden"], jnp.nan)}
    for found in (GRADIENTS(broken, mask, False), GRADIENTS(PARAMS, mask, False)):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert not np.isfinite(GRADIENTS(broken, mask, True)[1]["table"]).all()


def test_sizes_that_the_parts_do_not_divide():
    """Of 24 cells without the last column."""
    cut = {**PARAMS, "hidden": PARAMS["hidden"][:, :5], "scale": PARAMS["scale"][:, :5]}
    mask = first(B * T)[:, :5]

    def loss(params, whole):
        function = lambda mask, states, target: (  # noqa: E731
            cross_entropy(states[0] @ params["table"].T, target, mask), {})  # fmt: skip
        given = mask, [params["hidden"]], TARGET[:, :5]
        return (function(*given) if whole else over_real_tokens(function, *given))[0].total

    expected, found = (jax.jit(jax.value_and_grad(loss), static_argnums=1)(cut, whole) for whole in (True, False))
    jax.tree.map(lambda e, f: np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5), expected, found)


def test_a_frozen_parameter_costs_no_gradient():
    def products(learned):
        rest = {name: leaf for name, leaf in PARAMS.items() if name not in learned}
        grad = jax.grad(lambda own: losses({**own, **rest}, first(3), whole=False)[0])
        return str(jax.make_jaxpr(grad)({name: PARAMS[name] for name in learned})).count("dot_general")

    assert products(["table", "hidden"]) == products(["table"]) == products(["hidden"]) + 1


@pytest.mark.multidevice
def test_split_rows_and_accelerators_have_all_cells():
    def shapes():
        seen = []
        jax.eval_shape(lambda p: losses(p, first(3), False, seen), PARAMS)
        return set(seen)

    assert shapes() == {(SIZE, 1)}
    for device in ("gpu", "tpu"):
        with planned_for(device):
            assert shapes() == {(B, T)}
    for devices, shape in ((1, (SIZE, 1)), (2, (B, T))):
        with rows_split_as(batch_sharding(make_mesh(devices=jax.devices()[:devices]))):
            assert shapes() == {shape}
