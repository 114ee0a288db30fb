"""Token choice against Hugging Face's logits warpers and against counting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from empax.core.largest import largest
from empax.decoding.sampling import at_least, nucleus, sample_tokens, typical


@pytest.mark.parametrize(("vocab", "k"), [(7, 3), (32, 1), (333, 1), (333, 8), (1000, 20), (1001, 31), (100, 100)])
@pytest.mark.parametrize("kind", ["plain", "ties", "barred"])
def test_largest_is_top_k(vocab, k, kind):
    logits = np.random.default_rng(vocab + k).normal(size=(3, 2, vocab)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "barred":
        logits[..., vocab // 3 :] = -np.inf
    logits = jnp.asarray(logits)
    both = jax.jit(largest, static_argnums=1)(logits, k), jax.lax.top_k(logits, k)
    for found, expected in zip(*both, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("k", [0, 8])
def test_largest_refuses_what_the_vocabulary_lacks(k):
    with pytest.raises(ValueError, match="1 to 7"):
        largest(jnp.zeros((1, 7)), k)


def warped(logits, *, temperature, top_k, top_p, min_p=0.0, typical_p=1.0):
    """Probabilities [V] after Hugging Face's warpers, in their order."""
    scores = torch.tensor(logits)[None]
    scores = TemperatureLogitsWarper(temperature)(None, scores) if temperature != 1.0 else scores
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1.0 else scores
    scores = MinPLogitsWarper(min_p)(None, scores) if min_p else scores
    scores = TypicalLogitsWarper(typical_p)(None, scores) if typical_p < 1.0 else scores
    return scores.softmax(-1)[0].double().numpy()


SETTINGS = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"temperature": 0.6, "top_k": 0, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 6, "top_p": 1.0},
    {"temperature": 1.5, "top_k": 0, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 10, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.01},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.1, "typical_p": 0.6},
    {"temperature": 1.2, "top_k": 0, "top_p": 0.95, "min_p": 0.1, "typical_p": 0.6},
]


@pytest.mark.oracle
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frequencies_follow_the_truncated_softmax(settings):
    vocab, draws = 45, 20_000
    logits = np.random.default_rng(4).normal(size=vocab).astype(np.float32) * 1.5
    expected = warped(logits, **settings) * draws
    tiled = jnp.broadcast_to(logits, (1, draws, vocab))
    tokens = jax.jit(functools.partial(sample_tokens, **settings))(jax.random.key(5), tiled)
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=vocab)
    assert (counts[expected == 0.0] == 0).all()
    often = expected > 5
    assert (counts[often] > 0).all()
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    degrees = max(often.sum() - 1, 1)
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.oracle
@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.7, 0.95, 0.999])
def test_the_nucleus_is_hugging_faces(top_p):
    logits = np.random.default_rng(8).normal(size=(50, 300)).astype(np.float32) * 2.0
    logits[:, 200:] = -np.inf  # barred beforehand
    found = np.isfinite(np.asarray(jax.jit(lambda x: nucleus(x, top_p))(jnp.asarray(logits))))
    np.testing.assert_array_equal(found, np.isfinite(TopPLogitsWarper(top_p)(None, torch.tensor(logits)).numpy()))


@pytest.mark.oracle
@pytest.mark.parametrize("share", [0.05, 0.2, 0.6, 0.95])
@pytest.mark.parametrize(("ours", "theirs"), [(at_least, MinPLogitsWarper), (typical, TypicalLogitsWarper)])
def test_what_stays_is_what_stays_at_hugging_faces(ours, theirs, share):
    logits = np.random.default_rng(9).normal(size=(50, 300)).astype(np.float32) * 2.0
    logits[:, 200:] = -np.inf
    found = np.asarray(jax.jit(ours, static_argnums=1)(jnp.asarray(logits), share))
    np.testing.assert_array_equal(found, theirs(share)(None, torch.tensor(logits)).numpy())
    assert 50 < np.isfinite(found).sum() < 50 * 200
    np.testing.assert_array_equal(ours(jnp.asarray(logits), {at_least: 0.0, typical: 1.0}[ours]), logits)


def test_typical_tokens_of_equals_are_all_of_them_and_never_nothing():
    assert np.isfinite(typical(jnp.zeros((1, 10)), 0.5)).all()
    assert np.isfinite(typical(jnp.full((1, 10), -jnp.inf).at[0, 4].set(0.0), 0.5)).sum() == 1


def test_the_nucleus_of_equals_is_all_of_them_and_never_nothing():
    assert np.isfinite(nucleus(jnp.zeros((1, 10)), 0.5)).all()
    many = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3000)), jnp.float32)
    assert np.isfinite(nucleus(many, 1.0 - 1e-9)).all()  # as a float32, p is 1 and the sum may stay below it
    spiked = jnp.zeros((1, 10)).at[0, 3].set(100.0)
    np.testing.assert_array_equal(np.isfinite(nucleus(spiked, 0.999))[0], np.arange(10) == 3)


def test_barred_tokens_are_never_drawn():
    logits = jnp.full((1, 500, 70), -jnp.inf).at[:, :, jnp.array([3, 40])].set(0.0)
    for top_k in (0, 10):
        draw = jax.jit(functools.partial(sample_tokens, top_k=top_k, top_p=0.9))
        tokens = draw(jax.random.key(0), logits)
        np.testing.assert_array_equal(np.unique(tokens), [3, 40])
