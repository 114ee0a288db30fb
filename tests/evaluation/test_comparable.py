"""A metric compares two systems only over the same rows, with the same labels."""

import dataclasses

import pytest

from empax.core.config import ConfigError
from empax.core.types import MECHANISMS, Prediction
from empax.evaluation import comparable
from empax.evaluation.comparing import check_compared, compare_systems
from empax.evaluation.scoring import BART_DIRECTIONS, METRICS, VARIANTS, ScoringSettings, make_statistics
from empax.evaluation.statistics import estimate

LEVELS = dict.fromkeys(MECHANISMS, "low")  # of references
THOUGHTS = ("intent", "intent_prediction", "intent_classifier", "intent_first", "intent_second")
JUDGED = tuple(
    f"{judge}{side}_attributes" for judge in ("", "second_seed_", "linear_") for side in ("reference", "response")
)


def notes_of(i):
    bart = {"bart_score": dict.fromkeys(BART_DIRECTIONS, -1.0 - i), "bart_score_model": "x"}
    said = {note: dict.fromkeys(MECHANISMS, "high" if i == 3 and "response" in note else "low") for note in JUDGED}
    return {"nll": 3.0 + i, "num_tokens": 4, **dict.fromkeys(THOUGHTS, "wishing"), "intent": GOLD[i], **bart, **said}


GOLD = ("wishing", "wishing", "wishing", "neutral")
NOTES = notes_of(3)
ROWS = [
    Prediction(
        (f"turn {i}",), f"reply {i}", f"word {i} .", id=f"d{i}#2", emotion="sad",
        emotion_prediction="sad" if i < 3 else "proud", notes=notes_of(i),
        exemplars=({"id": "e", "emotion": "sad" if i < 3 else "proud"},),
    )
    for i in range(4)
]  # fmt: skip


def changed(*, notes=None, **fields):
    """The same rows, of which the last is another."""
    return [*ROWS[:-1], dataclasses.replace(ROWS[-1], notes={**NOTES, **(notes or {})}, **fields)]


def left_out(rows):
    """Metrics that do not compare, and why."""
    reasons = {name: comparable.not_comparable(name, ROWS, rows) for name in (*METRICS, *VARIANTS)}
    return {name: reason for name, reason in reasons.items() if reason}


LIKELIHOODS = [name for name in (*METRICS, *VARIANTS) if name.startswith(("perplexity", "bits_per_byte"))]
INTENTS = [name for name in (*METRICS, *VARIANTS) if name.startswith("intent_accuracy")]


@pytest.mark.parametrize(
    ("rows", "names", "reason"),
    [
        (changed(notes={"nll": None}), LIKELIHOODS, "nll and num_tokens"),
        (changed(notes={"num_tokens": None}), LIKELIHOODS, "different rows"),
        (changed(notes={"num_tokens": 5}), [n for n in LIKELIHOODS if n.split(":")[0] == "perplexity"], "tokenizers"),
        (changed(notes={"nll": 9.0}), [], ""),
        (changed(emotion=""), ["emotion_accuracy", "exemplar_emotion_match"], "different rows"),
        (changed(emotion="joy"), ["emotion_accuracy", "exemplar_emotion_match"], "the emotions of the contexts differ"),
        (
            changed(emotion_prediction=""),
            ["emotion_accuracy"],
            "emotion and emotion_prediction are given for different",
        ),
        (changed(exemplars=()), ["exemplar_emotion_match"], "exemplars' emotions are given for different rows"),
        (changed(notes={"intent": ""}), INTENTS, "different rows"),
        (changed(notes={"intent": "agreeing"}), INTENTS, "the intents of the references differ"),
        (changed(notes={"intent_second": None}), ["intent_accuracy:second"], "intent and intent_second are given for"),
        (changed(notes={"bart_score": {"recall": -2.0, "precision": -1.0}}), ["bart_score_faithfulness"], "different"),
    ],
)
def test_other_rows_or_other_labels_leave_out_what_they_change(rows, names, reason):
    found = left_out(rows)
    assert set(found) == set(names)
    assert all(reason in why for why in found.values())


@pytest.mark.parametrize("judge", ["", "second_seed", "linear"])
def test_judges_are_looked_at_one_by_one(judge):
    prefix = f"{judge}_" if judge else ""

    def names(*mechanisms):
        variants = (f"{judge}{end}" for end in (("", "_macro", "_macro_binary") if judge else ("", "macro")))
        every = [f"{name}_f1{f':{v}' if v else ''}" for v in variants for name in mechanisms]
        return {*every, *(f"{name}_f1:macro_binary" for name in mechanisms if not judge)}

    part = left_out(changed(notes={f"{prefix}response_attributes": {**LEVELS, "exploration": ""}}))
    assert set(part) == names("empathy", "exploration")
    assert f"{prefix}reference_attributes and {prefix}response_attributes are given for different rows" in part.values()
    other = left_out(changed(notes={f"{prefix}reference_attributes": {**LEVELS, "exploration": "high"}}))
    assert set(other) == names("empathy", *MECHANISMS)
    assert all("different judges" in why for why in other.values())


def test_a_metric_that_compares_counts_as_many_rows_of_both():
    """Whatever field one system lacks on a row: what compares has the same value, as the systems are the same."""
    names = [name for name in (*METRICS, *VARIANTS) if name not in comparable.OWN_ROWS and "of_10000" not in name]
    fields = {"emotion": "", "emotion_prediction": "", "exemplars": ()}
    whole = {name: estimate(one) for name, one in make_statistics(ROWS, names).items()}
    assert set(names) == set(whole)
    for change in (*({"notes": {name: None}} for name in NOTES), *({name: empty} for name, empty in fields.items())):
        rows = changed(**change)
        part = {name: estimate(one) for name, one in make_statistics(rows, names).items()}
        compared = [name for name in part if not comparable.not_comparable(name, ROWS, rows)]
        assert {name: part[name] for name in compared} == {name: whole[name] for name in compared}, change


def test_a_comparison_says_what_it_leaves_out():
    names = ("perplexity_per_word", "emotion_accuracy", "empathy_f1", "bleu_1")
    rows = changed(notes={"num_tokens": None, "response_attributes": None}, emotion="")
    (pair,) = compare_systems({"a": ROWS, "b": rows}, settings=ScoringSettings(2), names=names)["pairs"]
    assert list(pair["metrics"]) == ["bleu_1"]
    assert set(pair["left_out"]) == set(names[:3])


def test_what_counts_own_mistakes_is_refused_and_a_metric_of_the_users_is_not():
    for name, instead in (("emotion_wrong", "intent_accuracy"), ("first_emotion_wrong", "intent_accuracy:first")):
        with pytest.raises(ConfigError, match=f"{name} is for tables of single systems.* compare by {instead}, over"):
            check_compared([f"intent_accuracy:{name}"])
    check_compared(METRICS)
    assert comparable.not_comparable("intent_accuracy:mine", ROWS, changed(emotion="")) == ""
