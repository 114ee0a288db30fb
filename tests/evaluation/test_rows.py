"""Anybody's outputs: which fields of a line are checked, so that the report can rely on them."""

import json

import pytest

from empax.core.types import Prediction
from empax.evaluation.rows import read_predictions

NOTES = {"nll": 3.5, "num_tokens": 2}
GOOD = {"context": ["I passed the exam!"], "response": "Congratulations!", "reference": "That is great."}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reference_attributes": "strong"}, "'reference_attributes' must map names to strings"),
        ({"independent_response_attributes": {"exploration": 2}}, "'independent_response_attributes' must map names"),
        ({"response_attributes": {"exploration": "huge"}}, "holds the level 'huge', must be one of low, mid, high"),
        ({"context": [["a", "b"]]}, "'context' must be a list of strings"),
        ({"context": "a"}, "'context' must be a list of strings, one for each turn"),
        ({"exemplars": ["x"]}, "'exemplars' must be a list of objects"),
        ({"exemplars": [{}]}, "one of 'exemplars' has none of id, context, response, text, emotion"),
        ({"exemplars": [{"score": 1.0}]}, "one of 'exemplars' has none of"),
        ({"exemplars": [{"response": 3}]}, "'response' of one of 'exemplars' is of type int, must be a string"),
        ({"exemplars": [{"id": True}]}, "'id' of one of 'exemplars' is of type bool"),
        ({"exemplars": [{"context": [1]}]}, "'context' of one of 'exemplars' must be a list of strings"),
        ({"exemplars": [{"text": "a", "attributes": ["high"]}]}, "'attributes' of one of 'exemplars' must map"),
        ({"attributes": ["high"]}, "'attributes' must map names to strings"),
        ({"num_tokens": -1}, "'num_tokens' is -1, must be a number of at least 0"),
        ({"nll": True}, "'nll' is True, must be a number of at least 0"),
        ({"nll": "7"}, "'nll' is '7', must be a number of at least 0"),
        ({"nll": 1402.0, "num_tokens": 2}, "'nll' is 1402 for 2 tokens: the perplexity of more than 700 nats"),
        ({"intent": 3}, "'intent' is of type int, must be a string"),
        ({"intent_second": ["a"]}, "'intent_second' is of type list, must be a string"),
        ({"bart_score": -1.0, "bart_score_model": "a"}, "'bart_score' must map names of directions"),
        ({"bart_score": {"recall": 0.5}, "bart_score_model": "a"}, "'bart_score' must map names of directions"),
        ({"bart_score": {"recall": True}, "bart_score_model": "a"}, "'bart_score' must map names of directions"),
        ({"bart_score": {"recall": -1.0}}, "'bart_score' needs 'bart_score_model'"),
    ],
)
def test_fields_that_the_report_reads_are_checked_line_by_line(tmp_path, fields, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (GOOD, GOOD | fields, GOOD)), encoding="utf-8")
    rows, bad = read_predictions(path)
    assert len(rows) == 2
    assert [line.number for line in bad] == [2]
    assert reason in bad[0].reason


def test_lines_are_counted_with_blank_ones_and_a_list_is_no_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = GOOD | {"context": ["a\u2028b"], "emotion": None, "id": 7, **NOTES}
    path.write_text(json.dumps(good, ensure_ascii=False) + "\n\n[1]\n", encoding="utf-8")
    rows, bad = read_predictions(path)
    assert rows == [Prediction(("a\u2028b",), GOOD["response"], GOOD["reference"], id="7", notes=NOTES)]
    assert [line.number for line in bad] == [3]
    assert bad[0].reason.startswith("must be a JSON object, not a list")


@pytest.mark.parametrize(
    "fields",
    [
        {"nll": 0, "num_tokens": 0},
        {"nll": 1400.0, "num_tokens": 2},
        {"nll": None, "num_tokens": None, "intent": None},
        {"id": 7, "emotion": "sad", "attributes": {"sentiment": "any word"}},
        {"reference_attributes": None, "response_attributes": {"exploration": "low", "other": "any word"}},
        {"reference_attributes": {"exploration": ""}},
        {"bart_score": {"recall": -3.5, "precision": 0}, "bart_score_model": "a"},
        {"exemplars": [{"id": 3, "score": 1}, {"text": "a"}, {"context": "b"}, {"emotion": "sad", "response": None}]},
        {"exemplars": [{"context": ["a"], "response": "b", "score": -0.5, "attributes": {"sentiment": "low"}}]},
    ],
)
def test_whatever_may_be_there_is_taken(tmp_path, fields):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD | fields), encoding="utf-8")
    rows, bad = read_predictions(path)
    assert bad == []
    (row,) = rows
    assert row.context == ("I passed the exam!",)
    assert list(row.exemplars) == fields.get("exemplars", [])
