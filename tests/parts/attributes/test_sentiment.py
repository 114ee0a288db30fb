"""The regressor that learns VADER's scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import WorkDir, read_json
from empax.core.system import RunContext
from empax.data.sample import load_annotated_pairs
from empax.evaluation.empathy import sentiment
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import unit_variance
from empax.parts.attributes import judge_kind, judge_stage
from empax.parts.attributes import sentiment as module
from empax.parts.attributes.sentiment import (
    SentimentExamples,
    SentimentRegressor,
    SentimentTaskSettings,
    build_sentiment,
    check_sentiment,
)
from tests.plans import plan_of
from tests.systems.learning import random_like

TEXTS = ["That is great!", "What a terrible day.", "The table is brown."]


def regressor():
    config = BertConfig(300, d_model=8, num_heads=2, d_ff=16, num_layers=1, max_positions=48, dropout=0.0)
    return SentimentRegressor(DualEncoder(BertEncoder(config)))


def test_texts_come_with_vaders_scores(tokenizer):
    examples = SentimentExamples(TEXTS, tokenizer, 40)
    batch = examples.collate(np.array([1, 0, -1]), 40, np.random.default_rng(0))
    np.testing.assert_allclose(batch.compound[:2], [sentiment(TEXTS[1]), sentiment(TEXTS[0])], rtol=1e-6)
    assert batch.compound[0] < -0.3 < 0.3 < batch.compound[1]
    np.testing.assert_array_equal(batch.valid, [True, True, False])
    np.testing.assert_array_equal(batch.source_mask.sum(axis=1), [len(examples.rows[1]), len(examples.rows[0]), 0])


def test_the_loss_is_the_squared_error_of_a_tanh(tokenizer):
    task = regressor()
    batch = SentimentExamples(TEXTS, tokenizer, 40).collate(np.array([0, 1, -1]), 40, np.random.default_rng(0))
    batch = jax.tree.map(jnp.asarray, batch)
    shapes = jax.eval_shape(task.init, jax.random.key(0), batch)
    params = random_like(shapes, scale=1.0)
    loss, metrics = jax.jit(lambda p: task.loss(p, {}, batch, jax.random.key(0), train=False))(params)
    embed = jax.jit(task.encoder.apply)
    encoding = embed({"params": params["encoder"]}, batch.source, batch.source_mask)
    expected = np.tanh(
        np.asarray(unit_variance(encoding)) @ np.asarray(params["head"]["out"]) + np.asarray(params["head"]["out_bias"])
    )
    wrong = expected[:2, 0] - np.asarray(batch.compound)[:2]
    assert float(loss.value()) == pytest.approx(np.mean(wrong**2), rel=1e-4)
    assert float(metrics["mae"].value()) == pytest.approx(np.mean(np.abs(wrong)), rel=1e-4)


def test_it_learns_from_the_runs_responses_or_posts_and_judges_no_mechanism(finished, monkeypatch):
    config = read_json(finished / "config.json")
    section = {"kind": "train", "task": "attributes.sentiment", "steps": 1, "batch_size": 4, "buckets": (64,)}
    plan = plan_of({**config, "run": [*config["run"], "sentiment"], "sentiment": section})
    run = RunContext(WorkDir(finished), plan, "sentiment")
    stage = SentimentTaskSettings(max_examples=7, max_validation_examples=3)
    check_sentiment(stage, run)
    assembly = build_sentiment(stage, run)
    assert (len(assembly.train), len(assembly.validation)) == (7, 3)
    monkeypatch.setattr(module, "find_epitome", lambda folder: folder)
    monkeypatch.setattr(module, "load_epitome", lambda folder: load_annotated_pairs())
    posts = build_sentiment(SentimentTaskSettings(data="epitome"), run)
    assert len(posts.train) + len(posts.validation) == 625
    assert len(posts.validation) == pytest.approx(125, abs=2)
    assert judge_kind(run, "sentiment") == ""
    with pytest.raises(ConfigError, match=r"config\.sentiment trains no judge"):
        judge_stage(run, "sentiment")
    with pytest.raises(ConfigError, match="max_tokens = 80 is more than the longest bucket; set it to at most 64"):
        check_sentiment(SentimentTaskSettings(max_tokens=80), run)
