"""Whether the embedding of a checkpoint is also its head, and where a model and a checkpoint disagree about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.files import DataError
from empax.interop.layouts import plain_names
from empax.interop.readers import open_tensors
from empax.interop.tensors import Tensor, Tensors

_HEAD = "lm_head.weight"


def untie(tensors: dict[str, Tensor], embedding: str) -> None:
    """Makes two of the one embedding of `tensors`, for a model that has two: a file of tied weights holds one copy."""
    if embedding in tensors:
        tensors.setdefault(_HEAD, tensors[embedding])


def disagreements(tensors: Tensors, embedding: str, *, tied: bool, scaled: bool = False) -> list[str]:
    """Says where the model has one embedding and `tensors` two different ones.

    Args:
      tensors: by their foreign names.
      embedding: the foreign name of the token embedding.
      tied: whether the model's head is its token embedding.
      scaled: whether its logits are scaled, as those of a T5 v1.0 are.
    """
    if embedding not in tensors:
        return []
    problems = [
        f"{name} is not {embedding}, but encoder and decoder share one embedding here"
        for name in sorted(tensors)
        if name.endswith("coder.embed_tokens.weight") and not _same(tensors[name], tensors[embedding])
    ]
    if tied and has_own_head(tensors, embedding):
        advice = "set tie_word_embeddings to false" + (" and scale_decoder_outputs to true" if scaled else "")
        problems.append(f"{_HEAD} is not {embedding}, but the config ties them: {advice}")
    return problems


def t5_head(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The `fields` of a T5 or an mT5 with `tie_word_embeddings` as its weights say, not as config.json does.

    Transformers 5 writes true for each, and shares one embedding or reads a head of its own by the weights alone. That
    the logits of a T5 are scaled is another field, `scale_decoder_outputs`; in older files the first says that too.
    """
    said = {} if fields.get("tie_word_embeddings") is None else {"tie_word_embeddings": fields["tie_word_embeddings"]}
    if fields["model_type"] == "t5":
        scaled = fields.get("scale_decoder_outputs")
        said["scale_decoder_outputs"] = said.get("tie_word_embeddings", True) if scaled is None else scaled
    try:
        tensors = plain_names(open_tensors(folder), fields["model_type"])
    except DataError:
        return {**fields, **said}  # whoever reads the weights will say so
    return {**fields, **said, "tie_word_embeddings": not has_own_head(tensors, "shared.weight")}


def has_own_head(tensors: Tensors, embedding: str) -> bool:
    """Whether `tensors` hold a head that is not the token embedding, whose foreign name is `embedding`."""
    return _HEAD in tensors and embedding in tensors and not _same(tensors[_HEAD], tensors[embedding])


def _same(one: Tensor, other: Tensor, rows: int = 4096) -> bool:
    """Whether two tensors are equal, a few rows at a time: what compares them is as large as what is compared."""
    if one.shape != other.shape:
        return False
    a, b = np.asarray(one), np.asarray(other)
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))
