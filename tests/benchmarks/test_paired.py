"""Ratios, turns, and the line of JSON."""

import importlib
import json
import os

import numpy as np
import pytest

import benchmarks
from benchmarks.paired import DisagreementError, Row, arguments, in_turns, report, timed


def test_a_ratio_above_one_says_that_we_are_ahead():
    seconds = Row([2.0, 1.0, 9.0], [4.0, 6.0, 5.0], "seconds").summary()
    assert (seconds["ours"], seconds["theirs"], seconds["ratio"]) == (2.0, 5.0, 2.5)
    assert (seconds["lowest_ratio"], seconds["highest_ratio"]) == (0.5556, 6.0)
    rate = Row([6.0], [4.0], "texts/s", more_is_better=True, facts={"parts": 1}).summary()
    assert (rate["ratio"], rate["rounds"], rate["parts"]) == (1.5, 1, 1)


def test_who_begins_changes_every_round():
    calls = []

    def call(name):
        return lambda number: calls.append((name, number)) or f"{name}{number}"

    pairs = in_turns(call("ours"), call("theirs"), 3)
    assert pairs == [("ours0", "theirs0"), ("ours1", "theirs1"), ("ours2", "theirs2")]
    assert calls == [("ours", 0), ("theirs", 0), ("theirs", 1), ("ours", 1), ("ours", 2), ("theirs", 2)]


def test_the_first_call_of_each_side_does_not_count():
    calls = []
    ours, theirs = timed(lambda: calls.append("ours"), lambda: calls.append("theirs"), 1)
    assert calls == ["ours", "theirs", "ours", "theirs"]
    assert len(ours) == len(theirs) == 1


def test_the_headline_is_the_row_where_we_are_worst(capsys):
    rows = {"a": Row([1.0], [3.0], "seconds"), "b": Row([1.0], [0.5], "MB"), "c": Row([9.0], [1.0], "/s", True)}
    result = report("some", rows, ("the same work",), extra=1)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert {key: result[key] for key in ("benchmark", "row", "ours", "theirs", "unit", "ratio", "work", "extra")} == {
        "benchmark": "some", "row": "b", "ours": 1.0, "theirs": 0.5, "unit": "MB", "ratio": 0.5,
        "work": ["the same work"], "extra": 1,
    }  # fmt: skip
    assert result["rows"]["c"]["ratio"] == 9.0


def test_every_round_is_told_as_it_ends(capsys):
    in_turns(lambda number: number, lambda number: number, 2)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["round 1 of 2", "round 2 of 2"]


def test_thorough_measures_more_and_what_is_said_behind_it_counts():
    parser = arguments("", (), rounds=3, batches=6)
    parser.add_argument("--batches", type=int, default=2)
    default, thorough = parser.parse_args([]), parser.parse_args(["--thorough", "--rounds=4"])
    assert (default.rounds, default.batches) == (3, 2)
    assert (thorough.rounds, thorough.batches) == (4, 6)


def test_only_benchmarks_without_a_device_are_bound_to_the_cpu(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    importlib.reload(benchmarks)
    arguments("", (), rounds=3, devices=True)
    assert "JAX_PLATFORMS" not in os.environ
    arguments("", (), rounds=3)
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.oracle
def test_what_disagrees_is_not_compared():
    from benchmarks.sides import check_agreement

    expected = np.ones((3, 4), np.float32)
    assert check_agreement("it", expected, expected, tolerance=1e-4) == 0.0
    for wrong in (1.001 * expected, np.where(np.eye(3, 4), np.nan, expected)):
        with pytest.raises(DisagreementError, match="it: relative error"):
            check_agreement("it", wrong, expected, tolerance=1e-4)
