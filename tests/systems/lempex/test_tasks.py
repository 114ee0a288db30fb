"""The generator: off, every flag leaves the plain model; on, each changes what it says it does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.models.heads import EMOTION_HEAD
from empax.models.transformer import EncoderDecoder
from empax.systems.dialogue.generator import Generator
from empax.systems.lempex.tasks import LempexGenerator
from tests.systems.lempex import toy

CONTEXTS, RESPONSES = [[5, 6, 7], [8]], [[10, 11], [12, 13, 14]]
EXEMPLARS = [[[4, 5], [6, 7, 8]], [[9], []]]


def test_with_every_flag_off_it_is_the_plain_generator_to_the_bit():
    model = EncoderDecoder(dataclasses.replace(toy.CONFIG, dropout=0.3))
    batch = toy.make_batch(CONTEXTS, RESPONSES)
    plain = Generator(model, EMOTION_HEAD, toy.DECODER, emotion_weight=0.0, heads=())
    ours = LempexGenerator(model, toy.DECODER, speakers=False)
    fresh, other = jax.jit(ours.init)(jax.random.key(3), batch), jax.jit(plain.init)(jax.random.key(3), batch)
    assert set(fresh) == {"model"}
    for one, two in zip(jax.tree.leaves(fresh["model"]), jax.tree.leaves(other["model"]), strict=True):
        np.testing.assert_array_equal(one, two)
    for rng in (None, jax.random.key(5)):
        found = [
            jax.jit(jax.value_and_grad(lambda p, t=t, rng=rng: t.loss(p, {}, batch, rng)[0].value()))(p)
            for t, p in ((ours, fresh), (plain, other))
        ]
        assert found[0][0] == found[1][0]
        for one, two in zip(jax.tree.leaves(found[0][1]["model"]), jax.tree.leaves(found[1][1]["model"]), strict=True):
            np.testing.assert_array_equal(one, two)
    rng = jax.random.key(0)
    made = [t.generate(p, {}, batch, rng).tokens for t, p in ((ours, fresh), (plain, other))]
    np.testing.assert_array_equal(*made)
    np.testing.assert_array_equal(ours.read(fresh, batch)["nll"], plain.read(other, batch)["nll"])


@pytest.fixture(scope="module")
def whole():
    batch = toy.make_batch(CONTEXTS, RESPONSES, exemplars=EXEMPLARS, other=EXEMPLARS[::-1])
    task = toy.make_task(exemplars=True, speakers=True)
    return task, toy.random_like(jax.eval_shape(task.init, jax.random.key(0), batch)), batch


def test_speakers_and_exemplars_change_what_is_read(whole):
    task, params, batch = whole
    assert set(params) == {"model", "fusion", "speakers"}
    nll = task.read(params, batch)["nll"]
    listener = batch.replace(speaker=batch.speaker.at[0, 1].set(2))
    changed = task.read(params, listener)["nll"]
    assert changed[0] != nll[0]
    assert changed[1] == nll[1]
    silent = {**params, "speakers": jnp.zeros_like(params["speakers"])}
    without = dataclasses.replace(task, speakers=False)
    np.testing.assert_array_equal(task.read(silent, batch)["nll"], without.read(params, batch)["nll"])
    found = task.read(params, batch)
    swapped = task.read(params, batch.replace(exemplar=batch.other, exemplar_mask=batch.other_mask))
    np.testing.assert_array_equal(found["nll_of_other_exemplars"], swapped["nll"])
    assert np.abs(found["nll_of_other_exemplars"] - found["nll"]).min() > 1e-4


def test_a_row_does_not_depend_on_the_others(whole):
    task, params, batch = whole
    alone = jax.tree.map(lambda leaf: leaf[:1], batch)
    np.testing.assert_allclose(task.read(params, alone)["nll"], task.read(params, batch)["nll"][:1], rtol=1e-5)


@pytest.mark.slow
def test_exemplars_that_tell_the_reply_are_used_and_others_cost_likelihood():
    words = [10, 11, 12, 13]
    batch = toy.make_batch(
        [[5]] * 4, [[w] for w in words], exemplars=[[[w], [w, 6]] for w in words],
        other=[[[w], [w, 6]] for w in words[1:] + words[:1]],
    )  # fmt: skip
    task = toy.make_task(exemplars=True)
    params, _ = toy.train(task, jax.jit(task.init)(jax.random.key(0), batch), {}, batch, 150)
    found = task.read(params, batch)
    assert np.max(found["nll"]) < 0.2
    assert np.min(found["nll_of_other_exemplars"] - found["nll"]) > 1.0
    tokens = task.generate(params, {}, batch, jax.random.key(0)).tokens[:, 0, 0]
    np.testing.assert_array_equal(tokens, words)


def test_judges_are_trained_where_they_are_not_frozen():
    batch = toy.make_batch(CONTEXTS, RESPONSES, levels=[[0, 1, 2]] * 2, compounds=[0.1, 0.2])
    for frozen_judges in (True, False):
        task = toy.make_task(toy.make_losses(frozen_judges=frozen_judges))
        params = jax.eval_shape(task.init, jax.random.key(0), batch)
        assert ("judges" in params) is not frozen_judges
    trained = toy.random_like(params)
    same = toy.make_task(toy.make_losses())
    frozen = {"judges": trained["judges"]}
    one = task.loss(trained, {}, batch, None)[0].value()
    two = same.loss({"model": trained["model"]}, frozen, batch, None)[0].value()
    np.testing.assert_allclose(one, two, rtol=1e-6)
    grads = jax.jit(jax.grad(lambda p: task.loss(p, {}, batch, None)[0].value()))(trained)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads["judges"]["sentiment"]["head"]))


def test_validation_has_the_likelihood_alone():
    batch = toy.make_batch(CONTEXTS, RESPONSES)
    task = toy.make_task(toy.make_losses())
    params = toy.random_like(jax.eval_shape(task.init, jax.random.key(0), batch))
    loss, metrics = task.loss(params, {"judges": {}}, batch, None)
    assert set(metrics) == {"nll"}
    np.testing.assert_allclose(loss.value(), metrics["nll"].value(), rtol=1e-6)
