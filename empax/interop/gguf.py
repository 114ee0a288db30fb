"""Models from GGUF files: settings and tensors in Hugging Face's names and layouts.

Llama, Mistral (which llama.cpp calls a Llama too), Qwen2 and Qwen3. The package `gguf` dequantises. `data.gguf` reads
the header, since the package's reader trusts every count in a broken file.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

from empax.core.files import DataError
from empax.data.gguf import GgufFile, GgufTensor, read_gguf
from empax.interop.tensors import LazyTensor, MappedTensor

_PLAIN = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}
_BYTES_AT_ONCE = 1 << 18  # of blocks, to bound memory
_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_TURNED = ("llama", "mistral")  # llama.cpp permutes their queries and keys

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def read_gguf_weights(path: Path) -> dict[str, LazyTensor]:
    """Returns the tensors of a GGUF file by Hugging Face's names; reads none of them.

    Raises:
      DataError: the model is of another kind, the file is truncated, or a tensor has an unsupported quantisation.
    """
    file, architecture = _model(path)
    heads, groups = _heads(file, architecture) if architecture in _TURNED else (0, 0)
    size = path.stat().st_size
    tensors = {}
    for row in file.tensors:
        if row.name == _ROPE_FACTORS:  # read with the settings
            continue
        stored = _stored(path, row)
        if stored.end > size:
            raise DataError(f"{path} is cut short: {row.name} ends at byte {stored.end} of {size}; fetch it again.")
        turned = re.fullmatch(r"blk\.\d+\.attn_([qk])\.\w+", row.name)
        count = 0 if turned is None else {"q": heads, "k": groups}[turned[1]]
        if count and row.shape[0] % (2 * count):
            raise DataError(
                f"{path}: {row.name} has {row.shape[0]} rows, which do not divide into {count} heads of even size."
            )
        dtype = _PLAIN.get(row.kind, np.dtype(np.float32))
        read = functools.partial(_numbers, row, stored, count)
        tensors[_foreign_name(row.name)] = LazyTensor(row.shape, dtype, read)
    return tensors


def _numbers(row: GgufTensor, stored: MappedTensor, heads: int) -> np.ndarray:
    """Returns the tensor `row` in Hugging Face's layout: dequantised, rows of queries and keys in its order.

    `heads`: number of heads of a projection to queries or keys; 0 for other tensors.
    """
    array = np.asarray(stored)
    if row.kind not in _PLAIN:
        array = _dequantize(array, row.kind).reshape(row.shape)
    if heads:
        # llama.cpp rotates adjacent pairs of a head, Hugging Face a number and the one half a head further.
        array = array.reshape(heads, -1, 2, *row.shape[1:]).swapaxes(1, 2).reshape(row.shape)
    return array


def gguf_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of the model's `config.json` from a GGUF file.

    Raises:
      DataError: the model is of another kind, or lacks a setting.
    """
    file, name = _model(path)
    heads, groups = _heads(file, name)
    width = file.size(f"{name}.embedding_length")
    shapes = {row.name: row.shape for row in file.tensors}
    if "token_embd.weight" not in shapes:
        raise DataError(f"{path} has no token_embd.weight; fetch or convert the model again.")
    head_dim = file.size(f"{name}.attention.key_length", max(width // heads, 1))
    if head_dim % 2 or heads % groups:
        raise DataError(
            f"{path}: {name}.attention.head_count = {heads}, {name}.attention.head_count_kv = {groups} and heads of "
            f"{head_dim} do not go together: the size of heads must be even, and head_count a multiple of "
            "head_count_kv."
        )
    fields = {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": file.size(f"{name}.feed_forward_length"),
        "num_hidden_layers": file.size(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.size(f"{name}.context_length"),
        # Stored in float32, so 1e-5 would come back with spurious digits.
        "rms_norm_eps": float(f"{file.real(f'{name}.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": file.real(f"{name}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, name),
        "tie_word_embeddings": "output.weight" not in shapes,
        **_own_fields(file, name, set(shapes)),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if f"tokenizer.ggml.{theirs}_token_id" in file.metadata:
            fields[f"{ours}_token_id"] = file.metadata[f"tokenizer.ggml.{theirs}_token_id"]
    return fields


def _own_fields(file: GgufFile, name: str, tensors: set[str]) -> dict[str, Any]:
    """Returns the fields that differ between the architectures."""
    key = f"{name}.attention.sliding_window"
    window = file.size(key) if key in file.metadata else None
    if name in _TURNED:
        if name == "mistral" or window is not None:
            kind = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
            return {**kind, "sliding_window": window}
        biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **biases}
    if window is not None:
        raise DataError(f"{file.path}: {key} = {window} does not say which layers it applies to; give the safetensors.")
    kind = {"model_type": name, "architectures": [f"{name.capitalize()}ForCausalLM"]}
    return {**kind, "attention_bias": "blk.0.attn_q.bias" in tensors} if name == "qwen3" else kind


def _model(path: Path) -> tuple[GgufFile, str]:
    file = read_gguf(path)
    architecture = file.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise DataError(f"{path} is a {architecture!r}; only GGUF files of {', '.join(_ARCHITECTURES)} are read.")
    return file, architecture


def _heads(file: GgufFile, name: str) -> tuple[int, int]:
    """Returns the numbers of query heads, and of key and value heads."""
    for key in (f"{name}.attention.head_count", f"{name}.attention.head_count_kv"):
        if isinstance(file.metadata.get(key), list):
            raise DataError(
                f"{file.path} has different numbers of heads in its layers, which a {name} here cannot have."
            )
    heads = file.size(f"{name}.attention.head_count")
    return heads, file.size(f"{name}.attention.head_count_kv", heads)


def _foreign_name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        return name  # unchanged, so it is reported as surplus
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _stored(path: Path, row: GgufTensor) -> MappedTensor:
    """Returns the numbers of the file, or the bytes of its blocks, [rows, bytes]."""
    if row.kind in _PLAIN:
        return MappedTensor(path, row.offset, _PLAIN[row.kind], row.shape)
    block, size = _block(path, row)
    if row.shape[-1] % block:
        raise DataError(f"{path}: {row.name} has rows of {row.shape[-1]}, not a multiple of the block size {block}.")
    rows = (math.prod(row.shape[:-1]), row.shape[-1] // block * size)
    return MappedTensor(path, row.offset, np.dtype(np.uint8), rows)


def _block(path: Path, row: GgufTensor) -> tuple[int, int]:
    """Returns the numbers and bytes of a block; raises DataError if the package `gguf` cannot dequantise its type."""
    import gguf  # slow to import, and needed only here

    try:
        kind = gguf.GGMLQuantizationType(row.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        name = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}.get(row.kind, f"type {row.kind}")
        raise DataError(
            f"{path}: {row.name} is quantised as {name}, which the package gguf does not read; use a file in F32, "
            "F16, BF16, Q4_0, Q4_1, Q8_0, or Q2_K to Q6_K."
        ) from error
    return block, size


def _dequantize(rows: np.ndarray, kind: int) -> Float[np.ndarray, "rows numbers"]:
    """Dequantises blocks, some rows at a time."""
    import gguf

    kinds = gguf.GGMLQuantizationType(kind)
    block, size = gguf.GGML_QUANT_SIZES[kinds]
    numbers = np.empty((len(rows), rows.shape[1] // size * block), np.float32)
    at_once = max(1, _BYTES_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), at_once):
        part = np.ascontiguousarray(rows[start : start + at_once])
        numbers[start : start + at_once] = gguf.quants.dequantize(part, kinds)
    return numbers


def _rope_scaling(file: GgufFile, name: str) -> dict[str, Any] | None:
    """Returns the scaling of rotary positions; Llama 3.1's is recognised by a tensor of factors."""
    neutral = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
    for key, value in neutral.items():
        key = f"{name}.rope.scaling.{key}"
        if key in file.metadata and file.real(key) != value:
            raise DataError(f"{file.path}: {key} = {file.real(key)} is not read here; give the safetensors.")
    rows = [row for row in file.tensors if row.name == _ROPE_FACTORS]
    kind = file.text(f"{name}.rope.scaling.type", "none")
    if not rows:
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise DataError(
                f"{file.path} scales rotary positions by {kind!r}; only none, linear, yarn and Llama 3.1's are read."
            )
        factor = file.real(f"{name}.rope.scaling.factor")
        if factor < 1:
            raise DataError(f"{file.path}: {name}.rope.scaling.factor = {factor} must be at least 1.")
        return {"rope_type": kind, "factor": factor} | (_yarn(file, name) if kind == "yarn" else {})
    if rows[0].kind != 0 or len(rows[0].shape) != 1 or not 0 < rows[0].shape[0] <= 1 << 16:
        raise DataError(f"{file.path}: {_ROPE_FACTORS} is not a list of F32; fetch or convert the model again.")
    factors = np.asarray(_stored(file.path, rows[0]))
    base = file.real(f"{name}.rope.freq_base", 10000.0)
    wavelengths = 2 * np.pi * base ** (np.arange(len(factors)) / len(factors))
    factor = float(factors.max())
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    # llama.cpp's factors for these settings, which every Llama 3.1 to 3.3 has.
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    if not np.allclose(factors, 1.0 / ((1.0 - smooth) / factor + smooth), rtol=1e-3):
        raise DataError(
            f"{file.path}: the factors in {_ROPE_FACTORS} are not those of Llama 3.1; give its safetensors."
        )
    return scaling


def _yarn(file: GgufFile, name: str) -> dict[str, Any]:
    """Returns the settings of YaRN other than its factor."""
    found: dict[str, Any] = {
        "original_max_position_embeddings": file.size(f"{name}.rope.scaling.original_context_length")
    }
    for theirs in ("beta_fast", "beta_slow"):
        if (key := f"{name}.rope.scaling.yarn_{theirs}") in file.metadata:
            found[theirs] = file.real(key)
    return found
