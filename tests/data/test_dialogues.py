"""Instances: which turns, which history, and MoEL's way of counting."""

import json

import pytest

from empax.core.files import DataError
from empax.core.types import Dialogue, Instance, Utterance
from empax.data.dialogues import instance_from_row, instance_to_row, to_instances
from empax.data.empathetic_dialogues import find_archive, read_dialogues


def dialogue(name, num_turns, situation="rain", emotion="sad"):
    turns = [Utterance("listener" if i % 2 else "speaker", f"{name}{i + 1}") for i in range(num_turns)]
    return Dialogue(name, emotion, situation, tuple(turns))


def test_every_listener_turn_with_its_whole_history():
    found = to_instances([dialogue("a", 5), dialogue("b", 1), dialogue("c", 2, emotion="proud")])
    assert found == [
        Instance("a#2", ("a1",), "a2", "sad"),
        Instance("a#4", ("a1", "a2", "a3"), "a4", "sad"),
        Instance("c#2", ("c1",), "c2", "proud"),
    ]
    assert found[1].dialogue_id == "a"


def test_a_situation_that_says_what_happened_is_noted_and_a_topic_is_not():
    for told in ("I lost my dog", "I lost my old dog"):
        assert to_instances([dialogue("a", 2, told)])[0].notes == {"situation": told}
    for topic in ("my old dog", ""):
        assert to_instances([dialogue("a", 2, topic)])[0].notes == {}


def test_moel_compat_merges_neighbours_and_loses_the_last():
    dialogues = [
        dialogue("a", 3, "x"),
        dialogue("b", 3, "x", emotion="proud"),  # same situation: goes on where a stopped
        dialogue("c", 4, "y"),
        dialogue("d", 2, "x"),  # same situation, but no neighbour
        dialogue("e", 4, "z"),  # last: lost
    ]
    found = to_instances(dialogues, moel_compat=True)
    assert [i.id for i in found] == ["a#2", "a#4", "a#6", "c#2", "c#4", "d#2"]
    assert found[2] == Instance("a#6", ("a1", "a2", "a3", "b1", "b2"), "b3", "sad")
    strangers = [dialogue(name, 2, "") for name in "abc"]  # without a situation nothing says that they belong together
    assert [i.id for i in to_instances(strangers, moel_compat=True)] == ["a#2", "b#2"]
    assert to_instances([], moel_compat=True) == to_instances([dialogue("a", 4)], moel_compat=True) == []


def test_every_turn_answers_where_there_is_no_listener():
    found = to_instances([dialogue("a", 3), dialogue("b", 1)], every_turn=True)
    assert found == [Instance("a#2", ("a1",), "a2", "sad"), Instance("a#3", ("a1", "a2"), "a3", "sad")]


def test_rows_round_trip_through_json():
    instance = Instance("a#2", ("Grüße", 'a "quote"'), "b", "sad", {"attributes": {"sentiment": "low"}})
    assert instance_from_row(json.loads(json.dumps(instance_to_row(instance)))) == instance
    assert isinstance(instance_from_row(instance_to_row(instance)).context, tuple)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": "one text"}, "'a#2': context must be a list"),
        ({"context": [3]}, "'a#2': context must be a list"),
        ({"extra": 1}, "has the fields id, context"),
        ({"emotion": 3}, "'a#2': emotion must be a text, found 3"),
        ({"notes": []}, r"'a#2': notes must be an object, found \[\]"),
    ],
)
def test_bad_rows_are_refused(change, message):
    row = instance_to_row(Instance("a#2", ("a",), "b", "sad")) | change
    with pytest.raises(DataError, match=message):
        instance_from_row(row)


@pytest.mark.real_data
def test_real_pair_counts(real_data):
    archive = find_archive(real_data)
    splits = {split: list(read_dialogues(archive, split)) for split in ("train", "validation", "test")}
    instances = {split: to_instances(dialogues) for split, dialogues in splits.items()}
    counts = {split: len(found) for split, found in instances.items()}
    assert counts == {"train": 40290, "validation": 5724, "test": 5249}
    for found in instances.values():
        assert len({i.id for i in found}) == len(found)
        assert all(len(i.context) % 2 == 1 for i in found)
    compatible = {split: len(to_instances(found, moel_compat=True)) for split, found in splits.items()}
    assert compatible == {"train": 40291, "validation": 5722, "test": 5247}
