"""Names of T5 and BERT tensors in the checkpoints of FiD and Atlas.

Source: the code that wrote them, github.com/facebookresearch/FiD and github.com/facebookresearch/atlas.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from empax.core.files import DataError
from empax.data.model_files import warn_once
from empax.interop.tensors import Tensor, Tensors

_ATLAS_PARTS = {"t5": "reader", "bert": "retriever"}
_CROSS_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def plain_names(tensors: Tensors, architecture: str) -> dict[str, Tensor]:
    """Returns `tensors` under Hugging Face's names for `architecture`.

    Names of other models are unchanged. An Atlas checkpoint gives its reader for "t5", its retriever for "bert". FiD's
    wrapper names are removed.

    Raises:
      DataError: an Atlas checkpoint without that part, or with two retrievers, one for queries and one for passages.
    """
    plain = dict(tensors)
    if any(re.match(r"reader\.|retriever\.(module\.)?(query_|passage_)?contriever\.", name) for name in plain):
        plain = _part_of_atlas(plain, architecture)
    if any(name.startswith("encoder.encoder.") for name in plain):
        plain = _renamed(plain, lambda name: re.sub(r"^encoder\.encoder\.", "encoder.", name))
        # FiD wraps each block of the encoder, with or without gradient checkpointing.
        plain = _renamed(plain, lambda name: re.sub(r"^(encoder\.block\.\d+)\.module\.", r"\1.", name))
        _warn_of_cross_bias(plain)
    if architecture == "bert" and "model.embeddings.word_embeddings.weight" in plain:
        plain = _renamed(plain, lambda name: name.removeprefix("model."))  # FiD's retriever
    return plain


def _part_of_atlas(tensors: dict[str, Tensor], architecture: str) -> dict[str, Tensor]:
    if architecture not in _ATLAS_PARTS:
        raise DataError(f"An Atlas checkpoint holds a t5 and a bert, not a {architecture}: correct model_type.")
    part = _ATLAS_PARTS[architecture]
    pattern = re.compile(rf"{part}\.(?:module\.)?")
    found = {pattern.sub("", name, count=1): tensor for name, tensor in tensors.items() if pattern.match(name)}
    if not found:
        raise DataError(f"This Atlas checkpoint has no {part}, which model_type = {architecture!r} needs.")
    if part == "retriever":
        if any(name.startswith(("query_contriever.", "passage_contriever.")) for name in found):
            raise DataError(
                "This Atlas checkpoint has one retriever for queries and one for passages; only a shared one is read."
            )
        found = _renamed(found, lambda name: name.removeprefix("contriever."))
    return found


def _renamed(tensors: dict[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    return {rename(name): tensor for name, tensor in tensors.items()}


def _warn_of_cross_bias(tensors: Tensors) -> None:
    """Warns of the position bias that the Transformers of FiD gave cross-attention, and T5 does not have."""
    if _CROSS_BIAS not in tensors:
        return
    spread = float(np.ptp(np.asarray(tensors[_CROSS_BIAS]).astype(np.float32), axis=0).max())
    if spread > 0:  # the same bias at all distances does not change attention
        warn_once(
            f"{_CROSS_BIAS} differs by up to {spread:.3g} between distances. T5 has no such bias, nor has Transformers "
            "since version 4.0: it is dropped, and replies may differ a little from those of the code that wrote it."
        )
