"""A tokenizer of letters, and what it makes of them."""

import pytest

from empax.data.bpe import train_bpe


@pytest.fixture(scope="session")
def tokenizer():
    return train_bpe(["a b c d e f g h i j k l m n o p"], vocab_size=300)


@pytest.fixture(scope="session")
def spelled(tokenizer):
    return lambda letters: [i for letter in letters.split() for i in tokenizer.encode(letter)]
