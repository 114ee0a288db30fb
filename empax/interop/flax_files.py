"""Weights of the Flax models that Transformers had until version 5: `flax_model.msgpack`, in one file or in shards.

Source of the names: transformers 4, modeling_flax_pytorch_utils.py, which converted one into the other.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from flax import serialization
from flax.traverse_util import flatten_dict

from empax.core.files import DataError, system_errors
from empax.data.model_files import check_whole

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, EOFError, MemoryError)
"""Exceptions that msgpack and Flax raise on malformed bytes or on a message that does not hold arrays."""

_RENAMED = {"kernel": "weight", "embedding": "weight", "scale": "weight"}


def read_flax(file: Path) -> dict[str, np.ndarray]:
    """Returns the parameters of one msgpack file in the names and layout of the PyTorch model.

    In that layout kernels are transposed, GPT-2's too, and embeddings and norm scales are called "weight".

    Raises:
      DataError: the file is truncated, not written by Flax, or holds no arrays.
    """
    check_whole(file)
    with system_errors(file, "read"):
        content = file.read_bytes()
    try:
        tree = serialization.msgpack_restore(content)
    except _MALFORMED as error:
        raise DataError(
            f"{file} is not a whole msgpack file of Flax ({type(error).__name__}: {error}); fetch the model again."
        ) from error
    if isinstance(tree, dict) and set(tree) == {"params"}:
        tree = tree["params"]
    if not isinstance(tree, dict):
        raise DataError(f"{file} holds a {type(tree).__name__}, not parameters by name.")
    tensors = {}
    for path, array in flatten_dict(tree).items():
        path = [str(part) for part in path]
        if not isinstance(array, np.ndarray):
            raise DataError(f"{'/'.join(path)} of a Flax model is a {type(array).__name__}, not an array.")
        *modules, name = path
        tensors[".".join([*modules, _RENAMED.get(name, name)])] = array.T if name == "kernel" else array
    if not tensors:
        raise DataError(f"{file} holds no array.")
    return tensors
