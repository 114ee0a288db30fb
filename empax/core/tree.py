"""Parameter trees: names, sizes, hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from empax.core.types import Params


def path_name(path: tuple[Any, ...]) -> str:
    """Formats a key path as "encoder/layers/attention/query"."""
    return "/".join(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)


def map_named(function: Callable[[str, Any], Any], tree: Params) -> Params:
    """Maps `function(name, leaf)` over `tree`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path_name(path), leaf), tree)


def named_leaves(tree: Params) -> dict[str, Any]:
    """Returns the leaves by name, in the tree's order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def count_params(tree: Params) -> int:
    """Returns the number of values in the tree; works on shapes too."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def count_bytes(tree: Params) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def hash_tree(tree: Params) -> str:
    """Returns a short hash of names, shapes, dtypes and bytes; equal trees have equal hashes."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(tree).items():
        array = np.asarray(leaf)
        digest.update(f"{name}:{array.shape}:{array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
