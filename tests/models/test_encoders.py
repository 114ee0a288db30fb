import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.models.bert import BertConfig, BertEncoder, bert_config
from empax.models.dual_encoder import DualEncoder, EmotionEncoder
from empax.models.heads import ClassificationHead, masked_mean

CONFIG = BertConfig(vocab_size=31, d_model=12, num_heads=3, d_ff=20, num_layers=2, max_positions=9)


@pytest.fixture(scope="module")
def tower():
    ids = jnp.asarray(np.random.default_rng(0).integers(1, 31, size=(3, 8)))
    mask = jnp.asarray(np.arange(8)[None] < np.array([8, 5, 1])[:, None])
    params = jax.jit(DualEncoder(BertEncoder(CONFIG)).init)(jax.random.key(0), ids, mask)["params"]
    return params, ids, mask


def embed(params, ids, mask, **settings):
    return DualEncoder(BertEncoder(CONFIG), **settings).apply({"params": params}, ids, mask, method="embed")


def test_pooling_and_normalising(tower):
    params, ids, mask = tower
    states = np.asarray(BertEncoder(CONFIG).apply({"params": params["encoder"]}, ids, mask))
    expected = np.stack([row[real].mean(0) for row, real in zip(states, np.asarray(mask), strict=True)])
    np.testing.assert_allclose(embed(params, ids, mask), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(embed(params, ids, mask, pooling="cls"), states[:, 0], rtol=1e-6)
    unit = embed(params, ids, mask, normalize=True)
    np.testing.assert_allclose(unit, expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_padding_changes_no_embedding(tower):
    params, ids, mask = tower
    expected = embed(params, ids, mask)
    np.testing.assert_array_equal(embed(params, jnp.where(mask, ids, 7), mask), expected)
    short = embed(params, ids[1:, :5], mask[1:, :5])
    np.testing.assert_allclose(short, expected[1:], rtol=1e-5, atol=1e-6)


def test_a_filler_row_has_neither_nan_values_nor_nan_gradients(tower):
    params, ids, mask = tower

    def loss(params):
        return embed(params, ids, mask.at[0].set(False), normalize=True).sum()

    value, grads = jax.value_and_grad(loss)(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_emotions_add_the_probability_that_both_are_the_same(tower):
    params, ids, mask = tower
    encoder, head = DualEncoder(BertEncoder(CONFIG), normalize=True), ClassificationHead(num_classes=4)
    rng = np.random.default_rng(0)
    both = {"encoder": params, "emotion": {"out": rng.normal(size=(12, 4)), "out_bias": rng.normal(size=4)}}
    alone = np.asarray(embed(params, ids, mask, normalize=True))
    logits = alone * 12**0.5 @ both["emotion"]["out"] + both["emotion"]["out_bias"]
    emotions = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    def joined(share):
        return np.asarray(EmotionEncoder(encoder, head, share).apply({"params": both}, ids, mask, method="embed"))

    found = joined(0.3)
    assert found.shape == (3, EmotionEncoder(encoder, head, 0.3).size) == (3, 16)
    np.testing.assert_allclose(found @ found.T, 0.7 * alone @ alone.T + 0.3 * emotions @ emotions.T, rtol=1e-4)
    np.testing.assert_array_equal(joined(0.0), alone)


def test_masked_mean_in_half_precision_sums_in_float32():
    states = jnp.full((1, 1000, 1), 1.001, jnp.bfloat16)
    mean = masked_mean(states, jnp.ones((1, 1000), bool))
    assert mean.dtype == jnp.float32
    np.testing.assert_allclose(mean, np.asarray(states[0, 0], np.float32)[None], rtol=1e-5)


@pytest.mark.parametrize("hidden", [None, 6])
def test_head_is_the_formula(hidden):
    features = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32))
    head = ClassificationHead(num_classes=3, hidden=hidden)
    params = head.init(jax.random.key(0), features)["params"]
    weights = {name: np.asarray(leaf) for name, leaf in params.items()}
    expected = np.asarray(features)
    if hidden:
        expected = np.tanh(expected @ weights["hidden"] + weights["hidden_bias"])
    expected = expected @ weights["out"] + weights["out_bias"]
    np.testing.assert_allclose(head.apply({"params": params}, features), expected, rtol=1e-5, atol=1e-6)
    rngs = {"dropout": jax.random.key(1)}
    dropped = head.apply({"params": params}, features, deterministic=False, rngs=rngs)
    assert np.abs(dropped - expected).max() > 1e-3


def test_settings_that_bert_cannot_have():
    with pytest.raises(ConfigError, match="multiple of num_heads"):
        BertConfig(vocab_size=31, d_model=13, num_heads=3, d_ff=20, num_layers=2)
    with pytest.raises(ConfigError, match="lacks hidden_size"):
        bert_config({"vocab_size": 5, "num_attention_heads": 1, "intermediate_size": 3, "num_hidden_layers": 1})


def test_too_many_tokens_is_a_config_error(tower):
    params, _, _ = tower
    with pytest.raises(ConfigError, match="max_positions = 9"):
        embed(params, jnp.ones((1, 10), jnp.int32), jnp.ones((1, 10), bool))
