"""Checks that a tokenizer matches an embedding, and gives rows to new tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.files import DataError
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
    own = _own_tokenizer(folder)  # without one, nothing shows whether they match
    if not isinstance(tokenizer, SubwordTokenizer) or own is None or own.own_size > rows:
        check_vocabulary(tokenizer, rows, model)
    elif not tokenizer.extends(own):
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, {model} {rows} rows, and its own tokenizer has other ids: "
            "they do not belong together. Use the model's own (config.prepare.tokenizer.pretrained)."
        )
    return tokenizer.vocab_size


def new_tokens(tokenizer: Tokenizer, folder: Path) -> dict[int, list[int]]:
    """Returns the ids of tokens that the model in `folder` has not been trained on, with the pieces of their names.

    These are the tokens that its own tokenizer lacks, also where its embedding has rows to spare. The pieces are those
    of the words: of "sentiment low" for `<sentiment:low>`. A name without letters or digits is left out. The result is
    empty if the model has no tokenizer of its own, or one with other ids.
    """
    if not isinstance(tokenizer, SubwordTokenizer):
        return {}
    if tokenizer.source == str(folder) and tokenizer.own_size == tokenizer.vocab_size:
        return {}  # it is the model's own
    own = _own_tokenizer(folder)
    if own is None or not tokenizer.extends(own):
        return {}
    ours, known = (each.backend.get_vocab(with_added_tokens=True) for each in (tokenizer, own))
    names = {i: " ".join(re.findall(r"[^\W_]+", token)) for token, i in ours.items() if token not in known}
    before = len(own.encode("a"))  # byte-level pieces of a word differ at the start of a text
    found = {i: own.encode(f"a {words}")[before:] for i, words in sorted(names.items())}
    return {i: pieces for i, pieces in found.items() if names[i] and pieces}


def _own_tokenizer(folder: Path) -> SubwordTokenizer | None:
    """Returns the tokenizer in the folder of a model, None if it has none that can be read."""
    try:
        return load_tokenizer(folder)
    except (ConfigError, DataError):
        return None


_NEW_ROW_NOISE = 0.01


def grow_vocabulary(params: Params, size: int, new: Mapping[int, Sequence[int]] | None = None) -> Params:
    """Returns the parameters of a generator with rows for `size` ids, and with input rows for the tokens `new`.

    The input row of a token in `new` (`new_tokens`) becomes the mean of the rows of its pieces, even if there is a row
    for its id: rows to spare in a released table were never trained, and are a tenth as large as others in a T5. So
    the model reads a new token as the words of its name, also with adapters, which train no embedding. A model whose
    output is tied to the table scores it as the mean of its pieces; a separate output keeps the rows that it has.

    Any other row that is added is the mean of the old rows plus seeded noise of a hundredth of their standard
    deviation. With the mean, a new token is no likelier than an average one and the outputs change little; the noise
    makes new tokens differ. Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"; the
    size of the noise and rows from names: ours. `size` is at least the number of existing rows.
    """
    rng = np.random.default_rng(0)
    grown = dict(params)
    for name in ("token_embedding", "output_embedding"):
        if name in params:
            table = _on_host(params[name])
            noise = rng.normal(size=(size - len(table), table.shape[1])) * table.std(axis=0, dtype=np.float64)
            rows = table.mean(axis=0, dtype=np.float64) + _NEW_ROW_NOISE * noise
            table = np.concatenate([table, rows.astype(table.dtype)])
            for row, pieces in (new or {}).items() if name == "token_embedding" else ():
                table[row] = table[list(pieces)].mean(axis=0)
            grown[name] = jnp.asarray(table)
    if "output_bias" in params:
        bias = _on_host(params["output_bias"])
        grown["output_bias"] = jnp.asarray(np.pad(bias, (0, size - len(bias)), constant_values=bias.mean()))
    return grown


def _on_host(leaf: Any) -> np.ndarray:
    """Returns a whole array; all processes must call this for one that is spread over them."""
    spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    return np.asarray(distributed.whole(leaf) if spread else leaf)
