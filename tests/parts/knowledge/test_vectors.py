"""Vectors of texts: the same one by one, few at a time and many."""

import dataclasses

import jax
import numpy as np
import pytest

from empax.data.bpe import train_bpe
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.knowledge.vectors import TextEncoder

TEXTS = ["I lost my keys.", "No", "I lost my keys. " * 3, "Where did you last see them, do you think?", "a " * 60]


@pytest.fixture(scope="module")
def encoder():
    sizes = EncoderSettings(num_layers=1, d_model=16, num_heads=2, d_ff=16, max_positions=64)
    return TextEncoder.of(sizes, train_bpe(TEXTS, vocab_size=280), seed=0)


@pytest.mark.parametrize("rows", [1, 3])
def test_few_texts_have_the_vectors_that_many_have_each_in_its_place(encoder, rows):
    short = TEXTS[:4]
    found = encoder.few(short, rows=rows, lengths=(24, 64))
    np.testing.assert_allclose(found, encoder(short), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-6)
    assert np.abs(found[0] - found[3]).max() > 1e-3


def test_the_end_of_a_text_longer_than_all_lengths_counts(encoder):
    start, end = "one two three four " * 4, "seven eight nine"
    found = encoder.few([start + end, "zero " + start + end, end + " " + start], lengths=(16,))
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert np.abs(found[0] - found[2]).max() > 1e-3


def test_what_changes_a_vector_changes_the_hash(encoder):
    others = [
        dataclasses.replace(encoder, model=encoder.model.clone(truncate=4)),
        dataclasses.replace(encoder, tokenizer=train_bpe([*TEXTS, "zz zz zz"], vocab_size=280)),
        dataclasses.replace(encoder, params=jax.tree.map(lambda leaf: leaf + 1.0, encoder.params)),
    ]
    assert len({encoder.hash, *(other.hash for other in others)}) == 4
    assert dataclasses.replace(encoder).hash == encoder.hash


def test_no_texts_have_no_vectors(encoder):
    assert encoder.few([], lengths=(16, 32)).shape == (0, 16)
