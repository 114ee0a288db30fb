"""Our own tokenizer: a byte-level BPE, trained on a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tokenizers as rust
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from empax.core.config import ConfigError
from empax.data.tokenizers import (
    EOS_TOKEN,
    LISTENER_TOKEN,
    PAD_TOKEN,
    SEPARATOR,
    SPEAKER_TOKEN,
    START_TOKEN,
    SubwordTokenizer,
)

BASE_TOKENS = (PAD_TOKEN, EOS_TOKEN, START_TOKEN, SEPARATOR, SPEAKER_TOKEN, LISTENER_TOKEN)
"""Tokens with the first ids of every BPE that we train, in this order."""

# Contractions, a word, one digit, a run of signs, blanks; words, digits and signs include the space before them.
_PIECES = Regex(r"(?i:'(?:s|t|re|ve|m|ll|d)\b)| ?\p{L}[\p{L}\p{M}]*| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+")


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, lowercase: bool = True, special_tokens: Sequence[str] = ()
) -> SubwordTokenizer:
    """Trains a byte-level BPE, which can encode any text; decoding restores it except for case and runs of blanks.

    Words include the space before them, every digit is a separate piece, punctuation is separate from words.
    Source: Sennrich et al. 2016; bytes as the alphabet: Radford et al. 2019.

    The order of `texts` does not matter. `vocab_size` is the maximum number of tokens, special tokens and the 256 bytes
    included. `special_tokens` are atomic tokens in addition to BASE_TOKENS; `decode` skips them. Raises ConfigError if
    `vocab_size` is smaller than the number of special tokens and bytes.
    """
    special = list(dict.fromkeys((*BASE_TOKENS, *special_tokens)))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(special) + len(alphabet):
        raise ConfigError(
            f"vocab_size = {vocab_size} is too small: {len(special)} special tokens and {len(alphabet)} bytes "
            f"need {len(special) + len(alphabet)}; set it higher."
        )
    backend = rust.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            *([normalizers.Lowercase()] if lowercase else []),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
            # The first word of a text gets the same token as inside a sentence.
            normalizers.Prepend(" "),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # The second removes the blank before the first word, which the text did not have.
    first_blank = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), first_blank])  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return SubwordTokenizer(backend, pad=PAD_TOKEN, eos=EOS_TOKEN, start=START_TOKEN)
