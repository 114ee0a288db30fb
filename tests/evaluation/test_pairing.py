import dataclasses

import pytest

from empax.core.files import DataError
from empax.core.types import Prediction
from empax.evaluation import pairing
from tests.evaluation.values import rows_of


def test_pairs_by_id_or_by_context_and_reference():
    rows = rows_of(["a", "b", "c"])
    first, second = pairing.pair_rows(rows, rows[::-1])
    assert [row.id for row in first] == [row.id for row in second] == ["d0#2", "d0#4", "d1#2"]
    unnamed = rows_of(["a", "b", "c"], id="")
    first, second = pairing.pair_rows(rows, unnamed[::-1])
    assert [row.response for row in second] == ["a", "b", "c"]
    twice = [unnamed[0], dataclasses.replace(unnamed[0], response="again")]
    assert pairing.pair_rows(twice, twice)[1] == twice
    with pytest.raises(DataError, match=r"1 rows are only in the first \(3 rows\), 0 only in the second"):
        pairing.pair_rows(rows, rows[:2])
    with pytest.raises(DataError, match="ids must be unique"):
        pairing.pair_rows([rows[0], rows[0]], rows)


@pytest.mark.parametrize(("field", "value"), [("reference", "other"), ("context", ("other",)), ("emotion", "sad")])
def test_one_id_with_two_texts_is_refused_by_name(field, value):
    row = dataclasses.replace(rows_of(["a"])[0], emotion="proud")
    with pytest.raises(DataError, match=rf"id 'd0#2' has different {field}s .*; give both the same test rows"):
        pairing.pair_rows([row], [dataclasses.replace(row, **{field: value})])


def test_ids_tell_dialogues():
    assert pairing.dialogues_of(rows_of("abcde")).tolist() == [0, 0, 1, 1, 2]
    for other in ("", "7", "d1"):
        assert pairing.dialogues_of([*rows_of("ab"), dataclasses.replace(rows_of("a")[0], id=other)]) is None
    rows = [Prediction(("x",), "a", "b", id=f"hit:1_conv:{i}#{n}") for i in (3, 1) for n in (2, 4)]
    assert pairing.dialogues_of(rows).tolist() == [1, 1, 0, 0]
    found = pairing.describe_rows(rows_of("abc"))
    assert (found["rows"], found["dialogues"], found["resampled"]) == (3, 2, "dialogues")
    unnamed = pairing.describe_rows(rows_of("cba", id="")[::-1])
    assert (unnamed["dialogues"], unnamed["resampled"]) == (None, "rows")
    assert unnamed["sha256"] == found["sha256"]  # of contexts and references, in any order
    assert pairing.describe_rows(rows_of("ab"))["sha256"] != found["sha256"]


def test_cleaned_rows_are_found_again():
    ours = [
        Prediction(('He said "I\'m off!"',), "a", "You can't know that."),
        Prediction(("hello",), "b", "Nobody else has this."),
        Prediction(("hi",), "c", "Don't worry"),
    ]
    theirs = [
        Prediction(("hi",), "x", "do not worry"),
        Prediction(("merged",), "y", "extra"),
        Prediction(("he said i am off !",), "z", "you can not know that ."),
    ]
    first, second = pairing.shared_rows(ours, theirs)
    assert (first.tolist(), second.tolist()) == ([0, 2], [2, 0])
    assert pairing.shared_rows(ours, [])[0].tolist() == []


@pytest.mark.real_data
@pytest.mark.slow
def test_all_our_test_rows_are_in_the_released_files(real_data):
    from empax.data.dialogues import to_instances
    from empax.data.empathetic_dialogues import find_archive, read_dialogues
    from empax.evaluation.rows import read_predictions

    instances = to_instances(read_dialogues(find_archive(str(real_data)), "test"))
    ours = [Prediction(i.context, "", i.response, id=i.id) for i in instances]
    theirs, _ = read_predictions(real_data / "peer_outputs" / "transformer.jsonl")
    positions, _ = pairing.shared_rows(ours, theirs)
    assert len(positions) == len(ours) == 5249
    assert len(theirs) == 5255
