"""Contrast beside any generator's likelihood."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.data.exemplars import LabelledBatch
from empax.decoding.settings import DecodeSettings
from empax.models.heads import EMOTION_HEAD
from empax.models.layers import apply
from empax.models.transformer import EncoderDecoder, TransformerConfig
from empax.parts.generator.contrast import Contrast, Read
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.settings import ContrastSettings
from empax.parts.generator.stages import begun_with
from empax.parts.generator.task import Generator

MODEL = EncoderDecoder(
    TransformerConfig(
        vocab_size=20, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_encoder_layers=1, num_decoder_layers=1,
        dropout=0.0, start_id=2,
    )
)  # fmt: skip
BEAM = DecodeSettings("beam", 5, num_beams=3, rerank="similarity", rerank_similarity=1.0)
PLAIN = Generator(MODEL, Decoder(BEAM, 2, 1, 0), EMOTION_HEAD, emotion_weight=0.1)
TASK = dataclasses.replace(PLAIN, contrast=ContrastSettings(weight=0.5))


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    ids = lambda width: jnp.asarray(rng.integers(3, 20, (3, width)), jnp.int32)  # noqa: E731
    everything = lambda width: jnp.ones((3, width), bool)  # noqa: E731
    target = jnp.concatenate([ids(4), jnp.ones((3, 1), jnp.int32)], axis=1)
    emotion = jnp.zeros(3, jnp.int32)
    return LabelledBatch(ids(6), everything(6), target, everything(5), jnp.ones(3, bool), emotion)


@pytest.fixture(scope="module")
def params(given):
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(TASK.init, jax.random.key(0), given)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, leaf.dtype), shapes)


def loss(task, params, given):
    return jax.jit(lambda p, b: task.loss(p, {}, b, jax.random.key(0), train=False))(params, given)


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
        return Contrast(TASK.contrast, MODEL).similarities(
            params["model"], params["contrast"], read, found, whole, None
        )

    scored = np.asarray(jax.jit(cosines)(params))
    assert (np.diff(scored, axis=1) <= 1e-6).all()
    assert np.ptp(scored) > 1e-3


def test_a_contrast_that_an_earlier_stage_did_not_learn_begins_at_random():
    drawn = {"model": 1, "emotion": 2, "contrast": 3}
    assert begun_with(drawn, {"model": 10, "emotion": 20}) == {"model": 10, "emotion": 20, "contrast": 3}
    assert begun_with(drawn, {"model": 10, "contrast": 30}) == {"model": 10, "contrast": 30}
    assert begun_with({"model": 1}, {"model": 10, "contrast": 30}) == {"model": 10}
