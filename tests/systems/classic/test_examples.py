"""Contexts as rows of words."""

import numpy as np

from empax.core.types import Instance
from empax.data.words import train_words
from empax.systems.classic.adversary import AdversarySettings
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
    batch = examples(room=5).collate(np.array([0]), 8, RNG)
    assert words(batch.source[0])[:5] == ["[CLS]", "am", "so", "sad", "."]
    assert words(batch.speaker[0])[:5] == ["[CLS]", *["<speaker>"] * 4]
    assert examples(room=5).lengths.tolist() == [[5, 4], [4, 3]]


def test_an_emotion_stands_before_the_context():
    made = examples(emotions=["proud", "sad"])
    batch = made.collate(np.array([0, 1]), 16, RNG)
    assert [words(row)[:3] for row in batch.source] == [["[CLS]", "proud", "i"], ["[CLS]", "sad", "we"]]
    assert words(batch.speaker[0])[:3] == ["[CLS]", "[CLS]", "<speaker>"]
    assert made.lengths[0, 0] == examples().lengths[0, 0] + 1
    cut = examples(emotions=["proud", "sad"], room=5).collate(np.array([0]), 8, RNG)
    assert words(cut.source[0])[:5] == ["[CLS]", "proud", "so", "sad", "."]


def test_the_turn_that_follows_a_response():
    first = Instance("a#2", TOLD.context[:1], TOLD.context[1], "sad")
    critics = AdversarySettings()
    batch = examples((ASKED, first, TOLD), adversary=critics, train=True).collate(np.array([1, 0, -1, 2]), 16, RNG)
    assert words(batch.feedback[0]) == ["i", "am", "so", "sad"]  # of "I am so sad."
    assert batch.feedback_mask.tolist() == [[True] * 4, [False] * 4, [False] * 4, [False] * 4]
    for options in ({"adversary": critics}, {"train": True}):
        assert examples(**options).collate(np.array([0]), 16, RNG).feedback is None
