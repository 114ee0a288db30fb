"""Contexts as rows of words."""

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.types import Instance
from empax.data.words import train_words
from empax.systems.classic.adversary import AdversarySettings
from empax.systems.classic.examples import check_lexicon, emotional_words
from tests.systems.classic.small import rows_of

TOLD = Instance("a#4", ("I lost my dog.", "Oh no!", "I am so sad."), "I'm sorry.", "sad")
ASKED = Instance("b#2", ("We won!",), "Great!", "proud")
WORDS = train_words([*TOLD.context, TOLD.response, *ASKED.context, ASKED.response, "proud"], min_count=1)
RNG = np.random.default_rng(0)


def examples(instances=(TOLD, ASKED), **options):
    return rows_of(instances, WORDS, emotional=("lost", "sad"), **options)


def words(row):
    return [WORDS.backend.id_to_token(int(i)) for i in row]


def test_a_row_is_a_first_token_and_the_words_of_all_turns():
    batch = examples().collate(np.array([0, -1, 1]), 16, RNG)
    expected = ["[CLS]", "i", "lost", "my", "dog", ".", "oh", "no", "!", "i", "am", "so", "sad", "."]
    assert words(batch.source[0]) == [*expected, "<pad>", "<pad>"]
    said = "[CLS] " + "<speaker> " * 5 + "<listener> " * 3 + "<speaker> " * 5
    assert words(batch.speaker[0]) == [*said.split(), "<pad>", "<pad>"]
    assert [w for w, kept in zip(words(batch.source[0]), batch.emotional[0], strict=True) if kept] == ["lost", "sad"]
    assert words(batch.target[0])[:4] == ["i", "am", "sorry", "."]  # truncated, so without an end
    assert words(batch.target[2])[:3] == ["great", "!", "</s>"]
    assert batch.target_mask.sum(axis=1).tolist() == [4, 0, 3]
    assert batch.valid.tolist() == [True, False, True]
    assert batch.emotion.tolist() == [27, -1, 26]
    assert batch.source_mask.sum(axis=1).tolist() == [14, 0, 4]


def test_the_newest_words_stay_behind_the_first_token():
    for batch in (examples(room=5).collate(np.array([0]), 8, RNG), examples().collate(np.array([0]), 5, RNG)):
        assert words(batch.source[0])[:5] == ["[CLS]", "am", "so", "sad", "."]
        assert words(batch.speaker[0])[:5] == ["[CLS]", *["<speaker>"] * 4]
    assert examples(room=5).lengths.tolist() == [[5, 4], [4, 3]]


def test_an_emotion_stands_before_the_context():
    made = examples(emotions=["proud", "sad"])
    batch = made.collate(np.array([0, 1]), 16, RNG)
    assert [words(row)[:3] for row in batch.source] == [["[CLS]", "proud", "i"], ["[CLS]", "sad", "we"]]
    assert words(batch.speaker[0])[:3] == ["[CLS]", "[CLS]", "<speaker>"]
    assert made.lengths[0, 0] == examples().lengths[0, 0] + 1


def test_words_of_emotion(tmp_path):
    found = words(np.flatnonzero(emotional_words("vader", WORDS)))
    assert set(found) == {"lost", "no", "sad", "sorry", "won", "great", "proud"}
    own = tmp_path / "own.txt"
    own.write_text("\ufeffDog\r\n\nzyzzyva\n", encoding="utf-8")
    assert np.flatnonzero(emotional_words(str(own), WORDS)).tolist() == [WORDS.token_id("dog")]
    (tmp_path / "other.txt").write_text("zyzzyva")
    with pytest.raises(ConfigError, match="has none of the"):
        emotional_words(str(tmp_path / "other.txt"), WORDS)
    with pytest.raises(ConfigError, match=r"lexicon = 'nrc' is not a file; give one with a word on each line"):
        check_lexicon("nrc")
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="UTF-16, must be UTF-8"):
        emotional_words(str(tmp_path / "broken.txt"), WORDS)


def test_the_turn_that_follows_a_response():
    first = Instance("a#2", TOLD.context[:1], TOLD.context[1], "sad")
    critics = AdversarySettings()
    batch = examples((ASKED, first, TOLD), adversary=critics, train=True).collate(np.array([1, 0, -1, 2]), 16, RNG)
    assert words(batch.feedback[0]) == ["i", "am", "so", "sad"]  # of "I am so sad."
    assert batch.feedback_mask.tolist() == [[True] * 4, [False] * 4, [False] * 4, [False] * 4]
    for options in ({"adversary": critics}, {"train": True}):
        assert examples(**options).collate(np.array([0]), 16, RNG).feedback is None
