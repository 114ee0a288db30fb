"""T5 from two ONNX files, `encoder.onnx` and `decoder.onnx`: its tensors in Hugging Face's names and layouts.

The graphs are not run. Source of the protobuf messages: github.com/onnx/onnx, onnx/onnx.proto.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np

from empax.core.files import DataError
from empax.data.model_files import check_whole
from empax.interop.tensors import LazyTensor, MappedTensor, dtypes_of

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"

_DTYPES = dtypes_of("1=float32 2=uint8 3=int8 6=int32 7=int64 10=float16 11=float64 16=bfloat16")
# Numbers of protobuf fields.
_GRAPH, _NODE, _INITIALIZER = 7, 1, 5
_NODE_INPUT, _NODE_NAME, _NODE_TYPE = 1, 3, 4
_DIMS, _TYPE, _FLOATS, _INTS, _NAME, _RAW, _LOCATION = 1, 2, 4, 5, 8, 9, 14

_Span: TypeAlias = tuple[int, int]
"""Offsets of a value's first byte in the file, and of the byte after its last."""


def has_onnx(folder: Path) -> bool:
    """Whether `folder` holds an encoder and a decoder as ONNX files."""
    return (folder / ENCODER).is_file() and (folder / DECODER).is_file()


def read_onnx_t5(folder: Path) -> dict[str, LazyTensor]:
    """Returns the tensors of a T5 by Hugging Face's names; reads none of them.

    Raises:
      DataError: a file is truncated or not an ONNX file, keeps its weights elsewhere or in an unsupported type, or
        neither file has a weight of a T5.
    """
    tensors: dict[str, LazyTensor] = {}
    for file, pattern, prefix in (
        (folder / ENCODER, r"(?:\w+\.)?((?:block\.\d+|final_layer_norm|embed_tokens)\..*)", "encoder."),
        (folder / DECODER, r"(?:\w+\.)?((?:decoder|shared|lm_head)\..*)", ""),
    ):
        for name, weight in read_onnx(file).items():
            if found := re.fullmatch(pattern, name):
                tensors[prefix + found[1]] = weight
    if not tensors:
        raise DataError(f"{folder}: {ENCODER} and {DECODER} hold no T5; no other model is read from ONNX.")
    return tensors


def read_onnx(file: Path) -> dict[str, LazyTensor]:
    """Returns the initialisers of one ONNX file by their names in PyTorch; reads none of them.

    The right factor of a product loses its name on export, so it gets the name of its module. Numbers, scale and zero
    point from `onnxruntime.quantization` become one tensor.

    Raises:
      DataError: the file is truncated or not an ONNX file, or keeps its weights elsewhere or in an unsupported type.
    """
    check_whole(file)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _named(file, *_parse(file, data))
        except DataError:
            raise
        except (IndexError, ValueError) as error:
            raise DataError(f"{file} is not a whole ONNX file ({error}); fetch the model again.") from error


def _parse(file: Path, data: mmap.mmap) -> tuple[dict[str, MappedTensor | float], dict[str, str]]:
    """Returns initialisers by name, scalars as numbers, and the name of the product of each right factor."""
    graphs = [span for number, span in _fields(data, (0, len(data))) if number == _GRAPH]
    initialisers: dict[str, MappedTensor | float] = {}
    factors: dict[str, str] = {}
    for number, span in (field for graph in graphs for field in _fields(data, _message(graph))):
        if number == _INITIALIZER:
            name, value = _tensor(file, data, _message(span))
            if name in initialisers:
                raise ValueError(f"it has two weights {name[:80]!r}")
            initialisers[name] = value
        elif number == _NODE:
            node: dict[int, list[str]] = {}
            for part, text in _fields(data, _message(span)):
                if part in (_NODE_INPUT, _NODE_NAME, _NODE_TYPE):
                    node.setdefault(part, []).append(_text(data, text))
            if node.get(_NODE_TYPE) in (["MatMul"], ["MatMulInteger"]):
                if _NODE_NAME not in node or len(node.get(_NODE_INPUT, ())) < 2:
                    raise ValueError("a product without a name or without two factors")
                module = node[_NODE_NAME][0].rpartition("/")[0]
                factors[node[_NODE_INPUT][1]] = f"{module.strip('/').replace('/', '.')}.weight"
    if not initialisers:
        raise ValueError("it has no graph with weights")
    return initialisers, factors


def _named(file: Path, initialisers: dict[str, MappedTensor | float], factors: dict[str, str]) -> dict[str, LazyTensor]:
    """Returns the weights of `_parse` under their PyTorch names, quantised parts joined."""
    weights = {}
    for name, stored in initialisers.items():
        if not isinstance(stored, MappedTensor):
            continue
        known = name.removesuffix("_quantized")
        scale, zero_point = 1.0, 0.0
        if known != name:
            scale, zero_point = (initialisers.get(f"{known}_{part}") for part in ("scale", "zero_point"))
            if not isinstance(scale, float) or not isinstance(zero_point, float):
                raise DataError(f"{file}: {name} does not have a single scale and zero point, the only form read here.")
            if not (math.isfinite(scale) and math.isfinite(zero_point)):
                raise ValueError(f"{name} has the scale {scale} and the zero point {zero_point}")
        theirs = factors.get(name, known)
        if theirs in weights:
            raise ValueError(f"it has two weights {theirs[:80]!r}")
        dtype = np.dtype(np.float32) if np.issubdtype(stored.dtype, np.integer) else stored.dtype
        weight = LazyTensor(stored.shape, dtype, functools.partial(_weight, stored, scale, int(zero_point)))
        weights[theirs] = weight.turned() if name in factors else weight  # [inputs, outputs] there
    return weights


def _weight(stored: MappedTensor, scale: float, zero_point: int) -> np.ndarray:
    array = np.asarray(stored)
    if not np.issubdtype(array.dtype, np.integer):
        return array
    return (array.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)


def _tensor(file: Path, data: mmap.mmap, span: _Span) -> tuple[str, MappedTensor | float]:
    """Returns the name and place of a TensorProto; a scalar is returned as a number."""
    shape: list[int] = []
    name, kind, raw = "", 0, None
    number: float | None = None
    for field, value in _fields(data, span):
        if field == _DIMS:
            shape += [value] if isinstance(value, int) else _packed(data, value)
        elif field == _TYPE:
            kind = _number(value)
        elif field == _NAME:
            name = _text(data, value)
        elif field == _RAW:
            raw = _message(value)
        elif field == _FLOATS:
            start, stop = _message(value)
            number = float(np.frombuffer(data[start:stop], "<f4")[0])
        elif field == _INTS:
            number = float(value if isinstance(value, int) else _packed(data, value)[0])
        elif field == _LOCATION and value:
            raise DataError(f"{file} keeps {name} in another file, which is not read here.")
    if raw is None and not shape and number is not None:
        return name, number
    if str(kind) not in _DTYPES or raw is None:
        raise DataError(f"{file}: {name} is of type {kind}; only {', '.join(_DTYPES)} are read, as bytes.")
    tensor = MappedTensor(file, raw[0], _DTYPES[str(kind)], tuple(shape))
    if tensor.end != raw[1]:
        raise ValueError(f"{name[:80]!r} of shape {shape} has {raw[1] - raw[0]} bytes")
    return name, tensor if shape else float(np.asarray(tensor))


def _fields(data: mmap.mmap, span: _Span) -> Iterator[tuple[int, int | _Span]]:
    """Yields the fields of a protobuf message: number, and an integer's value or the span of any other value."""
    at, stop = span
    while at < stop:
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise ValueError(f"byte {at} ends the key of a field {number}")
        if kind == 0:
            value, at = _varint(data, at)
            if at > stop:
                raise ValueError(f"a number reaches beyond byte {stop}")
            yield number, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
            if length < 0:
                raise ValueError(f"a field of {length} bytes before byte {at}")
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"byte {at} begins a field of kind {kind}")
        if at + length > stop:
            raise ValueError(f"a field of {length} bytes reaches beyond byte {stop}")
        yield number, (at, at + length)
        at += length


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if value >> 64 or (byte >= 0x80 and shift > 63):
            raise ValueError(f"a number of more than 64 bits before byte {at}")
        if byte < 0x80:
            # 64 bits in two's complement.
            return (value - (1 << 64) if value >> 63 else value), at


def _packed(data: mmap.mmap, span: int | _Span) -> list[int]:
    at, stop = _message(span)
    numbers = []
    while at < stop:
        number, at = _varint(data, at)
        numbers.append(number)
    if at > stop:
        raise ValueError(f"a number reaches beyond byte {stop}")
    return numbers


def _message(value: int | _Span) -> _Span:
    if isinstance(value, int):
        raise ValueError("a number where a message was expected")
    return value


def _number(value: int | _Span) -> int:
    if not isinstance(value, int):
        raise ValueError("a message where a number was expected")
    return value


def _text(data: mmap.mmap, value: int | _Span) -> str:
    start, stop = _message(value)
    return data[start:stop].decode("utf-8")
