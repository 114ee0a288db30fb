"""Folders of LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors` or `.bin`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.tree import named_leaves
from empax.core.types import Params
from empax.data.model_files import read_model_json
from empax.interop import mappings
from empax.interop.readers import ADAPTER_FILES, merge_advice, read_safetensors
from empax.interop.tensors import Tensor
from empax.interop.torch_files import read_torch
from empax.models.lora import LoraSettings, init_adapters

_PREFIX = "base_model.model."
_PART = re.compile(r"(.+)\.lora_([AB])\.weight")
_READ = frozenset(
    (
        "peft_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "rank_pattern", "alpha_pattern",
        "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "modules_to_save",
        "init_lora_weights", "bias",
    )
)  # fmt: skip
_UNREAD = frozenset(
    (
        "task_type", "auto_mapping", "inference_mode", "peft_version", "fan_in_fan_out", "layers_pattern",
        "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "qalora_group_size", "runtime_config", "ensure_weight_tying",
    )
)  # fmt: skip
"""Fields that change nothing of what a finished adapter computes."""

_LONGEST_NAME = 1024

_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways of initialising that leave the base model's weights alone."""


class Module(NamedTuple):
    """A module of the foreign model, and our weights that its adapter changes: several where it joins them."""

    name: str  # with {layer}
    rows: list[mappings.Row]

    @property
    def pattern(self) -> str:
        return re.escape(self.name).replace(r"\{layer\}", r"\d+")


def modules_of(mapping: mappings.Mapping, owners: Iterable[str]) -> list[Module]:
    """The foreign modules of our weights `owners`, in the table's order."""
    owners, modules = set(owners), {}
    for row in mapping.rows:
        if row.ours in owners:
            modules.setdefault(row.foreign.removesuffix(".weight"), []).append(row)
    return [Module(name, found) for name, found in modules.items()]


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """What an `adapter_config.json` says, as far as it changes what the adapter computes.

    Attributes:
      base, revision: name or folder of the model that the adapter sits on; which of its versions, "" = the newest.
      rank, alpha: r and alpha of the modules that no pattern names.
      rank_pattern, alpha_pattern: the same by regular expressions of the ends of modules' names.
      rank_stabilized: whether the factor is alpha / sqrt(r) (Kalajdzievski 2023, Eq. 9) in place of alpha / r.
      targets: one regular expression, "all-linear", or the ends of modules' names.
      excluded: as `targets`, of what is left out.
      some_layers: whether only some layers have adapters.
      saved: ends of the names of modules that the adapter replaces whole.
    """

    file: Path
    base: str
    revision: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    dropout: float
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    some_layers: bool
    saved: tuple[str, ...]

    def targeted(self, module: str) -> bool:
        """Whether PEFT puts an adapter on the linear `module`."""
        if _named(self.excluded, module) or self.saves(module):
            return False
        return self.targets == "all-linear" or _named(self.targets, module)

    def saves(self, module: str) -> bool:
        return any(re.fullmatch(rf"(.*\.)?{re.escape(name)}(\..*)?", module) for name in self.saved)

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def factor_of(self, module: str) -> float:
        """What the product of A and B is multiplied by."""
        rank = self.rank_of(module)
        return _by_pattern(self.alpha_pattern, module, self.alpha) / (rank**0.5 if self.rank_stabilized else rank)


def _named(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(values: Mapping[str, float], module: str, default: float) -> float:
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads and checks `adapter_config.json`.

    Raises:
      DataError: the file is broken, or a field is missing or of the wrong kind.
      ConfigError: it is an adapter of a kind that is not read here.
    """
    file = folder / "adapter_config.json"
    fields = {name: value for name, value in read_model_json(file).items() if value is not None}
    _check_kind(file, fields)
    targets = fields.get("target_modules")
    if not targets or not _is_names(targets):
        raise DataError(f"{file}: target_modules = {_short(targets)} must be a list of names or a regular expression.")
    excluded, saved = fields.get("exclude_modules", []), fields.get("modules_to_save", [])
    for name, value, kinds in (("exclude_modules", excluded, (list, str)), ("modules_to_save", saved, (list,))):
        if not _is_names(value) or not isinstance(value, kinds):
            raise DataError(f"{file}: {name} = {_short(value)} must be a list of names.")
    base = fields.get("base_model_name_or_path")
    if not isinstance(base, str) or not 0 < len(base) <= _LONGEST_NAME:
        raise DataError(
            f"{file} does not say which model the adapter sits on; set base_model_name_or_path to its folder or name."
        )
    config = AdapterConfig(
        file=file,
        base=base,
        revision=str(fields.get("revision", "")),
        rank=_number(file, "r", fields.get("r", 8), whole=True),
        alpha=_number(file, "lora_alpha", fields.get("lora_alpha", 8)),
        rank_pattern=_pattern(file, "rank_pattern", fields.get("rank_pattern", {}), whole=True),
        alpha_pattern=_pattern(file, "alpha_pattern", fields.get("alpha_pattern", {})),
        rank_stabilized=fields.get("use_rslora", False),
        dropout=fields.get("lora_dropout", 0.0),
        targets=targets.lower() if _is_all(targets) else targets if isinstance(targets, str) else tuple(targets),
        excluded=excluded if isinstance(excluded, str) else tuple(excluded),
        some_layers=bool(fields.get("layers_to_transform")) or fields.get("layers_to_transform") == 0,
        saved=tuple(saved),
    )
    if not isinstance(config.rank_stabilized, bool):
        raise DataError(f"{file}: use_rslora = {_short(config.rank_stabilized)} must be true or false.")
    if not isinstance(config.dropout, int | float) or not 0 <= config.dropout < 1:
        raise DataError(f"{file}: lora_dropout = {_short(config.dropout)} must be a number from 0 to below 1.")
    for pattern in (config.targets, config.excluded, *config.rank_pattern, *config.alpha_pattern):
        if isinstance(pattern, str):
            try:
                re.compile(pattern)
            except re.error as error:
                raise DataError(f"{file}: {_short(pattern)} is not a regular expression: {error}.") from error
    return config


def _check_kind(file: Path, fields: Mapping[str, Any]) -> None:
    """Raises ConfigError for an adapter that is not plain or rank-stabilised LoRA."""
    problems = []
    if fields.get("peft_type", "LORA") != "LORA":
        problems.append(f"peft_type = {_short(fields['peft_type'])}")
    if fields.get("bias", "none") != "none":
        problems.append(f"bias = {_short(fields['bias'])}")
    start = fields.get("init_lora_weights", True)
    if not isinstance(start, bool | str) or start not in _STARTS:
        problems.append(f"init_lora_weights = {_short(start)}, which changes the weights that it sits on,")
    problems += [f"{name} = {_short(value)}" for name, value in fields.items() if value and name not in _READ | _UNREAD]
    if problems:
        raise ConfigError(
            f"{file}: {'; '.join(problems)} is not read here; what is read: LoRA and rank-stabilised LoRA without "
            f"biases (peft_type = 'LORA', use_dora = false, bias = 'none'). {merge_advice()}"
        )


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_all(value: Any) -> bool:
    return isinstance(value, str) and value.lower() == "all-linear"


def _number(file: Path, name: str, value: Any, *, whole: bool = False) -> Any:
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    least, most = (1, 1 << 20) if whole else (1e-6, 1e6)
    if not right or not least <= value <= most:
        kind = "whole number" if whole else "number"
        raise DataError(f"{file}: {name} = {_short(value)} must be a {kind} from {least} to {most}.")
    return value


def _pattern(file: Path, name: str, value: Any, *, whole: bool = False) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{file}: {name} = {_short(value)} must be an object of numbers by names of modules.")
    return {key: _number(file, f"{name}.{key}", number, whole=whole) for key, number in value.items()}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def open_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter's folder, by PEFT's names without what all of them begin with; none is read.

    Raises:
      DataError: there is no such file, or it is broken.
    """
    for name, read in zip(ADAPTER_FILES, (read_safetensors, read_torch), strict=True):
        if (folder / name).is_file():
            return {key.removeprefix(_PREFIX): tensor for key, tensor in read(folder / name).items()}
    raise DataError(
        f"{folder} holds adapter_config.json, but neither {' nor '.join(ADAPTER_FILES)}; fetch the adapter again."
    )


def grown_vocabulary(folder: Path) -> dict[str, int]:
    """The `vocab_size` of an adapter that holds an embedding of its own; empty where it holds none."""
    ends = (".embed_tokens.weight", ".wte.weight", ".word_embeddings.weight", "shared.weight")
    found = [tensor for name, tensor in open_adapter(folder).items() if name.endswith(ends) and tensor.shape]
    return {"vocab_size": found[0].shape[0]} if found else {}


class Adapters(NamedTuple):
    """An adapter in our terms.

    Attributes:
      params: as `models.lora.init_adapters` makes them, numpy arrays.
      settings: with which they are merged or trained further; the pattern finds just the weights that they are on.
      saved: tensors that replace those of the base model, by their foreign names.
    """

    params: Params
    settings: LoraSettings
    saved: dict[str, Tensor]


class _Place(NamedTuple):
    """One linear module of one layer."""

    rows: list[mappings.Row]
    layer: int
    inputs: int
    outputs: int


def read_adapters(folder: Path, mapping: mappings.Mapping, shapes: Params) -> Adapters:
    """Reads an adapter for a model with the table `mapping` and parameters of `shapes`.

    All weights get the rank of the largest adapter, filled up with zeros, which stay zeros in training. Factors that
    differ between modules are taken into B. Where several of our weights are parts of one there (GPT-2's queries, keys
    and values), each gets the ranks that lead to it.

    Raises:
      DataError: the file is broken, or does not hold what its config says, or what the model has.
      ConfigError: it is an adapter of a kind that is not read here.
    """
    config = read_adapter_config(folder)
    whole = jax.eval_shape(lambda: init_adapters(jax.random.key(0), shapes, LoraSettings(pattern="", rank=1)))
    sizes = {name: leaf.shape for name, leaf in named_leaves(whole).items()}
    places = _places(mapping, sizes)
    pairs: dict[str, dict[str, np.ndarray]] = {}  # by the names of modules as the rows have them
    spelled: dict[str, str] = {}  # as the adapter has them
    saved: dict[str, Tensor] = {}
    for name, tensor in open_adapter(folder).items():
        part = _PART.fullmatch(name)
        module = mapping.canonical(f"{part[1]}.weight" if part else name).removesuffix(".weight")
        if part is None:
            saved[name] = tensor
        elif not mapping.ignores(f"{module}.weight"):
            pairs.setdefault(module, {})[part[2]] = np.asarray(tensor).astype(np.float32)
            spelled[module] = part[1]
    headless = any(module != name for module, name in spelled.items())
    spelled = {name: name.removeprefix(mapping.base) if headless else name for name in places} | spelled
    problems = _misfits(config, pairs, spelled, places)
    problems += [
        f"{name} belongs to no module of modules_to_save"
        for name in saved
        if not config.saves(name.rpartition(".")[0]) and mapping.canonical(name) not in _embeddings(mapping)
    ]
    if problems:
        listing = "\n  ".join(problems)
        raise DataError(f"The adapter in {folder} does not fit its model ({len(problems)} problems):\n  {listing}")
    factors = {name: config.factor_of(spelled[name]) for name in pairs}
    params, settings = _in_our_terms(config, pairs, factors, places, sizes)
    return Adapters(params, settings, saved)


def _places(mapping: mappings.Mapping, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, _Place]:
    """Every linear module of the model by its name; `sizes` are those of adapters of rank 1 on everything."""
    places = {}
    for module in modules_of(mapping, {name.rpartition("/")[0] for name in sizes}):
        row, stacked = module.rows[0], "{layer}" in module.name
        a, b = (sizes[f"{row.ours}/{part}"] for part in ("a", "b"))
        inputs, outputs = math.prod(a[stacked:]), row.layout.parts * math.prod(b[stacked:])
        for layer in range(a[0] if stacked else 1):
            places[module.name.format(layer=layer)] = _Place(module.rows, layer, inputs, outputs)
    return places


def _embeddings(mapping: mappings.Mapping) -> set[str]:
    """What PEFT saves unasked where the vocabulary has grown."""
    names = ("token_embedding", "output_embedding")
    return {"lm_head.weight", *(row.foreign for row in mapping.rows if row.ours in names)}


def _misfits(
    config: AdapterConfig,
    pairs: Mapping[str, Mapping[str, np.ndarray]],
    spelled: Mapping[str, str],
    places: Mapping[str, _Place],
) -> list[str]:
    """Everything missing, surplus or of the wrong shape."""
    problems = []
    for module, pair in pairs.items():
        name, rank = spelled[module], config.rank_of(spelled[module])
        place = places.get(module)
        if place is None:
            problems.append(f"{name} is no linear layer here that LoRA adapts")
        elif not config.targeted(name):
            problems.append(f"{name} has an adapter, but target_modules = {_short(config.targets)} does not name it")
        elif found := [f"lora_{part}" for part in ("A", "B") if part not in pair]:
            problems.append(f"{name} lacks {found[0]}")
        elif (pair["A"].shape, pair["B"].shape) != ((rank, place.inputs), (place.outputs, rank)):
            problems.append(
                f"{name} has A {list(pair['A'].shape)} and B {list(pair['B'].shape)}, which must be "
                f"{[rank, place.inputs]} and {[place.outputs, rank]}"
            )
    if not config.some_layers:
        missing = [name for name in places if name not in pairs and config.targeted(spelled[name])]
        problems += [f"missing {spelled[name]}.lora_A.weight" for name in missing]
    return problems or ([] if pairs or config.saved else ["it adapts nothing"])


def _in_our_terms(
    config: AdapterConfig,
    pairs: Mapping[str, Mapping[str, np.ndarray]],
    factors: Mapping[str, float],
    places: Mapping[str, _Place],
    sizes: Mapping[str, tuple[int, ...]],
) -> tuple[Params, LoraSettings]:
    """Adapters with layers stacked and one rank, and the settings that go with them."""
    factor = next(iter(factors.values()), 1.0)
    most = max((len(pair["A"]) for pair in pairs.values()), default=1)
    stacks: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # [L, R, inputs] and [L, R, outputs]
    stacked = {row.ours for place in places.values() for row in place.rows if "{layer}" in row.foreign}
    joined = {row.ours for place in places.values() for row in place.rows if row.layout.parts > 1}
    for module, pair in pairs.items():
        place, rank = places[module], len(pair["A"])
        scaled = pair["B"] * np.float32(factors[module] / factor)
        for row in place.rows:
            size = place.outputs // row.layout.parts
            layers = sizes[f"{row.ours}/a"][0] if row.ours in stacked else 1
            if row.ours not in stacks:
                a, b = (np.zeros((layers, most, length), np.float32) for length in (place.inputs, size))
                stacks[row.ours] = (a, b)
            stacks[row.ours][0][place.layer, :rank] = pair["A"]
            stacks[row.ours][1][place.layer, :rank] = scaled[row.layout.part * size :][:size].T
    fresh = not any(pair["B"].any() for pair in pairs.values())
    for name in list(stacks):
        a, b = stacks.pop(name)
        # Of parts of one weight, what leads to this one; of any other, all that the adapter has.
        own = b.any(axis=(0, 2)) if name in joined and not fresh else a.any(axis=(0, 2)) | b.any(axis=(0, 2))
        if own.any():
            stacks[name] = (a[:, own], b[:, own])
    rank = max((a.shape[1] for a, _ in stacks.values()), default=1)
    leaves: dict[str, Params] = {}
    for name, pair in stacks.items():
        a, b = (np.pad(array, ((0, 0), (0, rank - array.shape[1]), (0, 0))) for array in pair)
        a_size, b_size = sizes[f"{name}/a"], sizes[f"{name}/b"]
        first = int(name in stacked)  # where the axis of the ranks is
        b_shape = (*b_size[:first], rank, *b_size[first + 1 :])
        leaves[name] = {"a": np.moveaxis(a, 1, 2).reshape(*a_size[:-1], rank), "b": b.reshape(b_shape)}
    pattern = rf"^(.*/)?({'|'.join(map(re.escape, sorted(leaves)))})$"
    settings = LoraSettings(pattern=pattern, rank=rank, alpha=factor * rank, dropout=config.dropout)
    return unflatten_dict(leaves, sep="/"), settings
