"""Words of emotion, and intensities of words."""

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.words import train_words
from empax.systems.classic.lexicons import rated_words

WORDS = train_words(["i lost my dog . oh no ! i am so sad ran miss we won"], min_count=1)
INTENSITY = "concepts.intensity"


def known(setting, name):
    found = rated_words(setting, str(name), WORDS)
    return {WORDS.backend.id_to_token(int(i)): float(found[i]) for i in np.flatnonzero(found)}


def test_words_of_emotion(tmp_path):
    assert known("lexicon", "vader") == dict.fromkeys(("lost", "no", "sad", "miss", "won"), 1.0)
    (own := tmp_path / "own.txt").write_text("\ufeffDog\r\n\nzyzzyva\n", encoding="utf-8")
    assert known("lexicon", own) == {"dog": 1.0}


def test_intensities_of_a_file_are_those_of_valence_and_arousal(tmp_path):
    path = tmp_path / "vad.txt"
    path.write_text("Word\tValence\tArousal\tDominance\ndog\t0.9\t0.4\t0.5\nSad\t0.1\t0.3\t0.2\nmiss\t0.5\t0.0\t0.5\n")
    expected = {
        word: (((valence - 0.5) ** 2 + (arousal / 2) ** 2) ** 0.5 - 0.06467) / 0.607468
        for word, (valence, arousal) in {"dog": (0.9, 0.4), "sad": (0.1, 0.3)}.items()  # "miss" has the least there is
    }
    assert known(INTENSITY, path) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "content", "message"),
    [
        ("lexicon", b"zyzzyva", "lexicon = '.*' has none of the [0-9]+ words; give another"),
        ("lexicon", b"\xff\xfe", "UTF-16, must be UTF-8"),
        ("lexicon", None, "lexicon = '.*' is not a file; give one with a word on each line"),
        (INTENSITY, b"zyzzyva 0.9 0.4", r"concepts\.intensity = '.*' has none of the"),
        (INTENSITY, b"dog 0.9 0.4\nsad 0.1", "line 2: 'sad 0.1' must be a word, its valence, its arousal"),
        (INTENSITY, b"dog -0.9 0.4", r"line 1: -0.9, 0.4 must lie in \[0, 1\]"),
        (INTENSITY, None, "is not a file; give one with a word, its valence and its arousal on each line"),
    ],
)
def test_a_file_that_does_not_serve_is_named(setting, content, message, tmp_path):
    path = tmp_path / "words.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ConfigError, DataError), match=message):
        rated_words(setting, str(path), WORDS)
