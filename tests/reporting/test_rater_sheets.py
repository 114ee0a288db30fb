"""Pairs for raters: the same contexts, sides drawn by the seed, and a key that tells them apart."""

import csv

import pytest

from empax.core.config import ConfigError
from empax.core.files import read_json, write_jsonl
from empax.core.types import Prediction
from empax.reporting import rater_sheets


def system(name, num=40):
    return [Prediction((f"one {i}", "oh", f"two {i}"), f"{name} {i}", "yes", id=f"d{i}#4") for i in range(num)]


def test_the_key_tells_whose_each_side_is_and_the_sheet_does_not(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", system("ours"))
    write_jsonl(tmp_path / "b.jsonl", system("theirs")[::-1])
    given = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), f"--output={tmp_path / 'out'}", "--rows=30"]
    assert rater_sheets.main(given) == 0
    text = (tmp_path / "out" / "pairs.csv").read_text(encoding="utf-8")
    assert "jsonl" not in text
    rows, key = list(csv.DictReader(text.splitlines(keepends=True))), read_json(tmp_path / "out" / "key.json")
    assert key["systems"] == given[:2]
    assert len(rows) == len(key["pairs"]) == 30
    assert len({pair["id"] for pair in key["pairs"]}) == 30
    for row, pair in zip(rows, key["pairs"], strict=True):
        number = pair["id"][1:].split("#")[0]
        names = ["ours", "theirs"] if pair["side_1"] == 0 else ["theirs", "ours"]
        assert [row["reply_1"], row["reply_2"]] == [f"{name} {number}" for name in names]
        assert row["context"] == f"S: one {number}\nL: oh\nS: two {number}"
        assert (row["number"], row["empathy"], row["relevance"], row["fluency"]) == (str(pair["number"]), "", "", "")
    assert {pair["side_1"] for pair in key["pairs"]} == {0, 1}


def test_the_seed_draws_contexts_and_sides():
    a, b = system("ours"), system("theirs")
    one, again, other = (rater_sheets.sheets(a, b, rows=20, seed=seed)[1] for seed in (0, 0, 1))
    assert one == again != other


def test_more_rows_than_there_are(tmp_path, capsys):
    with pytest.raises(ConfigError, match="rows = 9, but the two systems answer 3 contexts; set it from 1 to as many"):
        rater_sheets.sheets(system("a", 3), system("b", 3), rows=9, seed=0)
    rater_sheets.sheets(system("a", 3), system("b", 3), rows=3, seed=0)
    write_jsonl(tmp_path / "a.jsonl", system("a", 3))
    assert rater_sheets.main([str(tmp_path / "a.jsonl")] * 2 + [f"--output={tmp_path}"]) == 2
    assert "rows = 100" in capsys.readouterr().err
