"""The classifiers of the mechanisms: what they read, how they learn, how they judge."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import f1_score

from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir, read_json
from empax.core.system import RunContext
from empax.core.types import LEVELS, MECHANISMS
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.parts.attributes import ClassifierTaskSettings, load_holdout, load_judge
from empax.parts.attributes.classifier import Classifier, PairExamples, encode
from empax.parts.attributes.pairs import AttributeBatch, Pair, class_weights, load_pairs
from tests.plans import plan_of
from tests.systems.learning import random_like

# --------------------------------------------------------------------------------------------------------- the input


def test_a_pair_is_framed_and_a_lone_context_is_framed_alone(tokenizer, spelled):
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    pair, alone = encode(tokenizer, [("a b", "c"), ("a b", "c")], ["d e", ""], 20)
    assert pair == [cls, *spelled("a b c"), sep, *spelled("d e"), sep]
    assert alone == [cls, *spelled("a b c"), sep]


@pytest.mark.parametrize("max_tokens", [8, 9, 12])
def test_overlong_pairs_lose_the_oldest_of_the_context_and_the_middle_of_the_response(tokenizer, max_tokens, spelled):
    """Feelings and questions are at the ends of a long response."""
    context, response = "a b c d e f g h i", "j k l m n o p"
    (row,) = encode(tokenizer, [(context,)], [response], max_tokens)
    assert len(row) <= max_tokens
    first, second = (i for i, token in enumerate(row) if token == tokenizer.sep_id)
    assert second == len(row) - 1
    kept = row[1:first]
    assert kept == spelled(context)[-len(kept) :]
    half = max_tokens // 2
    assert row[first + 1 : second] == [*spelled(response)[: half - half // 2], *spelled(response)[-(half // 2) :]]
    (short,) = encode(tokenizer, [(context,)], ["j"], max_tokens)
    assert len(short) == max_tokens  # a short response leaves its room to the context


def test_settings_that_cannot_work_are_refused():
    for values, message in (
        ({"mechanisms": ()}, "must be some of emotional_reaction"),
        ({"mechanisms": ("sentiment",)}, "must be some of emotional_reaction"),
        ({"mechanisms": ("exploration", "exploration")}, "names one twice"),
        ({"max_tokens": 4}, "max_tokens = 4 must be at least 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            to_settings(ClassifierTaskSettings, values, where="config.attributes")


def make_pairs():
    return [Pair(("a b", "c"), "d e", (0, 1, 2)), Pair(("f",), "g h i", (2, 0, 1))]


def test_responses_are_hidden_as_often_as_asked(tokenizer):
    def batches(probability, count=1):
        examples = PairExamples(make_pairs(), tokenizer, 20, hide_probability=probability)
        rng = np.random.default_rng(0)
        return [examples.collate(np.array([0, 1, -1]), 12, rng) for _ in range(count)]

    whole, hidden = batches(0.0)[0], batches(1.0)[0]
    np.testing.assert_array_equal(whole.source_mask.sum(axis=1), [8, 7, 0])
    np.testing.assert_array_equal(hidden.source_mask.sum(axis=1), [5, 3, 0])
    np.testing.assert_array_equal(whole.valid, [True, True, False])
    np.testing.assert_array_equal(whole.labels[:2], [[0, 1, 2], [2, 0, 1]])
    share = np.mean([batch.source_mask[0].sum() == 5 for batch in batches(0.5, 200)])
    assert share == pytest.approx(0.5, abs=0.1)
    one, two = batches(0.5, 1)[0], batches(0.5, 1)[0]
    np.testing.assert_array_equal(one.source, two.source)


STATES = np.random.default_rng(0).normal(size=(4, 7, 2)).astype(np.float32)


class Known(nn.Module):
    """An encoder with known states."""

    config: types.SimpleNamespace

    def __call__(self, ids, mask, *, deterministic=True):
        return jnp.asarray(STATES)


@pytest.mark.parametrize("cls", [2, 3])
def test_a_speakers_feelings_are_not_the_listeners(cls):
    """The heads read the states of the response; without a response those of the context, of a filler row zeros."""
    ids = jnp.array([[cls, 5, 6, 3, 7, 3, 0], [cls, 5, 3, 7, 8, 9, 3], [cls, 5, 6, 3, 0, 0, 0], [0] * 7])
    task = Classifier(DualEncoder(Known(types.SimpleNamespace(d_model=2))), MECHANISMS, sep_id=3)
    read = task.vectors({"encoder": {"encoder": {}}}, ids, ids > 0, rng=None)
    expected = [STATES[0, 4:6].mean(0), STATES[1, 3:].mean(0), STATES[2, :4].mean(0), np.zeros(2)]
    np.testing.assert_allclose(read, expected, rtol=1e-5)
    given = task.vectors({"encoder": {"encoder": {}}}, None, ids > 0, rng=None, start=jnp.array([4, 3, 4, 0]))
    np.testing.assert_allclose(given, expected, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------- the loss


def test_the_loss_is_the_sum_of_weighted_cross_entropies():
    rng = np.random.default_rng(0)
    labels = np.array([[0, 1, 2], [2, 2, 0], [1, 1, 1]], np.int32)
    batch = AttributeBatch(
        source=rng.integers(3, 300, (3, 6)).astype(np.int32), source_mask=np.ones((3, 6), bool),
        target=np.zeros((3, 1), np.int32), target_mask=np.zeros((3, 1), bool),
        valid=np.array([True, True, False]), labels=labels,
    )  # fmt: skip
    batch = jax.tree.map(jnp.asarray, batch)
    weights = ((1.0, 2.0, 3.0), (0.5, 1.0, 4.0), (1.0, 1.0, 7.0))
    config = BertConfig(300, d_model=8, num_heads=2, d_ff=16, num_layers=1, max_positions=16, dropout=0.0)
    task = Classifier(DualEncoder(BertEncoder(config)), MECHANISMS, weights, sep_id=1)
    shapes = jax.eval_shape(task.init, jax.random.key(0), batch)
    params = random_like(shapes, rng, scale=1.0)
    logits = np.asarray(jax.jit(task.read, static_argnums=3)(params, batch.source, batch.source_mask, None))
    assert logits.shape == (3, 3, 3)
    loss, metrics = jax.jit(lambda p: task.loss(p, {}, batch, jax.random.key(0), train=False))(params)
    cells = {name: float(mean.value()) for name, mean in metrics.items()}
    guesses = logits.argmax(-1)
    summary = task.summarize(cells)
    accuracies = {"accuracy", *(f"{name}_accuracy" for name in MECHANISMS)}
    assert set(summary) == accuracies | {name.replace("accuracy", "weighted_f1") for name in accuracies}
    trained = jax.eval_shape(lambda p: task.loss(p, {}, batch, jax.random.key(0), train=True), params)[1]
    assert set(trained) == accuracies  # F1 is of evaluations alone
    f1 = [f1_score(labels[:2, c], guesses[:2, c], average="weighted", zero_division=0) for c in range(3)]
    for c, name in enumerate(MECHANISMS):
        assert summary[f"{name}_weighted_f1"] == pytest.approx(f1[c], abs=1e-6)
    assert summary["weighted_f1"] == pytest.approx(np.mean(f1), abs=1e-6)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    # The third row is a filler.
    expected = [-sum(weights[c][labels[b, c]] * log_probs[b, c, labels[b, c]] for c in range(3)) for b in range(2)]
    assert float(loss.value()) == pytest.approx(np.mean(expected), rel=1e-4)
    hits = logits.argmax(-1)[:2] == labels[:2]
    for c, name in enumerate(MECHANISMS):
        assert float(metrics[f"{name}_accuracy"].value()) == pytest.approx(hits[:, c].mean())
    assert float(metrics["accuracy"].value()) == pytest.approx(hits.mean(), rel=1e-5)


def test_class_weights_are_inverse_shares():
    pairs = [Pair(("a",), "b", levels) for levels in [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 0), (1, 1, 1), (2, 2, 2)]]
    assert class_weights(ClassifierTaskSettings(), pairs) == ()
    found = np.array(class_weights(ClassifierTaskSettings(class_weights=True), pairs))
    np.testing.assert_allclose(found[0], [6 / 3 / 3, 6 / 3 / 2, 6 / 3 / 1])
    np.testing.assert_allclose(found[1], [1.0, 1.0, 1.0])


# ------------------------------------------------------------------------------------------------ data, and a whole run


def context(workdir, **changes):
    config = read_json(workdir / "config.json")
    return RunContext(WorkDir(workdir), plan_of({**config, **changes}), "annotate")


def test_pairs_are_split_by_seeker_and_seed(finished):
    stage = ClassifierTaskSettings(data="sample", mechanisms=("exploration", "interpretation"))
    train, holdout = load_pairs(stage, context(finished))
    assert len(train) + len(holdout) == 625
    assert len(holdout) == pytest.approx(0.2 * 625, abs=2)
    assert not {pair.context for pair in train} & {pair.context for pair in holdout}
    assert all(len(pair.levels) == 2 for pair in train)
    again, _ = load_pairs(stage, context(finished))
    other, _ = load_pairs(stage, context(finished, seed=1))
    assert train == again != other
    assert load_pairs(stage, context(finished, seed=1, annotate={"kind": "annotate", "seed": 0}))[0] == train


def test_a_trained_judge_gives_a_level_to_every_text(finished):
    judge = load_judge(context(finished), "attributes")
    assert judge.max_tokens == 16
    contexts = [("My dog died.",), ("We won!", "Great!", "Yes!"), ("Hm.",)]
    logits = judge(contexts, ["Oh no, how old was he?", "", "Tell me more."])
    assert logits.shape == (3, len(MECHANISMS), len(LEVELS))
    assert np.isfinite(logits).all()
    alone = judge(contexts, [""] * 3)
    np.testing.assert_allclose(alone[1], logits[1], atol=1e-5)  # nobody had answered there
    assert np.abs(alone[[0, 2]] - logits[[0, 2]]).max() > 1e-3
    holdout = load_holdout(context(finished), "attributes")
    assert len(holdout) == len(load_pairs(ClassifierTaskSettings(data="sample"), context(finished))[1])
    quality = read_json(finished / "annotate" / "classifiers.json")
    assert set(quality) == set(MECHANISMS)
    for found in quality.values():
        assert found["pairs"] == np.sum(found["confusion"]) == len(holdout)
        assert found["accuracy"] == pytest.approx(100 * np.trace(found["confusion"]) / len(holdout))
