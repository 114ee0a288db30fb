"""The order of hypotheses by consensus: against a loop, and on what it is for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.types import Generated
from empax.decoding.rerank import Consensus, Hypotheses, Random, Similarity, make_reranker, rerank
from empax.decoding.sampling import Draws
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


def ranked(given, reranker, exemplars=None):
    mask = (given.tokens != EOS) & (given.tokens != PAD)
    unread = (lambda: None), (lambda ids, mask: None)
    found = Hypotheses(given.tokens, mask, given.log_probs, *unread, jax.random.key(7), exemplars)
    return rerank(given, reranker(found))


def overlap(one, two):
    """F1 of two lists of ids, by counting."""
    common = sum(min(one.count(t), two.count(t)) for t in set(one))
    return 2 * common / (len(one) + len(two)) if common else 0.0


@pytest.mark.parametrize("weight", [0.0, 0.75])
def test_the_order_is_that_of_a_loop(weight):
    given = hypotheses(0)
    rng = np.random.default_rng(1)
    others, sizes = rng.integers(2, 6, (3, 4, 7)), rng.integers(1, 8, (3, 4))
    sizes[0, 2] = sizes[1, 1:] = sizes[2] = 0  # examples with one exemplar less, with one and with none
    exemplars = (jnp.asarray(others), jnp.asarray(np.arange(7) < sizes[..., None]))
    found = jax.jit(lambda given: ranked(given, Consensus(token_f1, exemplar_weight=weight), exemplars))(given)
    for b in range(3):
        words = [[int(t) for t in row if t not in (EOS, PAD)] for row in np.asarray(given.tokens[b])]
        said = [row[:n].tolist() for row, n in zip(others[b], sizes[b], strict=True) if n]
        worth = [np.mean([overlap(one, two) for j, two in enumerate(words) if j != k]) for k, one in enumerate(words)]
        if said:
            worth = [w + weight * np.mean([overlap(one, z) for z in said]) for w, one in zip(worth, words, strict=True)]
        order = np.argsort(-np.round(worth, 6), kind="stable")
        np.testing.assert_array_equal(found.tokens[b], np.asarray(given.tokens[b])[order])
        np.testing.assert_array_equal(found.log_probs[b], np.asarray(given.log_probs[b])[order])
    alone = [ranked(given, Consensus(token_f1, exemplar_weight=some)).tokens for some in (0.0, weight)]
    np.testing.assert_array_equal(*alone)  # there their weight changes nothing


@pytest.mark.parametrize(("power", "first"), [(0.0, [2, EOS, PAD, PAD]), (2.0, [2, 3, 4, EOS])])
def test_a_length_power_prefers_what_says_more(power, first):
    tokens = jnp.asarray([[[2, 3, 4, EOS], [2, EOS, PAD, PAD], [2, EOS, PAD, PAD]]], jnp.int32)
    given = Generated(tokens, jnp.zeros((1, 3)))
    found = ranked(given, Consensus(token_f1, length_power=power))
    np.testing.assert_array_equal(found.tokens[0, 0], first)


def test_a_cut_hypothesis_comes_after_all_that_have_ended():
    tokens = jnp.asarray([[[2, 3, 4, 4], [2, 3, 4, EOS], [5, EOS, PAD, PAD], [2, 3, 4, 3]]], jnp.int32)
    given = Generated(tokens, jnp.zeros((1, 4)))
    reranker = Consensus(token_f1, length_power=1.0)
    np.testing.assert_array_equal(ranked(given, reranker).tokens[0, :, 0], [2, 2, 2, 5])

    def order(ended):
        made = (tokens != EOS) & (tokens != PAD)
        unread = (lambda: None), (lambda ids, mask: None), jax.random.key(0)
        worth = reranker(Hypotheses(tokens, made, jnp.zeros((1, 4)), *unread, ended=jnp.asarray([ended])))
        return np.argsort(-np.asarray(worth[0]), kind="stable").tolist()

    assert order([True] * 4) == order([False] * 4) == [0, 3, 1, 2]
    assert order([False, True, True, False]) == [1, 2, 0, 3]


def said_by_first_token(vectors):
    """An encoder that looks at the first token of each text alone."""

    def encode(ids, mask):
        assert mask[:, 0].all()
        return jnp.asarray([vectors[int(row[0])] for row in ids])

    return encode


COSINES = {2: [0.2, 0.96**0.5], 3: [1.2, 1.6], 4: [0.1, 0.99**0.5]}  # .2, .6 and .1 with the first axis
THREE = jnp.asarray([[[2, EOS, PAD, PAD], [3, 3, EOS, PAD], [4, 4, 4, 4]]], jnp.int32)  # of 2, 3 and 4 tokens


@pytest.mark.parametrize(
    ("likelihood", "weight", "expected"),
    [
        ("normalised", 0.7, (0.08, 0.33, -0.08)),
        ("normalised", 0.0, (-0.2, -0.3, -0.5)),
        ("normalised", 1.0, (0.2, 0.6, 0.1)),
        ("probability", 0.7, tuple(0.3 * np.exp([-2.0, -4.5, -10.0]) + 0.7 * np.array([0.2, 0.6, 0.1]))),
    ],
)
def test_similarity_of_worked_numbers(likelihood, weight, expected):
    """Mean log-probabilities of -1, -1.5 and -2.5."""
    log_probs, mask = jnp.asarray([[-2.0, -4.5, -10.0]]), (THREE != EOS) & (THREE != PAD)
    contexts = jnp.asarray([[7.0, 0.0]])
    given = Hypotheses(THREE, mask, log_probs, lambda: contexts, said_by_first_token(COSINES), jax.random.key(0))
    np.testing.assert_allclose(Similarity(weight, likelihood)(given)[0], expected, atol=1e-6)


def test_random_hypotheses_of_a_row_with_its_own_key_are_those_that_it_has_alone():
    keys = jax.vmap(jax.random.key)(jnp.array([4, 5, 4]))

    def worth(rows, rng):
        found = hypotheses(0, batch=rows)
        made = found.tokens != PAD
        return Random()(Hypotheses(found.tokens, made, found.log_probs, lambda: None, lambda ids, mask: None, rng))

    alone = [worth(1, key)[0] for key in keys]
    np.testing.assert_array_equal(worth(3, Draws(keys)), alone)
    assert (alone[0] != alone[1]).any()


def test_a_random_hypothesis_is_each_as_often_whatever_its_likelihood():
    given = hypotheses(3, batch=4000, num=4)
    given = given.replace(log_probs=jnp.broadcast_to(jnp.arange(4.0), given.log_probs.shape))
    first = np.asarray(ranked(given, Random()).log_probs[:, 0]).astype(int)
    counts = np.bincount(first, minlength=4)
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)
    np.testing.assert_array_equal(ranked(given, Random()).log_probs[:, 0], first)  # the same key, the same order


def test_a_config_names_the_reranker():
    settings = DecodeSettings(method="sample", num_samples=3, rerank_length=0.5, rerank_similarity=0.2)
    named = {name: make_reranker(dataclasses.replace(settings, rerank=name), utility)
             for name in ("", "consensus", "random", "similarity")}  # fmt: skip
    assert named == {
        "": None, "consensus": Consensus(utility, 0.5, 0.0), "random": Random(),
        "similarity": Similarity(0.2, "normalised"),
    }  # fmt: skip
    to_the_letter = DecodeSettings(method="beam", rerank="similarity", rerank_likelihood="probability")
    assert make_reranker(to_the_letter, utility) == Similarity(0.7, "probability")
