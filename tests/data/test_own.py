"""A corpus of the user's own: its files, what is wrong with them, and the same by Apache Beam."""

import json
import shutil

import pytest

from empax.core.files import DataError
from empax.core.types import Utterance
from empax.data.dialogues import to_instances
from empax.data.own import (
    SPLITS,
    check_files,
    example_rows,
    files_hash,
    find_files,
    has_emotions,
    load_dialogues,
    read_file,
    read_split,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def row(name, **fields):
    return {"id": name, "utterances": [f"My {name} broke.", "Oh no — which?", "The big one."], **fields}


def write(path, rows):
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "corpus"
    root.mkdir()
    for part in range(3):
        write(root / f"train-{part}.jsonl", [row(f"car-{part}-{i}", emotion="sad") for i in range(7)])
    write(root / "validation.jsonl", [row("bike", situation="a bike")])
    write(root / "test.jsonl", [row("cup")])
    return root


def test_dialogues_come_from_all_files_of_a_split(folder):
    found = load_dialogues(str(folder))
    assert {split: len(dialogues) for split, dialogues in found.items()} == {"train": 21, "validation": 1, "test": 1}
    (bike,) = found["validation"]
    assert (bike.id, bike.emotion, bike.situation) == ("bike", "", "a bike")
    assert bike.utterances[:2] == (Utterance("speaker", "My bike broke."), Utterance("listener", "Oh no — which?"))
    assert sorted(d.id for d in found["train"]) == [f"car-{part}-{i}" for part in range(3) for i in range(7)]
    assert {d.emotion for d in found["train"]} == {"sad"}


def test_fields_of_your_own_reach_every_instance_whatever_they_hold(folder):
    more = {"topic": "cars", "score": 0.5, "tags": ["a", "b"], "nested": {"x": None}, "bad key": True}
    write(folder / "train-4.jsonl", [row("own", **more) | {"utterances": ["a", "b", "c", "d"]}])
    found = {d.id: d for d in load_dialogues(str(folder))["train"]}
    assert found["own"].notes == more
    assert found["car-0-0"].notes == {}
    assert [i.notes for i in to_instances([found["own"]])] == [more, more]
    asked = example_rows(str(folder), {"topic"})
    assert [i.id for i in asked] == ["own#2", "own#4"]
    assert [i.id for i in example_rows(str(folder), ())] == ["car-0-0#2", "car-0-1#2"]
    assert [i.id for i in example_rows(str(folder), {"nothing"})] == ["car-0-0#2", "car-0-1#2"]
    write(folder / "train-5.jsonl", [row("told", situation="I met a bear.") | {"utterances": ["a", "b", "c", "d"]}])
    assert [i.id for i in example_rows(str(folder), {"situation"})] == ["told#2", "told#4"]


def test_pairs_may_have_fields_too(tmp_path):
    line = {"source": "a", "target": "b", "id": "p", "emotion": "sad", "score": 2}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({"source": "c", "target": "d"}) + "\n")
    first, second = read_file(tmp_path / "a.jsonl")
    assert (first.id, first.emotion, first.notes) == ("p", "sad", {"score": 2})
    assert (second.id, second.notes) == ("a:2", {})


def test_prepared_once_until_a_file_changes(folder, tmp_path):
    first = load_dialogues(str(folder))
    assert load_dialogues(str(folder)) == first
    assert len(list((tmp_path / "cache" / "tfds").iterdir())) == 1
    before = files_hash(folder)
    write(folder / "train-3.jsonl", [row("late")])
    assert files_hash(folder) != before
    assert len(load_dialogues(str(folder))["train"]) == 22


def test_a_cache_that_cannot_be_written_costs_time_alone(folder, tmp_path, monkeypatch, caplog):
    expected = load_dialogues(str(folder))
    (tmp_path / "file").touch()
    monkeypatch.setenv("EMPAX_CACHE_DIR", str(tmp_path / "file"))
    assert load_dialogues(str(folder)) == expected
    assert "set EMPAX_CACHE_DIR to a writable folder" in caplog.text


@pytest.mark.slow
def test_beam_prepares_the_same_in_the_same_order(folder, tmp_path):
    alone = load_dialogues(str(folder))
    shutil.rmtree(tmp_path / "cache")
    assert load_dialogues(str(folder), beam=("--runner=DirectRunner",)) == alone


def test_an_id_comes_once(folder):
    write(folder / "train-9.jsonl", [row("car-1-1")])
    with pytest.raises(DataError, match="2 dialogues of the split train have the id 'car-1-1'"):
        load_dialogues(str(folder))


@pytest.mark.parametrize("beam", [(), ("--runner=DirectRunner",)])
def test_a_bad_line_stops_preparing_and_is_named(folder, beam):
    write(folder / "train-9.jsonl", [row("fine"), row("bad", emotion="blue")])
    with pytest.raises(DataError, match=r"train-9\.jsonl, line 2: emotion = 'blue'"):
        load_dialogues(str(folder), beam=beam)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": ""}, "id = '' must be a text"),
        ({"emotion": "blue"}, "emotion = 'blue' must be empty or one of afraid"),
        ({"situation": 3}, "situation = 3 must be a text"),
        ({"utterances": []}, ""),
        ({"utterances": ["Hi.", " "]}, "none of them blank"),
        ({"utterances": "Hi."}, "must be a list of texts"),
        ({"utterance": []}, "unknown field 'utterance'; did you mean 'utterances'"),
        ({"Emotion": "sad"}, "unknown field 'Emotion'; did you mean 'emotion'"),
        ({"facts": []}, "the field 'facts' has a reserved name"),
        ({"source": "reddit"}, "or target; a line is a dialogue or a pair. Rename your own field"),
        ({"target": 3}, "utterances beside source or target"),
        ({"context": []}, "the field 'context' has a reserved name"),
    ],
)
def test_bad_dialogues_are_named(tmp_path, change, problem):
    path = tmp_path / "train.jsonl"
    write(path, [row("fine"), row("bad") | change])
    if not problem:  # a dialogue without turns makes no instance, and does no harm
        assert [d.utterances for d in read_file(path)][1] == ()
        return
    with pytest.raises(DataError, match=f"train.jsonl, line 2: .*{problem}"):
        list(read_file(path))


def test_every_split_must_be_there(folder):
    for split in SPLITS:
        assert find_files(folder)[split]
    (folder / "test.jsonl").unlink()
    with pytest.raises(DataError, match=r"holds no test\*\.jsonl; with data\.name = \"jsonl\""):
        find_files(folder)
    (folder / "test.jsonl").touch()
    with pytest.raises(DataError, match=r"holds no test\*\.jsonl with a line in it; with"):
        find_files(folder)
    (folder / "test.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"line 2: the file ends without a dialogue; write one per line, or delete"):
        check_files(folder)
    with pytest.raises(DataError, match=r"config\.data\.dir = ''"):
        find_files("")
    with pytest.raises(DataError, match=r"pairs\.jsonl' does not exist: it holds no train"):
        find_files(folder / "pairs.jsonl")


def test_pairs_of_one_file_are_split_by_their_contexts(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"source": f"s{i}", "target": f"t{i}"}) + "\n" for i in range(20)))
    splits = load_dialogues(str(file))
    found = {
        split: [tuple(turn.text for turn in d.utterances) for d in dialogues] for split, dialogues in splits.items()
    }
    assert sorted(found["validation"]) == [("s18", "t18"), ("s8", "t8")]
    assert sorted(found["test"]) == [("s19", "t19"), ("s9", "t9")]
    assert len(found["train"]) == 16
    assert {d.id for d in splits["test"]} == {"pairs:10", "pairs:20"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"source": "a"}, "target = None must be a text"),
        ({"source": " ", "target": "b"}, "source = ' ' must be a text"),
        ({"source": "a", "target": "b", "targets": "c"}, "unknown field 'targets'; did you mean 'target'"),
        ({"source": "a", "target": "b", "utterances": []}, "a line is a dialogue or a pair"),
    ],
)
def test_a_pair_that_is_none_is_named(row, message, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        list(read_file(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("count", [1, 9])
def test_a_single_file_has_a_line_for_each_split(tmp_path, count):
    pairs = [{"source": f"I lost my key {i}.", "target": "Oh no!"} for i in range(count)]
    write(tmp_path / "few.jsonl", pairs)
    for read in (check_files, load_dialogues):
        with pytest.raises(
            DataError, match=rf"few\.jsonl has too few different contexts \({count}\); .* at least ten, or a folder"
        ):
            read(str(tmp_path / "few.jsonl"))
    write(tmp_path / "few.jsonl", pairs * 1000)
    with pytest.raises(DataError, match=rf"too few different contexts \({count}\); of every ten, the ninth"):
        check_files(tmp_path / "few.jsonl")
    write(tmp_path / "few.jsonl", [{"source": f"I lost key {i}.", "target": "Oh no!"} for i in range(10)])
    check_files(tmp_path / "few.jsonl")


def test_all_replies_to_a_context_are_in_one_split_of_a_single_file(tmp_path):
    file = tmp_path / "pairs.jsonl"
    write(file, [{"source": f"s{i}", "target": f"t{i} {n}"} for n in range(3) for i in range(20)])
    found = {split: [d.utterances[0].text for d in read_split(file, split, alone=True)] for split in SPLITS}
    assert found["validation"] == ["s8", "s18"] * 3
    assert found["test"] == ["s9", "s19"] * 3
    assert len(found["train"]) == 48


def test_a_row_of_another_form_is_told_both_forms(tmp_path):
    for row in ({"prompt": "Hi.", "completion": "Hello."}, {"context": ["Hi."], "response": "Hello."}, {"id": "a"}):
        write(tmp_path / "chat.jsonl", [row])
        said = f"it has {', '.join(map(repr, row))}; a pair has source and target, a dialogue id, emotion"
        with pytest.raises(DataError, match=f"line 1: {said}"):
            list(read_file(tmp_path / "chat.jsonl"))


def test_an_emotion_counts_where_somebody_answers(tmp_path):
    rows = [{"id": "a", "emotion": "proud", "utterances": ["alone"]}, {"id": "b", "utterances": ["x", "y"]}]
    for split in SPLITS:
        write(tmp_path / f"{split}.jsonl", rows)
    assert not has_emotions(tmp_path, "train")
    write(tmp_path / "train.jsonl", [*rows, {"id": "c", "emotion": "sad", "utterances": ["x", "y"]}])
    assert has_emotions(tmp_path, "train")
    assert not has_emotions(tmp_path, "train", least=2)
    write(tmp_path / "train.jsonl", [{"id": i, "emotion": i, "utterances": ["x", "y"]} for i in ("sad", "proud")])
    assert has_emotions(tmp_path, "train", least=2)
