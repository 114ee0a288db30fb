"""The empathy identifiers as a task and as judges: what they read, how they learn, what they reward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError, to_settings
from empax.core.protocols import SummarizingTask
from empax.core.types import MECHANISMS
from empax.data.batches import eval_batches
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.parts.attributes.identifier import (
    ExchangeExamples,
    IdentifierJudge,
    Identifiers,
    IdentifierTaskSettings,
    empathy_reward,
    encode_contexts,
    encode_responses,
    make_task,
)
from empax.parts.attributes.pairs import Pair
from tests.systems.learning import keys, learn, random_like

ENCODER = EncoderSettings(d_model=8, num_heads=2, d_ff=16, num_layers=1, max_positions=16)
STAGE = IdentifierTaskSettings(encoder=ENCODER, max_context_tokens=10, response_buckets=(6, 8))
CONTEXTS = [("a b", "c"), ("f",), ("a b c d e f g h i",), ("k",), ("l m",)]
RESPONSES = ["d e", "g h i j k l m n", "j", "", "a b c"]


def test_context_and_response_are_framed_apart_and_cut_where_least_is_lost(tokenizer, spelled):
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    contexts, responses = encode_contexts(tokenizer, CONTEXTS, 10), encode_responses(tokenizer, RESPONSES, 8)
    assert contexts[0] == [cls, *spelled("a b c"), sep]
    assert responses[0] == [cls, *spelled("d e"), sep]
    whole = spelled(CONTEXTS[2][0])
    assert contexts[2] == [cls, *whole[-8:], sep]  # the newest stay
    whole = spelled(RESPONSES[1])
    assert responses[1] == [cls, *whole[:3], *whole[-3:], sep]  # both ends stay
    assert responses[3] == [cls, sep]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pooling": "sum"}, "'mean', 'max'"),
        ({"head": "deep"}, "'mlp', 'linear'"),
        ({"dropout": 1.0}, r"dropout = 1.0 must lie in \[0, 1\)"),
        ({"max_context_tokens": 3}, "max_context_tokens = 3 must be at least 4"),
        ({"response_buckets": (16, 8)}, "must be ascending"),
        ({"response_buckets": ()}, "must be ascending"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        to_settings(IdentifierTaskSettings, values, where="config.identifiers")


def pairs():
    return [Pair(c, r, (i % 3, (i + 1) % 3, 2)) for i, (c, r) in enumerate(zip(CONTEXTS, RESPONSES, strict=True))]


def test_batches_hold_the_context_as_source_and_the_response_as_target(tokenizer):
    examples = ExchangeExamples(pairs(), tokenizer, STAGE)
    assert examples.lengths.shape == (5, 2)
    assert examples.lengths[2, 0] == 10
    rng = np.random.default_rng(0)
    batch = examples.collate(np.array([0, 4, -1]), 10, rng)
    assert (batch.source.shape, batch.target.shape) == ((3, 10), (3, 6))  # the smallest bucket of responses
    assert examples.collate(np.array([0, 1]), 10, rng).target.shape == (2, 8)
    np.testing.assert_array_equal(batch.source_mask.sum(axis=1), [*examples.lengths[[0, 4], 0], 0])
    np.testing.assert_array_equal(batch.target_mask.sum(axis=1), [*examples.lengths[[0, 4], 1], 0])
    np.testing.assert_array_equal(batch.valid, [True, True, False])
    np.testing.assert_array_equal(batch.labels[:2], [[0, 1, 2], [1, 2, 2]])


def judge_of(tokenizer, mechanisms=MECHANISMS):
    stage = dataclasses.replace(STAGE, mechanisms=mechanisms)
    task = make_task(stage, load_encoder(stage.encoder, tokenizer))
    own = [dataclasses.replace(pair, levels=pair.levels[: len(mechanisms)]) for pair in pairs()]
    examples = ExchangeExamples(own, tokenizer, stage)
    ((_, batch),) = eval_batches(examples, batch_size=5, buckets=[10])
    shapes = jax.eval_shape(task.init, jax.random.key(0), batch)
    return IdentifierJudge(task, random_like(shapes, scale=1.0), tokenizer, stage, "hash"), batch


@pytest.mark.slow
def test_texts_are_judged_alike_one_by_one_and_by_several_judges(tokenizer):
    judge, _ = judge_of(tokenizer)
    assert isinstance(judge.task, SummarizingTask)
    log_probs = judge(CONTEXTS, RESPONSES)
    assert log_probs.shape == (5, 3, 3)
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=-1), 1.0, rtol=1e-5)
    assert np.abs(log_probs - log_probs[:1]).max() > 0.1
    np.testing.assert_allclose(judge(CONTEXTS[1:2], RESPONSES[1:2])[0], log_probs[1], rtol=1e-4, atol=1e-5)
    assert judge([], []).shape == (0, 3, 3)

    # One mechanism a stage, in another order: the same numbers under the same names.
    singles = []
    for mechanism in reversed(MECHANISMS):
        own = {name: judge.params[name] for name in ("context_encoder", "response_encoder", mechanism)}
        task = dataclasses.replace(judge.task, model=judge.task.model.clone(mechanisms=(mechanism,)))
        singles.append(dataclasses.replace(judge, task=task, params=own))
    for judges in ([judge], singles):
        found = Identifiers(tuple(judges))(CONTEXTS, RESPONSES)
        np.testing.assert_allclose(found, log_probs, rtol=1e-4, atol=1e-5)


def test_the_empathy_reward_is_the_product_of_the_gold_levels_probabilities():
    raw, levels = np.random.default_rng(0).random((2, 3, 3)), np.array([[0, 1, 2], [2, 2, 0]])
    given = raw / raw.sum(-1, keepdims=True)
    found = empathy_reward(np.log(given), levels)
    expected = [np.prod([given[b, m, levels[b, m]] for m in range(3)]) for b in range(2)]
    cross_entropies = -np.log([[given[b, m, levels[b, m]] for m in range(3)] for b in range(2)]).sum(1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(found, np.exp(-cross_entropies), rtol=1e-6)


def test_what_is_impossible_earns_nothing_and_breaks_nothing():
    log_probs = np.tile([0.0, -200.0, -200.0], (1, 3, 1)).astype(np.float32)
    assert empathy_reward(log_probs, np.array([[1, 1, 1]]))[0] == 0.0


@pytest.mark.slow
def test_one_mechanism_learns_its_label_from_context_and_response(tokenizer):
    judge, batch = judge_of(tokenizer, ("interpretation",))
    batch = jax.tree.map(jnp.asarray, batch)
    loss = jax.jit(lambda params, key: judge.task.loss(params, {}, batch, key, train=False))
    params, metrics = learn(loss, judge.params, keys(40), 0.03)
    before, after = (float(loss(one, jax.random.key(0))[0].value()) for one in (judge.params, params))
    assert after < 0.5 * before
    summary = judge.task.summarize({name: float(mean.value()) for name, mean in metrics.items()})
    assert set(summary) == {"accuracy", "interpretation_accuracy", "weighted_f1", "interpretation_weighted_f1"}
    assert not np.allclose(
        judge.params["context_encoder"]["token_embedding"], params["context_encoder"]["token_embedding"]
    )
