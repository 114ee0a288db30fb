"""`flax_model.msgpack`, as Transformers 4 wrote it. That all models are read from it: `test_families.py`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict

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


def test_shards_are_read_by_their_index_and_a_missing_one_is_named(tmp_path):
    model = tiny("bart")
    tree = oracle.flax_tree(model)
    whole = open_tensors(written(tmp_path / "whole", model, tree))
    folder = written(tmp_path / "shards", model, {})
    (folder / "flax_model.msgpack").unlink()
    flat = flatten_dict(tree, sep="/")
    names = sorted(flat)
    places = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"flax_model-0000{number}-of-00002.msgpack"
        shard = unflatten_dict({name: flat[name] for name in part}, sep="/")
        (folder / file).write_bytes(serialization.to_bytes(shard))
        places |= dict.fromkeys(part, file)
    (folder / "flax_model.msgpack.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found = open_tensors(folder)
    oracle.assert_same_bytes(found, whole)
    (folder / "flax_model-00002-of-00002.msgpack").unlink()
    with pytest.raises(DataError, match=r"flax_model-00002-of-00002\.msgpack is missing"):
        open_tensors(folder)


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
