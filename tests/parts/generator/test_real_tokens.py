"""Training and evaluation leave out the logits of padding, and find the same."""

import contextlib
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from empax.core.types import TrainState
from empax.data.exemplars import LabelledBatch
from empax.decoding.settings import DecodeSettings
from empax.training.step import make_train_step
from tests.parts.generator.tiny import PROMPTED, drawn, generator, random_ids
from tests.systems.learning import loss_and_gradient, use_all_cells

T, SIZE = 16, 3 * 16 // 8
TASK = dataclasses.replace(generator(DecodeSettings("greedy", 4)), label_smoothing=0.1)
MODELS = {"encoder-decoder": TASK, "prompted": dataclasses.replace(TASK, model=PROMPTED)}


@pytest.fixture(autouse=True)
def few_cells(monkeypatch):
    monkeypatch.setattr("empax.losses.real_tokens.LEAST", 1)


@pytest.fixture(scope="module")
def given():
    """Responses of 9, 3 and 4 tokens; the last is filler."""
    rng = np.random.default_rng(0)
    mask = jnp.arange(T)[None] < jnp.array([[9], [3], [4]])
    valid = jnp.array([True, True, False])
    return LabelledBatch(
        random_ids(rng, 6), jnp.ones((3, 6), bool), random_ids(rng, T), mask, valid, jnp.zeros(3, jnp.int32)
    )


@contextlib.contextmanager
def shapes():
    """The cells [N, 1] or [B, T] that logits are computed of."""
    seen = set()

    def spy(call, args, kwargs, context):
        if context.method_name == "logits_from":
            seen.add(args[0].shape[:2])
        return call(*args, **kwargs)

    with nn.intercept_methods(spy):
        yield seen


def assert_same(found, expected):
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", [True, False])
def test_nothing_changes_without_padding(given, monkeypatch, name, train):
    task = MODELS[name]
    params = drawn(task, given)

    def learned():
        with shapes() as seen:
            return loss_and_gradient(task, params, {}, given, train=train), seen

    found, seen = learned()
    assert seen == {(SIZE, 1)}
    use_all_cells(monkeypatch)
    expected, seen = learned()
    assert seen == {(3, T)}
    assert_same(found, expected)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_nor_in_an_update_of_micro_batches(given, monkeypatch, accumulate):
    """Each has another number of tokens; the last has none."""

    def updated():
        optimizer = optax.sgd(1.0)
        params = drawn(TASK, given)
        state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key(0))
        with shapes() as seen:
            state, metrics = make_train_step(TASK, optimizer, accumulate=accumulate)(state, {}, given)
        return (state.params, metrics), seen

    found, seen = updated()
    assert seen == {(SIZE // accumulate, 1)}
    use_all_cells(monkeypatch)
    assert_same(found, updated()[0])
