"""What exemplars are worth: sums, paired differences, replies, and what is said of them."""

import numpy as np
import pytest

from empax.core.files import DataError
from empax.core.types import Prediction
from empax.evaluation import text
from empax.evaluation.statistics import estimate
from empax.evaluation.swaps import meaning, score_swaps

ROWS = 60
REFERENCES = {
    f"d{i // 2}#{2 * (i % 2) + 2}": Prediction(
        ("so",), "", f"i am sorry to hear that number {i % 7}", id=f"d{i // 2}#{2 * (i % 2) + 2}"
    )
    for i in range(ROWS)
}
SHIFTS = {"own": 0.0, "random": 0.3, "nearest": -0.5, "none": 0.1}
SAID = {
    "own": "i am sorry to hear that",
    "random": "what happened ?",
    "nearest": "i am sorry to hear that number 3 , why ?",
    "none": "oh",
}


def lines(shifts=None, replies=20, said=None):
    """Of every dialogue the likelihood is another; beside others than its own, one shifted by about as much."""
    made = []
    for name, shift in (shifts or SHIFTS).items():
        rng = np.random.default_rng(len(name))
        for i, row in enumerate(REFERENCES):
            parts = {"first": 2.0 + shift + 0.01 * rng.normal(), "rest": 10.0 + 7 * (i % 11), "end": 1.0}
            found = {"nll": sum(parts.values()), "num_tokens": 4 + i % 11}
            found |= {f"nll_{part}": value for part, value in parts.items()}
            if name != "none":
                found["exemplar_f1"] = 20.0 if name == "nearest" else 10.0
            if i < replies:
                found["response"] = f"{(said or SAID)[name]} {i if name == 'own' else ''}".strip()
            made.append({"given": name, "id": row, "exemplars": [], **found})
    return made


def test_likelihoods_add_up_and_differences_are_paired():
    found = score_swaps(lines(), REFERENCES, samples=200)
    assert found["rows"] == ROWS
    rows = [row for row in lines() if row["given"] == "own"]
    own = found["given"]["own"]
    assert own["nll"]["value"] == pytest.approx(np.mean([row["nll"] for row in rows]))
    per_token = sum(row["nll"] for row in rows) / sum(row["num_tokens"] for row in rows)
    assert own["nll_per_token"]["value"] == pytest.approx(per_token)
    assert own["exemplar_f1"]["value"] == pytest.approx(10.0)
    assert "minus_own" not in own
    assert "exemplar_f1" not in found["given"]["none"]
    for cells in found["given"].values():
        assert sum(cells[f"nll_{part}"]["value"] for part in ("first", "rest", "end")) == pytest.approx(
            cells["nll"]["value"]
        )
    for name, shift in SHIFTS.items():
        cells = found["given"][name]
        for other in {"own", "none"} - {name}:
            difference = cells[f"minus_{other}"]["nll"]
            expected = cells["nll"]["value"] - found["given"][other]["nll"]["value"]
            assert difference["value"] == pytest.approx(expected)
            assert difference["value"] == pytest.approx(shift - SHIFTS[other], abs=0.01)
            assert difference["low"] <= difference["value"] <= difference["high"]
            # Rows differ far more than what they are shown does.
            assert difference["high"] - difference["low"] < 0.05 < cells["nll"]["high"] - cells["nll"]["low"]
            assert cells[f"minus_{other}"]["nll_rest"]["value"] == pytest.approx(0.0, abs=1e-9)


def test_replies_are_scored_on_the_rows_that_all_answer_and_distinct_at_equal_counts():
    found = score_swaps(lines(), REFERENCES, samples=50)["replies"]
    assert found["rows"] == 20
    references = [row.reference for row in REFERENCES.values()][:20]
    said = {name: [row["response"] for row in lines() if row["given"] == name and "response" in row] for name in SHIFTS}
    counts = {name: text.distinct_statistic(replies, 2).num_items for name, replies in said.items()}
    assert found["bigrams"] == min(counts.values()) == 0  # "oh" has none
    for name, replies in said.items():
        cells = found["given"][name]
        precision = text.precision_statistic(text.count_matches(replies, references, "nltk"), 2)
        assert cells["bleu_2_precision"]["value"] == pytest.approx(estimate(precision))
        assert cells["questions"]["value"] == (100.0 if "?" in SAID[name] else 0.0)
        assert cells["words"]["value"] == np.mean([len(reply.split()) for reply in replies])
    difference = found["given"]["random"]["minus_own"]["words"]
    assert difference["value"] == -4.0
    assert "minus_none" not in found["given"]["random"]
    longer = {**SAID, "none": "oh no"}
    equal = score_swaps(lines(said=longer), REFERENCES, samples=50)["replies"]
    assert equal["bigrams"] == 20
    assert equal["given"]["none"]["distinct_2"]["value"] == pytest.approx(5.0)
    assert equal["given"]["own"]["distinct_2"]["value"] > 20.0


def test_without_replies_or_rows_there_is_no_such_table():
    assert score_swaps(lines(replies=0), REFERENCES, samples=10)["replies"] == {}
    assert score_swaps([], REFERENCES) == {"rows": 0, "given": {}, "replies": {}}


def test_rows_of_another_evaluation_are_refused():
    with pytest.raises(DataError, match="'own' are over other rows"):
        score_swaps([row for row in lines() if row["id"] != "d3#2" or row["given"] == "own"], {})
    some = [row for row in lines() if row["id"] != "d3#2" or row["given"] != "none"]
    with pytest.raises(DataError, match="'none' are over other rows than the rest"):
        score_swaps(some, REFERENCES)


@pytest.mark.parametrize(
    ("shifts", "words"),
    [
        ({}, ["finds make the reference likelier than random ones do (-0.3",
              "they make the reference likelier than none", "nobody knows, would save more (-0.5"]),
        ({"own": 0.5}, ["less likely than random", "less likely than none", "would save more"]),
        ({"random": 0.0, "none": 0.0}, ["no likelier than random ones do", "no likelier than none do"]),
        ({"nearest": 0.0}, ["would save nothing more"]),
        ({"nearest": 0.4}, ["cost likelihood"]),
    ],
)  # fmt: skip
def test_the_sentence_says_what_the_intervals_say(shifts, words):
    found = score_swaps(lines({**SHIFTS, **shifts}), REFERENCES, samples=200)
    for some in words:
        assert some in meaning(found)


def test_no_sentence_without_what_it_is_about():
    few = {name: SHIFTS[name] for name in ("own", "none")}
    assert meaning(score_swaps(lines(few), REFERENCES, samples=10)) == ""
