"""Folders of weights, and names that lead to them."""

import json

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from flax import serialization

from empax.core.files import DataError
from empax.data.chat import read_chat_template
from empax.data.tokenizer_folders import read_declared
from empax.interop.huggingface import load_config, resolve
from empax.interop.readers import open_tensors, read_safetensors
from empax.interop.sentence_modules import read_modules

TYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16", "uint32"]
TYPES += ["bfloat16", "uint64"]


@pytest.mark.parametrize("name", TYPES)
def test_safetensors_of_every_type(tmp_path, name):
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    tensors = {
        "a": (np.arange(6) % 2).reshape(2, 3).astype(dtype),
        "b": np.ones((), dtype),
        "c": np.ones((0, 3), dtype),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np"})
    read = open_tensors(tmp_path)
    assert set(read) == set(tensors)
    for key, expected in tensors.items():
        assert (read[key].shape, read[key].dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(np.asarray(read[key]), expected)


def test_a_tensor_is_a_view_of_the_file_and_may_be_cast(tmp_path):
    safetensors.numpy.save_file({"a": np.arange(6.0)}, tmp_path / "model.safetensors")
    tensor = open_tensors(tmp_path)["a"]
    assert not np.asarray(tensor).flags.writeable
    assert not np.asarray(tensor).flags.owndata
    assert np.asarray(tensor, np.float32).dtype == np.float32
    copied = np.array(tensor)
    copied += 1
    np.testing.assert_array_equal(tensor, np.arange(6.0))
    assert jnp.asarray(tensor).shape == (6,)


def test_a_type_that_is_not_known_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    header = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(DataError, match="a is of type F8_E8M0; only F64"):
        read_safetensors(file)


def test_one_file_of_weights_by_its_path(tmp_path):
    file = tmp_path / "own.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(4)}, file)
    assert set(open_tensors(file)) == {"a"}
    with pytest.raises(DataError, match=r"must end in \.safetensors, \.bin"):
        open_tensors(file.rename(tmp_path / "own.onnx"))


WRITERS = {
    "model.safetensors": safetensors.numpy.save_file,
    "pytorch_model.bin": lambda tensors, file: torch.save(jax.tree.map(torch.tensor, tensors), file),
    "flax_model.msgpack": lambda tensors, file: file.write_bytes(serialization.to_bytes(tensors)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_shards_are_read_by_their_index_and_a_missing_one_is_named(name, tmp_path):
    tensors = {"a": np.ones(2, np.float32), "b": np.zeros(3, np.float32)}
    stem, _, ending = name.partition(".")
    files = {key: f"{stem}-0000{number}-of-00002.{ending}" for number, key in enumerate(tensors, 1)}
    for key, file in files.items():
        WRITERS[name]({key: tensors[key]}, tmp_path / file)
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    jax.tree.map(np.testing.assert_array_equal, open_tensors(tmp_path), tensors)
    (tmp_path / files["b"]).unlink()
    with pytest.raises(DataError, match=rf"{files['b']} is missing"):
        open_tensors(tmp_path)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    safetensors.numpy.save_file({"a": np.zeros(4)}, tmp_path / "a.safetensors")
    index = inside / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(DataError, match="outside the folder"):
        open_tensors(inside)
    (inside / "parts").mkdir()
    (inside / "parts" / "a.safetensors").symlink_to(tmp_path / "a.safetensors")  # as the hub's cache has it
    index.write_text(json.dumps({"weight_map": {"a": "parts/a.safetensors"}}))
    assert set(open_tensors(inside)) == {"a"}
    for content, message in (
        ("[]", "must hold a JSON object"),
        ("{}", "has no weight_map from names of weights to files"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
    ):
        index.write_text(content)
        with pytest.raises(DataError, match=message):
            open_tensors(inside)


@pytest.mark.parametrize("has", [True, False])
def test_from_the_hub_pickles_come_only_where_there_are_no_safetensors(tmp_path, monkeypatch, has):
    asked = []

    def snapshot(name, *, allow_patterns):
        asked.append(allow_patterns)
        if has:
            (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("facebook/contriever") == tmp_path
    assert [any(".bin" in pattern for pattern in patterns) for patterns in asked] == (
        [False] if has else [False, True, False]
    )
    assert has or asked[-1][-1] == "flax_model*.msgpack"
    assert all({"*.json", "*.jinja"} <= set(patterns) for patterns in asked)  # the chat template, too


def test_a_gguf_file_is_its_own_place(tmp_path):
    assert resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("modules.json", read_modules),
        ("1_Pooling/config.json", read_modules),
        ("chat_template.jinja", read_chat_template),
        ("tokenizer_config.json", read_chat_template),
        ("tokenizer_config.json", lambda folder: read_declared(folder, {})),
        ("special_tokens_map.json", lambda folder: read_declared(folder, {})),
        ("model.safetensors", open_tensors),
        ("model.safetensors.index.json", open_tensors),
        ("adapter_config.json", load_config),
    ],
)
def test_a_link_that_leads_nowhere_is_not_passed_by(name, read, tmp_path):
    """As the hub's cache has them whose files are gone; another file, or none, would change what is computed."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "gone")
    if read is open_tensors:
        (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(DataError, match=rf"there is no file .*{name}"):
        read(tmp_path)
