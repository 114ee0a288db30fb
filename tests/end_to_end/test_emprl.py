"""EmpRL's recipe in small: fine-tuning, identifiers, PPO, evaluation, report; then the tasks that differ."""

import jax
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import read_json, read_jsonl
from empax.core.tree import hash_tree
from empax.core.types import MECHANISMS
from empax.serving.export import ExportSettings, export_run, trained_model
from empax.training.checkpoint import load_params

pytestmark = pytest.mark.slow

CONFIG = "configs/emprl_transformer.py:tiny"


def test_ppo_begins_with_the_fine_tuned_model_and_moves_it(workdir):
    tuned, policy = load_params(workdir / "generator"), load_params(workdir / "ppo")
    assert set(policy) == {"model", "value"}
    assert jax.tree.structure(tuned["model"]) == jax.tree.structure(policy["model"])
    moved = [
        np.abs(a - b).max()
        for a, b in zip(jax.tree.leaves(tuned["model"]), jax.tree.leaves(policy["model"]), strict=True)
    ]
    assert 0.0 < max(moved) < 0.1  # a few updates at a small learning rate


def test_a_policy_is_exported_without_its_value_head(workdir, tmp_path):
    for stage, chosen in (("", "ppo"), ("generator", "generator")):
        found = trained_model(workdir, ExportSettings(stage=stage))
        assert found.stage == chosen
        assert hash_tree(found.params) == hash_tree(load_params(workdir / chosen)["model"])
    with pytest.raises(ConfigError, match="stage 'ppo' has no adapters"):
        export_run(workdir, tmp_path / "adapters", ExportSettings(lora="adapters"))
    with pytest.raises(ConfigError, match="stage 'ppo' holds no retriever, only its generator"):
        export_run(workdir, tmp_path / "retriever", ExportSettings(what="retriever"))


def test_every_logged_row_says_what_the_policy_does(workdir):
    rows = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["stage"] == "ppo"]
    train = [row for row in rows if row["split"] == "train"]
    assert {row["split"] for row in rows} == {"train", "validation"}
    wanted = {"reward", "kl", "kl_coefficient", "policy_loss", "value_loss", "entropy", "response_tokens", "ratio"}
    assert all(wanted <= set(row) for row in train)
    assert all(0.0 < row["reward"] <= 1.0 for row in train)
    assert all({"nll"} <= set(row) for row in rows if row["split"] == "validation")


def test_the_report_has_empathy_and_replies_over_training(workdir):
    report = read_json(workdir / "report.json")
    assert report["system"] == "emprl"
    assert {"empathy_f1", *(f"{name}_f1" for name in MECHANISMS), "distinct_2", "perplexity"} <= set(report["metrics"])
    assert report["paper"] == {}  # its rows are of another corpus
    assert set(report["notes"]["classifiers"]) == set(MECHANISMS)  # how good the identifiers are
    assert "replies" not in report  # they quote the corpus
    kept = sorted(path.stem for path in (workdir / "ppo" / "replies").glob("*.json"))
    assert kept == ["000000", "000002", "000004"]  # before anything is learnt, at the only refresh, at the end
    for step in kept:
        reply = read_json(workdir / "ppo" / "replies" / f"{step}.json")[0]
        assert set(reply) == {"context", "response"}
    assert "Training, heard" in (workdir / "report.html").read_text()


@pytest.mark.parametrize("form", ["expected", "grpo", "dpo", "trajectory"])
def test_the_other_forms(recipe, workdir, tmp_path, form):
    recipe(tmp_path / "run", f"--reuse={workdir}", config=f"configs/emprl_transformer.py:{form},tiny")
    assert (tmp_path / "run" / "report" / "DONE").exists()
    assert set(load_params(tmp_path / "run" / "ppo")) == (
        {"model", "value"} if form in ("expected", "trajectory") else {"model"}
    )


def test_a_policy_that_reads_exemplars_begins_with_regs_generator(recipe, finished, tmp_path):
    """And answers with exemplars that the filter of its index lets through, which its re-ranking counts."""
    workdir, decoding = tmp_path / "run", "--config.emprl.decoding"
    options = "--config.reindex.filter=gold_emotion", f"{decoding}.rerank=consensus", f"{decoding}.num_samples=2"
    options = *options, f"{decoding}.rerank_exemplars=1.0", f"--reuse={finished}"
    recipe(workdir, *options, config="configs/emprl_transformer.py:retrieval,tiny")
    joint, policy = load_params(workdir / "joint")["generator"]["model"], load_params(workdir / "ppo")
    assert set(policy) == {"model", "value"}
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(joint), jax.tree.leaves(policy["model"]), strict=True)]
    assert 0.0 < max(moved) < 0.1
    predictions = list(read_jsonl(workdir / "predictions.jsonl"))
    assert all(row["exemplars"] and row["attributes"] for row in predictions)
    assert all(exemplar["emotion"] == row["emotion"] for row in predictions for exemplar in row["exemplars"])
    metrics = read_json(workdir / "report.json")["metrics"]
    assert {"empathy_f1", "exemplar_emotion_match", "distinct_2"} <= set(metrics)
    assert {path.stem for path in (workdir / "ppo" / "replies").glob("*.json")} == {"000000", "000002", "000004"}
