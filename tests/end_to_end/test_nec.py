"""NEC's recipe in small: facts, a ranker, both trainings, answers, and what a report and a chat say of facts."""

import jax
import numpy as np
import pytest

import empax
from empax.chat import describe
from empax.core.files import read_json, read_jsonl
from empax.data.knowledge import Fact
from empax.parts.knowledge import sources
from empax.serving.export import trained_model
from empax.serving.session import Session
from empax.training.checkpoint import load_params
from tests.end_to_end.promises import assert_a_killed_run_ends_the_same, assert_gold_is_not_read

CONFIG = "configs/nec.py:scratch,tiny"
pytestmark = pytest.mark.slow


def test_predictions_tell_the_facts_behind_them(workdir):
    rows = list(read_jsonl(workdir / "predictions.jsonl"))
    assert len(rows) == 62
    shown = [row for row in rows if row["notes"]["facts"]]
    assert len(shown) == 4
    assert all({"head", "relation", "tail", "words", "score"} <= set(fact) for fact in shown[0]["notes"]["facts"])
    report = read_json(workdir / "report.json")
    assert report["data"]["knowledge"]["source"] == "the built-in sample, written by hand"
    assert 0 < report["data"]["knowledge"]["test"]["with_facts"] < 0.1


def test_contrast_goes_on_from_likelihood_and_changes_every_layer(workdir):
    before, after = (load_params(workdir / name) for name in ("generator", "contrastive"))
    assert set(before) == {"model", "social"}
    assert set(after) == {"model", "social", "projection"}
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before["model"], after["model"])
    assert all(change > 0 for change in jax.tree.leaves(moved["encoder"]))
    logged = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["stage"] == "contrastive"]
    assert logged
    assert all({"nll", "contrast", "loss"} <= set(row) for row in logged)


def test_a_chat_finds_facts_and_shows_them(workdir, monkeypatch):
    session = Session.load(workdir)
    assert session.reply(["I lost my dog."]).notes["facts"] == []  # the built-in ones are about its own instances
    facts = [Fact("dog", "IsA", "pet"), Fact("it", "xReact", "sad")]
    monkeypatch.setattr(sources.Sample, "find", lambda self, instances, split: [(facts, 0) for _ in instances])
    said = Session.load(workdir).reply(["I lost my dog."])
    assert [fact["tail"] for fact in said.notes["facts"]] == ["sad", "pet"]
    told = describe(said, 0.1, 3)
    assert all(f"knows: {fact['words']} ({fact['relation']})" in told for fact in said.notes["facts"])


def test_a_finished_run_is_loaded_as_the_model_without_facts(workdir, caplog):
    assert trained_model(workdir).before == "query:"
    model = empax.load(workdir)
    assert "trained its generator on tagged dialogues, but empax.load gives it the bare text" in caplog.text
    assert model.generate(["I lost my dog."]) == model.generate(["I lost my dog."])


def test_the_gold_response_and_emotion_reach_no_answer(workdir):
    assert_gold_is_not_read(workdir)


@pytest.mark.parametrize("stage", ["generator", "contrastive"])
def test_a_killed_run_ends_with_the_same_bits(workdir, recipe, tmp_path, stage):
    assert_a_killed_run_ends_the_same(workdir, tmp_path / "run", recipe, CONFIG, stage, "contrastive")


@pytest.mark.parametrize(
    "form", ["no_social,no_self", "scratch,no_entity,no_frequent,no_emotion,no_rerank,shuffled", "no_contrast,ranker"]
)
def test_the_other_forms(workdir, recipe, tmp_path, form):
    recipe(tmp_path / "run", f"--reuse={workdir}", config=f"configs/nec.py:{form},tiny")
    params = load_params(tmp_path / "run" / ("generator" if "no_contrast" in form else "contrastive"))
    expected = {"model"} | (set() if "no_social" in form else {"social"})
    assert set(params) == expected | (set() if "no_contrast" in form else {"projection"})
    source = read_json(tmp_path / "run" / "report.json")["data"]["knowledge"]["source"]
    assert ("tails exchanged between dialogues" in source) == ("shuffled" in form)
