"""Settings and initial parameters of the word-level Transformer of MoEL's lineage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

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
        """Builds the config of encoder and decoder.

        The output layer is the embedding table with `tie_embeddings`, else a table of its own with a bias.
        """
        names = (field.name for field in dataclasses.fields(WordLevelSettings))
        sizes: dict[str, Any] = {name: getattr(self, name) for name in names if name not in ("vectors", "kernel")}
        more = {"feed_forward_kernel": self.kernel, "tie_embeddings": tie_embeddings, "start_id": start_id}
        more["output_bias"] = "none" if tie_embeddings else "trained"
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


def word_counts(targets: Sequence[Sequence[int]], vocab_size: int) -> Int[np.ndarray, " V"]:
    """Returns how often `targets` have each word of the vocabulary; ids after it do not count."""
    words = np.concatenate([np.asarray(row, int) for row in targets])
    return np.bincount(words, minlength=vocab_size)[:vocab_size]


def log_frequencies(
    targets: Sequence[Sequence[int]], vocab_size: int, label_smoothing: float = 0.0
) -> Float[np.ndarray, " V"]:
    r"""Returns the initial bias of an output layer: the logarithm of each word's frequency in `targets`.

    .. math:: b_v = \log((1 - e) \frac{n_v + 1}{\sum_u (n_u + 1)} + \frac{e}{V})

    with n_v the number of v in `targets`, and e the label smoothing: the likelihood is best with this bias alone. Ours.
    From a bias of 0, the rows of the output layer would have to learn the frequencies first.
    """
    counts = word_counts(targets, vocab_size) + 1.0
    shares = (1.0 - label_smoothing) * counts / counts.sum() + label_smoothing / len(counts)
    return np.log(shares).astype(np.float32)
