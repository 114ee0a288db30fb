"""Devices as a mesh, and where arrays lie on it: batches are split, parameters replicated unless split."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from empax.core.config import ConfigError, check_numbers
from empax.core.tree import map_named

AXES: tuple[str, ...] = ("data", "fsdp", "tensor")
"""Axes of every mesh: copies of the model, shards of its parameters, shards within a layer."""


LOGICAL: Mapping[str, str] = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "mlp": "tensor"}
"""Over which axis of the mesh a parameter's axis of that name is split; those of other names are whole everywhere.

`MeshSettings.logical` changes single entries.
"""


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """How many devices lie along each axis, and what is split over them: `config.mesh`.

    Attributes:
      data: copies of the model; -1 = all devices that the other two axes leave.
      fsdp: devices over which the parameters are split; batches are split over them too.
      tensor: devices over which single matrix products are split.
      logical: name of a parameter's axis → the axis of the mesh that it is split over, "" = none; what is not named
        stays as LOGICAL has it.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    logical: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, along in self.logical.items():
            if name not in LOGICAL or along not in (*AXES, ""):
                raise ConfigError(
                    f"mesh.logical: {name!r} = {along!r} is not allowed; axes of parameters are {', '.join(LOGICAL)}, "
                    f'those of the mesh {", ".join(AXES)}, or "" for none.'
                )
        if self.data != -1 and self.data < 1:
            raise ValueError(f"data = {self.data} must be -1 (the rest of the devices) or at least 1.")
        check_numbers(self, "fsdp", "tensor", least=1)
        check_numbers(self, "data")


def make_mesh(settings: MeshSettings = MeshSettings(), devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lays `devices` (default: all) out as a mesh with the axes data, fsdp and tensor.

    Raises:
      ConfigError: the devices do not divide by fsdp * tensor, or are fewer than the settings ask for.
    """
    devices = jax.devices() if devices is None else devices
    inner = settings.fsdp * settings.tensor
    data = settings.data
    if data == -1:
        if len(devices) % inner:
            raise ConfigError(
                f"mesh: {len(devices)} devices do not divide by fsdp * tensor = {settings.fsdp} * {settings.tensor}; "
                "change mesh.fsdp or mesh.tensor."
            )
        data = len(devices) // inner
    if data * inner > len(devices):
        raise ConfigError(
            f"mesh: data * fsdp * tensor = {data} * {settings.fsdp} * {settings.tensor} needs {data * inner} devices, "
            f"there are {len(devices)}; make mesh.data smaller, or -1 for all devices."
        )
    grid = np.asarray(devices[: data * inner]).reshape(data, settings.fsdp, settings.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def local_mesh(settings: MeshSettings = MeshSettings()) -> Mesh | None:
    """All devices of this process, for work that no other process has a part in; None where it has one.

    They lie along `fsdp` where `settings` split parameters, which one device may then be too small for, else along
    `data`.
    """
    devices = jax.local_devices()
    split = settings.fsdp * settings.tensor > 1
    return make_mesh(MeshSettings(fsdp=len(devices) if split else 1), devices) if len(devices) > 1 else None


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis split over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


_ROWS: contextvars.ContextVar[NamedSharding | None] = contextvars.ContextVar("rows", default=None)


@contextlib.contextmanager
def rows_split_as(sharding: NamedSharding | None) -> Iterator[None]:
    """While a function is traced in it, `keep_rows_split` splits rows as `sharding` does a batch; None = not at all."""
    before = _ROWS.set(sharding)
    try:
        yield
    finally:
        _ROWS.reset(before)


def rows_are_split() -> bool:
    """Whether what is traced in `rows_split_as` has the rows of a batch on several devices."""
    sharding = _ROWS.get()
    return sharding is not None and batch_shards(sharding.mesh) > 1  # type: ignore[arg-type]


def knows_rows() -> bool:
    """Whether it is known where the rows lie of what is traced now."""
    return _ROWS.get() is not None or jax.local_device_count() == 1


def over_rows(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function` of arrays [rows, ...], which XLA cannot split, called by each device with its own rows.

    Where they do not divide, each device has all of them.
    """
    sharding = _ROWS.get()
    if sharding is None or sharding.mesh.size == 1:
        return function

    def called(*arrays: jax.Array) -> jax.Array:
        whole = len(arrays[0]) % batch_shards(sharding.mesh)  # type: ignore[arg-type]
        spec = PartitionSpec() if whole else sharding.spec
        return jax.shard_map(function, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)(*arrays)

    return called


def keep_rows_split(states: jax.Array) -> jax.Array:
    """Activations [rows, ...] on the devices that hold those rows of the batch; other axes lie as the compiler likes.

    Where parameters are split over `fsdp` the compiler has a choice, to gather a layer's weights or the whole batch's
    activations. This is what makes it gather the weights. Does nothing outside `rows_split_as`, or where the rows do
    not divide.
    """
    sharding = _ROWS.get()
    if sharding is None or states.shape[0] % batch_shards(sharding.mesh):  # type: ignore[arg-type]
        return states
    spec = PartitionSpec(*sharding.spec, *(PartitionSpec.UNCONSTRAINED for _ in states.shape[1:]))
    return jax.lax.with_sharding_constraint(states, NamedSharding(sharding.mesh, spec))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts a batch is split; batch sizes must divide by it."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def place_rows(batch: Any, mesh: Mesh | None) -> Any:
    """Arrays [rows, ...] split over the devices of `mesh`, or whole on each of them where the rows do not divide.

    Without a mesh they are left alone.
    """
    if mesh is None:
        return batch
    divides = all(len(leaf) % batch_shards(mesh) == 0 for leaf in jax.tree.leaves(batch))
    return jax.device_put(batch, batch_sharding(mesh) if divides else replicated(mesh))


def shard_params(
    shapes: Any,
    mesh: Mesh | AbstractMesh,
    axes: Callable[[str, tuple[int, ...]], tuple[str | None, ...]] | None = None,
    logical: Mapping[str, str] = LOGICAL,
) -> Any:
    """Where each leaf of `shapes` lies on `mesh`.

    The names that `axes` gives to a leaf's axes decide, by LOGICAL: so an adapter is split as the weight that it is on.
    A leaf whose axes have no names is split over `fsdp` along its largest axis that divides, and is replicated if there
    is none or if fsdp = 1.
    Names and shapes of an optimizer's moments end like their parameters', so the same call places a whole `TrainState`.

    Args:
      shapes: a tree of arrays or `jax.ShapeDtypeStruct`.
      mesh: with the axes of `AXES`; an abstract one for `bytes_on_one`.
      axes: names of a leaf's axes by its name and shape (`models.layers.logical_axes`); None = none are known.
      logical: over which axis of the mesh an axis of that name is split.

    Returns:
      A tree like `shapes` of `NamedSharding`.
    """

    def place(name: str, leaf: Any) -> NamedSharding:
        names = axes(name, leaf.shape) if axes is not None else ()
        if any(names):
            return NamedSharding(mesh, _by_names(name, names, leaf.shape, mesh, logical))
        return NamedSharding(mesh, _largest_axis(leaf.shape, mesh.shape["fsdp"]))

    return map_named(place, shapes)


def bytes_on_one(shapes: Any, places: Any) -> int:
    """Of a tree of arrays or their shapes, what one device holds where they lie as `shard_params` says."""

    def size(leaf: Any, place: Any) -> int:
        return math.prod(place.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, shapes, places)))


def _by_names(
    leaf: str,
    names: tuple[str | None, ...],
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
    logical: Mapping[str, str],
) -> PartitionSpec:
    """Axes that do not divide stay whole."""

    def part(name: str | None, size: int) -> str | None:
        along = logical.get(name or "")
        return along if along and mesh.shape[along] > 1 and size % mesh.shape[along] == 0 else None

    parts = [part(name, size) for name, size in zip(names, shape, strict=True)]
    for along in AXES:
        if parts.count(along) > 1:
            twice = ", ".join(repr(name) for name, found in zip(names, parts, strict=True) if found == along)
            raise ConfigError(
                f"mesh.logical splits {twice} over {along!r}, but {leaf} has all of these axes, and one axis of the "
                "mesh splits one of them; set the others to another axis or to ''."
            )
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def _largest_axis(shape: tuple[int, ...], parts: int) -> PartitionSpec:
    divisible = [axis for axis, size in enumerate(shape) if size % parts == 0 and size >= parts]
    if parts == 1 or not divisible:
        return PartitionSpec()
    largest = max(divisible, key=lambda axis: shape[axis])
    return PartitionSpec(*(None,) * largest, "fsdp")
