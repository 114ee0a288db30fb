from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from empax.core.tree import count_bytes, count_params, hash_tree, map_named, named_leaves

TREE = {"encoder": {"layers": {"kernel": np.ones((2, 3), np.float32)}}, "bias": np.zeros(4, np.float16)}


def test_names():
    assert list(named_leaves(TREE)) == ["bias", "encoder/layers/kernel"]
    shown = map_named(lambda name, leaf: f"{name}{leaf.ndim}", TREE)
    assert shown["encoder"]["layers"]["kernel"] == "encoder/layers/kernel2"
    assert list(named_leaves(({"a": 1}, [2]))) == ["0/a", "1/0"]


def test_sizes_also_of_shapes():
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, TREE))
    for tree in (TREE, shapes):
        assert count_params(tree) == 10
        assert count_bytes(tree) == 2 * 3 * 4 + 4 * 2


def test_hash_sees_values_names_shapes_and_types():
    changed = [
        {**TREE, "bias": np.full(4, 1e-7, np.float16)},
        {**TREE, "bias": np.zeros((2, 2), np.float16)},
        {**TREE, "bias": np.zeros(4, np.int16)},
        {"encoder": TREE["encoder"], "scale": TREE["bias"]},
    ]
    assert len({hash_tree(tree) for tree in [TREE, *changed]}) == 5
    assert hash_tree(jax.tree.map(jnp.asarray, TREE)) == hash_tree(TREE)
