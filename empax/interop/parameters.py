"""Conversion of parameters from and to foreign names and shapes, directly to the devices that hold them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Sharding
from jax.typing import DTypeLike

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.tree import named_leaves
from empax.core.types import Params
from empax.interop import mappings
from empax.interop.architectures import Config, architecture_of
from empax.interop.tensors import LazyTensor, Tensor, Tensors, refuse_misfits
from empax.interop.tied_embeddings import HEAD, disagreements
from empax.models.bert import BertConfig
from empax.models.transformer import TransformerConfig

_READERS = 2
"""Layers read in parallel: copying and transposing keeps a core busy, not the disk."""

_ALIGNMENT = 64  # bytes; the CPU backend uses memory with this alignment without a copy


class LeafBuilder:
    """Builder of one parameter, slice by slice.

    Allocates host memory for the parts on this process's devices, once for parts on several devices. `finish` moves
    the parts to the devices (on the CPU without a copy). `sharding` = None: whole on the default device, uncommitted.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding | None = None):
        self.shape = shape
        self._sharding = sharding
        whole = tuple((0, size) for size in shape)
        self._bounds: dict[jax.Device, tuple[tuple[int, int], ...]] = {}
        if sharding is not None:
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                index = (slice(None),) * len(shape) if index is None else index
                self._bounds[device] = tuple(i.indices(n)[:2] for i, n in zip(index, shape, strict=True))
        self._parts = {
            bounds: _aligned(tuple(stop - start for start, stop in bounds), dtype)
            for bounds in set(self._bounds.values() if sharding is not None else [whole])
        }

    def put(self, array: np.ndarray, layer: int | None = None) -> None:
        """Writes the whole parameter, or index `layer` of its first axis."""
        for bounds, part in self._parts.items():
            target = part
            if layer is not None:
                (start, stop), *bounds = bounds
                if not start <= layer < stop:
                    continue
                target = part[layer - start]
            wanted = array[tuple(slice(start, stop) for start, stop in bounds)]
            # Transposing and casting in one step is slower than one after the other.
            target[...] = wanted if wanted.dtype == target.dtype else np.ascontiguousarray(wanted)

    def finish(self) -> jax.Array:
        """Returns the parameter; the builder is empty afterwards."""
        parts, self._parts = self._parts, {}
        if self._sharding is None:
            return jax.device_put(next(iter(parts.values())))
        arrays = [jax.device_put(parts[bounds], device) for device, bounds in self._bounds.items()]
        return jax.make_array_from_single_device_arrays(self.shape, self._sharding, arrays)


def _aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def import_params(
    architecture: str, tensors: Tensors, config: Config, *, shardings: Any = None, dtype: DTypeLike = np.float32
) -> Params:
    """Converts foreign tensors to our parameters with stacked layers; reads each tensor into its place and frees it.

    Host memory: the parameters on this process's devices, and one tensor, or two layers' tensors of one kind.

    `architecture` is a `model_type`. `shardings` is a tree of `NamedSharding` like the parameters, or a function from
    their shapes to it; None = all on the default device.

    Raises:
      DataError: tensors are missing, surplus or of the wrong shape; one message lists all, before anything is read.
      ConfigError: `shardings` lacks a parameter.
    """
    entry = architecture_of(architecture)
    mapping = entry.mapping(config)
    named = {mapping.canonical(name): tensor for name, tensor in tensors.items()}
    _check_names(tensors, mapping)
    _check_layers(config, len(tensors))
    wanted = entry.shapes(config)
    shapes = {name: leaf.shape for name, leaf in named_leaves(wanted).items()}
    shardings = shardings(wanted) if callable(shardings) else shardings
    places = dict.fromkeys(shapes) if shardings is None else named_leaves(shardings)
    if unplaced := sorted(set(shapes) - set(places)):
        raise ConfigError(f"shardings has no place for {', '.join(unplaced)} of this {architecture}.")
    embedding = mapping.embedding()
    if isinstance(config, TransformerConfig) and not config.tie_embeddings and embedding in named:
        named.setdefault(HEAD, named[embedding])  # an untied model with equal embeddings may be saved with one copy
    problems = _misfits(named, mapping, shapes)
    if not problems and not isinstance(config, BertConfig):
        headless = isinstance(config, TransformerConfig) and not config.num_decoder_layers
        scaled = isinstance(config, TransformerConfig) and config.output_scale
        problems = disagreements(named, embedding, tied=config.tie_embeddings and not headless, scaled=scaled)
    refuse_misfits(f"The weights do not fit this {architecture}", problems)
    leaves: dict[str, Any] = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for row in mapping.rows:
            leaf = LeafBuilder(shapes[row.ours], dtype, places[row.ours])
            list(pool.map(functools.partial(_read, leaf, row, named), row.parts(leaf.shape)))
            leaves[row.ours] = leaf.finish()
    return unflatten_dict(leaves, sep="/")


def _check_names(tensors: Tensors, mapping: mappings.Mapping) -> None:
    """Raises DataError if two foreign names are names of one parameter."""
    names: dict[str, str] = {}
    for name in tensors:
        other = names.setdefault(mapping.canonical(name), name)
        if other != name and not mapping.ignores(mapping.canonical(name)):
            raise DataError(f"{other} and {name} are the same weight of a model; remove one.")


def _check_layers(config: Config, num_tensors: int) -> None:
    """Raises DataError for more layers than weights, before anything is allocated for each layer."""
    sizes = vars(config)
    layers = sum(sizes.get(name, 0) for name in ("num_layers", "num_encoder_layers", "num_decoder_layers"))
    if layers > num_tensors:
        raise DataError(f"The config asks for {layers} layers; there are only {num_tensors} weights.")


def _read(
    leaf: LeafBuilder, row: mappings.Row, tensors: Tensors, part: tuple[str, int | None, tuple[int, ...]]
) -> None:
    """Reads one of the `row`'s parts into its place; an optional tensor that is absent becomes zeros."""
    name, layer, shape = part
    absent = row.optional and name not in tensors
    leaf.put(np.zeros(shape, np.float32) if absent else row.layout.to_ours(np.asarray(tensors[name]), shape), layer)


def _misfits(tensors: Tensors, mapping: mappings.Mapping, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Lists everything missing, surplus or of the wrong shape, by names and shapes alone."""
    problems = []
    used: set[str] = set()
    for row in mapping.rows:
        for name, _, one in row.parts(shapes[row.ours]):
            used.add(name)
            expected = row.layout.foreign_shape(one)
            if name not in tensors:
                problems += [] if row.optional else [f"missing {name} {list(expected)}"]
            elif tensors[name].shape != expected:
                problems.append(f"{name} has shape {list(tensors[name].shape)}, must be {list(expected)}")
    for name, make in mapping.constants:
        used.add(name)
        if name in tensors:
            problems += _other_constant(name, tensors[name], make())
    problems += [f"surplus {name}" for name in sorted(tensors) if name not in used and not mapping.ignores(name)]
    return list(dict.fromkeys(problems))  # report a tensor that several rows share once


_ROUNDED = 4e-3
"""Tolerance of constants of about 1 in a file of half precision."""


def _other_constant(name: str, tensor: Tensor, expected: np.ndarray) -> list[str]:
    if tensor.shape != expected.shape:
        return [f"{name} has shape {list(tensor.shape)}, must be {list(expected.shape)}"]
    if np.abs(np.asarray(tensor).astype(np.float32) - expected).max() > _ROUNDED:
        return [f"{name} does not hold the sines and cosines of a model of this kind"]
    return []


def foreign_tensors(architecture: str, params: Params, config: Config) -> dict[str, Tensor]:
    """Returns our parameters as lazy tensors under their foreign names.

    Raises:
      DataError: `params` lacks a parameter of the architecture, or has an unknown one.
    """
    mapping = architecture_of(architecture).mapping(config)
    leaves = named_leaves(params)
    missing = [row.ours for row in mapping.rows if row.ours not in leaves]
    if missing:
        raise DataError(f"These are not the parameters of this {architecture}: {', '.join(missing)} missing.")
    if surplus := sorted(set(leaves) - {row.ours for row in mapping.rows}):
        raise DataError(f"These are not the parameters of this {architecture}: {', '.join(surplus)} would be lost.")
    rows: dict[str, list[tuple[mappings.Row, int | None]]] = {}
    for row in mapping.rows:
        for name, layer, _ in row.parts(leaves[row.ours].shape):
            rows.setdefault(name, []).append((row, layer))
    tensors: dict[str, Tensor] = {}
    for name, parts in rows.items():
        row, layer = parts[0]
        leaf = leaves[row.ours]
        shape = row.layout.foreign_shape(tuple(leaf.shape if layer is None else leaf.shape[1:]))
        tensors[name] = LazyTensor(shape, np.dtype(leaf.dtype), functools.partial(_make_foreign, leaves, parts))
    tensors |= dict.fromkeys(mapping.copies, tensors[mapping.embedding()])
    return tensors | {name: make() for name, make in mapping.constants}


def _make_foreign(leaves: Mapping[str, Any], parts: Sequence[tuple[mappings.Row, int | None]]) -> np.ndarray:
    """Makes one foreign tensor from the parameters (or one layer of them) that share it."""
    arrays = []
    for row, layer in parts:
        leaf = leaves[row.ours]
        arrays.append(row.layout.to_foreign(np.asarray(leaf if layer is None else leaf[layer])))
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)


def export_params(architecture: str, params: Params, config: Config) -> dict[str, np.ndarray]:
    """Returns our parameters under their foreign names: the inverse of `import_params`.

    Raises:
      DataError: `params` are not those of the architecture.
    """
    return {name: np.asarray(tensor) for name, tensor in foreign_tensors(architecture, params, config).items()}
