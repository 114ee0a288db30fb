"""The word-level Transformer of MoEL's lineage, as settings."""

from __future__ import annotations

import dataclasses
from typing import Any

from empax.core.config import check_numbers
from empax.interop.pretrained_encoders import Dtype
from empax.models.transformer import word_level
from empax.models.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class WordLevelSettings:
    """Encoder and decoder; the defaults are the lineage's sizes.

    Attributes:
      vectors: of words, to start from: see `data.word_vectors.load_vectors`; empty = random.
      kernel: positions that a convolution of the feed-forward reads.
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
        """Of the encoder and the decoder; `tie_embeddings`: the output is the embedding table."""
        names = (field.name for field in dataclasses.fields(WordLevelSettings))
        sizes: dict[str, Any] = {name: getattr(self, name) for name in names if name not in ("vectors", "kernel")}
        more = {"feed_forward_kernel": self.kernel, "tie_embeddings": tie_embeddings, "start_id": start_id}
        return word_level(vocab_size, **sizes, **more)
