"""EPITOME: the join of three files, and splits that keep seekers together."""

import csv

import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.types import LEVELS, MECHANISMS
from empax.data.epitome import FILES, EpitomePair, load_epitome, split_by_seeker

ROWS = [
    ("s1", "r1", 'I said "no", twice\nand left', "Why?"),
    ("s1", "r2", 'I said "no", twice\nand left', "I see."),
    ("s2", "r3", "Help", "Hm"),
    ("s2", "r3", "Help", "Hm"),  # annotated twice
]


def write(folder, levels, rows=ROWS):
    for (mechanism, name), column in zip(FILES.items(), levels, strict=True):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["sp_id", "rp_id", "seeker_post", "response_post", "level", "rationales"])
            # The files differ in blanks.
            writer.writerows(
                [s, r, post.replace(" ", "  ") if mechanism != "emotional_reaction" else post, response, level, ""]
                for (s, r, post, response), level in zip(rows, column, strict=True)
            )


def test_three_files_become_one(tmp_path):
    write(tmp_path, ["0120", "2101", "1022"])
    pairs = load_epitome(tmp_path)
    assert [tuple(pair.levels[m] for m in MECHANISMS) for pair in pairs] == [
        ("low", "high", "mid"),
        ("mid", "mid", "low"),
        ("high", "low", "high"),
        ("low", "mid", "high"),
    ]
    assert pairs[0].seeker_post == 'I said "no", twice\nand left'
    assert (pairs[1].seeker_id, pairs[1].response_id, pairs[1].response_post) == ("s1", "r2", "I see.")


def test_bad_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"emotional-reactions-reddit.csv does not exist"):
        load_epitome(tmp_path)
    write(tmp_path, ["0120", "2131", "1022"])
    with pytest.raises(DataError, match=r"interpretations-reddit.csv, line .*: level is '3', must be 0, 1 or 2"):
        load_epitome(tmp_path)
    write(tmp_path, ["0120", "2101", "1022"])
    (tmp_path / FILES["exploration"]).write_text("sp_id,level\n", encoding="utf-8")
    with pytest.raises(DataError, match="the columns are"):
        load_epitome(tmp_path)
    lines = (tmp_path / FILES["interpretation"]).read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / FILES["exploration"]).write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(DataError, match=r"do not hold the same pairs: sp_id s2, rp_id r3"):
        load_epitome(tmp_path)


def corpus(num_pairs=600):
    """Uneven levels, some seekers with several responses, and one post under two ids."""
    pairs = []
    for i in range(num_pairs):
        seeker = i - i % 3 if i % 7 == 0 else i
        levels = {
            "emotional_reaction": LEVELS[(i % 20 > 12) + (i % 20 == 19)],
            "interpretation": LEVELS[2 * (i % 9 > 4)],
            "exploration": LEVELS[(i % 25 == 3) + 2 * (i % 25 in (4, 5, 6))],
        }
        text = "Same  post" if i in (17, 401) else f"post {seeker}"
        pairs.append(EpitomePair(f"s{seeker}" if i not in (17, 401) else f"s{i}", f"r{i}", text, "Hm", levels))
    return pairs


def shares(pairs, mechanism):
    return [sum(pair.levels[mechanism] == level for pair in pairs) / len(pairs) for level in LEVELS]


def assert_split(pairs, train, holdout):
    assert not {p.seeker_post for p in train} & {p.seeker_post for p in holdout}
    assert abs(len(holdout) / len(pairs) - 0.2) < 0.01
    for name in MECHANISMS:
        for whole, part in zip(shares(pairs, name), shares(holdout, name), strict=True):
            assert abs(whole - part) < 0.02


@pytest.mark.parametrize("seed", [0, 1])
def test_split_keeps_seekers_together_and_shares_equal(seed):
    pairs = corpus()
    train, holdout = split_by_seeker(pairs, holdout=0.2, seed=seed)
    assert sorted(p.response_id for p in train + holdout) == sorted(p.response_id for p in pairs)
    assert not {p.seeker_id for p in train} & {p.seeker_id for p in holdout}
    assert_split(pairs, train, holdout)
    assert (train, holdout) == split_by_seeker(pairs, holdout=0.2, seed=seed)
    assert holdout != split_by_seeker(pairs, holdout=0.2, seed=seed + 1)[1]


def test_one_post_under_two_ids_stays_together():
    for seed in range(5):
        sides = [{p.seeker_id for p in side} for side in split_by_seeker(corpus(), seed=seed)]
        assert any({"s17", "s401"} <= side for side in sides)


@pytest.mark.parametrize("holdout", [0.0, 1.0])
def test_a_share_of_nothing_or_all_is_refused(holdout):
    with pytest.raises(ConfigError, match=f"holdout = {holdout} must lie between 0 and 1, both excluded"):
        split_by_seeker(corpus(10), holdout=holdout)


@pytest.mark.real_data
def test_real_levels(real_data):
    pairs = load_epitome(real_data / "empathy_mental_health")
    assert len(pairs) == 3084
    counts = {m: tuple(sum(p.levels[m] == level for p in pairs) for level in LEVELS) for m in MECHANISMS}
    assert counts == {
        "emotional_reaction": (2037, 895, 152),
        "interpretation": (1626, 114, 1344),
        "exploration": (2604, 104, 376),
    }
    assert_split(pairs, *split_by_seeker(pairs, holdout=0.2, seed=0))
