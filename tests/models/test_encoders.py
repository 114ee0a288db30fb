import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import ClassificationHead, masked_mean
from empax.systems.reg.encoder import EmotionEncoder

CONFIG = BertConfig(vocab_size=31, d_model=12, num_heads=3, d_ff=20, num_layers=2, max_positions=9)


@pytest.fixture(scope="module")
def tower():
    ids = jnp.asarray(np.random.default_rng(0).integers(1, 31, size=(3, 8)))
    mask = jnp.asarray(np.arange(8)[None] < np.array([8, 5, 1])[:, None])
    params = jax.jit(DualEncoder(BertEncoder(CONFIG)).init)(jax.random.key(0), ids, mask)["params"]
    return params, ids, mask


def embed(params, ids, mask, **settings):
    return program(**settings)({"params": params}, ids, mask)


@functools.cache
def program(**settings):
    return jax.jit(DualEncoder(BertEncoder(CONFIG), **settings).apply)


def test_pooling_and_normalising(tower):
    params, ids, mask = tower
    states = np.asarray(jax.jit(BertEncoder(CONFIG).apply)({"params": params["encoder"]}, ids, mask))
    expected = np.stack([row[real].mean(0) for row, real in zip(states, np.asarray(mask), strict=True)])
    np.testing.assert_allclose(embed(params, ids, mask), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(embed(params, ids, mask, pooling="cls"), states[:, 0], rtol=1e-6)
    unit = embed(params, ids, mask, normalize=True)
    np.testing.assert_allclose(unit, expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_a_filler_row_has_neither_nan_values_nor_nan_gradients(tower):
    params, ids, mask = tower

    def loss(params):
        return embed(params, ids, mask.at[0].set(False), normalize=True).sum()

    value, grads = jax.value_and_grad(loss)(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_emotions_add_the_probability_of_the_exemplars_emotion(tower):
    params, ids, mask = tower
    encoder, head = DualEncoder(BertEncoder(CONFIG), normalize=True), ClassificationHead(num_classes=4)
    rng = np.random.default_rng(0)
    reader = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape), params)
    own = {"encoder": params, "emotion_encoder": reader}
    own["emotion"] = {"out": rng.normal(size=(12, 4)), "out_bias": rng.normal(size=4)}
    alone = np.asarray(embed(params, ids, mask, normalize=True))
    read = np.asarray(embed(reader, ids, mask, normalize=True))
    logits = read * 12**0.5 @ own["emotion"]["out"] + own["emotion"]["out_bias"]
    emotions = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    model = EmotionEncoder(encoder, head, 0.3)
    queries, given = model.read(own, ids, mask)
    np.testing.assert_allclose(given, logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.emotions(own, ids, mask), logits, rtol=1e-4, atol=1e-5)
    keys = model.keys(model.embed(own, ids, mask), jnp.asarray([2, -1, 0]))
    assert queries.shape == keys.shape == (3, model.size) == (3, 16)
    expected = 0.7 * alone @ alone.T + 0.3 * np.stack([emotions[:, 2], np.zeros(3), emotions[:, 0]], axis=1)
    np.testing.assert_allclose(queries @ keys.T, expected, rtol=1e-4)

    plain = EmotionEncoder(encoder, head)
    vectors, logits = plain.read(own, ids, mask)
    np.testing.assert_array_equal(vectors, alone)
    np.testing.assert_array_equal(plain.keys(vectors, jnp.asarray([2, -1, 0])), alone)
    expected = alone * 12**0.5 @ own["emotion"]["out"] + own["emotion"]["out_bias"]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)  # the encoder's own vectors
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, mask)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, own)


def test_masked_mean_in_half_precision_sums_in_float32():
    states = jnp.full((1, 1000, 1), 1.001, jnp.bfloat16)
    mean = masked_mean(states, jnp.ones((1, 1000), bool))
    assert mean.dtype == jnp.float32
    np.testing.assert_allclose(mean, np.asarray(states[0, 0], np.float32)[None], rtol=1e-5)


@pytest.mark.parametrize("hidden", [None, 6])
def test_head_is_the_formula(hidden):
    features = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32))
    head = ClassificationHead(num_classes=3, hidden=hidden)
    params = jax.jit(head.init)(jax.random.key(0), features)["params"]
    weights = {name: np.asarray(leaf) for name, leaf in params.items()}
    expected = np.asarray(features)
    if hidden:
        expected = np.tanh(expected @ weights["hidden"] + weights["hidden_bias"])
    expected = expected @ weights["out"] + weights["out_bias"]
    np.testing.assert_allclose(head.apply({"params": params}, features), expected, rtol=1e-5, atol=1e-6)
    rngs = {"dropout": jax.random.key(1)}
    dropped = head.apply({"params": params}, features, deterministic=False, rngs=rngs)
    assert np.abs(dropped - expected).max() > 1e-3
