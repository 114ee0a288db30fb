"""Settings and initial word vectors of the word-level Transformer of MoEL's lineage."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float

from empax.core.config import ConfigError, check_numbers
from empax.core.protocols import Tokenizer
from empax.data.wheels import MINILM, MPNET
from empax.data.word_vectors import check_vectors, load_vectors
from empax.interop.pretrained import check_weights
from empax.interop.pretrained_encoders import Dtype, word_embeddings
from empax.models.transformer import word_level
from empax.models.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class WordLevelSettings:
    """Sizes of encoder and decoder; the defaults are the lineage's.

    Attributes:
      vectors: initial word vectors: "minilm" or "mpnet", see `interop.pretrained_encoders.word_embeddings`, or one of
        `data.word_vectors.load_vectors`; empty = random.
      kernel: kernel size of the feed-forward layer's convolutions.
    """

    vectors: str = ""
    d_model: int = 300
    num_heads: int = 2
    head_dim: int = 20
    d_ff: int = 50
    kernel: int = 3
    num_encoder_layers: int = 1
    num_decoder_layers: int = 1
    dropout: float = 0.0
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        sizes = ("d_model", "num_heads", "head_dim", "d_ff", "kernel", "num_encoder_layers", "num_decoder_layers")
        check_numbers(self, *sizes, least=1)
        check_numbers(self, "dropout", least=0, below=1)

    def config(self, vocab_size: int, start_id: int, *, tie_embeddings: bool = True) -> TransformerConfig:
        """Builds the config of encoder and decoder; `tie_embeddings`: the output layer is the embedding table."""
        names = (field.name for field in dataclasses.fields(WordLevelSettings))
        sizes: dict[str, Any] = {name: getattr(self, name) for name in names if name not in ("vectors", "kernel")}
        more = {"feed_forward_kernel": self.kernel, "tie_embeddings": tie_embeddings, "start_id": start_id}
        return word_level(vocab_size, **sizes, **more)


_SIZES = {MINILM: 384, MPNET: 768}


def check_words(vectors: str, size: int) -> None:
    """Raises ConfigError or DataError if there are no such initial word vectors of `size` dimensions."""
    if vectors in _SIZES:
        if size > _SIZES[vectors]:
            raise ConfigError(f"{vectors!r} has {_SIZES[vectors]} dimensions, d_model = {size} is more; lower it.")
        check_weights(vectors)
    else:
        check_vectors(vectors, size)


def initial_words(vectors: str, tokenizer: Tokenizer, size: int) -> Float[np.ndarray, "V D"]:
    """Returns the initial word vectors of a tokenizer; for errors see `check_words`."""
    if vectors in _SIZES:
        return word_embeddings(vectors, tokenizer, size)
    return load_vectors(vectors, tokenizer, size)
