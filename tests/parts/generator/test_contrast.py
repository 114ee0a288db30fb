"""Contrast beside any generator's likelihood."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.data.exemplars import LabelledBatch
from empax.decoding.settings import DecodeSettings
from empax.models.layers import apply
from empax.parts.generator.contrast import Contrast, Read
from empax.parts.generator.settings import ContrastSettings
from empax.parts.generator.stages import begun_with
from tests.parts.generator.tiny import MODEL, drawn, generator, loss, random_ids

PLAIN = generator(DecodeSettings("beam", 5, num_beams=3, rerank="similarity", rerank_similarity=1.0))
TASK = dataclasses.replace(PLAIN, contrast=ContrastSettings(weight=0.5))


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    everything = lambda width: jnp.ones((3, width), bool)  # noqa: E731
    target = jnp.concatenate([random_ids(rng, 4), jnp.ones((3, 1), jnp.int32)], axis=1)
    emotion = jnp.zeros(3, jnp.int32)
    return LabelledBatch(random_ids(rng, 6), everything(6), target, everything(5), jnp.ones(3, bool), emotion)


@pytest.fixture(scope="module")
def params(given):
    return drawn(TASK, given)


def test_without_it_there_is_nothing_of_it(given, params):
    assert set(params) == {"model", "emotion", "contrast"}
    plain = jax.eval_shape(PLAIN.init, jax.random.key(0), given)
    assert set(plain) == {"model", "emotion"}
    assert PLAIN.splits_batches
    assert not TASK.splits_batches
    metrics = jax.eval_shape(lambda p: PLAIN.loss(p, {}, given, jax.random.key(0), train=True)[1], plain)
    assert "contrast" not in metrics


def test_the_loss_has_it_with_its_weight(given, params):
    found, metrics = loss(TASK, params, given)
    plain, _ = loss(PLAIN, params, given)
    assert float(metrics["contrast"].value()) > 0
    np.testing.assert_allclose(found.value(), plain.value() + 0.5 * metrics["contrast"].value(), rtol=1e-5)


def test_answers_are_the_beams_nearest_to_the_context(given, params):
    rng = jax.random.key(0)
    found = jax.jit(lambda p: TASK.generate(p, {}, given, rng).tokens)(params)

    def cosines(params):
        states = apply(MODEL, params["model"], given.source, given.source_mask, method="encode", rng=None)
        made = (found != 1) & (found != 0)
        whole = jnp.arange(found.shape[2])[None, None] <= made.sum(axis=2, keepdims=True)
        read = Read(states, given.source_mask)
        return Contrast(TASK.contrast, MODEL, params["model"], params["contrast"]).similarities(
            read, found, whole, None
        )

    scored = np.asarray(jax.jit(cosines)(params))
    assert (np.diff(scored, axis=1) <= 1e-6).all()
    assert np.ptp(scored) > 1e-3


def test_a_contrast_that_an_earlier_stage_did_not_learn_begins_at_random():
    drawn = {"model": 1, "emotion": 2, "contrast": 3}
    assert begun_with(drawn, {"model": 10, "emotion": 20}) == {"model": 10, "emotion": 20, "contrast": 3}
    assert begun_with(drawn, {"model": 10, "contrast": 30}) == {"model": 10, "contrast": 30}
    assert begun_with({"model": 1}, {"model": 10, "contrast": 30}) == {"model": 10}
