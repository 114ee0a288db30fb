"""What people answer passes every check; sets that no system should make do not; each limit is where it says."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import binomtest

from empax.core.types import EMOTIONS, Prediction
from empax.data.dialogues import to_instances
from empax.data.sample import load_dialogues
from empax.evaluation import reply_checks
from empax.evaluation.controls import make_controls
from empax.evaluation.verdict import verdict

TONES = ("glad about negative emotions", "sorry about positive emotions")


def of_people(dialogues):
    """People's replies, each a reference too: all that is checked of them but whether they are copies."""
    return [
        Prediction(one.context, one.response, one.response, id=one.id, emotion=one.emotion)
        for one in to_instances(dialogues)
    ]


@pytest.fixture(scope="module")
def people():
    return of_people(load_dialogues()["test"])


def paraphrased(rows):
    """The same in other words, so that they are no copies of references."""
    return [dataclasses.replace(row, response=f"well , {row.response.replace(' you ', ' a friend ')}") for row in rows]


def failed(rows):
    return {check["name"] for check in verdict(rows)["checks"] if not check["ok"]}


def answered(rows, *responses):
    return [dataclasses.replace(row, response=responses[i % len(responses)]) for i, row in enumerate(rows)]


def test_people_pass_but_for_being_the_reference(people):
    names = {check["name"] for check in verdict(people)["checks"]}
    assert {"openings", *TONES, "own replies, shuffled", "copies of references"} <= names
    assert failed(people) == {"copies of references"}
    assert verdict(people)["line"] == "Degenerate: 62 of 62 replies are copies of references."


def test_empty_replies_have_no_tone(people):
    silent = [dataclasses.replace(row, response=" ") for row in people]
    assert reply_checks.contradictions([*people, *silent]) == reply_checks.contradictions(people)


def test_words_are_the_same_however_a_tokenizer_sets_them_apart():
    assert reply_checks.words("I'm SO glad—you’ve won!") == ["i'm", "so", "glad", "you've", "won"]
    assert reply_checks.words("i 'm so glad you 've won !") == ["i'm", "so", "glad", "you've", "won"]
    assert reply_checks.words("Je suis désolé : 3") == ["je", "suis", "désolé", "3"]


@pytest.mark.parametrize("count", [2, 3, 7, 8, 62])
def test_one_canned_reply_never_passes(people, count):
    assert "equal replies" in failed(
        answered(people[:count], "I am so sorry to hear that.", "i am so sorry to hear that")
    )


@pytest.mark.parametrize("count", [2, 3, 8, 62])
def test_a_copy_of_the_references_never_passes(people, count):
    rows = people[:count]
    nearly = [dataclasses.replace(row, response=f"{row.reference.lower().rstrip('.?!')} .") for row in rows]
    for copied in (rows, nearly):
        assert "copies of references" in failed(copied)
    repeated = [dataclasses.replace(row, response=row.context[-1].upper()) for row in rows]
    assert "copies of turns of contexts" in failed(repeated)


@pytest.mark.parametrize(
    ("name", "of"), [("copies of references", "reference"), ("copies of turns of contexts", "turn")]
)
def test_a_tenth_may_be_copies(people, name, of):
    def copied(count):
        texts = [row.reference if of == "reference" else row.context[0] for row in people]
        rows = [f"{i} and other words than those of anybody" for i in range(len(people))]
        return [
            dataclasses.replace(row, response=text if i < count else other)
            for i, (row, text, other) in enumerate(zip(people, texts, rows, strict=True))
        ]

    assert name not in failed(copied(6))
    assert name in failed(copied(7))
    assert name not in failed(copied(1)[:1])  # one row says nothing


@pytest.mark.oracle
@pytest.mark.parametrize(("hits", "total"), [(0, 10), (3, 40), (52, 84), (10, 10)])
def test_the_lower_end_of_a_share_is_wilsons_and_of_the_misses_the_upper_one(hits, total):
    expected = binomtest(hits, total).proportion_ci(method="wilson")
    found = reply_checks.wilson_low(hits, total), 1 - reply_checks.wilson_low(total - hits, total)
    assert found == pytest.approx((expected.low, expected.high), abs=1e-6)


def beginning(people, count, opening="I'm so glad you've"):
    rows = paraphrased(people[:62])
    return [
        dataclasses.replace(row, response=f"{opening if i < count else f'{i} a {i}'} {row.response}")
        for i, row in enumerate(rows)
    ]


def test_openings_are_alike_from_a_quarter_on_beyond_doubt(people):
    last = max(k for k in range(63) if binomtest(k, 62).proportion_ci(method="wilson").low <= 0.25)
    assert 15 < last < 29
    assert "openings" not in failed(beginning(people, last))
    found = verdict(beginning(people, last + 1))
    assert f"{last + 1} of 62 replies begin with “i'm so glad”" in found["line"]


def test_replies_may_begin_as_references_do(people):
    rows = [
        dataclasses.replace(row, reference=f"Thank you for calling. {row.reference}")
        for row in beginning(people, 62, "Thank you for calling.")
    ]
    assert "openings" not in failed(rows)
    few = [dataclasses.replace(row, reference=p.reference) for row, p in zip(rows, people, strict=False)]
    assert "openings" in failed(few)


def toned(emotion, count, total, wrong, right):
    return [
        Prediction((f"turn {i}",), f"{wrong if i < count else right} {i}", f"some words {i}", emotion=emotion)
        for i in range(total)
    ]


@pytest.mark.parametrize(
    ("emotion", "name", "wrong", "right"),
    [("sad", TONES[0], "That's great", "That's not great"), ("proud", TONES[1], "I'm so sorry", "I'm so glad")],
)
def test_a_third_of_the_replies_may_be_of_the_other_tone(emotion, name, wrong, right):
    last = max(k for k in range(27) if binomtest(k, 26).proportion_ci(method="wilson").low <= 0.35)
    assert name not in failed(toned(emotion, last, 26, wrong, right))
    assert name in failed(toned(emotion, last + 1, 26, wrong, right))
    assert name in failed(toned(emotion, 8, 8, wrong, right))
    assert name not in failed(toned(emotion, 7, 7, wrong, right))  # too few rows


@pytest.mark.parametrize(
    ("text", "glad", "sorry"),
    [
        ("I'm so glad you've told me", True, False),
        ("It is a good thing you kept it", True, False),
        ("That ' s really great !", False, False),
        ("that 's really great !", True, False),
        ("That’s awesome, congratulations!", True, False),
        ("That is not great", False, False),
        ("I wouldn't be happy for him", False, False),
        ("it isn't that great", False, False),
        ("Oh no, I am sorry", False, True),
        ("That must have been so tough", False, True),
        ("What happened then?", False, False),
    ],
)
def test_what_is_glad_and_what_is_sorry(text, glad, sorry):
    found = {
        name: name in failed(toned(emotion, 26, 26, text, ""))
        for name, emotion in zip(TONES, ("sad", "proud"), strict=True)
    }
    assert found == {TONES[0]: glad, TONES[1]: sorry}


def test_every_emotion_has_at_most_one_tone():
    assert set(EMOTIONS) >= reply_checks.NEGATIVE | reply_checks.POSITIVE
    assert not reply_checks.NEGATIVE & reply_checks.POSITIVE


def test_own_replies_must_fit_better_than_shuffled(people):
    assert "own replies, shuffled" not in failed(paraphrased(people))
    other = make_controls(paraphrased(people), seed=3)[0]["shuffled"].rows
    (check,) = reply_checks.shuffled(other)
    assert not check.ok
    assert check.found.endswith(": no better than shuffled replies")


def test_shuffles_move_every_reply_to_another_dialogue():
    groups = np.repeat(np.arange(9), [1, 2, 1, 3, 1, 1, 2, 4, 2])
    moves = list(reply_checks._moves(groups))
    assert len(moves) == 99
    for moved in moves:
        assert sorted(moved) == list(range(len(groups)))
        assert not np.any(groups[moved] == groups)
    assert len({tuple(moved) for moved in moves}) > 90


def fitting(count, num_dialogues):
    """Replies of which `count` name what their context names, and the others what another context names."""
    return [
        Prediction(
            (f"thing{i} broke",),
            f"what of thing{i if i < count else (i + 1) % num_dialogues} then",
            f"oh {i}",
            id=f"d{i}#2",
        )
        for i in range(num_dialogues)
    ]


@pytest.mark.parametrize(("num_dialogues", "passes"), [(23, True), (24, False)])
def test_of_few_dialogues_chance_is_allowed_for(num_dialogues, passes):
    # Two replies fit. Of a shuffle one does, by chance: in a quarter of the shuffles two or more.
    (check,) = reply_checks.shuffled(fitting(2, num_dialogues))
    assert check.ok == passes
    assert not reply_checks.shuffled(fitting(0, num_dialogues))[0].ok
    assert reply_checks.shuffled(fitting(8, num_dialogues))[0].ok


def test_dialogues_without_ids_are_told_by_their_first_turns(people):
    without = reply_checks._dialogues([dataclasses.replace(row, id="") for row in people])
    told = reply_checks._dialogues(people)
    assert len(set(told)) == 32
    assert np.array_equal(without[:, None] == without, told[:, None] == told)
    assert not reply_checks.shuffled([dataclasses.replace(row, context=("one",), id="") for row in people])


def test_texts_without_a_common_word_are_not_judged():
    rows = [Prediction((f"甲{i}",), f"乙{i}", f"丙{i}") for i in range(30)]
    assert reply_checks.shuffled(rows) == []
    assert reply_checks.shuffled([Prediction((), "", "")] * 30) == []


def test_few_rows_are_not_shuffled(people):
    assert [len(reply_checks.shuffled(people[:n])) for n in (1, 3, 7, 8)] == [0, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.real_data
def test_people_of_empathetic_dialogues_pass(real_data):
    from empax.data.empathetic_dialogues import find_archive, read_dialogues

    dialogues = list(read_dialogues(find_archive(str(real_data)), "test"))
    assert failed(of_people(dialogues)) == {"copies of references"}
    rng = np.random.default_rng(0)
    for size in (8, 16, 32, 100):
        for _ in range(25):
            drawn = of_people([dialogues[i] for i in rng.choice(len(dialogues), size=size, replace=False)])
            assert failed(drawn) == {"copies of references"}
