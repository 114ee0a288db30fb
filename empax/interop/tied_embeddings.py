"""Whether the embedding of a checkpoint is also its head, and where a model and a checkpoint disagree about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.files import DataError
from empax.interop.readers import open_tensors
from empax.interop.tensors import Tensor, Tensors

_HEAD = "lm_head.weight"


def untie(tensors: dict[str, Tensor], embedding: str) -> None:
    """Makes two of the one embedding of `tensors`, for a model that has two: a file of tied weights holds one copy."""
    if embedding in tensors:
        tensors.setdefault(_HEAD, tensors[embedding])


def disagreements(tensors: Tensors, embedding: str, *, tied: bool) -> list[str]:
    """Says where the model has one embedding and `tensors` two different ones.

    Args:
      tensors: by their foreign names.
      embedding: the foreign name of the token embedding.
      tied: whether the model's head is its token embedding.
    """
    if embedding not in tensors:
        return []
    problems = [
        f"{name} is not {embedding}, but encoder and decoder share one embedding here"
        for name in sorted(tensors)
        if name.endswith("coder.embed_tokens.weight") and not _same(tensors[name], tensors[embedding])
    ]
    if tied and _HEAD in tensors and not _same(tensors[_HEAD], tensors[embedding]):
        problems.append(f"{_HEAD} is not {embedding}, but the config ties them: set tie_word_embeddings to false")
    return problems


def mt5_fields(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The `fields` of an mT5 with `tie_word_embeddings` as its weights say.

    Transformers 5 writes true for each, whatever the weights are, and reads a head of its own all the same.
    """
    if "tie_word_embeddings" in fields and not fields["tie_word_embeddings"]:
        return dict(fields)
    try:
        tensors = open_tensors(folder)
    except DataError:
        return dict(fields)  # whoever reads the weights will say so
    own = _HEAD in tensors and "shared.weight" in tensors and not _same(tensors[_HEAD], tensors["shared.weight"])
    return {**fields, "tie_word_embeddings": not own}


def _same(one: Tensor, other: Tensor, rows: int = 4096) -> bool:
    """Whether two tensors are equal, a few rows at a time: what compares them is as large as what is compared."""
    if one.shape != other.shape:
        return False
    a, b = np.asarray(one), np.asarray(other)
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))
