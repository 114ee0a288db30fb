"""Folders in our own format (`--format=empax`), with an exact round trip."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from empax.core.config import ConfigError, check_numbers, to_settings
from empax.core.files import DataError
from empax.core.tree import named_leaves
from empax.core.types import Params
from empax.data.model_files import read_model_json
from empax.interop.architectures import shapes_of
from empax.interop.readers import open_tensors
from empax.interop.tensors import refuse_misfits
from empax.models.bert import BertConfig, BertEncoder
from empax.models.decoder_only import DecoderOnly
from empax.models.dual_encoder import DualEncoder, Pooling, Projection
from empax.models.t5 import T5Encoder
from empax.models.transformer import EncoderDecoder, TransformerConfig

MODEL_TYPE = "empax"
"""`model_type` in the config.json of a folder in our own format."""


class Exported(NamedTuple):
    """The contents of a folder in our own format."""

    model: EncoderDecoder | DualEncoder
    params: Params


_ENCODERS = {"bert": (BertConfig, BertEncoder), "t5_encoder": (TransformerConfig, T5Encoder)}


@dataclasses.dataclass(frozen=True)
class _GeneratorFields:
    """The config.json of an encoder-decoder."""

    model_type: str
    model: Literal["encoder_decoder"]
    config: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _EncoderFields:
    """The config.json of a text encoder: see `DualEncoder`."""

    model_type: str
    model: Literal["dual_encoder"]
    encoder: Literal["bert", "t5_encoder"]
    config: Mapping[str, Any]
    pooling: Pooling
    normalize: bool
    projections: tuple[Projection, ...]
    truncate: int = 0
    normalize_whole: bool = False


def load_exported(folder: Path) -> Exported:
    """Reads a model and its parameters that `format="empax"` wrote, bit for bit.

    Raises:
      DataError: the folder is in another format, a file is missing or broken, or names or shapes do not match.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise DataError(f'{folder} holds no config.json; give a folder that was written in the format "empax".')
    fields = read_model_json(file)
    found = fields.get("model_type", "model of unknown kind")
    if found != MODEL_TYPE:
        raise DataError(f'{folder} holds a {found!r}, not a model in the format "empax": `load_pretrained` reads it.')
    try:
        model = _own_model(fields)
    except ConfigError as error:
        raise DataError(f"{file} is not what empax writes ({error}); export the model again.") from error
    shapes = shapes_of(model)
    found, expected = open_tensors(folder), named_leaves(shapes)
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"surplus {name}" for name in sorted(found) if name not in expected]
    problems += [
        f"{name} has shape {list(found[name].shape)}, must be {list(leaf.shape)}"
        for name, leaf in expected.items()
        if name in found and found[name].shape != leaf.shape
    ]
    refuse_misfits(f"The weights in {folder} do not fit its config", problems)
    leaves = [jnp.asarray(np.asarray(found[name])) for name in expected]
    return Exported(model, jax.tree.unflatten(jax.tree.structure(shapes), leaves))


def own_fields(model: EncoderDecoder | DecoderOnly | DualEncoder) -> dict[str, Any]:
    if isinstance(model, DecoderOnly):
        raise ConfigError('a decoder-only model is written only for transformers; use the format "transformers".')
    if isinstance(model, EncoderDecoder):
        return {"model_type": MODEL_TYPE, "model": "encoder_decoder", "config": dataclasses.asdict(model.config)}
    name = next(name for name, (_, module) in _ENCODERS.items() if isinstance(model.encoder, module))
    config = dataclasses.asdict(model.encoder.config)  # pyright: ignore[reportAttributeAccessIssue]
    pooling: dict[str, Any] = {"pooling": model.pooling, "normalize": model.normalize}
    pooling |= {"truncate": model.truncate, "normalize_whole": model.normalize_whole}
    pooling["projections"] = [dataclasses.asdict(projection) for projection in model.projections]
    return {"model_type": MODEL_TYPE, "model": "dual_encoder", "encoder": name, **pooling, "config": config}


def _own_model(fields: Mapping[str, Any]) -> EncoderDecoder | DualEncoder:
    if fields.get("model") == "encoder_decoder":
        said = to_settings(_GeneratorFields, fields, where="model")
        return EncoderDecoder(to_settings(TransformerConfig, said.config, where="config"))
    said = to_settings(_EncoderFields, fields, where="model")
    check_numbers(said, "truncate", least=0)
    config, module = _ENCODERS[said.encoder]
    return DualEncoder(
        module(to_settings(config, said.config, where="config")),
        pooling=said.pooling,
        normalize=said.normalize,
        projections=said.projections,
        truncate=said.truncate,
        normalize_whole=said.normalize_whole,
    )


def own_tensors(model: EncoderDecoder | DecoderOnly | DualEncoder, params: Params) -> dict[str, Any]:
    leaves, expected = named_leaves(params), named_leaves(shapes_of(model))
    if set(leaves) != set(expected):
        wrong = ", ".join(sorted(set(leaves) ^ set(expected)))
        raise DataError(f"These are not the parameters of this {type(model).__name__}; missing or surplus: {wrong}.")
    return leaves
