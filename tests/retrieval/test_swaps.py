"""Exemplars in place of a system's own: whose they are, and that the oracle finds what is planted."""

import numpy as np
import pytest

from empax.core.types import EMOTIONS, Instance
from empax.retrieval.swaps import DRAWN, draw_exemplars, nearest_exemplars


def pair(dialogue, turns=1, emotion="sad", situation="", response="oh"):
    notes = {"situation": situation} if situation else {}
    return Instance(f"{dialogue}#{turns + 1}", ("hello",) * turns, response, emotion, notes)


PAIRS = [
    pair(f"d{i}", turns, EMOTIONS[i % 3], situation=f"story {i // 2}") for i in range(40) for turns in (1, 3)
]  # two dialogues on a situation, two pairs of each
ASKED = [pair("d4", 1, EMOTIONS[1]), pair("new", 3, EMOTIONS[2]), pair("d9", 3, EMOTIONS[0], situation="story 4")]


@pytest.mark.parametrize("kind", DRAWN)
def test_what_is_drawn_is_of_other_dialogues_and_situations(kind):
    rows = draw_exemplars(kind, ASKED, PAIRS, 5, seed=0)
    assert rows.shape == (3, 5)
    assert (rows >= 0).all()
    for instance, found in zip(ASKED, rows, strict=True):
        stories = [PAIRS[row].notes["situation"] for row in found]
        assert len(set(stories)) == 5
        assert instance.notes.get("situation") not in stories
        assert kind != "same_turn" or {len(PAIRS[row].context) for row in found} == {len(instance.context)}
        assert kind != "same_emotion" or {PAIRS[row].emotion for row in found} == {instance.emotion}
    np.testing.assert_array_equal(draw_exemplars(kind, ASKED, PAIRS, 5, seed=0), rows)
    assert (draw_exemplars(kind, ASKED, PAIRS, 5, seed=1) != rows).any()


def test_random_ones_are_of_every_turn_and_emotion():
    rows = draw_exemplars("random", [ASKED[1]] * 50, PAIRS, 4, seed=0)
    assert {len(PAIRS[row].context) for row in rows.ravel()} == {1, 3}
    assert {PAIRS[row].emotion for row in rows.ravel()} == set(EMOTIONS[:3])
    counts = np.bincount(rows.ravel(), minlength=len(PAIRS))
    assert (counts > 0).mean() > 0.8


def test_where_there_are_too_few_none_stands():
    pairs = [pair("d1"), pair("d2"), pair("d2", 3), pair("d3", emotion="proud")]
    asked = [pair("d1"), pair("x", 5), pair("x", emotion="")]
    found = draw_exemplars("random", asked, pairs, 3, seed=0)
    assert sorted(found[0].tolist()) in ([-1, 1, 3], [-1, 2, 3])
    turns = draw_exemplars("same_turn", asked, pairs, 3, seed=0)
    assert sorted(turns[0].tolist()) == [-1, 1, 3]
    assert turns[1].tolist() == [-1] * 3
    emotions = draw_exemplars("same_emotion", asked, pairs, 3, seed=0)
    assert sorted(emotions[0].tolist()) in ([-1, -1, 1], [-1, -1, 2])
    assert emotions[2].tolist() == [-1] * 3  # nobody knows its emotion


def test_the_oracle_finds_a_planted_reply_but_not_in_the_own_situation():
    rng = np.random.default_rng(0)
    replies = rng.normal(size=(len(PAIRS), 8))
    replies = (replies / np.linalg.norm(replies, axis=1, keepdims=True)).astype(np.float32)
    gold = replies[[30, 51, 19]]  # of situations 7, 12 and 4, which is the third one's own
    found = nearest_exemplars(gold, replies, ASKED, PAIRS, 4)
    assert found[0, 0] == 30
    assert found[1, 0] == 51
    for row, own in zip(found, ("", "", "story 4"), strict=True):
        stories = [PAIRS[i].notes["situation"] for i in row]
        assert len(set(stories)) == 4
        assert own not in stories
    scores = np.where([i.notes["situation"] == "story 4" for i in PAIRS], -np.inf, replies @ gold[2])
    assert found[2, 0] == scores.argmax()
