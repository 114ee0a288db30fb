"""The ablations that are recipes of their own, in small: the parts that they leave out are left out."""

import functools

import jax
import numpy as np
import pytest

from empax.core.files import read_json, read_jsonl
from empax.systems.reg.parts import RegParts
from empax.training.checkpoint import load_params
from tests.plans import context_of


@pytest.fixture(scope="module")
def run_variant(recipe, finished, tmp_path_factory):
    """Runs a variant, once, behind the stages that it shares with the whole system."""

    @functools.cache
    def run(variant):
        workdir = tmp_path_factory.mktemp("variants") / variant
        recipe(workdir, f"--reuse={finished}", config=f"configs/reg_transformer.py:{variant},tiny")
        return workdir, list(read_jsonl(workdir / "predictions.jsonl"))

    return run


@pytest.mark.slow
def test_apart_shows_exemplars_by_the_untrained_retriever_and_no_attribute(run_variant):
    workdir, predictions = run_variant("apart")
    assert all(len(row["exemplars"]) == 2 and not row["attributes"] for row in predictions)
    assert not any(exemplar["attributes"] for row in predictions for exemplar in row["exemplars"])
    run = context_of(workdir, "exemplars")
    trained = load_params(workdir / "exemplars", "last")
    began = {"retriever": RegParts.of(run).retriever_params(run, ""), "generator": load_params(workdir / "generator")}
    same = {
        name: {np.array_equal(a, b) for a, b in zip(jax.tree.leaves(began[name]), jax.tree.leaves(part), strict=True)}
        for name, part in trained.items()
    }
    assert same == {"retriever": {True}, "generator": {False}}  # frozen, and trained in every leaf
    assert "exemplar_emotion_match" in read_json(workdir / "report.json")["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "base"), [("copy", "apart"), ("knn", "no_retrieval")])
def test_a_corpus_speaks_into_answers_and_likelihoods_and_trains_nothing(run_variant, variant, base):
    (with_it, said), (without, plain) = run_variant(variant), run_variant(base)
    stage = read_json(with_it / "config.json")["evaluate"]["stage"]
    trained = (jax.tree.leaves(load_params(folder / stage)) for folder in (with_it, without))
    for one, other in zip(*trained, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(a["notes"]["nll"] != b["notes"]["nll"] for a, b in zip(said, plain, strict=True))
    assert [row["exemplars"] for row in said] == [row["exemplars"] for row in plain]


@pytest.mark.slow
def test_no_retrieval_is_the_generator_alone(run_variant):
    workdir, predictions = run_variant("no_retrieval")
    assert not any(row["exemplars"] or row["attributes"] for row in predictions)
    assert all(set(row["notes"]["emotion_by_head"]) == {"generator"} for row in predictions)
    metrics = read_json(workdir / "report.json")["metrics"]
    assert "exemplar_emotion_match" not in metrics
    assert {"bleu_2", "perplexity", "emotion_accuracy"} <= set(metrics)


@pytest.mark.slow
def test_no_attributes_retrieves_without_emotions(run_variant):
    workdir, predictions = run_variant("no_attributes")
    assert all(len(row["exemplars"]) == 2 for row in predictions)
    assert not (workdir / "emotions").exists()
    assert "emotion_encoder" not in load_params(workdir / "joint")["retriever"]
    assert "empathy_f1" in read_json(workdir / "report.json")["metrics"]  # the classifiers still judge
