"""A mesh of devices, and the placement of arrays on it: batches are split, parameters replicated unless split."""

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
"""Axes of every mesh: replicas of the model, shards of its parameters, shards within a layer."""


LOGICAL: Mapping[str, str] = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "mlp": "tensor"}
"""Maps the names of parameter axes to the mesh axes that they are split over; other axes are not split.

`MeshSettings.logical` overrides single entries.
"""


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Number of devices along each mesh axis, and the arrays split over them: `config.mesh`.

    Attributes:
      data: replicas of the model; -1 = all devices left by the other two axes.
      fsdp: devices over which the parameters are split; batches are split over them too.
      tensor: devices over which individual matrix products are split.
      logical: name of a parameter's axis → mesh axis that it is split over, "" = none; other names keep their entry in
        LOGICAL.
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
    """Arranges `devices` (default: all) in a mesh with the axes data, fsdp and tensor.

    Raises:
      ConfigError: fsdp * tensor does not divide the number of devices, or the settings need more devices.
    """
    devices = jax.devices() if devices is None else devices
    inner = settings.fsdp * settings.tensor
    data = settings.data
    if data == -1:
        if len(devices) % inner:
            raise ConfigError(
                f"mesh: {len(devices)} devices cannot be divided by fsdp * tensor = {settings.fsdp} * "
                f"{settings.tensor}; change mesh.fsdp or mesh.tensor."
            )
        data = len(devices) // inner
    if data * inner > len(devices):
        smaller = "mesh.data smaller, or -1 for all devices" if inner <= len(devices) else "fsdp or tensor smaller"
        raise ConfigError(
            f"mesh: data * fsdp * tensor = {data} * {settings.fsdp} * {settings.tensor} needs {data * inner} devices, "
            f"but there are {len(devices)}; make {smaller}."
        )
    grid = np.asarray(devices[: data * inner]).reshape(data, settings.fsdp, settings.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def local_mesh(settings: MeshSettings = MeshSettings()) -> Mesh | None:
    """Returns a mesh of this process's devices, for work without other processes; None for a single device.

    The devices lie along `fsdp` if `settings` split parameters, which may be too large for one device, else along
    `data`.
    """
    devices = jax.local_devices()
    split = settings.fsdp * settings.tensor > 1
    return make_mesh(MeshSettings(fsdp=len(devices) if split else 1), devices) if len(devices) > 1 else None


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns a sharding with a full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns a sharding with the leading axis split over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


_ROWS: contextvars.ContextVar[NamedSharding | None] = contextvars.ContextVar("rows", default=None)


@contextlib.contextmanager
def rows_split_as(sharding: NamedSharding | None) -> Iterator[None]:
    """Makes `keep_rows_split` split rows as `sharding` splits a batch, for functions traced inside; None = no split."""
    before = _ROWS.set(sharding)
    try:
        yield
    finally:
        _ROWS.reset(before)


def rows_are_split() -> bool:
    """Whether functions traced in `rows_split_as` have the rows of a batch on several devices."""
    sharding = _ROWS.get()
    return sharding is not None and batch_shards(sharding.mesh) > 1  # type: ignore[arg-type]


def knows_rows() -> bool:
    """Whether the placement of rows is known in the current trace."""
    return _ROWS.get() is not None or jax.local_device_count() == 1


def over_rows(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Makes each device call `function` of arrays [rows, ...], which XLA cannot split, on its own rows.

    If the devices do not divide the rows, each device gets all rows.
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
    """Keeps activations [rows, ...] on the devices that hold those rows; the compiler places other axes.

    With parameters split over `fsdp`, the compiler could gather either a layer's weights or the activations of the
    whole batch. This constraint makes it gather the weights. Does nothing outside `rows_split_as`, or if the rows do
    not divide evenly.
    """
    sharding = _ROWS.get()
    if sharding is None or states.shape[0] % batch_shards(sharding.mesh):  # type: ignore[arg-type]
        return states
    spec = PartitionSpec(*sharding.spec, *(PartitionSpec.UNCONSTRAINED for _ in states.shape[1:]))
    return jax.lax.with_sharding_constraint(states, NamedSharding(sharding.mesh, spec))


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of parts of a batch; it must divide the batch size."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def place_rows(batch: Any, mesh: Mesh | None) -> Any:
    """Splits arrays [rows, ...] over the devices of `mesh`, or replicates them if the rows do not divide evenly.

    Without a mesh, leaves them unchanged.
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
    """Returns the placement of each leaf of `shapes` on `mesh`.

    The axis names from `axes` decide, through LOGICAL: thus an adapter is split like the weight that it adapts. A leaf
    without axis names is split over `fsdp` along its largest divisible axis, and is replicated if there is none or if
    fsdp = 1. Names and shapes of an optimizer's moments end like those of their parameters, so the same call places a
    whole `TrainState`.

    Args:
      shapes: a tree of arrays or `jax.ShapeDtypeStruct`.
      mesh: mesh with the axes of `AXES`; an abstract one for `bytes_on_one`.
      axes: maps a leaf's name and shape to the names of its axes (`models.layers.logical_axes`); None = no names.
      logical: name of a parameter's axis → mesh axis that it is split over.

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
    """Returns the bytes of a tree of arrays or shapes that one device holds under the placement of `shard_params`."""

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
    """Builds a spec from axis names; axes that do not divide evenly are not split."""

    def part(name: str | None, size: int) -> str | None:
        along = logical.get(name or "")
        return along if along and mesh.shape[along] > 1 and size % mesh.shape[along] == 0 else None

    parts = [part(name, size) for name, size in zip(names, shape, strict=True)]
    for along in AXES:
        if parts.count(along) > 1:
            twice = ", ".join(repr(name) for name, found in zip(names, parts, strict=True) if found == along)
            raise ConfigError(
                f"mesh.logical splits {twice} over {along!r}, but {leaf} has all of these axes, and an axis of the "
                "mesh can split only one; set the others to another axis or to ''."
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
