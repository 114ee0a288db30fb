"""Tokenizers of every kind of model, trained on a few texts, as their tokenizer.json would have them; and of wheels."""

import functools

import pytest
import tokenizers as rust
from tokenizers import decoders, models, pre_tokenizers, trainers

from empax.core.config import ConfigError
from empax.data.tokenizer_folders import load_tokenizer


@functools.cache
def of_wheel(name, *extra_tokens):
    """The tokenizer of a wheel; skips the test where that is not installed."""
    try:
        return load_tokenizer(name, extra_tokens=extra_tokens)
    except ConfigError as error:
        pytest.skip(str(error))


def trained(kind, texts, special, *, vocab_size=400, normalizer=None, splitter=None):
    """A byte-level BPE, Unigram with a blank in front of words, words, or BERT's pieces; `special` has the unknown."""
    unknown = next((token for token in special if "unk" in token.lower()), None)
    options = {"special_tokens": special, "show_progress": False}
    sized, bert = {"vocab_size": vocab_size, **options}, pre_tokenizers.BertPreTokenizer()
    model, usual, decoder, trainer = {
        "BPE": (models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(),
                trainers.BpeTrainer(initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), **sized)),
        "Unigram": (models.Unigram(), pre_tokenizers.Metaspace(), decoders.Metaspace(),
                    trainers.UnigramTrainer(unk_token=unknown, **sized)),
        "WordLevel": (models.WordLevel(unk_token=unknown or ""), bert, None, trainers.WordLevelTrainer(**options)),
        "WordPiece": (models.WordPiece(unk_token=unknown or ""), bert, decoders.WordPiece(),
                      trainers.WordPieceTrainer(**sized)),
    }[kind]  # fmt: skip
    backend = rust.Tokenizer(model)
    backend.pre_tokenizer = splitter or usual
    if normalizer is not None:
        backend.normalizer = normalizer
    if decoder is not None:
        backend.decoder = decoder
    backend.train_from_iterator(texts, trainer)
    return backend
