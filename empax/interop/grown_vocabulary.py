"""Whether a tokenizer and an embedding belong together, and rows for tokens that a model's own does not have."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.types import Params
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.tokenizers import SubwordTokenizer


def check_vocabulary(tokenizer: Tokenizer, rows: int, model: str) -> None:
    """Raises ConfigError if `tokenizer` writes ids for which the embedding of `model` has no row.

    The other way round is common: embeddings are filled up to a round number of rows.
    """
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but {model} only {rows} rows: they do not belong together. "
            "Take the model's own tokenizer; tokens may be added to it."
        )


def rows_for(tokenizer: Tokenizer, folder: Path, rows: int, model: str) -> int:
    """How many rows the embedding of the model in `folder`, which has `rows`, needs for `tokenizer`.

    Raises:
      ConfigError: they are too few, and the tokenizer is not the model's own with tokens added behind.
    """
    if tokenizer.vocab_size <= rows:
        return rows
    try:
        own = load_tokenizer(folder)
    except ConfigError:
        own = None  # nothing that could tell whether they belong together
    if not isinstance(tokenizer, SubwordTokenizer) or own is None or own.own_size > rows:
        check_vocabulary(tokenizer, rows, model)
    elif not tokenizer.extends(own):
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, {model} {rows} rows, and its own tokenizer has other ids: "
            "they do not belong together. Take the model's own (config.prepare.tokenizer.pretrained)."
        )
    return tokenizer.vocab_size


_NEW_ROW_NOISE = 0.01


def grow_vocabulary(params: Params, size: int) -> Params:
    """Parameters of a generator with rows for `size` ids; the present rows do not change.

    A new row is the mean of the old ones, so that a new token begins no likelier than an average one and what the model
    says changes little, with a hundredth of their deviation as seeded noise: no two tokens begin alike.
    Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"; the size of the noise: ours.

    Args:
      params: "token_embedding", and where the model has them "output_embedding" and "output_bias".
      size: at least the rows that there are.
    """
    rng = np.random.default_rng(0)
    grown = dict(params)
    for name in ("token_embedding", "output_embedding"):
        if name in params:
            table = np.asarray(distributed.whole(params[name]))
            noise = rng.normal(size=(size - len(table), table.shape[1])) * table.std(axis=0, dtype=np.float64)
            rows = table.mean(axis=0, dtype=np.float64) + _NEW_ROW_NOISE * noise
            grown[name] = jnp.asarray(np.concatenate([table, rows.astype(table.dtype)]))
    if "output_bias" in params:
        bias = np.asarray(distributed.whole(params["output_bias"]))
        grown["output_bias"] = jnp.asarray(np.pad(bias, (0, size - len(bias)), constant_values=bias.mean()))
    return grown
