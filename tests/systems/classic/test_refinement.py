"""CEM's reader and its loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.types import Instance
from empax.data.knowledge import SOCIAL_RELATIONS, Fact
from empax.data.words import train_words
from empax.systems.classic.settings import ClassicSettings
from empax.systems.classic.stages import ClassicParts
from tests.systems.classic.small import END, rows_of, token_nll

AFFECTION, COGNITION = SOCIAL_RELATIONS.index("xReact"), range(1, 5)


def with_facts(one, relation, *, ids=None, mask=None):
    """The batch with other facts of one relation."""
    facts, present = one.batch.facts, one.batch.facts_mask
    facts = facts if ids is None else facts.at[:, relation].set(ids)
    return dataclasses.replace(
        one.batch, facts=facts, facts_mask=present if mask is None else present.at[:, relation].set(mask)
    )


def states_of(one, stack, relation, batch):
    """What an encoder makes of the facts of a relation."""

    def encode(model, ids, mask):
        encoder = getattr(model.refinement, stack)
        inputs = model.core.enter(encoder, model.core.embed(ids), jnp.arange(ids.shape[1]), deterministic=True)
        return encoder(inputs, mask[:, None, :], deterministic=True)[0]

    return np.asarray(one.apply(batch.facts[:, relation], batch.facts_mask[:, relation], method=encode))


def refined(one, name, vector, states):
    def read(model, vector, states, mask):
        return getattr(model.refinement, name)(vector, states, mask, train=False)

    return np.asarray(one.apply(jnp.asarray(vector), states, one.batch.source_mask, method=read))


def test_the_decoder_reads_five_refined_contexts_behind_a_gate(made):
    one = made["cem"]
    batch = with_facts(one, COGNITION[1], mask=False)  # nothing is known of that one
    states = made["transformer"].read(batch, one.params).states
    real = np.asarray(batch.facts_mask[:, AFFECTION])
    feelings = states_of(one, "affection", AFFECTION, batch)
    mean = (feelings * real[..., None]).sum(axis=1) / real.sum(axis=1, keepdims=True)
    contexts = []
    for relation in COGNITION:
        first = states_of(one, "cognition", relation, batch)[:, 0]
        vector = np.zeros_like(first) if relation == COGNITION[1] else first
        contexts.append(refined(one, "refined_cognition", vector, states))
    affection = refined(one, "refined_affection", mean, states)
    joined = np.concatenate([*contexts, affection], axis=-1)
    own = jax.tree.map(np.asarray, one.params["refinement"])
    gated = joined / (1 + np.exp(-joined))
    expected = np.maximum(gated @ own["hidden"]["weight"], 0) @ own["out"]["weight"]
    read, mask = one.read(batch), np.asarray(batch.source_mask)
    np.testing.assert_allclose(np.asarray(read.states)[mask], expected[mask], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(read.context, affection[:, 0], rtol=1e-3, atol=1e-4)


def test_feelings_tell_the_emotion_and_all_facts_the_response(made):
    one = made["cem"]
    read, logits = one.read(), one.logits()
    for relation in range(5):
        other = with_facts(one, relation, ids=jnp.asarray([9, 8, 7, 6]), mask=True)
        assert np.array_equal(one.read(other).emotion, read.emotion) == (relation != AFFECTION)
        assert not np.allclose(one.logits(other), logits, atol=1e-4)


@pytest.mark.slow
def test_padding_of_facts_changes_nothing(made):
    one = made["cem"]
    wide = dataclasses.replace(
        one.batch,
        facts=jnp.pad(one.batch.facts, ((0, 0), (0, 0), (0, 3)), constant_values=7),
        facts_mask=jnp.pad(one.batch.facts_mask, ((0, 0), (0, 0), (0, 3))),
    )
    np.testing.assert_allclose(one.logits(wide), one.logits(), rtol=1e-4, atol=1e-5)


def test_a_row_for_each_relation_has_the_words_of_its_tails():
    facts = [Fact("x", "xReact", "sad"), Fact("x", "xWant", "to cry"), Fact("x", "xReact", "alone"),
             Fact("dog", "IsA", "pet")]  # fmt: skip
    known = Instance("a#2", ("I lost my dog.",), "Oh no!", "sad", {"facts": [fact.row() for fact in facts]})
    tokenizer = train_words(["i lost my dog . oh no ! sad alone to cry pet"], min_count=1)
    asked = [known, Instance("b#2", ("Hi.",), "Oh!", "")]
    examples = rows_of(asked, tokenizer, readers=("refinement",), facts_tokens=3)
    batch = examples.collate(np.array([0, 1, -1]), 9, np.random.default_rng(0))
    assert batch.facts.shape == (3, 5, 3)
    told = {
        relation: tokenizer.decode([int(i) for i in ids[mask][1:]])
        for relation, ids, mask in zip(SOCIAL_RELATIONS, batch.facts[0], batch.facts_mask[0], strict=True)
        if mask.any()
    }
    assert told == {"xReact": "sad alone", "xWant": "to cry"}
    assert (batch.facts[0][batch.facts_mask[0].any(axis=1), 0] == tokenizer.cls_id).all()
    assert not batch.facts_mask[1:].any()


def test_frequent_words_count_less_in_the_loss(made):
    one = made["multi_trs"]
    weights = np.random.default_rng(0).uniform(size=30).astype(np.float32)
    task = dataclasses.replace(one.task, weights={**one.task.weights, "frequency": 1.5})
    loss = jax.jit(lambda p, w: task.loss(p, {"frequency": w}, one.batch, jax.random.key(0), train=False))
    with_it, metrics = loss(one.params, weights)
    without = one.loss(one.params, one.batch, jax.random.key(0), train=False)[0]
    mask, target = np.asarray(one.batch.target_mask), np.asarray(one.batch.target)
    expected = (token_nll(one.logits(), one.batch) * weights[target]).sum() / mask.sum()
    np.testing.assert_allclose(metrics["frequency_loss"].value(), expected, rtol=1e-5)
    np.testing.assert_allclose(with_it.value(), without.value() + 1.5 * expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        ([[2, 2, 2, END], [3, 2, END], [4, 3, END]], [20 / 13, 0.0, 0.0, 10 / 13, 15 / 13]),
        ([[END]], [1.0, 0.0, 1.0, 1.0, 1.0]),
        ([[2, 3, END]], [5 / 3, 0.0, 0.0, 0.0, 5 / 3]),
    ],
)
def test_words_weigh_one_on_average_and_the_end_nothing(responses, expected):
    class Small:
        vocab_size, eos_id = 5, END

    weights = ClassicParts(ClassicSettings(), Small()).word_weights(responses)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
