import csv

import numpy as np
import pytest
from scipy import stats

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.sample import load_annotated_pairs
from empax.evaluation.human_ratings import SOURCES, RatedReply, correlations, find_ratings, load_ratings

COLUMNS = ["dialog_id", "speaker_uttr", *(f"{kind}_{who}" for kind in ("response", "rating") for who in SOURCES)]


def write(path, rows, columns=COLUMNS):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def write_rated(folder):
    """Writes ratings of replies of the built-in sample below `folder`: thirty dialogues with three replies each."""
    replies = [pair.response_post for pair in load_annotated_pairs()[:90]]
    rows = [[f"d{i}", "hi", *replies[3 * i : 3 * i + 3], 1 + i % 3, 1 + i // 3 % 3, 2] for i in range(30)]
    (folder / "human_ratings").mkdir()
    write(folder / "human_ratings" / "empathy_ratings.csv", rows)
    return folder


def made(count=60, seed=0):
    rng = np.random.default_rng(seed)
    ratings = rng.integers(1, 4, size=3 * count)
    replies = [RatedReply(f"d{i // 3}", "hi", "a reply", SOURCES[i % 3], int(r)) for i, r in enumerate(ratings)]
    return replies, ratings, rng


def test_reads_three_replies_a_row(tmp_path):
    path = write(tmp_path / "empathy_ratings.csv", [["d1", "I lost, badly", "a, b", "c", "d", 1, 2, 3]])
    found = load_ratings(find_ratings(tmp_path))
    assert found == [
        RatedReply("d1", "I lost, badly", "a, b", "human", 1),
        RatedReply("d1", "I lost, badly", "c", "chatgpt", 2),
        RatedReply("d1", "I lost, badly", "d", "chatgpt_empathy", 3),
    ]
    assert find_ratings(path) == path
    (tmp_path / "human_ratings").mkdir()
    nested = path.rename(tmp_path / "human_ratings" / path.name)
    assert find_ratings(tmp_path) == nested


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (["d1", "x", "a", "b", "c", 1, 4, 3], "line 3: rating_chatgpt is '4', must be 1, 2 or 3"),
        (["d1", "x", "a", "b", "c", 1, 2], "line 3: rating_chatgpt_empathy is None"),
    ],
)
def test_a_bad_rating_is_named(tmp_path, row, said):
    path = write(tmp_path / "r.csv", [["d0", "x", "a", "b", "c", 1, 2, 3], row])
    with pytest.raises(DataError, match=said):
        load_ratings(path)


def test_what_is_no_file_of_ratings_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no human_ratings/empathy_ratings\.csv; set --data to the"):
        find_ratings(tmp_path)
    with pytest.raises(DataError, match="lacks the columns rating_chatgpt_empathy"):
        load_ratings(write(tmp_path / "r.csv", [], COLUMNS[:-1]))
    with pytest.raises(DataError, match="has a header, but no ratings"):
        load_ratings(write(tmp_path / "r.csv", []))
    (tmp_path / "x.csv").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match="is not a CSV file in UTF-8"):
        load_ratings(tmp_path / "x.csv")


@pytest.mark.oracle
def test_correlations_are_those_of_scipy_and_of_counting_pairs():
    replies, ratings, rng = made()
    scores = np.round(ratings + rng.normal(0, 1.5, size=len(ratings)))
    found = correlations(scores, replies, samples=20)
    assert found["by_row"]["spearman"] == pytest.approx(stats.spearmanr(scores, ratings)[0])
    assert found["by_row"]["kendall"] == pytest.approx(stats.kendalltau(scores, ratings)[0])
    assert found["human_replies"]["kendall"] == pytest.approx(stats.kendalltau(scores[::3], ratings[::3])[0])
    assert (found["by_row"]["rows"], found["human_replies"]["rows"]) == (180, 60)
    signs = [
        np.sign(ratings[i] - ratings[j]) * np.sign(scores[i] - scores[j])
        for d in range(60) for i in range(3 * d, 3 * d + 3) for j in range(i + 1, 3 * d + 3) if ratings[i] != ratings[j]
    ]  # fmt: skip
    assert found["within_dialogue"]["kendall"] == pytest.approx(np.mean(signs))
    assert found["within_dialogue"]["pairs"] == len(signs)
    ranks = [np.concatenate([stats.rankdata(v[i : i + 3]) for i in range(0, 180, 3)]) for v in (scores, ratings)]
    assert found["within_dialogue"]["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_a_perfect_judge_a_wrong_one_and_one_that_knows_nothing():
    replies, ratings, rng = made(200)
    for scores, low, high in (
        (ratings.astype(float), 0.999, 1.001),
        (-ratings.astype(float), -1.001, -0.999),
        (rng.normal(size=600), -0.2, 0.2),
        (np.zeros(600), -1e-9, 1e-9),
    ):
        for part in correlations(scores, replies, samples=30).values():
            assert low <= part["spearman"] <= high
            assert low <= part["kendall"] <= high
            assert part["kendall_low"] <= part["kendall"] + 1e-9 <= part["kendall_high"] + 2e-9


def test_intervals_resample_dialogues():
    """Of the same reply thrice a dialogue, an interval is as wide as of one: rows would make it narrower."""
    _, ratings, rng = made(100)
    scores = ratings + rng.normal(0, 2, size=300)
    once = [RatedReply(f"d{i}", "hi", "a", "human", int(r)) for i, r in enumerate(ratings[:100])]
    thrice = [RatedReply(f"d{i // 3}", "hi", "a", "human", int(r)) for i, r in enumerate(np.repeat(ratings[:100], 3))]
    one = correlations(scores[:100], once, samples=200)["by_row"]
    three = correlations(np.repeat(scores[:100], 3), thrice, samples=200)["by_row"]
    assert (three["spearman_low"], three["spearman_high"]) == pytest.approx(
        (one["spearman_low"], one["spearman_high"]), abs=0.02
    )
    again = correlations(scores[:100], once, samples=200)["by_row"]
    assert again == one
    assert correlations(scores[:100], once, samples=200, seed=1)["by_row"] != one
