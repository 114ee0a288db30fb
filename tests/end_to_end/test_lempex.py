"""LEMPEx' recipe in small: judges, labels, exemplars, the generator, and what a report says of them."""

import numpy as np
import pytest

from empax.core.files import read_json, read_jsonl
from empax.core.types import MECHANISMS
from empax.serving.session import Session
from empax.training.checkpoint import load_params
from tests.end_to_end.promises import assert_a_killed_run_ends_the_same, assert_gold_is_not_read

CONFIG = "configs/lempex.py:tiny"
pytestmark = pytest.mark.slow


def test_judges_label_training_responses_alone(workdir):
    for split in ("train", "validation", "test"):
        rows = list(read_jsonl(workdir / "annotate" / f"{split}.jsonl"))
        assert all(set(row) == ({"id", "response_attributes"} if split == "train" else {"id"}) for row in rows)
    assert all(
        set(MECHANISMS) <= set(row["response_attributes"]) for row in read_jsonl(workdir / "annotate/train.jsonl")
    )
    quality = read_json(workdir / "annotate" / "classifiers.json")
    assert all({"weighted_f1", "binary_weighted_f1", "binary_accuracy"} <= set(found) for found in quality.values())


def test_all_five_losses_are_logged_and_judges_stay_out_of_the_checkpoint(workdir):
    rows = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["stage"] == "generator"]
    wanted = {"nll", "sentiment_loss", *(f"{name}_loss" for name in MECHANISMS)}
    assert {row["split"] for row in rows} == {"train", "validation"}
    assert all(wanted <= set(row) for row in rows if row["split"] == "train")
    assert all("nll" in row for row in rows if row["split"] == "validation")
    params = load_params(workdir / "generator")
    assert set(params) == {"model", "fusion", "speakers"}
    assert np.abs(params["speakers"][1:]).max() > 0.0
    np.testing.assert_array_equal(params["speakers"][0], 0.0)


def test_predictions_tell_exemplars_labels_and_what_exemplars_are_worth(workdir):
    rows = list(read_jsonl(workdir / "predictions.jsonl"))
    assert all(len(row["exemplars"]) == 2 for row in rows)
    assert all(row["id"].split("#")[0] != e["id"].split("#")[0] for row in rows for e in row["exemplars"])
    assert all({"nll", "nll_of_other_exemplars"} <= set(row["notes"]) for row in rows)
    assert all(set(MECHANISMS) <= set(row["notes"]["response_attributes"]) for row in rows)
    report = read_json(workdir / "report.json")
    (worth,) = [check for check in report["verdict"]["checks"] if check["name"] == "nats from exemplars"]
    assert "compared with those of another context" in worth["found"]
    named = {
        f"{name}_f1:{average}" for name in MECHANISMS for average in ("macro", "macro_binary", "second_seed_macro")
    }
    assert named <= set(report["variants"])
    assert "sentiment_mae" in report["metrics"]


def test_a_chat_shows_exemplars_and_the_levels_of_the_reply(workdir):
    session = Session.load(workdir)
    said = session.reply(["My dog ran away."])
    assert len(said.exemplars) == 2
    assert set(MECHANISMS) <= set(said.notes["response_attributes"])
    assert said.attributes == {}
    assert "nll_of_other_exemplars" not in said.notes


def test_the_gold_response_and_emotion_reach_no_answer(workdir):
    assert_gold_is_not_read(workdir)


@pytest.mark.parametrize("stage", ["judges", "sentiment", "generator"])  # the retriever: test_lempex_retriever
def test_a_killed_run_ends_with_the_same_bits(workdir, recipe, tmp_path, stage):
    assert_a_killed_run_ends_the_same(workdir, tmp_path / "run", recipe, CONFIG, stage, "generator")


@pytest.mark.parametrize(
    "form", ["t5_glove", "eq10", "unfrozen,time_axis", "t5,gumbel", "no_exemplars,binary", "q=3,weights_1"]
)
def test_the_other_forms(workdir, recipe, tmp_path, form):
    recipe(tmp_path / "run", f"--reuse={workdir}", config=f"configs/lempex.py:{form},tiny")
    params = load_params(tmp_path / "run" / "generator")
    expected = {"model", "speakers"}
    expected |= {"fusion"} if form not in ("t5_glove", "no_exemplars,binary") else set()
    expected |= {"eq10": {"head"}, "unfrozen,time_axis": {"judges"}}.get(form, set())
    assert set(params) == expected


def test_exemplars_of_the_gold_emotion_are_called_a_leak(workdir, recipe, tmp_path):
    recipe(tmp_path / "run", f"--reuse={workdir}", config="configs/lempex.py:gold_emotion,no_losses,tiny")
    assert read_json(tmp_path / "run" / "index" / "index.json")["leak"] == "gold_emotion"
    assert "leak" in (tmp_path / "run" / "report.md").read_text()
    with pytest.raises(AssertionError):
        assert_gold_is_not_read(tmp_path / "run")
