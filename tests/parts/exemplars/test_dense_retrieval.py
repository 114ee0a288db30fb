"""What a dense retriever learns from: which negatives are drawn, and the authors' pairs."""

import json

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.parts.exemplars.dense_retrieval import (
    FILES,
    FOLDER,
    Keys,
    RetrievalExamples,
    find_given_pairs,
    load_given_pairs,
)

# Six texts of four dialogues: two of the first, three emotions, and one whose emotion is unknown.
KEYS = Keys([[1, 2], [3], [4, 5, 6], [3], [7], [8]], np.array([0, 0, 1, 2, 3, 4]), np.array([5, 5, 5, 9, 9, -1]))
BOTH = ("other_emotion", "same_emotion")


def examples(negatives=BOTH, keys=KEYS, **options):
    queries = [[10 + i] * (i + 1) for i in range(len(KEYS.ids))]
    return RetrievalExamples(queries, keys, negatives, pad_id=0, max_key_tokens=4, **options)


def drawn(made, i, kind):
    return {made.draw(i, kind, np.random.default_rng(seed)) for seed in range(40)}


def test_negatives_are_of_other_dialogues_and_of_the_emotion_that_is_asked_for():
    made = examples()
    assert drawn(made, 0, "same_emotion") == {2}  # not row 1, of its own dialogue
    assert drawn(made, 2, "same_emotion") == {0, 1}
    assert drawn(made, 0, "other_emotion") == {3, 4}  # not row 5, of which no emotion is known
    assert drawn(made, 3, "other_emotion") == {0, 1, 2}
    assert drawn(made, 5, "same_emotion") == drawn(made, 5, "other_emotion") == {-1}


def test_a_batch_has_the_response_first_then_its_negatives():
    batch = examples().collate(np.array([2, 0, -1]), 4, np.random.default_rng(0))
    assert batch.key.shape == (3, 3, 4)
    np.testing.assert_array_equal(batch.source[:2], [[12, 12, 12, 0], [10, 0, 0, 0]])
    np.testing.assert_array_equal(batch.key[:2, 0], [[4, 5, 6, 0], [1, 2, 0, 0]])
    np.testing.assert_array_equal(batch.key_group[:2, 0], [1, 0])
    assert batch.key_group[0, 1] in (2, 3)
    assert batch.key_group[0, 2] == 0
    np.testing.assert_array_equal(batch.valid, [True, True, False])
    assert not batch.key_mask[2].any()
    assert (batch.key_text[2] == -1).all()


def test_a_text_has_one_number_wherever_it_stands():
    batch = examples(()).collate(np.arange(6), 6, np.random.default_rng(0))
    assert batch.key_text[1, 0] == batch.key_text[3, 0]
    assert len(set(batch.key_text.ravel().tolist())) == 5


def test_the_same_step_draws_the_same_negatives_and_another_one_others():
    more = [[20 + i] for i in range(30)]
    groups, emotions = np.append(KEYS.groups, np.arange(10, 40)), np.append(KEYS.emotions, np.full(30, 9))
    made = examples(keys=Keys([*KEYS.ids, *more], groups, emotions))
    rows = [made.collate(np.arange(3), 4, np.random.default_rng([3, step])).key[:, 1, 0] for step in (7, 7, 8)]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert (rows[0] != rows[2]).any()


def test_each_kind_of_negative_is_left_out_alone():
    for kinds in (BOTH, BOTH[:1], BOTH[1:], ()):
        batch = examples(kinds).collate(np.array([0]), 4, np.random.default_rng(0))
        assert batch.key.shape[1] == 1 + len(kinds)
        if kinds == BOTH[1:]:
            assert batch.key_group[0, 1] == 1


def test_given_negatives_are_taken_and_the_others_drawn():
    given = np.full((6, 2), -1)
    given[0] = 5, -1
    batch = examples(given=given).collate(np.array([0]), 4, np.random.default_rng(0))
    assert batch.key[0, 1, 0] == 8
    assert batch.key_group[0, 2] == 1


def pair(post="I failed.", answer="I am sorry.", **changes):
    passages = {"positive_ctxs": answer, "negative_ctxs": "Bananas.", "hard_negative_ctxs": "Try harder."}
    entry = {"question": post, "answers": [""], **{k: [{"title": "", "text": v}] for k, v in passages.items()}}
    return {**entry, **changes}


def write(tmp_path, entries, name=FILES["train"]):
    folder = tmp_path / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(entries), encoding="utf-8")
    return folder


def test_pairs_of_one_post_are_of_one_dialogue(tmp_path):
    folder = write(tmp_path, [pair(), pair("I won."), pair(answer="Oh no.")])
    found = load_given_pairs(folder, "train")
    assert [one.instance.dialogue_id for one in found] == [f"reddit-train-{d}" for d in (0, 1, 0)]
    assert len({one.instance.id for one in found}) == 3
    assert found[2].instance.context == ("I failed.",)
    assert found[2].instance.response == "Oh no."
    assert found[0].negatives == {"other_emotion": "Bananas.", "same_emotion": "Try harder."}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "must be a non-empty list of pairs"),
        ([], "must be a non-empty list of pairs"),
        ([pair(), 3], "entry 1 must be an object"),
        ([pair(question=" ")], r"entry 0: question = ' ' must be a text that is not blank"),
        ([pair(hard_negative_ctxs=[])], "entry 0: hard_negative_ctxs must be a list of at least one object with text"),
        ([pair(positive_ctxs=[{"title": ""}])], "entry 0: positive_ctxs = 'None' must be a text"),
        ([pair("x" * 100_001)], "entry 0: question: a text of 100001 characters"),
    ],
)
def test_a_file_that_is_no_list_of_pairs_is_refused(tmp_path, entries, said):
    with pytest.raises(DataError, match=said):
        load_given_pairs(write(tmp_path, entries), "train")


def test_a_folder_without_the_pairs_is_named(tmp_path, no_data_dir):
    with pytest.raises(ConfigError, match=r"holds no lempex_dpr/ with reddit-train.* the pairs that the authors"):
        find_given_pairs(tmp_path)
    with pytest.raises(ConfigError, match="EMPAX_DATA_DIR = ''"):
        find_given_pairs("")
    for name in FILES.values():
        folder = write(tmp_path, [pair()], name)
    assert find_given_pairs(tmp_path) == folder


@pytest.mark.real_data
def test_real_counts(real_data):
    folder = find_given_pairs(real_data)
    assert [len(load_given_pairs(folder, split)) for split in FILES] == [847, 200]
