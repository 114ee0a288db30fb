from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.types import EMOTIONS, Instance, Mean


def test_mean_counts_where_the_mask_is_true():
    mean = Mean.of(jnp.array([[1.0, 2.0], [3.0, 100.0]]), jnp.array([[True, True], [True, False]]))
    assert (float(mean.total), float(mean.weight), float(mean.value())) == (6.0, 3.0, 2.0)
    weighted = Mean.of(jnp.array([1, 2, 3]), jnp.array([True, True, False]), jnp.array([1, 3, 5]))
    assert (float(weighted.total), float(weighted.weight)) == (7.0, 4.0)


def test_parts_add_up_exactly():
    values, mask = np.arange(12.0, dtype=np.float32), np.arange(12) % 3 != 0
    parts = [Mean.of(jnp.asarray(values[i : i + 4]), jnp.asarray(mask[i : i + 4])) for i in (0, 4, 8)]
    whole = Mean.of(jnp.asarray(values), jnp.asarray(mask))
    total = parts[0] + parts[1] + parts[2] + Mean.zero()
    assert (float(total.total), float(total.weight)) == (float(whole.total), float(whole.weight))
    assert float(total.value()) == pytest.approx(values[mask].mean())


def test_masked_nan_leaks_neither_into_value_nor_gradient():
    mask = jnp.array([True, False])
    value, grad = jax.value_and_grad(lambda x: Mean.of(x, mask).value())(jnp.array([2.0, jnp.nan]))
    assert float(value) == 2.0
    np.testing.assert_array_equal(grad, [1.0, 0.0])


def test_mean_of_nothing_is_zero():
    assert float(Mean.of(jnp.array([5.0]), jnp.array([False])).value()) == 0.0


def test_integers_and_bools_are_summed_as_floats():
    mean = Mean.of(jnp.array([1, 0, 1]), jnp.array([True, True, True])).scale(0.5)
    assert mean.total.dtype == jnp.float32
    assert float(mean.value()) == pytest.approx(1 / 3)


def test_emotions_and_instances():
    assert len(EMOTIONS) == len(set(EMOTIONS)) == 32
    assert list(EMOTIONS) == sorted(EMOTIONS)
    assert Instance("hit:1#a#2", ("hello",), "", "sad").dialogue_id == "hit:1#a"
