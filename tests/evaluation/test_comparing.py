import dataclasses

import pytest

from empax.core.files import DataError
from empax.core.types import Prediction
from empax.evaluation import significance
from empax.evaluation.comparing import compare_systems
from empax.evaluation.normalisation import MOEL_METRICS, NORMALISATIONS, beside_peers, normalisation
from empax.evaluation.scoring import METRICS, VARIANTS, ScoringSettings, score

FAST = ScoringSettings(bootstrap_samples=20)
NAMES = ("bleu_1", "rouge_l", "distinct_1", "emotion_accuracy", "perplexity", "perplexity_per_word")


def rows_of(responses):
    return [
        Prediction(
            (f"turn {i}",), response, f"that is really great number {i} !", id=f"d{i // 2}#{2 + 2 * (i % 2)}",
            emotion="proud", emotion_prediction="proud" if i % 3 else "sad",
            notes={"nll": 9.0 + i, "num_tokens": 6},
        )
        for i, response in enumerate(responses)
    ]  # fmt: skip


GOOD = rows_of([f"that is great number {i} !" for i in range(16)])
OTHER = rows_of([f"oh that is number {i} ." for i in range(16)])
DULL = [dataclasses.replace(row, emotion_prediction="") for row in rows_of(["Oh."] * 16)]


def test_metrics_that_both_have_are_tested():
    found = compare_systems({"good": GOOD, "dull": DULL[::-1]}, settings=FAST)
    compared = found["pairs"][0]["metrics"]
    assert "emotion_accuracy" not in compared
    assert found["pairs"][0]["left_out"] == {"emotion_accuracy": "dull lacks its inputs"}
    assert {"bleu_1", "distinct_2", "perplexity", "length_ratio"} <= set(compared)
    own = score(GOOD, settings=FAST).metrics["rouge_l"]
    assert compared["rouge_l"]["difference"] == pytest.approx(own["value"])
    assert compared["rouge_l"]["first"] == pytest.approx(own)
    assert compared["rouge_l"]["second"]["value"] == 0.0
    # Of the swaps of eight dialogues that of all and that of none are as extreme.
    assert compared["rouge_l"]["p_value"] == pytest.approx(2 / 2**8, abs=0.01)
    assert {"p_bootstrap", "p_randomisation"} & set(compared["rouge_l"]) == {"p_bootstrap"}
    assert "p_bootstrap" not in compared["distinct_2"]
    assert compared["perplexity"]["difference"] == pytest.approx(0.0)
    expected = significance.holm([cell["p_value"] for cell in compared.values()])
    assert [cell["p_holm"] for cell in compared.values()] == pytest.approx(expected)


def test_every_pair_is_tested_and_corrected_together():
    found = compare_systems({"good": GOOD, "other": OTHER, "dull": DULL}, settings=FAST, names=NAMES)
    assert [(pair["first"], pair["second"]) for pair in found["pairs"]] == [
        ("good", "other"), ("good", "dull"), ("other", "dull"),
    ]  # fmt: skip
    cells = [cell for pair in found["pairs"] for cell in pair["metrics"].values()]
    assert found["correction"] == {
        "method": "Holm", "test": "approximate randomisation", "tests": len(cells), "pairs": 3, "metrics": 6,
        "samples": 40 * len(cells),
    }  # fmt: skip
    assert [cell["p_holm"] for cell in cells] == pytest.approx(significance.holm([cell["p_value"] for cell in cells]))
    values = score(OTHER, settings=FAST).metrics
    assert found["systems"]["other"]["metrics"]["bleu_1"] == pytest.approx(values["bleu_1"])
    assert "emotion_accuracy" not in found["systems"]["dull"]["metrics"]
    assert (found["rows"]["resampled"], found["rows"]["dialogues"]) == ("dialogues", 8)
    only = compare_systems(
        {"good": GOOD, "dull": DULL, "other": OTHER}, [("good", "other")], settings=FAST, names=NAMES
    )
    assert only["correction"]["pairs"] == len(only["pairs"]) == 1
    assert list(only["systems"]) == ["good", "dull", "other"]
    with pytest.raises(DataError, match="good and short do not pair up by id"):
        compare_systems({"good": GOOD, "short": OTHER[:9]}, settings=FAST)


@pytest.mark.parametrize("labels", ["ab", "ba"])
def test_the_rows_are_described_by_the_system_whose_dialogues_are_drawn(labels):
    """Whichever system has ids: the comparison is the same, and says so."""
    systems = {"a": [dataclasses.replace(row, id="") for row in GOOD], "b": OTHER}
    found = compare_systems({label: systems[label] for label in labels}, settings=FAST, names=("bleu_1",))
    assert (found["rows"]["resampled"], found["rows"]["dialogues"]) == ("dialogues", 8)
    with_ids = compare_systems({"a": GOOD, "b": OTHER}, settings=FAST, names=("bleu_1",))
    assert found["systems"]["b"] == with_ids["systems"]["b"]


def test_intervals_draw_whole_dialogues():
    some = [
        dataclasses.replace(row, response=row.reference) if i // 2 in (0, 3) else row for i, row in enumerate(OTHER)
    ]
    found = compare_systems({"a": some, "b": OTHER}, settings=FAST, names=("rouge_l",))
    own = found["systems"]["a"]["metrics"]["rouge_l"]
    assert own == pytest.approx(score(some, settings=FAST).metrics["rouge_l"])
    assert found["pairs"][0]["metrics"]["rouge_l"]["first"] == own
    by_row = score([dataclasses.replace(row, id="") for row in some], settings=FAST).metrics["rouge_l"]
    assert own["low"] < by_row["low"] < by_row["high"] < own["high"]


def test_peers_are_compared_on_the_rows_that_they_share():
    cleaned = [
        Prediction(row.context, f"i am number {i} .", row.reference, emotion="proud") for i, row in enumerate(GOOD)
    ]
    extra = Prediction(("merged",), "x", "y")
    peers = {"whole": [extra, *cleaned[::-1]], "part": cleaned[:12], "few": cleaned[:3]}
    names = [*MOEL_METRICS, "emotion_accuracy"]
    found = compare_systems({"ours": GOOD}, peers=peers, settings=FAST, names=names)
    assert found["absent"] == {"few": "shares 3 of 16 rows"}
    assert [(p["first"], p["second"], p["rows"]) for p in found["pairs"]] == [
        ("ours", "whole", 16),
        ("ours", "part", 12),
    ]
    assert found["systems"]["whole"]["rows"] == 16
    assert "distinct_1:moel" in found["systems"]["whole"]["metrics"]
    # Distinct-n of fewer rows is another number: it is in the pair, where both have as many, but not in the table.
    assert "distinct_1:moel" not in found["systems"]["part"]["metrics"]
    assert set(found["equal"]["distinct_1:moel"]["values"]) == {"ours", "whole"}
    pair = found["pairs"][1]["metrics"]["distinct_1:moel"]
    assert pair["first"]["value"] == pytest.approx(score(GOOD[:12], settings=FAST).variants["distinct_1:moel"]["value"])
    assert found["rows"]["resampled"] == "dialogues"  # by our ids


def test_every_metric_of_text_has_a_normalisation_and_peers_stand_beside_cleaned_text():
    without = {
        "emotion_accuracy", "intent_accuracy", "exemplar_emotion_match", "empathy_f1", "emotional_reaction_f1",
        "interpretation_f1", "exploration_f1",
    }  # fmt: skip
    for name in (*METRICS, *VARIANTS):
        base = name.partition(":")[0]
        assert (normalisation(name) == "") == (base in without), name
        assert normalisation(name) in {"", *NORMALISATIONS}
    assert all(normalisation(name) == "moel" for name in MOEL_METRICS)
    assert normalisation("bleu_2") == normalisation("bleu_2:precision") == "nltk"
    assert normalisation("bleu_2:nltk_cased") == normalisation("distinct_1:cased") == "cased"
    assert beside_peers("bleu_2") == beside_peers("bleu_2:moses") == "bleu_2:moel"
    assert beside_peers("emotion_accuracy") == "emotion_accuracy"
    assert beside_peers("perplexity") == ""
