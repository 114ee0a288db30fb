"""Intents: their labels by name, the reference intents of an emotion, and what they leave within reach."""

import collections

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.settings import DataSettings
from empax.core.types import EMOTIONS, IS_POSITIVE, POSITIVE_EMOTIONS, Instance
from empax.data import sample
from empax.data.dialogues import to_instances
from empax.data.empathetic_dialogues import load_dialogues
from empax.systems.reflectdiffu import labels as intents
from empax.systems.reflectdiffu.labels import (
    INTENTS,
    TABLE_1,
    IntentTable,
    intent_ids,
    intent_report,
    majority_by_turn,
    references,
)


def test_names_are_stored_and_numbers_are_their_places():
    assert set(INTENTS) == set(sample.load_intents().values())
    np.testing.assert_array_equal(intent_ids(["neutral", "agreeing", "sad", ""]), [8, 0, -1, -1])
    assert len(POSITIVE_EMOTIONS) == IS_POSITIVE.sum() == 13
    assert set(EMOTIONS) > POSITIVE_EMOTIONS


def test_table_1_has_three_intents_for_each_emotion():
    assert set(TABLE_1) == set(EMOTIONS)
    assert all(len(set(row) & set(INTENTS)) == 3 for row in TABLE_1.values())
    assert TABLE_1["faithful"] == ("acknowledging", "encouraging", "neutral")  # of its two groups the first
    assert TABLE_1["furious"] == TABLE_1["angry"]
    assert TABLE_1["devastated"] == TABLE_1["sad"]


def table():
    rows = [("sad", "consoling")] * 3 + [("sad", "questioning")] * 2 + [("sad", "wishing"), ("proud", "acknowledging")]
    instances = [Instance(f"d{i}#2", ("x",), "y", emotion) for i, (emotion, _) in enumerate(rows)]
    known = {f"d{i}#2": intent for i, (_, intent) in enumerate(rows)}
    unknown = [Instance("d8#2", ("x",), "y", "sad"), Instance("d9#2", ("x",), "y", "")]
    return IntentTable.of([*instances, *unknown], {**known, "d9#2": "neutral"})


def test_the_commonest_of_each_emotion_and_what_they_cover():
    found = table()
    assert found.counts.sum() == 7
    assert found.top(2)["sad"] == ("consoling", "questioning")
    assert found.top(2)["proud"] == ("acknowledging", "agreeing")  # of intents that never occur, the first
    assert found.covered(found.top(1)) == pytest.approx(100 * 4 / 7)
    assert found.covered(found.top(3)) == 100
    assert found.covered(TABLE_1) == pytest.approx(100 * 4 / 7)
    assert found.covered(TABLE_1, by_any=True) == pytest.approx(100 * 5 / 7)  # hopeful has wishing
    report = intent_report(found, found)
    assert report["shares"]["sad"]["questioning"] == pytest.approx(2 / 6, abs=1e-4)
    assert report["majority"] == pytest.approx(100 * 3 / 7, abs=0.01)


def test_references_are_counted_or_printed():
    assert references("train_statistics", table(), 2)["sad"] == ("consoling", "questioning")
    assert references("table_1", table(), 2)["sad"] == ("consoling", "encouraging")


def test_labels_are_read_by_name(tmp_path):
    path = tmp_path / "empathetic_dialogues" / "listener_intents.csv"
    path.parent.mkdir()
    header = "conv_id,utterance_idx,actor,label\n"
    path.write_text(header + "a,1,speaker,sad\na,2,listener,questioning\na,3,speaker,neutral\na,4,listener,sad\n")
    found = intents.load_intents(DataSettings("empathetic_dialogues", dir=str(tmp_path)))
    assert found == {"a#2": "questioning"}
    for text, message in (
        (header + "a,2,listener,joking\n", "line 2: 'joking' is neither an intent nor an emotion"),
        (header + "a,2,listener\n", "line 2: 3 fields must be 4"),
        ("id,label\n", "columns 'id,label' must be conv_id"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            intents.read_listener_intents(path)
    with pytest.raises(ConfigError, match=r"holds no listener_intents\.csv"):
        intents.load_intents(DataSettings("empathetic_dialogues", dir=str(tmp_path / "empathetic_dialogues" / "x")))
    with pytest.raises(ConfigError, match="'jsonl' has no response intents"):
        intents.load_intents(DataSettings("jsonl"))


@pytest.mark.real_data
def test_ceilings_of_the_real_labels(real_data):
    """In percent, of the test split: what ReflectDiffu's Table 1 and the commonest three intents leave within reach."""
    splits = load_dialogues(real_data)
    labels = intents.load_intents(DataSettings("empathetic_dialogues", dir=str(real_data)))
    assert collections.Counter(labels.values())["questioning"] == 16_439
    rows = {split: to_instances(dialogues) for split, dialogues in splits.items()}
    by_turn = majority_by_turn(rows["train"], rows["test"], labels)
    assert by_turn == {"first": "questioning", "later": "acknowledging", "accuracy": pytest.approx(41.5, abs=0.1)}
    tables = {split: IntentTable.of(instances, labels) for split, instances in rows.items()}
    report = intent_report(tables["train"], tables["test"])
    assert report["covered_by_table_1"] == pytest.approx(28.1, abs=0.1)
    assert report["covered_by_commonest"]["3"] == pytest.approx(73.3, abs=0.1)
    assert report["covered_by_commonest"]["1"] == pytest.approx(37.8, abs=0.1)
    assert report["covered_by_table_1_whatever_the_emotion"] == pytest.approx(53.4, abs=0.1)
    assert report["majority"] == pytest.approx(37.0, abs=0.1)


def test_the_commonest_intent_of_a_turn_is_a_control():
    def row(name, turns):
        return Instance(name, tuple("abc"[:turns]), "r", "sad")

    labels = {"a": "questioning", "b": "questioning", "c": "agreeing", "d": "wishing", "e": "wishing", "f": "agreeing"}
    train = [row("a", 1), row("b", 1), row("c", 1), row("d", 3), row("unknown", 3)]
    judged = [row("a", 1), row("c", 1), row("e", 3), row("f", 3), row("unlabelled", 1)]
    found = majority_by_turn(train, judged, labels)
    assert found == {"first": "questioning", "later": "wishing", "accuracy": 50.0}
