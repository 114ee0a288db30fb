"""Initial vectors of word-level models."""

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.data.words import train_words
from empax.parts.generator.word_level import check_words, initial_words

WORDS = train_words(["sad unhappy dog coffee . ,"], min_count=1)


@pytest.mark.usefixtures("minilm")
def test_words_have_minilms_embeddings_each_its_own():
    check_words("minilm", 300)
    table = initial_words("minilm", WORDS, 300)
    assert table.shape == (WORDS.vocab_size, 300)
    assert len(np.unique(table, axis=0)) == WORDS.vocab_size
    sad, unhappy, coffee = (table[WORDS.token_id(word)] for word in ("sad", "unhappy", "coffee"))
    assert np.corrcoef(sad, unhappy)[0, 1] > np.corrcoef(sad, coffee)[0, 1]
    with pytest.raises(ConfigError, match="'minilm' has 384 dimensions, d_model = 400 is more; lower it"):
        check_words("minilm", 400)


def test_other_names_are_files_of_vectors(tmp_path):
    file = tmp_path / "vectors.txt"
    file.write_text("sad 1 2\ndog 3 4\n", encoding="utf-8")
    check_words(str(file), 2)
    check_words("", 2)
    assert initial_words(str(file), WORDS, 2)[WORDS.token_id("dog")].tolist() == [3.0, 4.0]
    with pytest.raises(ConfigError, match="is not a file; give a text file of vectors"):
        check_words(str(tmp_path / "none.txt"), 2)
