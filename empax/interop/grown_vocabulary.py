"""Checks that a tokenizer matches an embedding, and adds rows for new tokens."""

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
    """Raises ConfigError if `tokenizer` has ids for which the embedding of `model` has no row.

    The reverse is common: embeddings are padded to a round number of rows.
    """
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but {model} only {rows} rows: they do not belong together. "
            "Use the model's own tokenizer; tokens may be added to it."
        )


def rows_for(tokenizer: Tokenizer, folder: Path, rows: int, model: str) -> int:
    """Returns the number of rows that `tokenizer` needs of the model in `folder`, whose embedding has `rows`.

    Raises:
      ConfigError: the rows are too few, and the tokenizer is not the model's own with added tokens.
    """
    if tokenizer.vocab_size <= rows:
        return rows
    try:
        own = load_tokenizer(folder)
    except ConfigError:
        own = None  # so nothing shows whether they match
    if not isinstance(tokenizer, SubwordTokenizer) or own is None or own.own_size > rows:
        check_vocabulary(tokenizer, rows, model)
    elif not tokenizer.extends(own):
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, {model} {rows} rows, and its own tokenizer has other ids: "
            "they do not belong together. Use the model's own (config.prepare.tokenizer.pretrained)."
        )
    return tokenizer.vocab_size


_NEW_ROW_NOISE = 0.01


def grow_vocabulary(params: Params, size: int) -> Params:
    """Returns the parameters of a generator with rows for `size` ids; the existing rows do not change.

    A new row is the mean of the old rows plus seeded noise of a hundredth of their standard deviation. With the mean, a
    new token is no likelier than an average one and the outputs change little; the noise makes new tokens differ.
    Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"; the size of the noise: ours.
    `size` is at least the number of existing rows.
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
