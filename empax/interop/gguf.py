"""Llama from GGUF files: settings and tensors as Hugging Face would give them.

Source of the block formats: github.com/ggml-org/ggml, src/ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

from empax.core.files import DataError
from empax.data.gguf import GgufFile, GgufTensor, read_gguf
from empax.interop.tensors import MappedTensor

_PLAIN = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}
_BLOCK = 32  # numbers that share a scale
_BLOCKS = {  # number of the type -> how a block lies in the file
    2: np.dtype([("scale", "<f2"), ("quants", "u1", 16)]),
    3: np.dtype([("scale", "<f2"), ("least", "<f2"), ("quants", "u1", 16)]),
    8: np.dtype([("scale", "<f2"), ("quants", "i1", 32)]),
}
_BLOCKS_AT_ONCE = 1 << 16
_READ = {0: "F32", 1: "F16", 30: "BF16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0"}
_NOT_READ = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"}
_NOT_READ |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"}
_NOT_READ |= {23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0"}
_NOT_READ |= {35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}

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
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class GgufWeight:
    """A tensor of a GGUF file as Hugging Face has it: no longer quantised, rows of queries and keys in its order.

    Attributes:
      stored: the numbers of the file, or its blocks.
      shape: of the tensor.
      kind: ggml's number for the type.
      heads: of a projection to queries or keys, how many heads its rows are; 0 of any other.
    """

    stored: MappedTensor
    shape: tuple[int, ...]
    kind: int
    heads: int = 0

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32) if self.kind in _BLOCKS else self.stored.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.stored)
        if self.kind in _BLOCKS:
            array = _dequantize(array, self.kind).reshape(self.shape)
        if self.heads:
            # llama.cpp turns neighbouring pairs of a head, Hugging Face a number and that half a head further.
            pairs = array.reshape(self.heads, -1, 2, *self.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(self.shape)
        return array.astype(self.dtype if dtype is None else dtype, copy=bool(copy))


def read_llama(path: Path) -> dict[str, GgufWeight]:
    """The tensors of a Llama in a GGUF file, by Hugging Face's names; none is read.

    Raises:
      DataError: the file is no Llama, is cut short, or holds a tensor in a quantisation that is not read here.
    """
    file = _llama(path)
    heads, groups = _heads(file)
    size = path.stat().st_size
    tensors = {}
    for row in file.tensors:
        if row.name == _ROPE_FACTORS:  # in the settings
            continue
        stored = _stored(path, row)
        if stored.end > size:
            raise DataError(f"{path} is cut short: {row.name} ends at byte {stored.end} of {size}; fetch it again.")
        turned = re.fullmatch(r"blk\.\d+\.attn_([qk])\.\w+", row.name)
        count = 0 if turned is None else {"q": heads, "k": groups}[turned[1]]
        if count and row.shape[0] % (2 * count):
            raise DataError(f"{path}: {row.name} has {row.shape[0]} rows, which {count} even heads cannot share.")
        tensors[_foreign_name(row.name)] = GgufWeight(stored, row.shape, row.kind, count)
    return tensors


def llama_fields(path: Path) -> dict[str, Any]:
    """What the `config.json` of the Llama in a GGUF file would say.

    Raises:
      DataError: the file is no Llama, or lacks a setting.
    """
    file = _llama(path)
    heads, groups = _heads(file)
    width = file.size("llama.embedding_length")
    shapes = {row.name: row.shape for row in file.tensors}
    if "token_embd.weight" not in shapes:
        raise DataError(f"{path} has no token_embd.weight; fetch or convert the model again.")
    head_dim = file.size("llama.attention.key_length", max(width // heads, 1))
    if head_dim % 2 or heads % groups:
        raise DataError(
            f"{path}: llama.attention.head_count = {heads}, llama.attention.head_count_kv = {groups} and heads of "
            f"{head_dim} do not go together: heads are even, and their number is a multiple of head_count_kv."
        )
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": file.size("llama.feed_forward_length"),
        "num_hidden_layers": file.size("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.size("llama.context_length"),
        # Written in float32, so 1e-5 comes back with digits that nobody meant.
        "rms_norm_eps": float(f"{file.real('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": file.real("llama.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if f"tokenizer.ggml.{theirs}_token_id" in file.metadata:
            fields[f"{ours}_token_id"] = file.metadata[f"tokenizer.ggml.{theirs}_token_id"]
    return fields


def _llama(path: Path) -> GgufFile:
    file = read_gguf(path)
    architecture = file.text("general.architecture")
    if architecture != "llama":
        raise DataError(f"{path} is a {architecture!r}; GGUF files are read of 'llama' alone.")
    return file


def _heads(file: GgufFile) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    for key in ("llama.attention.head_count", "llama.attention.head_count_kv"):
        if isinstance(file.metadata.get(key), list):
            raise DataError(f"{file.path} has another number of heads in each layer, which a Llama here has not.")
    heads = file.size("llama.attention.head_count")
    return heads, file.size("llama.attention.head_count_kv", heads)


def _foreign_name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        return name  # as it is, and so reported as surplus
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _stored(path: Path, row: GgufTensor) -> MappedTensor:
    if row.kind in _PLAIN:
        return MappedTensor(path, row.offset, _PLAIN[row.kind], row.shape)
    known = ", ".join(_READ.values())
    if row.kind not in _BLOCKS:
        name = _NOT_READ.get(row.kind, f"type {row.kind}")
        raise DataError(
            f"{path}: {row.name} is quantised as {name}; what is read: {known}. Take a file in one of them."
        )
    if row.shape[-1] % _BLOCK:
        raise DataError(f"{path}: {row.name} has rows of {row.shape[-1]}, no multiple of the {_BLOCK} of a block.")
    return MappedTensor(path, row.offset, _BLOCKS[row.kind], (math.prod(row.shape) // _BLOCK,))


def _dequantize(blocks: np.ndarray, kind: int) -> Float[np.ndarray, "blocks 32"]:
    """The numbers that blocks stand for: scale times quants, plus the least number or minus half the range."""
    numbers = np.empty((len(blocks), _BLOCK), np.float32)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):  # what is worked on stays small
        part, out = blocks[start : start + _BLOCKS_AT_ONCE], numbers[start : start + _BLOCKS_AT_ONCE]
        scale = part["scale"].astype(np.float32)[:, None]
        if _READ[kind] == "Q8_0":
            out[:] = part["quants"]
        else:
            # The first half of a block lies in the low four bits, the second in the high ones.
            out[:, : _BLOCK // 2] = part["quants"] & 15
            out[:, _BLOCK // 2 :] = part["quants"] >> 4
        if _READ[kind] == "Q4_0":
            out -= 8
        out *= scale
        if _READ[kind] == "Q4_1":
            out += part["least"].astype(np.float32)[:, None]
    return numbers


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    """The scaling of rotary positions; Llama 3.1's is known by the factors that stand for it in a tensor."""
    rows = [row for row in file.tensors if row.name == _ROPE_FACTORS]
    kind = file.text("llama.rope.scaling.type", "none")
    if not rows:
        if kind == "none":
            return None
        if kind != "linear":
            raise DataError(
                f"{file.path} scales rotary positions by {kind!r}; what is read: none, linear, Llama 3.1's."
            )
        factor = file.real("llama.rope.scaling.factor")
        if factor < 1:
            raise DataError(f"{file.path}: llama.rope.scaling.factor = {factor} must be at least 1.")
        return {"rope_type": "linear", "factor": factor}
    if rows[0].kind != 0 or len(rows[0].shape) != 1 or not 0 < rows[0].shape[0] <= 1 << 16:
        raise DataError(f"{file.path}: {_ROPE_FACTORS} is no list of F32; fetch or convert the model again.")
    factors = np.asarray(_stored(file.path, rows[0]))
    base = file.real("llama.rope.freq_base", 10000.0)
    wavelengths = 2 * np.pi * base ** (np.arange(len(factors)) / len(factors))
    factor = float(factors.max())
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    # What llama.cpp makes of these settings, which are those of every Llama 3.1 to 3.3.
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    if not np.allclose(factors, 1.0 / ((1.0 - smooth) / factor + smooth), rtol=1e-3):
        raise DataError(
            f"{file.path}: the factors in {_ROPE_FACTORS} are not those of Llama 3.1; give its safetensors."
        )
    return scaling
