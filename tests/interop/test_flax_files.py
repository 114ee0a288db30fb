"""`flax_model.msgpack`, as Transformers 4 wrote it. That all models are read from it: `test_families.py`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

from empax.core.files import DataError
from empax.interop.readers import open_tensors
from tests.interop import oracle
from tests.interop.tiny import tiny


def written(folder, model, tree):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(tree))
    return folder


def test_the_values_are_those_of_the_file_bit_by_bit_in_half_precision_too(tmp_path):
    model = tiny("t5")
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), oracle.flax_tree(model))
    tensors = open_tensors(written(tmp_path / "flax", model, {"params": tree}))
    for name, value in model.named_parameters():
        assert tensors[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(tensors[name], np.asarray(value.detach().numpy(), jnp.bfloat16))


def whole_bytes():
    return serialization.to_bytes({"shared": {"embedding": np.ones((3, 2), np.float32)}})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (whole_bytes()[:-5], "not a whole msgpack file"),
        (whole_bytes() + b"\x00", "not a whole msgpack file"),
        (b"\xc1" + whole_bytes(), "not a whole msgpack file"),
        (b"PK\x03\x04 no message at all", "not a whole msgpack file"),
        (serialization.msgpack_serialize({"a": {"b": 3}}), "a/b of a Flax model is a int"),
        (serialization.msgpack_serialize([1, 2]), "holds a list, not parameters by name"),
        (serialization.msgpack_serialize({}), "holds no array"),
    ],
)
def test_what_is_no_flax_model_is_refused_by_name(content, said, tmp_path):
    (tmp_path / "flax_model.msgpack").write_bytes(content)
    with pytest.raises(DataError, match=rf"flax_model\.msgpack.*{said}|{said}"):
        open_tensors(tmp_path)
