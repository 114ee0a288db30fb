import dataclasses

import numpy as np
import pytest
from sklearn import metrics

from empax.core.types import LEVELS, MECHANISMS, Instance, Prediction
from empax.evaluation import controls, scoring, text
from tests.evaluation.values import bleu

TRAINING = [Instance(f"t{i}#2", ("a",), f"training reply {i}", "sad" if i % 2 else "proud") for i in range(40)]


def rows(count=12, **changes):
    made = [
        Prediction(
            context=(f"context {i}",), response=f"reply {i}", reference=f"the gold reply number {i}", id=f"d{i}#2",
            emotion="sad",
            exemplars=({"response": "nothing alike"}, {"response": f"gold reply number {i}"}, {"text": "no reply"}),
        )
        for i in range(count)
    ]  # fmt: skip
    return [dataclasses.replace(row, **changes) for row in made]


def test_each_control_says_what_it_promises():
    found, absent = controls.make_controls(rows(), TRAINING, seed=3)
    assert absent == {}
    said = {name: [row.response for row in control.rows] for name, control in found.items()}
    assert said["canned"] == [controls.CANNED] * 12
    assert sorted(said["shuffled"]) == sorted(f"reply {i}" for i in range(12))
    assert all(reply != row.response for reply, row in zip(said["shuffled"], rows(), strict=True))
    assert set(said["random_training"]) <= {instance.response for instance in TRAINING}
    assert len(set(said["random_training"])) > 5
    assert set(said["same_emotion"]) <= {instance.response for instance in TRAINING if instance.emotion == "sad"}
    assert len(set(said["same_emotion"])) > 3
    assert said["first_exemplar"] == ["nothing alike"] * 12
    assert said["oracle_exemplar"] == [f"gold reply number {i}" for i in range(12)]
    assert "up to 2 exemplars" in found["oracle_exemplar"].about
    assert all(row.reference == f"the gold reply number {i}" for i, row in enumerate(found["canned"].rows))


def test_the_seed_decides_the_random_ones():
    first, again, other = (controls.make_controls(rows(), TRAINING, seed=seed)[0] for seed in (0, 0, 1))
    assert first == again
    for name in ("shuffled", "random_training", "same_emotion"):
        assert first[name] != other[name]
    assert first["canned"] == other["canned"]


def test_what_cannot_be_made_is_absent_with_its_reason():
    found, absent = controls.make_controls(rows(1, exemplars=(), emotion=""))
    assert list(found) == ["canned"]
    assert set(absent) == {"shuffled", "random_training", "same_emotion", "first_exemplar", "oracle_exemplar"}
    assert absent["random_training"] == "the training split is not known"
    _, absent = controls.make_controls([*rows(3), *rows(1, emotion="furious")], TRAINING)
    assert absent == {"same_emotion": "1 of 4 rows have no emotion that a training dialogue has"}


def test_controls_are_scored_by_the_metrics_of_the_system():
    found = controls.score_controls(rows(), TRAINING)
    scores = scoring.score(rows(), settings=scoring.ScoringSettings(1, 0, ("token_f1",)))
    expected = {**scores.metrics, **scores.variants}
    assert set(found["system"]) == set(controls.NAMES)
    for name, value in found["system"].items():
        if name in expected:
            assert value == pytest.approx(expected[name]["value"])
    oracle = found["controls"]["oracle_exemplar"]["metrics"]
    references = [row.reference for row in rows()]
    best = [f"gold reply number {i}" for i in range(12)]
    assert oracle["bleu_2"] == pytest.approx(bleu(best, references, 2))
    assert oracle["token_f1"] == pytest.approx(text.token_f1_rows(best, references).mean())
    canned = found["controls"]["canned"]["metrics"]
    assert canned["distinct_1"] < 10.0
    assert canned["bleu_2"] == pytest.approx(canned["brevity_penalty"] * canned["bleu_2_precision"])
    more = controls.score_controls(rows(), TRAINING, variants=("bleu_2:moel",))["controls"]["canned"]["metrics"]
    assert more == {**canned, "bleu_2:moel": more["bleu_2:moel"]}


def judged(count=400, seed=0):
    """Replies whose levels follow the references' half of the time."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        gold = {name: LEVELS[rng.choice(3, p=(0.6, 0.3, 0.1))] for name in MECHANISMS}
        other = {name: LEVELS[rng.choice(3, p=(0.7, 0.2, 0.1))] for name in MECHANISMS}
        said = {name: gold[name] if rng.random() < 0.5 else other[name] for name in MECHANISMS}
        notes = {"reference_attributes": gold, "response_attributes": said, "linear_response_attributes": gold}
        made.append(Prediction(("a",), "b", "c", id=str(i), notes=notes))
    return made


def test_agreement_of_levels_matches_scikit_learn():
    found = controls.empathy_agreement(judged())
    kappas, macros, weighted = [], [], []
    for name, one in found["mechanisms"].items():
        gold, said = (
            [row.notes[f"{whose}_attributes"][name] for row in judged()] for whose in ("reference", "response")
        )
        kappas.append(metrics.cohen_kappa_score(gold, said))
        macros.append(100 * metrics.f1_score(gold, said, average="macro"))
        weighted.append(100 * metrics.f1_score(gold, said, average="weighted"))
        assert one["kappa"] == pytest.approx(kappas[-1])
        majority = metrics.f1_score(gold, ["low"] * len(gold), average="weighted", zero_division=0)
        assert one["majority"]["weighted_f1"] == pytest.approx(100 * majority)
        assert (one["majority_level"], one["majority"]["kappa"]) == ("low", 0.0)
        assert one["references"]["low"] == pytest.approx(100 * gold.count("low") / len(gold))
        assert one["replies"]["high"] == pytest.approx(100 * said.count("high") / len(said))
        assert abs(one["shuffled"]["kappa"]) < 0.05 < one["kappa"]
    assert found["kappa"] == pytest.approx(np.mean(kappas))
    assert found["macro_f1"] == pytest.approx(np.mean(macros))
    assert found["weighted_f1"] == pytest.approx(np.mean(weighted))
    assert found["shuffled"]["weighted_f1"] < found["weighted_f1"]


def test_agreement_needs_the_notes_of_its_judge():
    assert controls.empathy_agreement(rows()) == {}
    assert controls.empathy_agreement(judged(5), "second_seed") == {}
    odd = [dataclasses.replace(judged(1)[0], notes={"reference_attributes": "x", "response_attributes": ["y"]})]
    assert controls.empathy_agreement(odd) == {}
    half = dataclasses.replace(judged(1)[0], notes=judged(1)[0].notes | {"response_attributes": {}})
    assert controls.empathy_agreement([*judged(), half]) == controls.empathy_agreement(judged())


def test_judges_agree_where_they_give_replies_one_level():
    found = controls.judges_agreement(judged(), "", "linear")
    own = controls.empathy_agreement(judged())["mechanisms"]
    assert found["exploration"]["kappa"] == pytest.approx(own["exploration"]["kappa"])
    assert 50 < found["exploration"]["share"] < 90
    assert controls.judges_agreement(judged(), "", "second_seed") == {}


@pytest.mark.real_data
def test_the_canned_reply_has_the_token_f1_that_it_is_known_for(real_data):
    from empax.evaluation.rows import read_predictions

    peers, _ = read_predictions(real_data / "peer_outputs" / "moel.jsonl")
    found = controls.score_controls(peers[:500])
    assert found["controls"]["canned"]["metrics"]["token_f1"] == pytest.approx(23.0, abs=1.5)
