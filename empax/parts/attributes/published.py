"""The judge of empathy that comes with empax (weights/empathy-minilm): identifiers, stored as changes of MiniLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from empax.core.config import to_settings
from empax.core.files import DataError, hash_json, read_json
from empax.core.tree import hash_tree
from empax.core.types import Params
from empax.data.wheels import published_folder
from empax.interop.pretrained_encoders import load_encoder
from empax.interop.readers import read_safetensors
from empax.models.lora import LoraSettings, merge
from empax.parts.attributes.identifier import IdentifierJudge, IdentifierTaskSettings, make_task

NAME = "empathy-minilm"
CONFIG, FILE = "config.json", "judge.safetensors"
"""Settings of the stage that trained it, rank and quality; and the changes."""


def load_published(folder: Path | None = None) -> IdentifierJudge:
    """Loads the judge in `folder`; None = the one included in empax.

    Raises:
      ConfigError: this copy of empax does not include it, MiniLM's wheel is not installed, or a setting is wrong.
      DataError: its files are broken.
    """
    folder = folder or published_folder(NAME)
    about, tensors = read_json(folder / CONFIG), read_safetensors(folder / FILE)
    if missing := {"settings", "rank"} - set(about):
        raise DataError(f"{folder / CONFIG} lacks {', '.join(sorted(missing))}; copy the folder again.")
    stage = to_settings(IdentifierTaskSettings, about["settings"], where=f"{folder / CONFIG}: settings")
    loaded = load_encoder(stage.encoder, None, sentences=False)
    assert loaded.params is not None  # it is pretrained
    found = {name: np.asarray(tensor).astype(np.float32) for name, tensor in tensors.items()}
    try:
        params = changed(loaded.params["encoder"], found, about["rank"])
    except (ValueError, TypeError) as error:
        raise DataError(f"{folder / FILE} does not fit {stage.encoder.pretrained}: {error}") from error
    made_by = hash_json([hash_tree(params), dataclasses.asdict(stage)])
    return IdentifierJudge(make_task(stage, loaded), params, loaded.tokenizer, stage, made_by)


def changed(encoder: Params, changes: Mapping[str, np.ndarray], rank: int) -> Params:
    """Returns the parameters of identifiers, whose two encoders start from `encoder`.

    `changes` has the factors A [layers, *inputs, rank] and B [layers, rank, *outputs] of changed weights, named
    WEIGHT/a and WEIGHT/b, and new values of other parameters. Source: Hu et al. 2022 (LoRA), with alpha = rank.
    """
    low_rank = {name: value for name, value in changes.items() if name.endswith(("/a", "/b"))}
    base = flatten_dict({"context_encoder": encoder, "response_encoder": encoder}, sep="/")
    base |= {name: value for name, value in changes.items() if name not in low_rank}
    settings = LoraSettings(rank=rank, alpha=float(rank))
    return merge(unflatten_dict(base, sep="/"), unflatten_dict(low_rank, sep="/"), settings)
