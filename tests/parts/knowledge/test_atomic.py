"""ATOMIC: its files, its events as somebody would tell them, and the pairs that a COMET learns from."""

import gzip
import json

import pytest

from empax.core.files import DataError, read_jsonl
from empax.data.knowledge import Fact
from empax.parts.knowledge.atomic import (
    RELATIONS,
    find_files,
    pairs,
    prompt,
    read_events,
    spoken,
    spoken_tail,
    write_pairs,
)

HEADER = ",".join(["event", *RELATIONS, "prefix", "split"])


def line(event, **tails):
    def quote(text):
        return '"' + text.replace('"', '""') + '"'

    return ",".join([event, *(quote(json.dumps(tails.get(r, []))) for r in RELATIONS), '"[]"', "dev"])


def write(folder, split, *lines, gzipped=False):
    text = "\n".join([HEADER, *lines]) + "\n"
    path = folder / f"v4_atomic_{split}.csv{'.gz' if gzipped else ''}"
    path.write_bytes(gzip.compress(text.encode()) if gzipped else text.encode())
    return path


def test_rows_of_one_event_are_joined_and_nothing_is_said_twice(tmp_path):
    path = write(tmp_path, "dev", line("PersonX wins", xReact=["happy", "none"]), line("PersonX waits"),
                 line("PersonX wins", xReact=["Happy", "proud"], oReact=["sad"]))  # fmt: skip
    found = read_events([path])
    assert list(found) == ["PersonX wins"]  # the other event says nothing
    assert found["PersonX wins"] == [
        Fact("PersonX wins", "xReact", "happy"), Fact("PersonX wins", "oReact", "sad"),
        Fact("PersonX wins", "xReact", "proud", 1),
    ]  # fmt: skip


def test_files_are_found_gzipped_or_not_in_the_folder_or_in_the_one_for_knowledge(tmp_path):
    with pytest.raises(DataError, match=r"holds no v4_atomic_trn\.csv or .*; name the folder of ATOMIC's files"):
        find_files(tmp_path)
    inner = tmp_path / "knowledge"
    inner.mkdir()
    path = write(inner, "tst", line("PersonX wins", xReact=["happy"]), gzipped=True)
    assert find_files(tmp_path) == [path]
    assert read_events([path])
    with pytest.raises(DataError, match="v4_atomic_dev"):
        find_files(tmp_path, ("dev",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n", "line 1: the column 'event' is missing; it is not a file of ATOMIC"),
        (f"{HEADER}\nPersonX wins,1\n", "line 2: 2 columns, must be 12"),
        (f"{HEADER}\n{line(' ')}\n", "line 2: the event is blank"),
        (f"{HEADER}\n{line('e', xReact=[1])}\n", "line 2, column xReact: '.1.' must be a JSON list of texts"),
        (f"{HEADER}\n{line('e').replace('[]', 'nonsense', 1)}\n", "column oEffect: not valid JSON"),
        (f'{HEADER}\n"e\n', "line 2: unexpected end of data"),
    ],
)
def test_what_is_no_atomic_is_refused_with_its_place(text, said, tmp_path):
    path = tmp_path / "v4_atomic_dev.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_events([path])


def test_an_event_as_the_one_whom_it_happened_to_tells_it():
    assert spoken("PersonX loses PersonX's dog") == "I loses my dog"
    assert spoken("PersonX gives PersonY a ___") == "I gives them a something"
    assert spoken("PersonX accepts PersonY's offer") == "I accepts their offer"
    tails = {"PersonX thanks PersonY": "thanks them", "to dial persony's phone": "to dial their phone",
             "Person X's dog barks": "my dog barks", "PersonX and PersonY cry": "I and them cry"}  # fmt: skip
    assert {tail: spoken_tail(tail) for tail in tails} == tails
    assert spoken_tail(" happy") == "happy"


def test_pairs_are_prompts_with_their_tails(tmp_path):
    events = read_events([write(tmp_path, "dev", line("PersonX wins", xReact=["happy", "proud"]))])
    asked = prompt("PersonX wins", "xReact")
    assert asked == "PersonX wins xReact [GEN]"
    assert pairs(events) == [{"source": asked, "target": "happy"}, {"source": asked, "target": "proud"}]
    assert pairs(events, first=True) == [{"source": asked, "target": "happy"}]


def test_no_event_is_in_two_splits(tmp_path):
    write(tmp_path, "dev", *(line(f"PersonX does {i}", xReact=["happy", "tired"]) for i in range(40)))
    write(tmp_path, "tst", line("PersonX does 3", xReact=["sad"]), line("PersonX sleeps", xReact=["calm", "warm"]))
    counts = write_pairs(tmp_path, tmp_path / "pairs")
    assert counts == {"train": 76, "validation": 4, "test": 1}
    events = {split: {row["source"] for row in read_jsonl(tmp_path / "pairs" / f"{split}.jsonl")} for split in counts}
    assert events["test"] == {prompt("PersonX sleeps", "xReact")}
    assert not events["train"] & events["validation"]
    assert len(events["train"] | events["validation"]) == 40


@pytest.mark.real_data
def test_the_real_files_have_the_published_counts(real_data):
    events = read_events(find_files(real_data, ("dev", "tst")))
    assert len(events) == 4617
    assert sum(map(len, events.values())) > 120_000  # distinct tails that say something
