"""The generator: off, every flag leaves the plain model; on, each changes what it says it does."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common, lempex, reg_transformer
from empax.models.heads import EMOTION_HEAD
from empax.models.stack import Stack
from empax.models.t5 import t5_from_scratch
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.task import Generator
from empax.pipeline.plan import make_plan, plain
from empax.planning.sketches import sketch_stage
from empax.systems.lempex.examples import NOBODY
from empax.systems.lempex.stages import started
from empax.systems.lempex.tasks import LempexGenerator, draw_speakers
from tests.systems.learning import keys, learn, random_like
from tests.systems.lempex import toy

CONTEXTS, RESPONSES = [[5, 6, 7], [8]], [[10, 11], [12, 13, 14]]
EXEMPLARS = [[[4, 5], [6, 7, 8]], [[9], []]]


def test_with_every_flag_off_it_is_the_plain_generator():
    model = EncoderDecoder(dataclasses.replace(toy.CONFIG, dropout=0.3))
    batch = toy.make_batch(CONTEXTS, RESPONSES)
    theirs = Generator(model, toy.DECODER, EMOTION_HEAD, emotion_weight=0.0, heads=())
    ours = LempexGenerator(model, toy.DECODER, speakers=False)

    params, other = (jax.jit(task.init)(jax.random.key(3), batch) for task in (ours, theirs))
    assert set(params) == {"model"}

    def learn(task, params):
        return jax.jit(jax.value_and_grad(lambda p: task.loss(p, {}, batch, jax.random.key(5), train=True)[0].value()))(
            params
        )

    (loss, grads), (expected, others) = learn(ours, params), learn(theirs, other)
    assert loss == expected  # to the bit, and so are the parameters
    for one, two in zip(jax.tree.leaves(params), jax.tree.leaves(other["model"]), strict=True):
        np.testing.assert_array_equal(one, two)
    for one, two in zip(jax.tree.leaves(grads), jax.tree.leaves(others["model"]), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def whole():
    batch = toy.make_batch(CONTEXTS, RESPONSES, exemplars=EXEMPLARS, other=EXEMPLARS[::-1])
    task = toy.make_task(exemplars=True, speakers=True)
    return task, random_like(jax.eval_shape(task.init, jax.random.key(0), batch)), batch


def test_speakers_and_exemplars_change_what_is_read_of_their_row_alone(whole):
    task, params, batch = whole
    assert set(params) == {"model", "fusion", "speakers"}
    read = jax.jit(task.read)
    nll = read(params, batch)["nll"]
    changed = read(params, batch.replace(speaker=batch.speaker.at[0, 1].set(2)))["nll"]
    assert changed[0] != nll[0]
    assert changed[1] == nll[1]
    silent = {**params, "speakers": jnp.zeros_like(params["speakers"])}
    without = jax.jit(dataclasses.replace(task, speakers=False).read)(params, batch)
    np.testing.assert_allclose(read(silent, batch)["nll"], without["nll"], rtol=1e-6)
    found = read(params, batch)
    swapped = read(params, batch.replace(exemplar=batch.other, exemplar_mask=batch.other_mask))
    np.testing.assert_array_equal(found["nll_of_other_exemplars"], swapped["nll"])
    assert np.abs(found["nll_of_other_exemplars"] - found["nll"]).min() > 1e-4


def test_speakers_begin_as_large_as_words_and_at_zero_beside_pretrained_weights():
    """Adafactor's steps are relative to a parameter's size: from zero, a short run would leave them near zero."""
    drawn = np.asarray(draw_speakers(jax.random.key(0), t5_from_scratch(20, d_model=300)))
    np.testing.assert_array_equal(drawn[NOBODY], 0.0)
    np.testing.assert_allclose(np.delete(drawn, NOBODY, axis=0).std(axis=1), 1.0, atol=0.15)  # a T5's words have 1

    table = np.ones((20, 300), np.float32)
    params = {"model": {"token_embedding": table}, "speakers": drawn}
    for pretrained, speakers in ((False, drawn), (True, np.zeros_like(drawn))):
        found = started(params, {"token_embedding": 2 * table}, pretrained=pretrained)
        np.testing.assert_array_equal(found["speakers"], speakers)
        np.testing.assert_array_equal(found["model"]["token_embedding"], 2 * table)


@pytest.mark.parametrize("decoder", [False, True])
def test_positions_move_as_fast_as_in_other_transformers_from_scratch(decoder):
    settings, other = lempex.get_config().generator, reg_transformer.get_config().generator
    (own,), (group,) = settings.optimizer.groups, other.optimizer.groups
    slopes = Stack(t5_from_scratch(20), 1, decoder)._slopes(jax.random.key(0), (32, 6))
    step = settings.optimizer.learning_rate * own["learning_rate_scale"] * np.sqrt(np.mean(np.square(slopes)))
    assert step == pytest.approx(other.optimizer.learning_rate * group["learning_rate_scale"], rel=0.2)


def test_the_recipe_says_how_much_longer_a_gpu_trains():
    few, many = (lempex.get_config(machine).generator.steps for machine in ("", "machine=gpu"))
    assert f"{many:,} updates instead of {few:,}" in lempex.__doc__


def test_speakers_can_become_as_large_as_the_words_of_a_pretrained_t5():
    """Whose embeddings have a root mean square of 13.5; speakers begin at zero, and alone part the turns."""
    config = lempex.get_config("t5")
    optimizer, (group,) = config.generator.optimizer, config.generator.optimizer.groups
    assert re.search(group["pattern"], "speakers")
    assert not re.search(group["pattern"], "model/token_embedding")
    plain = optimizer.learning_rate * config.generator.steps / 2
    assert 8 < plain * group["learning_rate_scale"] < 20
    assert f"at the plain rate it would reach {plain:.2f}.".replace(" 0.", " .") in inspect.getsource(lempex)
    assert config.lempex.generator.unroll == config.judges.encoder.unroll == common.ON_CPU["unroll"]


@pytest.mark.slow
def test_exemplars_that_tell_the_reply_are_used_and_others_cost_likelihood():
    words = [10, 11, 12, 13]
    batch = toy.make_batch(
        [[5]] * 4, [[w] for w in words], exemplars=[[[w], [w, 6]] for w in words],
        other=[[[w], [w, 6]] for w in words[1:] + words[:1]],
    )  # fmt: skip
    task = toy.make_task(exemplars=True)
    params = jax.jit(task.init)(jax.random.key(0), batch)
    params, _ = learn(lambda p, key: task.loss(p, {}, batch, key, train=True), params, keys(150), 0.01)
    found = jax.jit(task.read)(params, batch)
    assert np.max(found["nll"]) < 0.2
    assert np.min(found["nll_of_other_exemplars"] - found["nll"]) > 1.0
    tokens = jax.jit(task.generate)(params, {}, batch, jax.random.key(0)).tokens[:, 0, 0]
    np.testing.assert_array_equal(tokens, words)


@pytest.mark.slow
def test_judges_are_trained_where_they_are_not_frozen():
    batch = toy.make_batch(CONTEXTS, RESPONSES, levels=[[0, 1, 2]] * 2, compounds=[0.1, 0.2])
    fixed, learning = (toy.make_task(toy.make_losses(frozen_judges=frozen)) for frozen in (True, False))
    shapes = jax.eval_shape(learning.init, jax.random.key(0), batch)
    assert set(shapes) == {"model", "judges"}
    assert set(jax.eval_shape(fixed.init, jax.random.key(0), batch)) == {"model"}
    params = random_like(shapes)
    asked = jax.jit(
        lambda p: fixed.loss({"model": p["model"]}, {"judges": p["judges"]}, batch, jax.random.key(0), train=False)[
            0
        ].value()
    )
    both = jax.jit(jax.value_and_grad(lambda p: learning.loss(p, {}, batch, jax.random.key(0), train=False)[0].value()))
    value, grads = both(params)
    np.testing.assert_allclose(value, asked(params), rtol=1e-6)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads["judges"]["sentiment"]["head"]))


def test_a_plan_judges_rows_that_are_cut_as_in_training():
    config = plain(lempex.get_config("tiny"))
    for most in (64, 40):
        config["judges"]["max_tokens"] = most
        plan = make_plan(config)
        assert plan.stages["generator"].loop.buckets[-1] > most
        assert sketch_stage(plan, plan.stages["generator"]).sketch.batch.judged.shape[1] == most


def test_validation_has_the_likelihood_alone():
    batch = toy.make_batch(CONTEXTS, RESPONSES)
    task = toy.make_task(toy.make_losses())
    shapes = jax.eval_shape(task.init, jax.random.key(0), batch)
    loss, metrics = jax.eval_shape(lambda p: task.loss(p, {}, batch, jax.random.key(0), train=False), shapes)
    assert set(metrics) == {"nll"}
    assert loss.total.shape == ()
