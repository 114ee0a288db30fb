"""Hugging Face folders in and out, without PyTorch: safetensors and `config.json`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from empax.core.config import ConfigError
from empax.core.files import DataError, read_json
from empax.core.tree import named_leaves
from empax.core.types import Params
from empax.data.tokenizers import minilm_folder
from empax.interop import mappings
from empax.models.bert import BertConfig, BertEncoder, bert_config
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder, TransformerConfig

Config: TypeAlias = TransformerConfig | BertConfig

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a `model_type` of Hugging Face is here."""

    config: Callable[..., Any]
    mapping: Callable[[Any], mappings.Mapping]
    shapes: Callable[[Any], Params]


def _shapes_of_t5(config: TransformerConfig) -> Params:
    ids, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    return jax.eval_shape(lambda rng: EncoderDecoder(config).init(rng, ids, mask, ids), jax.random.key(0))["params"]


def _shapes_of_bert(config: BertConfig) -> Params:
    ids, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    return jax.eval_shape(lambda rng: BertEncoder(config).init(rng, ids, mask), jax.random.key(0))["params"]


ARCHITECTURES: dict[str, Architecture] = {
    "t5": Architecture(t5_config, mappings.t5_mapping, _shapes_of_t5),
    "bert": Architecture(bert_config, mappings.bert_mapping, _shapes_of_bert),
}


def load_safetensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, from one file or from the shards that its index names.

    Raises:
      DataError: there are no weights, a shard is missing, or a file is cut short.
    """
    index = folder / _INDEX
    if (folder / _WEIGHTS).is_file():
        files = [folder / _WEIGHTS]
    elif index.is_file():
        content = read_json(index)
        if not isinstance(content, dict) or "weight_map" not in content:
            raise DataError(f"{index} has no weight_map; fetch the model again.")
        files = [folder / name for name in sorted(set(content["weight_map"].values()))]
    else:
        raise DataError(_no_weights(folder))
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is missing, though {index.name} names it; fetch the model again.")
        try:
            tensors |= safetensors.numpy.load_file(file)
        except safetensors.SafetensorError as error:
            raise DataError(f"{file} is not a whole safetensors file ({error}); fetch the model again.") from error
    return tensors


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder; give one that holds config.json and {_WEIGHTS}."
    found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    hint = ""
    if (folder / "pytorch_model.bin").is_file():
        hint = " Its pytorch_model.bin needs PyTorch to read: save it once more with safe_serialization=True."
    return f"{folder} holds neither {_WEIGHTS} nor {_INDEX}, but {found}.{hint}"


def import_params(architecture: str, tensors: Mapping[str, np.ndarray], config: Config) -> Params:
    """Foreign tensors as our parameters, float32, layers stacked.

    Args:
      architecture: a `model_type` of ARCHITECTURES.
      tensors: by their foreign names.
      config: of the model that shall hold them.

    Raises:
      DataError: one message for everything that is missing, surplus or of the wrong shape.
    """
    entry = _architecture(architecture)
    mapping = entry.mapping(config)
    tensors = {_without_prefix(name, mapping.prefixes): array for name, array in tensors.items()}
    shapes = named_leaves(entry.shapes(config))
    problems = _untie(tensors, config)
    used: set[str] = set()
    params: dict[str, Any] = {}
    for row in mapping.rows:
        arrays = []
        shape = shapes[row.ours].shape
        stacked = "{layer}" in row.foreign
        one = shape[1:] if stacked else shape
        expected = row.layout.foreign_shape(one)
        for name in _foreign_names(row, shape):
            used.add(name)
            if name not in tensors:
                problems.append(f"missing {name} {list(expected)}")
            elif tensors[name].shape != expected:
                problems.append(f"{name} has shape {list(tensors[name].shape)}, must be {list(expected)}")
            else:
                arrays.append(row.layout.to_ours(tensors[name], one).astype(np.float32))
        if arrays:
            _put(params, row.ours, np.stack(arrays) if stacked else arrays[0])
    problems += [f"surplus {name}" for name in sorted(tensors) if name not in used and not mapping.ignores(name)]
    if problems:
        listing = "\n  ".join(problems)
        raise DataError(f"The weights do not fit this {architecture} ({len(problems)} problems):\n  {listing}")
    return jax.tree.map(jnp.asarray, params)


class LazyTensor(NamedTuple):
    """A foreign tensor that is made when it is written, so that not all of them are in memory at once."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]


def foreign_tensors(architecture: str, params: Params, config: Config) -> dict[str, LazyTensor]:
    """Our parameters under their foreign names, none of them made yet.

    Raises:
      DataError: `params` lacks a parameter of the architecture, or has one that it knows nothing of.
    """
    mapping = _architecture(architecture).mapping(config)
    leaves = named_leaves(params)
    missing = [row.ours for row in mapping.rows if row.ours not in leaves]
    if missing:
        raise DataError(f"These are not the parameters of this {architecture}: {', '.join(missing)} missing.")
    if surplus := sorted(set(leaves) - {row.ours for row in mapping.rows}):
        raise DataError(f"These are not the parameters of this {architecture}: {', '.join(surplus)} would be lost.")
    tensors = {}
    for row in mapping.rows:
        leaf = leaves[row.ours]
        stacked = "{layer}" in row.foreign
        shape = row.layout.foreign_shape(tuple(leaf.shape[1:] if stacked else leaf.shape))
        for layer, name in enumerate(_foreign_names(row, leaf.shape)):
            make = functools.partial(_make_foreign, row.layout, leaf, layer if stacked else None)
            tensors[name] = LazyTensor(shape, np.dtype(leaf.dtype), make)
    return tensors


def _make_foreign(layout: mappings.Layout, leaf: Any, layer: int | None) -> np.ndarray:
    return layout.to_foreign(np.asarray(leaf if layer is None else leaf[layer]))


def export_params(architecture: str, params: Params, config: Config) -> dict[str, np.ndarray]:
    """Our parameters under their foreign names: the inverse of `import_params`.

    Raises:
      DataError: `params` are not those of the architecture.
    """
    return {name: tensor.make() for name, tensor in foreign_tensors(architecture, params, config).items()}


class Pretrained(NamedTuple):
    """A model as it comes from a folder."""

    architecture: str
    config: Any
    params: Params


def load_config(folder: Path) -> dict[str, Any]:
    """The fields of a folder's `config.json`.

    Raises:
      DataError: there is none, or it names no `model_type`.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise DataError(f"{folder} holds no config.json; give a folder as Hugging Face models come.")
    fields = read_json(file)
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise DataError(f"{file} names no model_type; it must be one of {', '.join(ARCHITECTURES)}.")
    return fields


def load_pretrained(folder: Path, config: Config | None = None) -> Pretrained:
    """A model from a Hugging Face folder.

    Args:
      folder: holds `config.json` and safetensors.
      config: what to use in place of the folder's own (other dropout, dtype, fewer layers of a BERT).

    Returns:
      The architecture's name, its config, its parameters.

    Raises:
      DataError: files are missing or broken, or do not fit each other.
      ConfigError: the architecture is not known here.
    """
    fields = load_config(folder)
    architecture = fields["model_type"]
    used = _architecture(architecture).config(fields) if config is None else config
    return Pretrained(architecture, used, import_params(architecture, load_safetensors(folder), used))


def _untie(tensors: dict[str, np.ndarray], config: Config) -> list[str]:
    """Makes the two embeddings of `tensors` two where the model has two; says what cannot be."""
    if not isinstance(config, TransformerConfig) or "shared.weight" not in tensors:
        return []
    if not config.tie_embeddings:
        # A file of tied weights holds one copy only.
        tensors.setdefault("lm_head.weight", tensors["shared.weight"])
    elif "lm_head.weight" in tensors and not np.array_equal(tensors["lm_head.weight"], tensors["shared.weight"]):
        return ["lm_head.weight is not shared.weight, but the config ties them: set tie_embeddings = False"]
    return []


def resolve(name_or_folder: str) -> Path:
    """The local folder of a model: a folder itself, "minilm", or a name on the Hugging Face hub (downloaded).

    Raises:
      ConfigError: it is none of these, or the hub cannot be reached.
    """
    if Path(name_or_folder).is_dir():
        return Path(name_or_folder)
    if name_or_folder == "minilm":
        return minilm_folder()
    # Here and not above: reaching for the network is the exception, and the import costs time.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt"]
        return Path(huggingface_hub.snapshot_download(name_or_folder, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{name_or_folder!r} is neither a folder nor a model that the hub gives ({type(error).__name__}). Offline, "
            "give the path of a folder that holds config.json, model.safetensors and the tokenizer, or 'minilm'."
        ) from error


def _architecture(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise ConfigError(f"{name!r} is not an architecture here; it is one of {', '.join(ARCHITECTURES)}.")
    return ARCHITECTURES[name]


def _foreign_names(row: mappings.Row, shape: tuple[int, ...]) -> list[str]:
    if "{layer}" not in row.foreign:
        return [row.foreign]
    return [row.foreign.format(layer=layer) for layer in range(shape[0])]


def _without_prefix(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *parents, leaf = name.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[leaf] = value
