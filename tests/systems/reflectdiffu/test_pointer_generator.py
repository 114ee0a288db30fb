"""A distribution over words and copies: it sums to 1, copies what it attends to, and decodes as it is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.models.transformer import EncoderDecoder, scratch
from empax.systems.reflectdiffu.pointer_generator import PointerGenerator
from tests.systems.learning import random_like

B, S, T, V, D, SLOTS = 2, 6, 4, 17, 12, 2
SMALL = {"d_model": D, "num_heads": 2, "head_dim": 6, "d_ff": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.fixture(scope="module")
def made():
    base = EncoderDecoder(scratch(V, **SMALL, feed_forward_kernel=3, position="sinusoidal", start_id=2))
    model = PointerGenerator(base, slots=SLOTS, unknown_id=3)
    source, mask, target, states = example()
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), target, states, mask, source, method="decode"))
    params = random_like(shapes["params"], seed=3)
    run = jax.jit(lambda params, target, states, mask, source: model.apply(
        {"params": params}, target, states, mask, source, method="decode"))  # fmt: skip
    return model, params, run


def example():
    """Row 0 has one word twice, and a word of its own (id V); row 1 has padding."""
    rng = np.random.default_rng(0)
    source = np.array([[5, 9, 5, V, 4, 8], [7, 6, 10, 11, 0, 0]])
    mask = np.array([[1] * 6, [1] * 4 + [0] * 2], bool)
    target, states = rng.integers(4, V, (B, T)), rng.normal(size=(B, S, D)).astype(np.float32)
    target[0, 1] = V
    return tuple(map(jnp.asarray, (source, mask, target, states)))


def gated(params, bias):
    return {**params, "gate": jnp.zeros_like(params["gate"]), "gate_bias": jnp.float32(bias)}


def test_it_sums_to_one_and_its_gate_chooses(made):
    model, params, run = made
    source, mask, target, states = example()
    found = np.exp(run(params, target, states, mask, source))
    assert found.shape == (B, T, V + SLOTS)
    np.testing.assert_allclose(found.sum(axis=-1), 1.0, atol=1e-5)

    words = np.exp(run(gated(params, 50.0), target, states, mask, source))

    @jax.jit
    def plain(params, target):
        bound = model.model.bind({"params": params})
        hidden, weights = bound.decode_with_weights(target, states, mask)
        return bound.logits_from(hidden), weights

    logits, weights = plain(params["model"], model.known(target))
    np.testing.assert_allclose(words[..., :V], jax.nn.softmax(logits), atol=1e-5)
    assert words[..., V:].max() < 1e-8

    copies = np.exp(run(gated(params, -50.0), target, states, mask, source))
    weights = np.asarray(weights)
    np.testing.assert_allclose(copies[0, :, 5], weights[0, :, 0] + weights[0, :, 2], atol=1e-5)
    np.testing.assert_allclose(copies[0, :, V], weights[0, :, 3], atol=1e-5)
    assert copies[1, :, 0].max() < 1e-6  # padding
    np.testing.assert_allclose(copies[1, :, [7, 6, 10, 11]].sum(axis=0), 1.0, atol=1e-5)


def test_states_of_padding_change_nothing(made):
    _, params, run = made
    source, mask, target, states = example()
    expected = run(params, target, states, mask, source)
    changed = jnp.where(mask[..., None], states, 9.0)
    np.testing.assert_array_equal(run(params, target, changed, mask, source), expected)


@pytest.mark.slow
def test_cached_decoding_equals_teacher_forcing(made):
    """With a word that the vocabulary lacks; the second hypothesis follows another word until it is reordered."""
    model, params, run = made
    source, mask, target, states = example()
    expected = run(params, target, states, mask, source)
    options = {"num_hypotheses": 2, "max_length": T, "source": source}
    cache = model.apply({"params": params}, states, mask, **options, method="start_cache")
    step = jax.jit(lambda tokens, cache: model.apply({"params": params}, tokens, cache, method="step"))
    tokens = jnp.full((B, 2), 2)
    for t in range(T):
        found, cache = step(tokens, cache)
        np.testing.assert_allclose(found[:, 0], expected[:, t], rtol=1e-4, atol=1e-4)
        if t != 1:
            np.testing.assert_allclose(found[:, 1], expected[:, t], rtol=1e-4, atol=1e-4)
        if t == 1:
            cache = cache.reorder(jnp.zeros((B, 2), jnp.int32))
        tokens = jnp.stack([target[:, t], target[:, t] if t else (target[:, t] + 1) % V], axis=1)


def test_an_accelerator_converts_the_output_layer_once_for_all_steps(made, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    base = EncoderDecoder(dataclasses.replace(made[0].model.config, dtype="bfloat16"))
    model, params = made[0].clone(model=base), made[1]
    source, mask, target, states = example()
    options = {"num_hypotheses": 1, "max_length": T, "source": source}
    cache = model.apply({"params": params}, states, mask, **options, method="start_cache")
    step = jax.jit(lambda cache: model.apply({"params": params}, jnp.full((B, 1), 2), cache, method="step")[0])
    expected = model.apply({"params": params}, target, states, mask, source, method="decode")
    np.testing.assert_allclose(step(cache)[:, 0], expected[:, 0], rtol=0.05, atol=0.1)
    none = cache.replace(decoder=cache.decoder.replace(table=jnp.zeros_like(cache.decoder.table)))
    assert not np.allclose(step(none)[:, 0], expected[:, 0], atol=0.5)  # steps read the cache's
