"""Reader of a folder's weights in any of the supported formats: tensors that are read one at a time."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.gguf import find_gguf, is_gguf
from empax.data.model_files import check_whole, is_listed, read_model_json, short
from empax.interop.flax_files import read_flax
from empax.interop.gguf import read_gguf_weights
from empax.interop.onnx_files import DECODER, ENCODER, has_onnx, read_onnx_t5
from empax.interop.t5x import has_t5x, read_t5x
from empax.interop.tensors import MappedTensor, Tensor, dtypes_of
from empax.interop.torch_files import read_torch

SAFETENSORS, TORCH, FLAX = "model.safetensors", "pytorch_model.bin", "flax_model.msgpack"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
MERGE_ADVICE = (
    "Where PEFT is installed and can merge this kind, make one model of both: `PeftModel.from_pretrained("
    "AutoModelForCausalLM.from_pretrained(BASE), FOLDER).merge_and_unload().save_pretrained(OUT)` "
    "(AutoModelForSeq2SeqLM of an encoder-decoder, AutoModel of an encoder); save the tokenizer there too, and give "
    "OUT."
)
"""Advice on merging an unsupported adapter with PEFT."""
_ATLAS = "model.pth.tar"
_DTYPES = dtypes_of("""
    F64=float64 F32=float32 F16=float16 BF16=bfloat16 F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2
    I64=int64 I32=int32 I16=int16 I8=int8 U64=uint64 U32=uint32 U16=uint16 U8=uint8 BOOL=bool""")


def open_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder of weights, or of one file; reads none of them.

    Searches a folder for safetensors (one file, or shards with their index), PyTorch's `pytorch_model.bin` (the same),
    Flax's `flax_model.msgpack` (the same), Atlas's `model.pth.tar`, a GGUF file, a T5 as `encoder.onnx` and
    `decoder.onnx`, and the arrays of T5X, in this order. Names are those in the files; other libraries' names become
    Hugging Face's.

    Raises:
      DataError: there are no weights, a shard is missing, or a file is truncated or in an unsupported format.
    """
    if path.is_file():
        return _read_file(path)
    for name in (SAFETENSORS, TORCH, FLAX):
        if is_listed(path / name):
            return _read_file(path / name)
        index = path / f"{name}.index.json"
        if is_listed(index):
            return _read_shards(index)
    if (path / _ATLAS).is_file():
        return _read_file(path / _ATLAS)
    gguf = find_gguf(path)
    if gguf is not None:
        return _read_file(gguf)
    if has_onnx(path):
        return dict(read_onnx_t5(path))
    if has_t5x(path):
        return dict(read_t5x(path))
    raise DataError(_no_weights(path))


def read_safetensors(file: Path) -> dict[str, MappedTensor]:
    """Returns the tensors of one safetensors file.

    Raises:
      DataError: the file is truncated, or holds numbers of an unsupported type.
    """
    check_whole(file)
    try:
        # Checks the header against the file: all tensors lie within it, without gap or overlap.
        with safetensors.safe_open(file, framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{file} is not a whole safetensors file ({error}); fetch the model again.") from error
    # The library copies each tensor when reading, so the largest would be in memory twice.
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise DataError(f"{file}: {name} is of type {entry['dtype']}; only {', '.join(_DTYPES)} are read.")
        start = 8 + length + entry["data_offsets"][0]
        try:
            tensors[name] = MappedTensor(file, start, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
        except ValueError as error:
            raise DataError(f"{file}: {name} is impossible ({error}); fetch the model again.") from error
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    if is_gguf(file):
        return dict(read_gguf_weights(file))
    torch = dict.fromkeys((".bin", ".pth", ".pt", ".tar"), read_torch)
    readers = {".safetensors": read_safetensors, **torch, ".msgpack": read_flax}
    if file.suffix not in readers:
        raise DataError(
            f"{file} does not have the name of a weights file; it must end in {', '.join((*readers, '.gguf'))}."
        )
    return dict(readers[file.suffix](file))


def _read_shards(index: Path) -> dict[str, Tensor]:
    files = read_model_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise DataError(f"{index} has no weight_map from names of weights to files; fetch the model again.")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        # Checks the name, not a link's target: the Hub's cache keeps every file elsewhere.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{index} names {short(name)}, which is outside the folder.")
        file = index.parent / name
        if not file.is_file():
            raise DataError(f"{file} is missing, though {index.name} names it; fetch the model again.")
        tensors |= _read_file(file)
    return tensors


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter.

    Raises:
      ConfigError: it also holds a whole model, so the choice is ambiguous.
    """
    wholes = (SAFETENSORS, TORCH, FLAX, *(f"{name}.index.json" for name in (SAFETENSORS, TORCH, FLAX)))
    whole = [name for name in wholes if (folder / name).is_file()]
    found = [name for name in (ADAPTER_CONFIG, *ADAPTER_FILES) if is_listed(folder / name)]
    if whole and found:
        raise ConfigError(
            f"{folder} holds a whole model ({whole[0]}) and an adapter beside it ({', '.join(found)}). If the adapter "
            "is already merged into the model, remove its files; otherwise move them to their own folder, set "
            f"base_model_name_or_path to {folder.resolve()} in its {ADAPTER_CONFIG}, and give that folder."
        )
    return ADAPTER_CONFIG in found


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder; give one that holds config.json and {SAFETENSORS}."
    if is_adapter(folder):
        return f"{folder} holds an adapter, which sits on the weights of another model: `load_pretrained` reads both."
    found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    known = f"{SAFETENSORS}, {TORCH}, {FLAX}, an index of shards of any ({SAFETENSORS}.index.json), {_ATLAS}, a .gguf "
    known += f"file, {ENCODER} with {DECODER}, or a checkpoint of T5X"
    return f"{folder} holds no weights that are read here ({known}), but {found}."
