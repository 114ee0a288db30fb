"""Reader of Hugging Face folders without PyTorch: weights and `config.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.types import Params
from empax.data.gguf import find_gguf, is_gguf
from empax.data.model_files import read_model_json
from empax.data.wheels import NAMED
from empax.interop.adapter_files import Adapters, grown_vocabulary, read_adapter_config, read_adapters
from empax.interop.architectures import ARCHITECTURES, Config, architecture_of
from empax.interop.config_fields import check_fields, known_fields, their_words, without_nulls
from empax.interop.gguf import gguf_fields
from empax.interop.layouts import plain_names
from empax.interop.mappings import Mapping as Table
from empax.interop.onnx_files import has_onnx
from empax.interop.parameters import import_params
from empax.interop.readers import MERGE_ADVICE, is_adapter, open_tensors
from empax.interop.t5x import has_t5x
from empax.interop.tensors import Tensors
from empax.interop.tied_embeddings import has_own_head, t5_head
from empax.models.bert import BertConfig
from empax.models.lora import LoraSettings, merge

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja")
"""Files of a Hub model that are fetched besides its weights."""

_WEIGHTS = (("*.safetensors",), ("pytorch_model*.bin", "adapter_model.bin"), ("flax_model*.msgpack",))
"""In one file or in shards; the first format that a model has is fetched."""


class Pretrained(NamedTuple):
    """A model loaded from a folder."""

    architecture: str
    config: Any
    params: Params


def load_config(folder: Path) -> dict[str, Any]:
    """Returns the fields of a folder's `config.json`, or those derived from a GGUF file or from a T5 in ONNX or T5X.

    For an adapter these are the fields of its base model. `folder` may be a GGUF file itself.

    Raises:
      DataError: none of these exists, or the config names no `model_type`.
      ConfigError: the architecture or a setting of it is not supported.
    """
    file = folder / "config.json"
    if is_adapter(folder):
        return load_config(adapter_base(folder)) | grown_vocabulary(folder)
    if not file.is_file():
        return _fields_of_weights(folder)
    fields = read_model_json(file)
    name = fields.get("model_type")
    if name is None:
        raise DataError(f"{file} names no model_type; it must be one of {', '.join(ARCHITECTURES)}.")
    if name not in list(ARCHITECTURES):  # it may be of any type
        raise ConfigError(
            f"{file}: model_type = {name!r} is not read here; it must be one of {', '.join(ARCHITECTURES)}."
        )
    check_fields(fields, file)
    fields = without_nulls(known_fields(fields, file))
    fields = t5_head(fields, folder) if name in ("t5", "mt5") else fields
    _check_supported(fields, file)
    return fields


def _fields_of_weights(folder: Path) -> dict[str, Any]:
    """Returns the fields derived from weights without a `config.json`."""
    if (gguf := find_gguf(folder)) is not None:
        fields = gguf_fields(gguf)
    elif has_onnx(folder) or has_t5x(folder):
        fields = _t5_fields(open_tensors(folder), folder, t5x=not has_onnx(folder))
    else:
        raise DataError(_no_config(folder))
    check_fields(fields, gguf or folder)
    _check_supported(fields, gguf or folder)
    return fields


def _t5_fields(tensors: Tensors, where: Path, *, t5x: bool) -> dict[str, Any]:
    """Returns the fields of the T5 whose weights are `tensors`, by Hugging Face's names; `t5x`: T5X wrote them.

    Settings that no shape shows are those of all released models: the largest relative distance is 128, gated layers
    use GELU. T5X scales the logits if it has no separate head; elsewhere only v1.0, which is not gated, scales them.
    """
    first = "encoder.block.0.layer.{}".format
    gated = f"{first(1)}.DenseReluDense.wi_0.weight" in tensors
    names = (
        "shared.weight",
        f"{first(0)}.SelfAttention.relative_attention_bias.weight",
        f"{first(0)}.SelfAttention.q.weight",
        f"{first(1)}.DenseReluDense.{'wi_0' if gated else 'wi'}.weight",
    )
    lacking = [
        name for name in names if name not in tensors or len(tensors[name].shape) != 2 or 0 in tensors[name].shape
    ]
    if lacking:
        raise DataError(f"{where} holds no T5: it lacks the matrices {', '.join(lacking)}.")
    layers = {"encoder": 0, "decoder": 0}
    for found in filter(None, (re.match(r"(encoder|decoder)\.block\.([0-9]{1,6})\.", name) for name in tensors)):
        layers[found[1]] = max(layers[found[1]], int(found[2]) + 1)
    (vocab_size, d_model), (buckets, heads), (keys, _), (d_ff, _) = (tensors[name].shape for name in names)
    return {
        "model_type": "t5",
        "vocab_size": vocab_size,
        "d_model": d_model,
        "d_kv": keys // heads,
        "d_ff": d_ff,
        "num_layers": layers["encoder"],
        "num_decoder_layers": layers["decoder"],
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": not has_own_head(tensors, "shared.weight"),
        "scale_decoder_outputs": "lm_head.weight" not in tensors if t5x else not gated,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def _check_supported(fields: Mapping[str, Any], file: Path) -> None:
    """Raises ConfigError, which names the `file`, if its `fields` ask for something unsupported."""
    try:
        model_config(fields)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def model_config(fields: Mapping[str, Any], **changes: Any) -> Config:
    """Returns the settings of the model that a `config.json` describes; `changes` override fields of ours.

    Raises:
      ConfigError: the architecture is not supported, or `fields` ask for something unsupported.
    """
    name = fields["model_type"]
    try:
        return architecture_of(name).config(fields, **changes)
    except ConfigError as error:
        raise ConfigError(their_words(str(error), name)) from error


def _no_config(folder: Path) -> str:
    if folder.suffix and not folder.exists():
        return f"{folder}: there is no such file."
    if folder.is_file():
        return _is_file(folder)
    if folder.is_dir() and (folder / "model.pth.tar").is_file():
        return (
            f"{folder} holds an Atlas checkpoint, but no config.json: put that of its reader or of its retriever (such "
            "as google/t5-base-lm-adapt's or facebook/contriever's) beside it, with the tokenizer of the same model."
        )
    return f"{folder} holds no config.json; give the folder of a Hugging Face model, or a GGUF file."


def _is_file(path: Path) -> str:
    return f"{path} is a file; give the folder that holds config.json, or a file that ends in .gguf."


def load_pretrained(folder: Path, config: Config | None = None, *, shardings: Any = None) -> Pretrained:
    """Loads a model from a Hugging Face folder.

    Args:
      folder: a folder with `config.json` and weights in a format of `interop.readers`; or a GGUF file.
      config: settings to use instead of the folder's (other dropout, dtype, fewer layers of a BERT).
      shardings: see `import_params`.

    Raises:
      DataError: files are missing or broken, or do not match.
      ConfigError: the architecture is not supported.
    """
    if is_adapter(folder):
        return load_adapted(folder, config, shardings=shardings).merged()
    fields = load_config(folder)
    architecture = fields["model_type"]
    used = model_config(fields) if config is None else config
    tensors = plain_names(open_tensors(folder), architecture)
    tensors = architecture_of(architecture).mapping(used).without(tensors, _cut(fields, used))
    return Pretrained(architecture, used, _imported(folder, architecture, tensors, used, shardings))


def _imported(folder: Path, architecture: str, tensors: Tensors, config: Config, shardings: Any) -> Params:
    """Calls `import_params`; errors name the `folder` of the `tensors`."""
    try:
        return import_params(architecture, tensors, config, shardings=shardings)
    except DataError as error:
        if str(folder) in str(error):
            raise
        raise DataError(f"{folder}: {error}") from error


class Adapted(NamedTuple):
    """A model with an adapter that is not yet merged into it.

    Attributes:
      params: parameters of the model, including those that the adapter replaces.
      adapters: low-rank adapters on them, for further training with `settings`.
    """

    architecture: str
    config: Any
    params: Params
    adapters: Params
    settings: LoraSettings

    def merged(self) -> Pretrained:
        return Pretrained(self.architecture, self.config, merge(self.params, self.adapters, self.settings))


def adapter_base(folder: Path) -> Path:
    """Returns the folder of the base model of the adapter in `folder`.

    Raises:
      DataError: the adapter names no base model, or names another adapter.
      ConfigError: the model does not exist, or the kind of adapter is not supported.
    """
    config = read_adapter_config(folder)
    if config.revision not in ("", "main") and not expand(config.base).is_dir():
        raise ConfigError(
            f"{config.file}: the adapter sits on revision {config.revision!r} of {config.base}; fetch that, and set "
            "base_model_name_or_path to its folder."
        )
    try:
        base = resolve(config.base)
    except ConfigError as error:
        raise ConfigError(f"{config.file}, base_model_name_or_path: {error}") from error
    if is_adapter(base):
        raise DataError(f"{config.file} names {base} as its model, which is an adapter itself. {MERGE_ADVICE}")
    return base


def generation_folder(folder: Path) -> Path:
    """Returns the folder with the model's decoding settings: for a GGUF file, the folder that holds it.

    An adapter without them uses those of its base model.
    """
    if folder.is_file():
        return folder.parent
    return adapter_base(folder) if not (folder / "generation_config.json").is_file() and is_adapter(folder) else folder


def read_adapter(folder: Path) -> Adapters:
    """Reads the adapter in `folder` without its base model; raises as `load_adapted`."""
    fields = load_config(folder)
    return _adapters(folder, fields["model_type"], model_config(fields))


def _adapters(folder: Path, architecture: str, config: Config) -> Adapters:
    entry = architecture_of(architecture)
    return read_adapters(folder, entry.mapping(config), entry.shapes(config))


def _with_adapter(base: Tensors, adapters: Adapters, mapping: Table) -> dict[str, Any]:
    """Returns the tensors of the model with the adapter's replacements and updates."""
    kept = {name: tensor for name, tensor in base.items() if mapping.canonical(name) not in adapters.saved}
    tensors: dict[str, Any] = kept | adapters.saved
    for name, tensor in tensors.items():
        more = adapters.added.get(mapping.canonical(name))
        if more is not None and tensor.shape == more.shape:  # else `import_params` reports the model's error
            tensors[name] = np.asarray(tensor).astype(np.float32) + more
    return tensors


def _cut(fields: Mapping[str, Any], config: Config) -> range:
    """Returns the layers of a folder with these `fields` that a BERT of `config` leaves out."""
    if not isinstance(config, BertConfig):
        return range(0)
    return range(config.num_layers, cast(BertConfig, model_config(fields)).num_layers)


def load_adapted(folder: Path, config: Config | None = None, *, shardings: Any = None) -> Adapted:
    """Loads an adapter written by PEFT and its base model.

    `config` and `shardings` are those of the model, as for `load_pretrained`, but with all of its layers.

    Raises:
      DataError: files are missing or broken, or do not match.
      ConfigError: the kind of adapter or of model is not supported.
    """
    fields = load_config(folder)
    architecture = fields["model_type"]
    used = model_config(fields) if config is None else config
    mapping, adapters = architecture_of(architecture).mapping(used), _adapters(folder, architecture, used)
    base = adapter_base(folder)
    tensors = _with_adapter(plain_names(open_tensors(base), architecture), adapters, mapping)
    rows, bias = load_config(base)["vocab_size"], tensors.get("final_logits_bias")
    if bias is not None and bias.shape == (1, rows) and rows < used.vocab_size:  # as transformers grows it
        tensors["final_logits_bias"] = np.pad(np.asarray(bias), ((0, 0), (0, used.vocab_size - rows)))
    params = _imported(folder, architecture, tensors, used, shardings)
    return Adapted(architecture, used, params, adapters.params, adapters.settings)


def resolve(name_or_folder: str) -> Path:
    """Returns the path of a model: a folder or a GGUF file itself, a wheel's by its name, or a download from the Hub.

    Names of wheels are those in `data.wheels.NAMED` ("minilm", "smollm2", ...). From the Hub the safetensors are
    fetched, else `pytorch_model.bin`, else `flax_model.msgpack`.

    Raises:
      ConfigError: it is none of these, or the Hub cannot be reached.
    """
    path = expand(name_or_folder)
    if not (path.is_dir() or is_gguf(path)) and name_or_folder in NAMED:
        path = NAMED[name_or_folder]()
    if path.is_dir() or is_gguf(path):
        note(f"the model {name_or_folder!r}", path)
        return path
    if path.is_file():
        raise ConfigError(_is_file(path))
    # Imported here because it is slow and rarely needed.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    folder = path
    try:
        for weights in _WEIGHTS:
            folder = Path(huggingface_hub.snapshot_download(name_or_folder, allow_patterns=[*_SMALL, *weights]))
            if any(any(folder.glob(pattern)) for pattern in weights):
                break
        return folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{name_or_folder!r} is neither a folder nor a model that the hub gives ({type(error).__name__}). Without "
            "network, give the path of a folder that holds config.json, the weights and the tokenizer, that of a GGUF "
            f"file, or {' or '.join(map(repr, NAMED))}."
        ) from error
