"""The order of hypotheses by consensus: against a loop, and on what it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.types import Generated
from empax.decoding.rerank import by_consensus
from empax.decoding.settings import DecodeSettings
from empax.evaluation.device_metrics import token_f1, utility

EOS, PAD = 1, 0


def hypotheses(seed, batch=3, num=5, length=6):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, 6, (batch, num, length))
    ends = rng.integers(1, length, (batch, num))
    columns = np.arange(length)
    tokens = np.where(columns == ends[..., None], EOS, np.where(columns > ends[..., None], PAD, tokens))
    return Generated(
        tokens=jnp.asarray(tokens, jnp.int32), log_probs=jnp.asarray(-rng.random((batch, num)), jnp.float32)
    )


def overlap(one, two):
    """F1 of two lists of ids, by counting."""
    common = sum(min(one.count(t), two.count(t)) for t in set(one))
    return 2 * common / (len(one) + len(two)) if common else 0.0


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_the_order_is_that_of_a_loop(weight):
    given = hypotheses(0)
    rng = np.random.default_rng(1)
    others, sizes = rng.integers(2, 6, (3, 4, 7)), rng.integers(1, 8, (3, 4))
    sizes[0, 2] = sizes[2] = 0  # an example with one witness less, and one with none
    witnesses = (jnp.asarray(others), jnp.asarray(np.arange(7) < sizes[..., None]))

    @jax.jit
    def rank(given):
        options = {"witnesses": witnesses, "witness_weight": weight}
        return by_consensus(given, token_f1, eos_id=EOS, pad_id=PAD, **options)

    found = rank(given)
    for b in range(3):
        words = [[int(t) for t in row if t not in (EOS, PAD)] for row in np.asarray(given.tokens[b])]
        said = [row[:n].tolist() for row, n in zip(others[b], sizes[b], strict=True) if n]
        worth = [np.mean([overlap(one, two) for j, two in enumerate(words) if j != k]) for k, one in enumerate(words)]
        if said:
            worth = [w + weight * np.mean([overlap(one, z) for z in said]) for w, one in zip(worth, words, strict=True)]
        order = np.argsort(-np.round(worth, 6), kind="stable")
        np.testing.assert_array_equal(found.tokens[b], np.asarray(given.tokens[b])[order])
        np.testing.assert_array_equal(found.log_probs[b], np.asarray(given.log_probs[b])[order])


def test_what_was_drawn_twice_comes_before_what_was_drawn_once():
    tokens = jnp.asarray([[[2, 3, EOS], [4, 5, EOS], [4, 5, EOS]]], jnp.int32)
    found = by_consensus(Generated(tokens, jnp.asarray([[-1.0, -2.0, -3.0]])), utility, eos_id=EOS, pad_id=PAD)
    np.testing.assert_array_equal(found.tokens[0, 0], [4, 5, EOS])
    np.testing.assert_array_equal(found.log_probs[0], [-2.0, -3.0, -1.0])


@pytest.mark.parametrize(("power", "first"), [(0.0, [2, EOS, PAD, PAD]), (2.0, [2, 3, 4, EOS])])
def test_a_length_power_prefers_what_says_more(power, first):
    tokens = jnp.asarray([[[2, 3, 4, EOS], [2, EOS, PAD, PAD], [2, EOS, PAD, PAD]]], jnp.int32)
    given = Generated(tokens, jnp.zeros((1, 3)))
    found = by_consensus(given, token_f1, eos_id=EOS, pad_id=PAD, length_power=power)
    np.testing.assert_array_equal(found.tokens[0, 0], first)


def test_one_hypothesis_agrees_with_nobody():
    with pytest.raises(ValueError, match="not allowed with one hypothesis"):
        DecodeSettings(method="sample", rerank="consensus")
    with pytest.raises(ValueError, match=r"rerank_exemplars = 1\.0 is not allowed without rerank"):
        DecodeSettings(rerank_exemplars=1.0)
