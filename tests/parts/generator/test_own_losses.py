"""Losses of users beside any generator's likelihood."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.shapes import shapes_of
from empax.data.exemplars import LabelledBatch
from empax.decoding.settings import DecodeSettings
from empax.parts.generator.own_losses import try_losses
from empax.parts.generator.settings import LossSettings
from tests.parts.generator.tiny import MODEL, V, drawn, generator, loss, random_ids

ROWS, T = 3, 5
PLAIN = generator(DecodeSettings("greedy", 4))


def unsure(logits, batch):
    """The entropy of each token: what a confidence penalty takes."""
    log_probs = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_probs) * log_probs).sum(axis=-1)


def first_token(logits, batch):
    """Of each row, how likely its first token is."""
    return jax.nn.log_softmax(logits[:, 0])[jnp.arange(len(logits)), batch.target[:, 0]]


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """An importable module with the functions."""
    made = types.ModuleType("losses_of_somebody")
    made.unsure, made.first_token = unsure, first_token
    made.whole = lambda logits, batch: logits.sum()
    made.ids = lambda logits, batch: batch.target
    made.fails = lambda logits, batch: logits[:, :, V + 1, 0]
    monkeypatch.setitem(sys.modules, made.__name__, made)


@pytest.fixture(scope="module")
def given():
    """Three rows of 5, 3 and 4 target tokens; the last one is filler."""
    rng = np.random.default_rng(0)
    mask = jnp.arange(T)[None] < jnp.array([[5], [3], [4]])
    valid = jnp.array([True, True, False])
    source, target = random_ids(rng, 6), random_ids(rng, T)
    return LabelledBatch(source, jnp.ones((ROWS, 6), bool), target, mask, valid, jnp.zeros(ROWS, jnp.int32))


@pytest.fixture(scope="module")
def params(given):
    return drawn(PLAIN, given)


def with_losses(*losses):
    return dataclasses.replace(PLAIN, own_losses=losses)


def named(name, weight=0.5):
    return LossSettings(f"losses_of_somebody:{name}", weight)


@pytest.mark.parametrize("name", ["unsure", "first_token"])
def test_it_is_added_with_its_weight_and_logged_under_its_name(given, params, name):
    plain, before = loss(PLAIN, params, given)
    found, metrics = loss(with_losses(named(name)), params, given)
    assert set(metrics) - set(before) == {f"losses_of_somebody:{name}"}
    logits = jax.jit(MODEL.apply)({"params": params["model"]}, given.source, given.source_mask, given.target)
    values = np.asarray({"unsure": unsure, "first_token": first_token}[name](logits, given))
    counted = np.asarray(given.target_mask & given.valid[:, None])
    expected = np.average(values, weights=counted if values.ndim == 2 else counted.sum(axis=1))
    np.testing.assert_allclose(metrics[f"losses_of_somebody:{name}"].value(), expected, rtol=1e-5)
    np.testing.assert_allclose(found.value(), plain.value() + 0.5 * expected, rtol=1e-5)


def test_gradients_add_up(given, params):
    def gradient(params, *losses):
        task = with_losses(*losses)
        value = lambda params: task.loss(params, {}, given, jax.random.key(0), train=False)[0].value()  # noqa: E731
        return jax.grad(value)(params)["model"]["token_embedding"]

    one, other = named("unsure"), named("first_token", -1.0)
    each = (), (one,), (other,), (one, other)
    found = jax.jit(lambda params: [gradient(params, *losses) for losses in each])(params)  # one compilation
    plain, first, second, both = map(np.asarray, found)
    assert np.abs(first - plain).max() > 1e-3
    np.testing.assert_allclose(both, first + second - plain, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "losses_of_somebody has no function 'missing'"),
        (
            "whole",
            r"somebody:whole returns .* must return an array of floats of shape \(3,\) or \(3, 5\)",
        ),
        ("ids", "must return an array of floats"),
        ("fails", "the loss losses_of_somebody:fails raised IndexError"),
    ],
)
def test_what_is_no_loss_is_told_before_any_work(name, message):
    batch = shapes_of(LabelledBatch, B=ROWS, S=6, T=T)
    try_losses([named("unsure"), named("first_token")], batch, V)
    with pytest.raises(ConfigError, match=message):
        try_losses([named("unsure"), named(name)], batch, V)
