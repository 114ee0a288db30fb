"""The command: a study from files, answers from the page and from sheets, and what it refuses."""

import csv
import json

import pytest

from empax import rate
from empax.core.files import read_json, write_jsonl
from empax.core.types import Prediction


@pytest.fixture
def study(tmp_path):
    for name in ("ours", "theirs"):
        rows = [Prediction((f"c {i}",), f"{name} {i}", f"gold {i}", id=f"d{i}#2") for i in range(30)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    files = [f"{name}={tmp_path / name}.jsonl" for name in ("ours", "theirs")]
    assert rate.main(["make", *files, "--reference", f"--output={tmp_path / 'study'}", "--rows=20"]) == 0
    return tmp_path / "study"


def test_answers_of_page_and_sheet_are_counted_together(study, tmp_path, capsys):
    key = read_json(study / "key.json")
    assert key["systems"] == ["ours", "theirs", "reference"]
    choices = {"ours": 1, "theirs": 0, "reference": 2, "another context's reply": -1}
    said = {}
    for item in key["items"]:
        left, right = (choices[name] for name in item["systems"])
        said[item["number"]] = "1" if left > right else "2"
    answers = {str(n): dict.fromkeys(("empathy", "relevance", "fluency"), v) for n, v in said.items()}
    page = {"study": key["study"], "rater": "ann", "answers": answers}
    (tmp_path / "answers-ann.json").write_text(json.dumps(page))
    with (study / "sheet.csv").open() as file:
        rows = list(csv.DictReader(file))
    with (tmp_path / "bob.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, **answers[row["number"]]} for row in rows)
    files = [str(study / "key.json"), str(tmp_path / "answers-ann.json"), str(tmp_path / "bob.csv")]
    assert rate.main(["score", *files, f"--output={tmp_path / 'scores.json'}", "--samples=20"]) == 0
    found = read_json(tmp_path / "scores.json")
    assert found["empathy"]["win_rates"]["ours : theirs"] == [1.0, 1.0, 1.0]
    assert found["empathy"]["win_rates"]["ours : reference"] == [0.0, 0.0, 0.0]
    assert found["empathy"]["agreement"]["fleiss_kappa"] == pytest.approx(1.0)
    assert found["raters"]["bob"]["checks_passed"] == 1.0
    assert "win rate" in capsys.readouterr().out


def test_what_is_wrong_is_named(study, tmp_path, capsys):
    def refused(*words):
        assert rate.main(list(words)) == 2
        return capsys.readouterr().err

    key, page = str(study / "key.json"), tmp_path / "a.json"
    page.write_text(json.dumps({"study": "other", "answers": {}}))
    assert "is of the study 'other'" in refused("score", key, str(page))
    own = read_json(study / "key.json")["study"]
    page.write_text(json.dumps({"study": own, "rater": "ann", "answers": {"1": {"empathy": "3"}}}))
    assert "item 1: '3' must be one of 1, 2, tie" in refused("score", key, str(page))
    page.write_text(json.dumps({"study": own, "rater": "ann", "answers": {"999": {}}}))
    assert "answers item 999, which the study does not have" in refused("score", key, str(page))
    page.write_text(json.dumps({"study": own, "rater": "ann", "answers": {"1": {"empathy": "1"}}}))
    assert "no item of the study has an answer to every aspect" in refused("score", key, str(page))
    assert "are both of the rater 'ann'" in refused("score", key, str(page), str(page))
    assert "is no key of a study" in refused("score", str(page), str(page))
    assert "must be NAME=FILE" in refused("make", "a.jsonl", f"--output={tmp_path}")
    assert rate.main(["power", "--win-rate=0.6"]) == 0
    assert "194 ratings" in capsys.readouterr().out
