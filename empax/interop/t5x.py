"""Reader of T5X checkpoints of T5 1.0 and 1.1: a folder of zarr arrays, under Hugging Face's names.

Source of the names: github.com/google-research/t5x, t5x/examples/t5/network.py; of the arrays: zarr's specification,
version 2. No library reads them, since it would allocate as much memory as a broken file claims to need.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.files import DataError
from empax.data.model_files import read_model_json
from empax.interop.tensors import LazyTensor, dtypes_of

_TARGET = "target."
_BLOCKS = {
    "encoder": {
        "pre_attention_layer_norm": "layer.0.layer_norm",
        "attention": "layer.0.SelfAttention",
        "pre_mlp_layer_norm": "layer.1.layer_norm",
        "mlp": "layer.1.DenseReluDense",
    },
    "decoder": {
        "pre_self_attention_layer_norm": "layer.0.layer_norm",
        "self_attention": "layer.0.SelfAttention",
        "pre_cross_attention_layer_norm": "layer.1.layer_norm",
        "encoder_decoder_attention": "layer.1.EncDecAttention",
        "pre_mlp_layer_norm": "layer.2.layer_norm",
        "mlp": "layer.2.DenseReluDense",
    },
}
_WHOLE = {
    "token_embedder.embedding": "shared.weight",
    "decoder.logits_dense.kernel": "lm_head.weight",
    **{
        f"{stack}.relpos_bias.rel_embedding": f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for stack in _BLOCKS
    },
    **{f"{stack}.{stack}_norm.scale": f"{stack}.final_layer_norm.weight" for stack in _BLOCKS},
}
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_PROJECTIONS |= {name: name for name in ("wi", "wi_0", "wi_1", "wo")}

_DESCRIPTION = ".zarray"
_FIELDS = ("zarr_format", "shape", "chunks", "dtype", "compressor", "fill_value", "order", "filters")
_FIELDS += ("dimension_separator",)
_DTYPES = dtypes_of("<f2 <f4 <f8 bfloat16")
_MOST_EXPANDED = 1 << 26
"""Bytes that an array may always take; a larger array may take `_MOST_RATIO` bytes for each byte of its files."""
_MOST_RATIO = 64  # trained weights compress by less than 2
_MOST_CHUNKS = 1 << 20
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array of a T5X checkpoint.

    Attributes:
      folder: folder of its chunks.
      shape: its stored shape.
      chunks: shape of a chunk; the last chunks may reach beyond the array.
      dtype: type of its elements.
    """

    folder: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * self.dtype.itemsize

    def grid(self) -> list[tuple[int, ...]]:
        """Returns the indices of all chunks in the grid."""
        counts = (-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True))
        return list(itertools.product(*map(range, counts)))

    def file(self, place: tuple[int, ...]) -> Path:
        """Returns the file of the chunk at `place` in the grid."""
        return self.folder / ".".join(map(str, place))

    def read(self) -> np.ndarray:
        array = np.empty(self.shape, self.dtype)
        for place in self.grid():
            starts = [number * chunk for number, chunk in zip(place, self.chunks, strict=True)]
            target = array[tuple(slice(at, at + chunk) for at, chunk in zip(starts, self.chunks, strict=True))]
            chunk = np.frombuffer(self._content(self.file(place)), self.dtype).reshape(self.chunks)
            target[...] = chunk[tuple(map(slice, target.shape))]
        return array

    def _content(self, file: Path) -> bytes:
        """Returns the bytes of a chunk; unpacks no more than its size."""
        unpack = zlib.decompressobj(wbits=47)  # zlib or gzip header
        try:
            content = unpack.decompress(file.read_bytes(), self.chunk_bytes + 1)
        except zlib.error as error:
            raise DataError(f"{file} cannot be read ({error}); fetch the checkpoint again.") from error
        if not unpack.eof or unpack.unused_data:
            raise DataError(f"{file} is not a whole compressed file; fetch the checkpoint again.")
        if len(content) != self.chunk_bytes:
            raise DataError(f"{file} does not hold exactly {self.chunk_bytes} bytes; fetch the checkpoint again.")
        return content


def has_t5x(folder: Path) -> bool:
    """Whether `folder` is a T5X checkpoint."""
    return (folder / f"{_TARGET}token_embedder.embedding").is_dir()


def read_t5x(folder: Path) -> dict[str, LazyTensor]:
    """Returns the weights in a T5X checkpoint ("checkpoint_1000000") without the optimizer state; reads none of them.

    Raises:
      DataError: an array is broken, incomplete, or not part of a T5.
    """
    tensors = {}
    for path in sorted(folder.glob(f"{_TARGET}*")):
        theirs = path.name.removeprefix(_TARGET)
        name = _foreign_name(theirs)
        if name is None:
            raise DataError(
                f"{path} is not an array of a T5 1.0 or 1.1 with a name for every layer; no other T5X checkpoint is "
                "read."
            )
        array = _open(path)
        tensor = LazyTensor(array.shape, array.dtype, array.read)
        tensors[name] = tensor.turned() if theirs.endswith((".kernel", ".rel_embedding")) else tensor
    return tensors


def _foreign_name(name: str) -> str | None:
    if name in _WHOLE:
        return _WHOLE[name]
    found = re.fullmatch(r"(encoder|decoder)\.layers_(\d+)\.(\w+)\.(?:(\w+)\.kernel|scale)", name)
    if found is None or found[3] not in _BLOCKS[found[1]]:
        return None
    module = f"{found[1]}.block.{found[2]}.{_BLOCKS[found[1]][found[3]]}"
    if found[4] is None:
        return f"{module}.weight"
    return f"{module}.{_PROJECTIONS[found[4]]}.weight" if found[4] in _PROJECTIONS else None


def _open(folder: Path) -> _Array:
    """Opens the array in `folder`; checks that all chunks exist and can have the right size."""
    file = folder / _DESCRIPTION
    if not file.is_file():
        raise DataError(f"{folder} is not a zarr array: it lacks {_DESCRIPTION}; fetch the checkpoint again.")
    array = _described(file, read_model_json(file))
    wanted = math.prod(-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True))
    if wanted > _MOST_CHUNKS:
        raise DataError(f"{file} asks for {wanted} chunks; fetch the checkpoint again.")
    chunks = {array.file(place) for place in array.grid()}
    found = {path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}
    for kind, names in (("lacks", chunks - found), ("has, besides its own,", found - chunks)):
        if names:
            shown = ", ".join(sorted(str(path.relative_to(folder)) for path in names)[:_SHOWN])
            more = ", ..." if len(names) > _SHOWN else ""
            raise DataError(f"{folder} {kind} the chunks {shown}{more}; fetch the checkpoint again.")
    size = sum(path.stat().st_size for path in chunks)
    needed = wanted * array.chunk_bytes
    if needed > max(_MOST_EXPANDED, size * _MOST_RATIO):
        raise DataError(f"{folder} has {size} bytes of chunks, too few for {needed}; fetch the checkpoint again.")
    return array


def _described(file: Path, said: dict[str, Any]) -> _Array:
    """Parses the description of an array.

    Raises:
      DataError: a value is impossible in T5X, or not supported.
    """
    compressor = said.get("compressor")
    shape: Any = said.get("shape")
    chunks: Any = said.get("chunks")
    right = {
        "zarr_format": said.get("zarr_format") == 2,
        "shape": _is_shape(shape),
        "chunks": _is_shape(shape)
        and _is_shape(chunks)
        and len(chunks) == len(shape)
        and all(map(operator.le, chunks, shape)),  # else a file could claim any chunk size
        "dtype": said.get("dtype") in list(_DTYPES),
        "compressor": isinstance(compressor, dict) and compressor.get("id") == "gzip",
        "order": said.get("order", "C") == "C",
        "filters": said.get("filters") in (None, []),
        "dimension_separator": said.get("dimension_separator", ".") == ".",
    }
    wrong = [name for name, fits in right.items() if not fits] + sorted(set(said) - set(_FIELDS))
    if wrong:
        listing = ", ".join(f"{name} = {str(said.get(name))[:80]}" for name in wrong)
        raise DataError(
            f"{file} sets {listing}, which is not read here, only zarr 2 in {', '.join(_DTYPES)}, packed by gzip. "
            "Fetch the checkpoint again."
        )
    return _Array(file.parent, tuple(shape), tuple(chunks), _DTYPES[said["dtype"]])


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 1 <= len(value) <= 4
        and all(type(size) is int and 1 <= size < 1 << 31 for size in value)
        and math.prod(value) < 1 << 48
    )
