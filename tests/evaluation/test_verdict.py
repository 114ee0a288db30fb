import dataclasses

import pytest
from scipy.stats import binomtest

from empax.core.types import EMOTIONS, LEVELS, MECHANISMS, Prediction
from empax.evaluation.verdict import verdict


def healthy(count=32):
    return [
        Prediction(
            context=(f"turn {i}",), response=f"that is {i} kinds of good", reference=f"i am so glad {i} times",
            emotion=EMOTIONS[i % 32], emotion_prediction=EMOTIONS[i % 32],
            attributes={"sentiment": LEVELS[i % 3]},
            exemplars=({"response": f"exemplar {i}"},),
            notes={
                "intent": "questioning" if i % 2 else "wishing",
                "intent_prediction": "questioning" if i % 2 else "wishing",
                "response_attributes": dict.fromkeys(MECHANISMS, LEVELS[i % 2]),
                "reference_attributes": dict.fromkeys(MECHANISMS, LEVELS[i % 3]),
                "nll": 10.0, "nll_of_other_exemplars": 11.0, "num_tokens": 5,
            },
        )
        for i in range(count)
    ]  # fmt: skip


def changed(**fields):
    return [dataclasses.replace(row, **fields) for row in healthy()]


def noted(**notes):
    return [dataclasses.replace(row, notes={**row.notes, **notes}) for row in healthy()]


def failed(found):
    return [check["name"] for check in found["checks"] if not check["ok"]]


def test_a_sound_run_passes_every_check_and_says_how_many():
    found = verdict(healthy(), retrieves=True)
    assert (found["degenerate"], failed(found)) == (False, [])
    assert found["line"] == f"No degeneracy found in {len(found['checks'])} checks."
    assert len({check["name"] for check in found["checks"]}) == len(found["checks"]) >= 16


@pytest.mark.parametrize(
    ("rows", "name", "said"),
    [
        (changed(response=" "), "empty replies", "32 of 32 replies are empty"),
        (changed(reference=""), "empty references", "32 of 32 references are empty"),
        (changed(response="Oh no."), "equal replies", "32 of 32 replies are one and the same"),
        (changed(response="Oh no."), "distinct replies", "1 of 32 replies are distinct"),
        (changed(response="yes"), "length", "replies are 0.17 times as long as the references"),
        (changed(response="so " * 20), "length", "replies are 3.33 times"),
        (changed(emotion_prediction="sad"), "one class: emotion predictions", "all 32 emotion predictions are 'sad'"),
        (changed(emotion_prediction="sad"), "chance: emotion head", "accuracy of the emotion head is 3.1%"),
        (noted(intent_prediction="wishing"), "chance: intent head", "50.0%, of the most frequent label 50.0%: at"),
        ([dataclasses.replace(row, attributes={"sentiment": "low"}) for row in healthy(400)],
         "one class: sentiment levels of contexts", "all 400 sentiment levels of contexts are 'low'"),
        (noted(response_attributes=dict.fromkeys(MECHANISMS, "low")), "one class: exploration levels of replies",
         "all 32 exploration levels of replies are 'low'"),
        (changed(exemplars=()), "exemplars", "32 of 32 rows have no exemplar"),
        (changed(exemplars=({"response": "x"},)), "exemplars differ", "32 of 32 rows have the same exemplars"),
        ([dataclasses.replace(row, exemplars=({"response": row.response},)) for row in healthy()],
         "copies of exemplars", "32 of 32 replies are copies"),
        (noted(nll_of_other_exemplars=10.0), "nats from exemplars",
         "by 0.0000 nats a token, compared with those of another context: retrieval is unused"),
    ],
)  # fmt: skip
def test_each_degeneracy_is_found_and_named_on_top(rows, name, said):
    found = verdict(rows, retrieves=True)
    assert found["degenerate"]
    assert name in failed(found)
    assert found["line"].startswith("Degenerate: ")
    assert said in found["line"]


def test_without_retrieval_exemplars_are_not_missed():
    rows = changed(exemplars=())
    assert not verdict(rows)["degenerate"]
    assert verdict(rows, retrieves=True)["degenerate"]
    assert [c["name"] for c in verdict(healthy())["checks"] if "exemplars" in c["name"]]


def test_too_few_rows_are_not_judged_by_their_spread():
    found = verdict([Prediction(("hi",), "hello", "hey")])
    assert [check["name"] for check in found["checks"]] == [
        "empty replies", "empty references", "length", "copies of references", "copies of turns of contexts",
    ]  # fmt: skip
    assert found["line"] == "No degeneracy found in 5 checks. 1 row is too few for the others."


def test_one_class_is_no_fault_where_the_labels_have_one_too():
    assert not verdict(changed(emotion="sad", emotion_prediction="sad"))["degenerate"]


@pytest.mark.parametrize(("usual", "judged"), [(22, "sound"), (21, "degenerate")])
def test_one_class_is_a_fault_beyond_doubt(usual, judged):
    """Eight equal labels are at least 0.676 of all, by Wilson's interval: 22 of 32 true ones are more, 21 are less."""
    gold = ["low"] * usual + ["high"] * (32 - usual)
    rows = [
        dataclasses.replace(
            row,
            attributes={"exploration": "low"},  # as of 95% of contexts
            notes={
                **row.notes,
                "reference_attributes": {"exploration": level},
                "response_attributes": {"exploration": "low"} if i < 8 else {},
            },
        )
        for i, (row, level) in enumerate(zip(healthy(), gold, strict=True))
    ]
    assert failed(verdict(rows)) == ["one class: exploration levels of replies"] * (judged == "degenerate")


def first(count, rows, **fields):
    """`rows`, the first `count` of them changed."""
    return [dataclasses.replace(row, **fields) if i < count else row for i, row in enumerate(rows)]


def copies(count, rows):
    return [
        dataclasses.replace(row, exemplars=({"response": row.response if i < count else "x"}, {"text": str(i)}))
        for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("make", "last", "name"),
    [
        (lambda n: first(n, healthy(100), response=""), 5, "empty replies"),
        (lambda n: first(n, healthy(100), reference=" "), 5, "empty references"),
        (lambda n: first(n, healthy(100), response="I am sorry."), 25, "equal replies"),
        (lambda n: first(n, healthy(100), exemplars=()), 5, "exemplars"),
        (lambda n: first(n, healthy(100), exemplars=({"response": "x"},)), 25, "exemplars differ"),
        (lambda n: copies(n, healthy(100)), 50, "copies of exemplars"),
        (lambda n: first(32, healthy(), response="so " * n), 12, "length"),  # references have six words
        (lambda n: first(32, healthy(), response="so " * (6 - n)), 3, "length"),
        (lambda n: [dataclasses.replace(r, response=f"w{i % (20 - n)}") for i, r in enumerate(healthy(100))], 10,
         "distinct replies"),
    ],
)  # fmt: skip
def test_each_limit_is_the_last_that_passes(make, last, name):
    assert name not in failed(verdict(make(last)))
    assert name in failed(verdict(make(last + 1)))


def test_eight_rows_are_enough_to_judge_their_spread():
    few, enough = (verdict(changed(response="Oh no.")[:count]) for count in (7, 8))
    assert {check["name"] for check in enough["checks"]} - {check["name"] for check in few["checks"]} >= {
        "distinct replies", "chance: emotion head", "one class: emotion predictions",
        "nats from exemplars", "copies of exemplars",
    }  # fmt: skip


@pytest.mark.parametrize(("hits", "above"), [(40, True), (39, False)])
def test_above_chance_is_by_wilsons_interval(hits, above):
    """Half of 64 rows are of one label: the interval of 40 hits begins above one half, that of 39 does not."""
    low = binomtest(hits, 64).proportion_ci(method="wilson").low
    assert (low > 0.5) == above
    rows = healthy(64)
    for i, row in enumerate(rows):
        gold = "wishing" if i % 2 else "questioning"
        guess = gold if i < hits else "agreeing"
        rows[i] = dataclasses.replace(row, notes={**row.notes, "intent": gold, "intent_prediction": guess})
    assert ("chance: intent head" in failed(verdict(rows))) != above


@pytest.mark.slow
@pytest.mark.real_data
def test_what_released_systems_are_called(real_data):
    from empax.evaluation.rows import read_predictions

    alike = {"transformer": "i am sorry", "kemp": "i am sure", "mime_greedy": "that is a"}
    for name in (*alike, "t5_small_finetuned", "moel", "multi_trs"):
        rows, _ = read_predictions(real_data / "peer_outputs" / f"{name}.jsonl")
        line = verdict(rows)["line"]
        if name in alike:
            assert line.startswith("Degenerate: ")
            assert line.endswith(f" replies begin with “{alike[name]}”."), line
        else:
            assert line.startswith("No degeneracy"), line
