"""Parameters straight into their sharding, and what that costs in memory."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.sharding import MeshSettings, make_mesh, shard_params
from empax.core.tree import named_leaves
from empax.interop.architectures import ARCHITECTURES
from empax.interop.huggingface import load_pretrained
from empax.interop.parameters import LeafBuilder, export_params, import_params
from empax.models.t5 import t5_config

FIELDS = {"model_type": "t5", "vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
MEMORY = {**FIELDS, "vocab_size": 4096, "d_model": 384, "d_kv": 64, "d_ff": 1536, "num_layers": 8, "num_heads": 6}


def weights(fields, fill=None):
    config = t5_config(fields)
    rng = np.random.default_rng(0)
    draw = (lambda s: np.full(s, fill, np.float32)) if fill is not None else (lambda s: rng.normal(size=s).astype("f4"))
    params = jax.tree.map(lambda leaf: draw(leaf.shape), ARCHITECTURES["t5"].shapes(config))
    return config, params


@pytest.mark.multidevice
@pytest.mark.parametrize("spec", [(None, "fsdp"), ("fsdp",), (), ("fsdp", None, "tensor"), (None, ("fsdp", "tensor"))])
@pytest.mark.parametrize("stacked", [True, False])
def test_a_leaf_is_what_device_put_would_make_of_it(spec, stacked):
    mesh = make_mesh(MeshSettings(data=2, fsdp=2, tensor=2))
    whole = np.random.default_rng(0).normal(size=(4, 8, 6)).astype(np.float32)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    leaf = LeafBuilder(whole.shape, np.float32, sharding)
    for layer in range(4) if stacked else [None]:
        leaf.put(whole if layer is None else whole[layer], layer)
    made, expected = leaf.finish(), jax.device_put(whole, sharding)
    assert made.sharding == expected.sharding
    for ours, theirs in zip(made.addressable_shards, expected.addressable_shards, strict=True):
        assert (ours.device, ours.index) == (theirs.device, theirs.index)
        np.testing.assert_array_equal(ours.data, theirs.data)


def test_a_leaf_is_not_copied_on_the_cpu_and_survives_donation():
    leaf = LeafBuilder((300, 400), np.float32)
    leaf.put(np.ones((300, 400)))
    place = next(iter(leaf._parts.values())).ctypes.data
    array = leaf.finish()
    assert array.unsafe_buffer_pointer() == place
    assert not array.committed
    mesh = make_mesh(MeshSettings(data=8))
    copies = LeafBuilder((16,), np.float32, NamedSharding(mesh, PartitionSpec()))
    copies.put(np.arange(16))
    shared = copies.finish()
    first, second = shared.addressable_shards[0].data, shared.addressable_shards[1].data
    doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)(first)
    np.testing.assert_array_equal(doubled, 2.0 * np.arange(16))
    np.testing.assert_array_equal(second, np.arange(16))


@pytest.mark.multidevice
def test_params_are_read_into_their_shardings(tmp_path):
    config, params = weights(FIELDS)
    tensors = export_params("t5", params, config)
    shardings = shard_params(params, make_mesh(MeshSettings(data=2, fsdp=4)))
    made = import_params("t5", tensors, config, shardings=shardings)
    places = named_leaves(shardings)
    for name, leaf in named_leaves(made).items():
        assert leaf.sharding == places[name]
        np.testing.assert_array_equal(leaf, named_leaves(params)[name], err_msg=name)
    assert any(leaf.addressable_shards[0].data.size < leaf.size for leaf in jax.tree.leaves(made))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    loaded = load_pretrained(tmp_path, shardings=shardings).params
    jax.tree.map(np.testing.assert_array_equal, loaded, made)
    half = import_params("t5", tensors, config, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(half["token_embedding"], params["token_embedding"].astype(jnp.bfloat16))
    del shardings["encoder"]["final_norm"]
    with pytest.raises(ConfigError, match="no place for encoder/final_norm/scale"):
        import_params("t5", tensors, config, shardings=shardings)


class Unread:
    """A tensor that must not be read."""

    def __init__(self, array):
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("read")


def test_what_does_not_fit_is_listed_before_anything_is_read():
    config, params = weights(FIELDS)
    tensors = {name: Unread(array) for name, array in export_params("t5", params, config).items()}
    tensors["lm_head.weight"] = Unread(np.zeros((40, 16)))
    tensors["shared.weight"] = Unread(np.zeros((41, 16)))
    tensors["new"] = Unread(np.zeros(3))
    del tensors["decoder.final_layer_norm.weight"]
    with pytest.raises(DataError) as caught:
        import_params("t5", tensors, config)
    for problem in ("(3 problems)", "missing decoder.final", "shared.weight has shape [41, 16]", "surplus new"):
        assert problem in str(caught.value)


CHILD = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 4)
from empax.core.sharding import MeshSettings, make_mesh, shard_params
from empax.core.tree import count_bytes
from empax.interop import architectures, huggingface
from empax.models.t5 import t5_config

def peak():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM")) * 1024

folder = Path(sys.argv[1])
config = t5_config(json.loads((folder / "config.json").read_text()))
shapes = architectures.ARCHITECTURES["t5"].shapes(config)
shardings = shard_params(shapes, make_mesh(MeshSettings(data=1, fsdp=4))) if sys.argv[2] == "sharded" else None
jax.block_until_ready(jax.device_put(0))
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = peak()
params = jax.block_until_ready(huggingface.load_pretrained(folder, config, shardings=shardings).params)
print(peak() - before, count_bytes(params))
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A model of 140 MB in shards of at most 16 MB."""
    folder = tmp_path_factory.mktemp("big")
    config, params = weights(MEMORY, fill=1.0)
    shard, names, number, shards = {}, {}, 0, []
    for name, array in [*export_params("t5", params, config).items(), (None, None)]:
        if name is None or sum(one.nbytes for one in shard.values()) + array.nbytes > 16e6:
            file = f"model-{number}.safetensors"
            safetensors.numpy.save_file(shard, folder / file)
            shards.append((folder / file).stat().st_size)
            names |= dict.fromkeys(shard, file)
            shard, number = {}, number + 1
        if name is not None:
            shard[name] = array
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text(json.dumps(MEMORY))
    return folder, max(shards)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
@pytest.mark.parametrize("where", ["default", "sharded"])
def test_host_memory_stays_within_the_parameters_and_a_shard(big, where):
    folder, largest = big
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), where], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    grown, size = map(int, result.stdout.split())
    assert size > 120e6
    assert size < grown <= size + 1.2 * largest
