"""The command: a study from files, answers from the page and from sheets, and what it refuses."""

import csv
import json
from unittest import mock

import pytest

from empax import rate
from empax.core.files import read_json, write_jsonl
from empax.core.types import Prediction
from empax.rating.study import ASPECTS


def write_page(path, study, answers, rater="ann"):
    """What the page of a study lets a rater save; gives the path as a word of a command."""
    path.write_text(json.dumps({"study": study, "rater": rater, "answers": answers}))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """NAME=FILE of two systems."""
    for name in ("ours", "theirs"):
        rows = [Prediction((f"c {i}",), f"{name} {i}", f"gold {i}", id=f"d{i}#2") for i in range(30)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    return [f"{name}={tmp_path / name}.jsonl" for name in ("ours", "theirs")]


@pytest.fixture
def study(files, tmp_path):
    assert rate.main(["make", *files, "--reference", f"--output={tmp_path / 'study'}", "--rows=20"]) == 0
    return tmp_path / "study"


@pytest.fixture
def refused(capsys):
    """What the command says, which does nothing."""

    def refuse(*words):
        assert rate.main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    return refuse


def test_help_explains_the_flags_of_a_study(capsys):
    with pytest.raises(SystemExit) as ended:
        rate.main(["make", "--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "pairs (two replies side by side) or likert (one reply, 1 to 5); default pairs" in said
    assert "share of items with a known answer; default 0.05" in said


def test_answers_of_page_and_sheet_are_counted_together(study, tmp_path, capsys):
    key = read_json(study / "key.json")
    assert key["systems"] == ["ours", "theirs", "reference"]
    choices = {"ours": 1, "theirs": 0, "reference": 2, "another context's reply": -1}
    said = {}
    for item in key["items"]:
        left, right = (choices[name] for name in item["systems"])
        said[item["number"]] = "1" if left > right else "2"
    answers = {str(n): dict.fromkeys(ASPECTS, v) for n, v in said.items()}
    page = write_page(tmp_path / "answers-ann.json", key["study"], answers)
    with (study / "sheet.csv").open() as file:
        rows = list(csv.DictReader(file))
    with (tmp_path / "bob.CSV").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, **answers[row["number"]]} for row in rows)
    files = [str(study / "key.json"), page, str(tmp_path / "bob.CSV")]
    assert rate.main(["score", *files, f"--output={tmp_path / 'scores.json'}", "--samples=20"]) == 0
    found = read_json(tmp_path / "scores.json")
    assert found["empathy"]["win_rates"]["ours : theirs"] == [1.0, 1.0, 1.0]
    assert found["empathy"]["win_rates"]["ours : reference"] == [0.0, 0.0, 0.0]
    assert found["empathy"]["agreement"]["fleiss_kappa"] == pytest.approx(1.0)
    assert found["raters"]["bob"]["checks_passed"] == 1.0
    assert "win rate" in capsys.readouterr().out
    assert rate.main(["score", *files, "--seed=-1"]) == 2
    assert "--seed = -1 must be at least 0" in capsys.readouterr().err


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(rate, "main", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        rate.command_line()
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_study_is_not_overwritten_by_another(study, files, refused):
    make = ["make", *files, "--reference", f"--output={study}", "--rows=20"]
    before = (study / "key.json").read_text()
    assert "name at most so many with --rows" in refused(*make[:-1], "--rows=31")
    assert "key.json is not a folder" in refused("make", "a=none", "b=none", f"--output={study / 'key.json'}")
    assert f"{study} holds another study" in refused(*make, "--seed=1")
    assert (study / "key.json").read_text() == before
    assert rate.main(make) == 0  # the very same
    assert rate.main([*make[:-2], f"--output={study}-2", "--rows=30"]) == 0
    assert (study / "key.json").read_text() == before


def test_a_sheet_of_another_study_is_refused(study, files, tmp_path, refused):
    assert rate.main(["make", *files, "--reference", f"--output={tmp_path / 'other'}", "--rows=20", "--seed=1"]) == 0
    ids = [read_json(tmp_path / name / "key.json")["study"] for name in ("other", "study")]
    score = ["score", study / "key.json"]
    said = f"sheet.csv is from the study '{ids[0]}', the key from '{ids[1]}'; give the key"
    assert said in refused(*score, tmp_path / "other" / "sheet.csv")
    (tmp_path / "ann.csv").write_text("number;empathy\n1;1\n")
    assert f"ann.csv has no column 'study {ids[1]}'" in refused(*score, tmp_path / "ann.csv")


def test_outputs_that_say_ids_alone_are_completed_from_the_corpus(tmp_path, refused, small_archive):
    files = []
    for name in ("ours", "theirs"):
        rows = [{"id": f"hit:{i}_conv:{2 * i}#2", "response": f"{name} {i}"} for i in range(3)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        files.append(f"{name}={tmp_path / name}.jsonl")
    make = ["make", *files, "--reference", f"--output={tmp_path / 'study'}", "--rows=3"]
    assert "line 1: lacks 'context', 'reference'" in refused(*make)
    assert rate.main([*make, f"--data={small_archive}"]) == 0
    sheet = (tmp_path / "study" / "sheet.csv").read_text()
    assert "I passed exam 1!" in sheet
    assert "That is great." in sheet


def test_what_most_raters_prefer_becomes_pairs_to_learn_from(study, files, tmp_path, refused):
    """Ann always prefers people's own replies, and else ours; Bob and Eve contradict each other."""
    key = read_json(study / "key.json")
    rank, rated = {"ours": 1, "theirs": 0, "reference": 2}, [row for row in key["items"] if row["kind"] == "rated"]
    first = {str(row["number"]): rank[row["systems"][0]] > rank[row["systems"][1]] for row in rated}
    said = {
        "ann": {number: "1" if won else "2" for number, won in first.items()},
        "bob": dict.fromkeys(first, "1"),
        "eve": dict.fromkeys(first, "2"),
    }
    said["ann"][str(rated[0]["number"])] = "tie"  # nobody's majority
    given = [str(study / "key.json")]
    for name, values in said.items():
        answers = {number: {"empathy": v, "relevance": "tie", "fluency": "tie"} for number, v in values.items()}
        given.append(write_page(tmp_path / f"answers-{name}.json", key["study"], answers, name))
    systems = ["--systems", *files]
    out = tmp_path / "pairs.jsonl"
    assert rate.main(["pairs", *given, *systems, f"--output={out}"]) == 0
    pairs = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(pairs) == len(rated) - 1
    text = {"ours": "ours {}", "theirs": "theirs {}", "reference": "gold {}"}
    for row, pair in zip(rated[1:], pairs, strict=True):
        number = row["id"][1:].removesuffix("#2")
        best, worst = sorted(row["systems"], key=lambda name: -rank[name])
        expected = {"chosen": text[best].format(number), "rejected": text[worst].format(number)}
        assert pair == {"context": [f"c {number}"], **expected}
    assert "prefer no reply for fluency" in refused("pairs", *given, *systems, f"--output={out}", "--aspect=fluency")
    assert len(out.read_text().splitlines()) == len(pairs)
    assert "shows the reply of 'theirs' to" in refused("pairs", *given, *systems[:2], f"--output={out}")


def test_a_system_called_reference_keeps_its_own_replies(files, tmp_path, monkeypatch, refused):
    make = ["make", files[0], files[1].replace("theirs=", "reference="), f"--output={tmp_path / 'study'}", "--rows=20"]
    assert "which --reference adds; rename the system" in refused(*make)
    assert "rename the system" in refused(*make, "--reference")
    assert rate.main([make[0], *files, *make[3:]]) == 0
    key = read_json(tmp_path / "study" / "key.json")  # as of a study that was made with such a name
    renamed = json.loads(json.dumps(key).replace('"theirs"', '"reference"'))
    (tmp_path / "key.json").write_text(json.dumps(renamed))
    rated = [row for row in renamed["items"] if row["kind"] == "rated"]
    answers = {str(row["number"]): dict.fromkeys(ASPECTS, "1") for row in rated}
    page = write_page(tmp_path / "a.json", key["study"], answers)
    given = ["pairs", str(tmp_path / "key.json"), page, f"--output={tmp_path / 'pairs.jsonl'}"]
    assert rate.main([*given, "--systems", *make[1:3]]) == 0
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == 20
    for pair in pairs:
        assert {pair[name].split()[0] for name in ("chosen", "rejected")} == {"ours", "theirs"}


def test_empty_rows_of_a_sheet_are_passed_over_and_others_are_named(study, tmp_path, refused):
    lines = (study / "sheet.csv").read_text().splitlines()
    sheet, score = tmp_path / "ann.csv", ["score", study / "key.json", tmp_path / "ann.csv"]
    commas = "," * lines[0].count(",")
    sheet.write_text("\n".join([*lines, commas, " " + commas, ""]))
    assert "no item of the study has an answer to every aspect" in refused(*score)
    sheet.write_text("\n".join([*lines, lines[1]]))
    assert f"ann.csv answers item {lines[1].split(',')[0]} 2 times; keep one" in refused(*score)
    sheet.write_text("\n".join([lines[0].replace("empathy", "Empathy"), *lines[1:]]))
    assert "ann.csv lacks the columns empathy of its study's sheet.csv" in refused(*score)
    sheet.write_text("\n".join([*lines, "x" + commas]))
    assert f"ann.csv, line {len(lines) + 1}: 'x' in the column 'number' must be an item's number" in refused(*score)


def test_what_is_wrong_is_named(study, tmp_path, refused, capsys):
    key, page = study / "key.json", tmp_path / "a.json"
    write_page(page, "other", {})
    assert "is from the study 'other'" in refused("score", key, page)
    for answers, said in (
        ({"1": {}, "01": {}}, "answers item 1 2 times; keep one of the answers"),
        ({"1": {"empathy": "3"}}, "item 1: '3' must be one of 1, 2, tie"),
        ({"999": {}}, "answers item 999, which the study does not have"),
        ({"1": {"empathy": "1"}}, "no item of the study has an answer to every aspect"),
    ):
        write_page(page, read_json(key)["study"], answers)
        assert said in refused("score", key, page)
    assert "are both from the rater 'ann'" in refused("score", key, page, page)
    assert "is not the key of a study" in refused("score", page, page)
    assert "must be NAME=FILE" in refused("make", "a.jsonl", f"--output={tmp_path}")
    assert rate.main(["power", "--win-rate=0.6"]) == 0
    assert "194 ratings" in capsys.readouterr().out
