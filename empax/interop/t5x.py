"""Checkpoints of T5X, T5 1.0 and 1.1: a folder of zarr arrays, under Hugging Face's names.

Source of the names: github.com/google-research/t5x, t5x/examples/t5/network.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.files import DataError, read_json

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
_PROJECTIONS = {
    "query": "q",
    "key": "k",
    "value": "v",
    "out": "o",
    "wi": "wi",
    "wi_0": "wi_0",
    "wi_1": "wi_1",
    "wo": "wo",
}


@dataclasses.dataclass(frozen=True)
class ZarrTensor:
    """An array of a T5X checkpoint that is read when asked for; `transposed`: as Hugging Face has it."""

    folder: Path
    stored: Any
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.stored.shape)
        return shape[::-1] if self.transposed else shape

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype.numpy_dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        try:
            array = self.stored.read().result()
        except ValueError as error:
            raise DataError(f"{self.folder} cannot be read ({error}); fetch the checkpoint again.") from error
        array = array.T if self.transposed else array
        return array.astype(self.dtype if dtype is None else dtype, copy=bool(copy))


def has_t5x(folder: Path) -> bool:
    """Whether `folder` is a checkpoint of T5X."""
    return (folder / f"{_TARGET}token_embedder.embedding").is_dir()


def read_t5x(folder: Path) -> dict[str, ZarrTensor]:
    """The weights in a checkpoint folder of T5X ("checkpoint_1000000"), without the optimizer's; none is read.

    Raises:
      DataError: an array is broken or not whole, or is no T5's.
    """
    tensors = {}
    for path in sorted(folder.glob(f"{_TARGET}*")):
        theirs = path.name.removeprefix(_TARGET)
        name = _foreign_name(theirs)
        if name is None:
            raise DataError(
                f"{path} is no array of a T5 1.0 or 1.1 with a name for every layer, which is what is read of T5X."
            )
        tensors[name] = _open(path, transposed=theirs.endswith((".kernel", ".rel_embedding")))
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


def _open(path: Path, *, transposed: bool) -> ZarrTensor:
    import tensorstore  # Orbax brings it; here, since few checkpoints need it

    described = read_json(path / ".zarray") if (path / ".zarray").is_file() else {}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
    try:
        stored = tensorstore.open(spec, open=True, read=True).result()
    except ValueError as error:
        raise DataError(f"{path} is no zarr array ({error}); fetch the checkpoint again.") from error
    # A chunk that is not there would count as zeros.
    wanted = math.prod(-(-size // chunk) for size, chunk in zip(stored.shape, described["chunks"], strict=True))
    found = sum(file.name[0].isdecimal() for file in path.rglob("*") if file.is_file())
    if found < wanted:
        raise DataError(f"{path} has {found} of its {wanted} chunks; fetch the checkpoint again.")
    return ZarrTensor(path, stored, transposed)
