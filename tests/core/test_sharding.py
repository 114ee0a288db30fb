from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from empax.core.config import ConfigError, to_settings
from empax.core.sharding import (
    LOGICAL,
    MeshSettings,
    batch_sharding,
    batch_shards,
    keep_rows_split,
    knows_rows,
    local_mesh,
    make_mesh,
    over_rows,
    place_rows,
    replicated,
    rows_are_split,
    rows_split_as,
    shard_params,
)

SHAPES = {
    "layers": {"kernel": jax.ShapeDtypeStruct((4, 6, 16), np.float32), "bias": jax.ShapeDtypeStruct((6,), np.float32)},
    "step": jax.ShapeDtypeStruct((), np.int32),
}


def specs(mesh):
    return jax.tree.map(lambda sharding: sharding.spec, shard_params(SHAPES, mesh))


@pytest.mark.multidevice
def test_minus_one_is_the_rest_of_the_devices():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(MeshSettings(fsdp=2, tensor=2)).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(make_mesh(MeshSettings(data=2)).shape) == {"data": 2, "fsdp": 1, "tensor": 1}
    assert make_mesh(devices=jax.devices()[3:4]).devices.item() == jax.devices()[3]


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"fsdp": 3}, r"8 devices cannot be divided by fsdp \* tensor = 3 \* 1"),
        ({"data": 8, "fsdp": 2}, "needs 16 devices, but there are 8; make mesh.data smaller, or -1"),
        ({"data": 1, "fsdp": 8, "tensor": 2}, "needs 16 devices, but there are 8; make fsdp or tensor smaller"),
        ({"data": 0}, r"config\.mesh: data = 0 must be -1"),
        ({"tensor": 0}, "must be at least 1"),
        ({"logical": {"mlp": "datta"}}, "'mlp' = 'datta' is not allowed; axes of parameters are embed, .* data, fsdp"),
        ({"logical": {"embd": "fsdp"}}, r"mesh\.logical: 'embd' = 'fsdp' is not allowed"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(values, says):
    with pytest.raises(ConfigError, match=says):
        make_mesh(to_settings(MeshSettings, values, where="config.mesh"))


@pytest.mark.multidevice
def test_batches_are_split_over_data_and_fsdp():
    mesh = make_mesh(MeshSettings(fsdp=2, tensor=2))
    rows = jax.device_put(np.arange(8), batch_sharding(mesh))
    assert batch_shards(mesh) == 4
    assert {tuple(shard.data.tolist()) for shard in rows.addressable_shards} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert jax.device_put(np.arange(8), replicated(mesh)).is_fully_replicated


@pytest.mark.multidevice
def test_parameters_are_replicated_until_fsdp_splits_their_largest_axis():
    whole = {"layers": {"kernel": PartitionSpec(), "bias": PartitionSpec()}, "step": PartitionSpec()}
    assert specs(make_mesh()) == whole
    split = {"layers": {"kernel": PartitionSpec(None, None, "fsdp"), "bias": PartitionSpec()}, "step": PartitionSpec()}
    assert specs(make_mesh(MeshSettings(fsdp=4))) == split
    assert specs(make_mesh(MeshSettings(fsdp=2)))["layers"]["bias"] == PartitionSpec("fsdp")


@pytest.mark.multidevice
def test_the_logical_axes_of_a_mesh_can_be_changed():
    settings = MeshSettings(data=2, fsdp=2, tensor=2, logical={"mlp": "fsdp", "embed": ""})
    mesh = make_mesh(settings)
    shapes = {"wi": jax.ShapeDtypeStruct((8, 16), np.float32)}

    def spec(logical):
        return shard_params(shapes, mesh, axes=lambda *_: ("embed", "mlp"), logical=logical)["wi"].spec

    assert spec(LOGICAL) == PartitionSpec("fsdp", "tensor")
    assert spec({**LOGICAL, **settings.logical}) == PartitionSpec(None, "fsdp")
    with pytest.raises(ConfigError, match=r"splits 'embed', 'mlp' over 'fsdp', but wi has all of these axes"):
        spec({**LOGICAL, "mlp": "fsdp"})


@pytest.mark.multidevice
def test_rows_of_activations_lie_where_those_of_the_batch_do():
    """Though what they come from is split otherwise: else a whole batch would be gathered for split weights."""
    mesh = make_mesh(MeshSettings(data=2, fsdp=4))
    states = jax.device_put(np.ones((16, 3, 8)), NamedSharding(mesh, PartitionSpec(None, None, "fsdp")))

    def split(states, sharding):
        def traced(states):
            with rows_split_as(sharding):
                return keep_rows_split(2 * states)

        return jax.jit(traced)(states).sharding.spec

    assert split(states, batch_sharding(mesh))[0] == ("data", "fsdp")
    assert split(states, None)[0] is None
    assert split(states[:6], batch_sharding(mesh))[0] is None  # six rows do not divide by eight devices
    assert keep_rows_split(states) is states


@pytest.mark.multidevice
def test_rows_are_placed_on_all_devices_where_they_divide():
    mesh = make_mesh(MeshSettings(fsdp=2, tensor=2))
    assert place_rows([1], None) == [1]
    for rows, split in ((8, True), (6, False)):
        for leaf in jax.tree.leaves(place_rows({"a": np.zeros(8), "b": np.zeros((rows, 2))}, mesh)):
            assert leaf.is_fully_replicated != split
    assert dict(local_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(local_mesh(MeshSettings(tensor=2)).shape) == {"data": 1, "fsdp": 8, "tensor": 1}


@pytest.mark.multidevice
@pytest.mark.parametrize(("tensor", "rows", "seen"), [(1, 16, 2), (4, 16, 8), (8, 16, 16), (1, 6, 6)])
def test_a_function_of_rows_sees_those_of_its_device(tensor, rows, seen):
    sharding = batch_sharding(make_mesh(MeshSettings(tensor=tensor)))

    def traced(array):
        return over_rows(lambda own: own * 0 + len(own))(array)

    assert not rows_are_split()
    assert not knows_rows()  # on eight devices
    with rows_split_as(sharding):
        np.testing.assert_array_equal(jax.jit(traced)(np.zeros(rows)), seen)
        assert rows_are_split() == (tensor < 8)
        assert knows_rows()
    np.testing.assert_array_equal(traced(np.zeros(rows)), rows)
