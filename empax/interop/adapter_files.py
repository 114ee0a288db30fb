"""Folders of LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors` or `.bin`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from empax.core.files import DataError
from empax.core.tree import named_leaves
from empax.core.types import Params
from empax.data.model_files import short
from empax.interop import mappings
from empax.interop.adapter_config import AdapterConfig, read_adapter_config
from empax.interop.readers import ADAPTER_FILES, read_safetensors
from empax.interop.tensors import Tensor, refuse_misfits
from empax.interop.tied_embeddings import HEAD, check_adapted, check_replaced
from empax.interop.torch_files import read_torch
from empax.models.lora import LoraSettings, init_adapters

log = logging.getLogger("empax")

_PREFIX = "base_model.model."
_PART = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")


class Module(NamedTuple):
    """A module of the foreign model, and our weights that its adapter changes: several if it joins them."""

    name: str  # with {layer}
    rows: list[mappings.Row]

    @property
    def pattern(self) -> str:
        return re.escape(self.name).replace(r"\{layer\}", r"\d+")


def modules_of(mapping: mappings.Mapping, owners: Iterable[str]) -> list[Module]:
    """Returns the foreign modules of our weights `owners`, in the table's order."""
    owners, modules = set(owners), {}
    for row in mapping.rows:
        if row.ours in owners:
            modules.setdefault(row.foreign.removesuffix(".weight"), []).append(row)
    return [Module(name, found) for name, found in modules.items()]


def open_adapter(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of an adapter's folder by PEFT's names without their common prefix; reads none of them.

    Raises:
      DataError: the file is missing or broken.
    """
    for name, read in zip(ADAPTER_FILES, (read_safetensors, read_torch), strict=True):
        if (folder / name).is_file():
            return {
                # PEFT saves an embedding that has an adapter as its base layer.
                key.removeprefix(_PREFIX).replace(".base_layer.", "."): tensor
                for key, tensor in read(folder / name).items()
            }
    raise DataError(
        f"{folder} holds adapter_config.json, but neither {' nor '.join(ADAPTER_FILES)}; fetch the adapter again."
    )


def grown_vocabulary(folder: Path) -> dict[str, int]:
    """Returns the `vocab_size` of an adapter that holds an embedding; empty if it holds none."""
    ends = (".embed_tokens.weight", ".wte.weight", ".word_embeddings.weight", "shared.weight")
    found = [tensor for name, tensor in open_adapter(folder).items() if name.endswith(ends) and tensor.shape]
    return {"vocab_size": found[0].shape[0]} if found else {}


class Adapters(NamedTuple):
    """An adapter in our names and layouts.

    Attributes:
      params: NumPy arrays in the structure of `models.lora.init_adapters`.
      settings: settings for merging or further training; the pattern matches only the adapted weights.
      saved: tensors that replace those of the base model, by the table's foreign names.
      added: updates of weights that `init_adapters` does not adapt (embeddings, their projections), by the same names.
    """

    params: Params
    settings: LoraSettings
    saved: dict[str, Tensor]
    added: dict[str, np.ndarray]


class _Place(NamedTuple):
    """A linear module of one layer, or an embedding; `rows` are its weights that `init_adapters` adapts."""

    rows: list[mappings.Row]
    layer: int
    inputs: int
    outputs: int
    embedding: bool = False


class _Pair(NamedTuple):
    """A file's tensors of one module, and its name for it: A [R, inputs] and B [outputs, R]; either may be missing."""

    name: str
    embedding: bool
    parts: dict[str, np.ndarray]


class _Contents(NamedTuple):
    """The contents of a file, by the table's names.

    Attributes:
      pairs: low-rank adapters by module.
      saved: tensors that replace weights of the model.
      names: the file's names of `saved`.
      outside: the file's names of modules that our model does not have.
    """

    pairs: dict[str, _Pair]
    saved: dict[str, Tensor]
    names: dict[str, str]
    outside: set[str]


def read_adapters(folder: Path, mapping: mappings.Mapping, shapes: Params) -> Adapters:
    """Reads an adapter for a model with the table `mapping` and parameters of `shapes`.

    All weights get the rank of the largest adapter, padded with zeros, which stay zero in training. Factors that differ
    between modules are folded into B. If several of our weights are parts of one foreign weight (GPT-2's queries, keys
    and values), each gets the ranks that affect it.

    Raises:
      DataError: the file is broken, or does not match its config or the model.
      ConfigError: the kind of adapter is not supported.
    """
    config = read_adapter_config(folder)
    whole = jax.eval_shape(lambda: init_adapters(jax.random.key(0), shapes, LoraSettings(pattern="", rank=1)))
    sizes = {name: leaf.shape for name, leaf in named_leaves(whole).items()}
    places, leaves = _places(mapping, sizes) | _others(mapping, shapes, sizes), named_leaves(shapes)
    known = {name for row in mapping.rows for name, _, _ in row.parts(leaves[row.ours].shape)}
    found = _sorted_out(folder, mapping)
    asked = {own for own, name in found.names.items() if config.saves(_owner(name))}
    check_adapted(folder, mapping, found.pairs)
    check_replaced(folder, mapping, found.saved, asked=asked, known=known)
    problems = _misfits(config, found, places, known, _spelling(mapping, found))
    # PEFT also saves embeddings that have grown, which `modules_to_save` does not name.
    unasked = (
        own for own in found.saved if own not in (*asked, mapping.embedding(), HEAD) and not mapping.ignores(own)
    )
    problems += [f"{found.names[own]} belongs to no module of modules_to_save" for own in unasked]
    refuse_misfits(f"The adapter in {folder} does not fit its model", problems)
    if found.outside:
        log.warning("%s: the adapter is also on %s, not read here.", folder, ", ".join(sorted(found.outside)))
    factors = {module: config.factor_of(pair.name) for module, pair in found.pairs.items()}
    adapted = {module: pair.parts for module, pair in found.pairs.items() if places[module].rows}
    params, settings = _in_our_terms(config, adapted, factors, places, sizes)
    others = (module for module in found.pairs if not places[module].rows)
    added = {f"{module}.weight": _product(found.pairs[module], factors[module]) for module in others}
    return Adapters(params, settings, found.saved, added)


def _sorted_out(folder: Path, mapping: mappings.Mapping) -> _Contents:
    found = _Contents({}, {}, {}, set())
    for name, tensor in open_adapter(folder).items():
        part = _PART.fullmatch(name)
        own = mapping.canonical(f"{part[1]}.weight" if part else name)
        if part is None:
            other = found.names.setdefault(own, name)
            found.saved[own] = tensor
        elif mapping.ignores(own) and not mapping.ties(own):
            found.outside.add(part[1])
            continue
        else:
            name = part[1]
            pair = found.pairs.setdefault(_owner(own), _Pair(name, bool(part[2]), {}))
            other = pair.name
            pair.parts[part[3]] = np.asarray(tensor).astype(np.float32)
        if other != name:
            raise DataError(f"{folder}: {other} and {name} are the same part of a model; remove one.")
    return found


def _owner(name: str) -> str:
    """Returns the module of a tensor."""
    return name.rpartition(".")[0]


def _product(pair: _Pair, factor: float) -> np.ndarray:
    """Returns the update of the foreign weight; for an embedding, its transpose."""
    product = np.float32(factor) * (pair.parts["B"] @ pair.parts["A"])
    return product.T if pair.embedding else product


def _places(mapping: mappings.Mapping, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, _Place]:
    """Returns every module that `init_adapters` adapts, by name; `sizes`: shapes of rank-1 adapters on everything."""
    places = {}
    for module in modules_of(mapping, {name.rpartition("/")[0] for name in sizes}):
        row, stacked = module.rows[0], "{layer}" in module.name
        a, b = (sizes[f"{row.ours}/{part}"] for part in ("a", "b"))
        inputs, outputs = math.prod(a[stacked:]), row.layout.parts * math.prod(b[stacked:])
        for layer in range(a[0] if stacked else 1):
            places[module.name.format(layer=layer)] = _Place(module.rows, layer, inputs, outputs)
    return places


def _others(mapping: mappings.Mapping, shapes: Params, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, _Place]:
    """Returns the other matrices outside the layers: embeddings [inputs, outputs], linear layers [outputs, inputs]."""
    places, leaves = {}, named_leaves(shapes)
    for row in mapping.rows:
        shape = row.layout.foreign_shape(leaves[row.ours].shape)
        if len(shape) != 2 or "{layer}" in row.foreign or f"{row.ours}/a" in sizes or row.layout.row:
            continue
        embedding = row.layout.split is None and row.ours != "output_embedding"
        inputs, outputs = shape if embedding else shape[::-1]
        places[row.foreign.removesuffix(".weight")] = _Place([], 0, inputs, outputs, embedding)
    return places


def _spelling(mapping: mappings.Mapping, found: _Contents) -> Callable[[str], str]:
    """Returns a function from the table's names to the file's, which have a shorter or a longer prefix."""
    for name in (*(pair.name for pair in found.pairs.values()), *found.names.values()):
        own = mapping.canonical(name)
        if own != name and own.endswith(name):
            front = own.removesuffix(name)
            return lambda module: module.removeprefix(front)
        if own != name and name.endswith(own):
            front = name.removesuffix(own)
            return lambda module: front + module
    return lambda module: module


def _misfits(
    config: AdapterConfig, found: _Contents, places: Mapping[str, _Place], known: set[str], spell: Callable[[str], str]
) -> list[str]:
    """Lists everything missing, and every adapter that is surplus or of the wrong shape."""
    problems = []
    for module, (name, embedding, parts) in found.pairs.items():
        rank, place = config.rank_of(name), places.get(module)
        if place is None or place.embedding != embedding:
            problems.append(f"{name} is not {'an embedding' if embedding else 'a linear layer'} that LoRA adapts here")
        elif not config.targeted(name):
            problems.append(f"{name} has an adapter, but target_modules = {short(config.targets)} does not name it")
        elif missing := [part for part in ("A", "B") if part not in parts]:
            problems.append(f"{name} lacks lora_{missing[0]}")
        elif (parts["A"].shape, parts["B"].shape) != ((rank, place.inputs), (place.outputs, rank)):
            problems.append(
                f"{name} has A {list(parts['A'].shape)} and B {list(parts['B'].shape)}, which must be "
                f"{[rank, place.inputs]} and {[place.outputs, rank]}"
            )
    for module in places.keys() - found.pairs.keys():
        if config.targeted(spell(module)) and (places[module].rows or config.targets != "all-linear"):
            problems.append(f"missing {spell(module)}.lora_{'embedding_' * places[module].embedding}A")
    problems += [f"missing {spell(own)}" for own in known - found.saved.keys() if config.saves(_owner(spell(own)))]
    if not problems and not found.pairs and not found.saved:
        problems.append("it adapts nothing" + f" but {', '.join(sorted(found.outside))}" * bool(found.outside))
    return sorted(problems)


def _in_our_terms(
    config: AdapterConfig,
    pairs: Mapping[str, Mapping[str, np.ndarray]],
    factors: Mapping[str, float],
    places: Mapping[str, _Place],
    sizes: Mapping[str, tuple[int, ...]],
) -> tuple[Params, LoraSettings]:
    """Returns adapters with stacked layers and one rank, and their settings."""
    factor = next(iter(factors.values()), 1.0)
    most = max((len(pair["A"]) for pair in pairs.values()), default=1)
    fresh = not any(pair["B"].any() for pair in pairs.values())
    weights: dict[mappings.Row, list[str]] = {}  # the modules that adapt each of our weights
    for module in pairs:
        for row in places[module].rows:
            weights.setdefault(row, []).append(module)
    stacks: dict[mappings.Row, tuple[np.ndarray, np.ndarray]] = {}  # [L, R, inputs] and [L, R, outputs]
    for row, modules in weights.items():
        inputs, outputs = places[modules[0]].inputs, places[modules[0]].outputs // row.layout.parts
        layers = sizes[f"{row.ours}/a"][0] if "{layer}" in row.foreign else 1
        a, b = (np.zeros((layers, most, length), np.float32) for length in (inputs, outputs))
        for module in modules:
            pair, layer = pairs[module], places[module].layer
            scaled = pair["B"] * np.float32(factors[module] / factor)
            a[layer, : len(pair["A"])] = pair["A"]
            b[layer, : len(pair["A"])] = scaled[row.layout.part * outputs :][:outputs].T
        # For parts of one weight, the ranks that affect this part; for any other weight, all ranks of the adapter.
        own = b.any(axis=(0, 2))
        if row.layout.parts == 1 or fresh:
            own |= a.any(axis=(0, 2))
        if own.any():
            stacks[row] = (a[:, own], b[:, own])
    rank = max((a.shape[1] for a, _ in stacks.values()), default=1)
    leaves: dict[str, Params] = {}
    for row, pair in stacks.items():
        a, b = (np.pad(array, ((0, 0), (0, rank - array.shape[1]), (0, 0))) for array in pair)
        a_size, b_size = sizes[f"{row.ours}/a"], sizes[f"{row.ours}/b"]
        first = int("{layer}" in row.foreign)  # the axis of the ranks
        b_shape = (*b_size[:first], rank, *b_size[first + 1 :])
        leaves[row.ours] = {"a": np.moveaxis(a, 1, 2).reshape(*a_size[:-1], rank), "b": b.reshape(b_shape)}
    pattern = rf"^(.*/)?({'|'.join(map(re.escape, sorted(leaves)))})$"
    settings = LoraSettings(pattern=pattern, rank=rank, alpha=factor * rank, dropout=config.dropout)
    return unflatten_dict(leaves, sep="/"), settings
