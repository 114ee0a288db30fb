"""Beams that are drawn: `num_beams` with `do_sample`."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper, TypicalLogitsWarper

from empax.decoding.sampling import Draws, truncated
from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings

EOS, PAD, VOCAB = 1, 0, 7


@flax.struct.dataclass
class Nothing:
    def reorder(self, parents):
        return self


def searched(table, rows, *, seed=0, limits=None, rng=None, **options):
    """Hypotheses of a model whose next logits depend on the latest token alone."""
    rng = jax.random.key(seed) if rng is None else rng
    limits = None if limits is None else tuple(map(jnp.asarray, limits))
    found = search(jnp.asarray(table), rng, limits, rows, DecodeSettings("beam", **options))
    return np.asarray(found.tokens), np.asarray(found.log_probs)


@functools.partial(jax.jit, static_argnames=("rows", "settings"))
def search(table, rng, limits, rows, settings):
    return generate(
        lambda tokens, cache: (table[tokens], cache), Nothing(), batch_size=rows, start_id=2, eos_id=EOS, pad_id=PAD,
        settings=settings, rng=rng, limits=limits,
    )  # fmt: skip


def logits(seed=0):
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)


def test_at_no_temperature_they_are_the_likeliest():
    for seed in range(3):
        plain, _ = searched(logits(seed), 1, max_tokens=5, num_beams=3)
        cold, _ = searched(logits(seed), 1, max_tokens=5, num_beams=3, draw_beams=True, temperature=1e-3)
        np.testing.assert_array_equal(plain[:, 0], cold[:, 0])  # others can be equally likely


def test_they_differ_by_seed():
    options = {"max_tokens": 5, "num_beams": 3, "draw_beams": True}
    one, two, again = (searched(logits(), 8, seed=seed, **options)[0] for seed in (0, 1, 0))
    np.testing.assert_array_equal(one, again)
    assert (one != two).any()


def test_a_row_with_its_own_key_is_drawn_as_it_is_alone():
    options, seeds = {"max_tokens": 5, "num_beams": 3, "draw_beams": True}, (3, 0, 3)
    together = searched(logits(), 3, rng=Draws(jax.vmap(jax.random.key)(jnp.array(seeds))), **options)
    for row, seed in enumerate(seeds):
        for found, alone in zip(together, searched(logits(), 1, seed=seed, **options), strict=True):
            np.testing.assert_allclose(found[row], alone[0], rtol=1e-6)
    assert (together[0][0] != together[0][1]).any()


@pytest.mark.oracle
@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"top_k": 4}, {"top_p": 0.6}])
def test_what_comes_first_comes_as_often_as_drawing_without_replacement_has_it(options):
    """One step of two beams: the likeliest of four continuations that numpy draws."""
    rows, table = 4000, logits(3)
    tokens, scores = searched(table, rows, max_tokens=1, num_beams=2, draw_beams=True, **options)
    found = np.bincount(tokens[:, 0, 0], minlength=VOCAB) / rows
    plain = table[2] - np.log(np.exp(table[2]).sum())
    scaled = plain / options.get("temperature", 1.0)
    shares = np.exp(scaled) / np.exp(scaled).sum()
    order = np.argsort(-shares)
    stays = np.zeros(VOCAB, bool)
    stays[order[: options.get("top_k", VOCAB)]] = True
    above = np.cumsum(shares[order]) - shares[order]
    stays[order] &= above < options.get("top_p", 1.0)
    stays[order[:2]] = True
    shares = np.where(stays, shares, 0.0) / shares[stays].sum()
    rng, wanted = np.random.default_rng(0), np.zeros(VOCAB)
    many = min(4, stays.sum())
    for _ in range(rows):
        wanted[max(rng.choice(VOCAB, many, replace=False, p=shares), key=lambda token: scaled[token])] += 1 / rows
    np.testing.assert_allclose(found, wanted, atol=4 * np.sqrt(0.5 / rows))
    np.testing.assert_allclose(scores[:, 0], scaled[tokens[:, 0, 0]], rtol=1e-5)


def test_what_is_cut_off_leaves_so_many():
    row = jnp.log(jnp.array([0.5, 0.3, 0.1, 0.06, 0.04]))
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    for options, many in (({}, 5), ({"top_k": 4}, 4), ({"top_p": 0.93}, 4), ({"min_p": 0.1}, 4), ({"top_p": 0.1}, 3)):
        found = truncated(row, **{**off, **options}, at_least_tokens=3)
        assert np.isfinite(found).sum() == many, options
        np.testing.assert_array_equal(found[:many], row[:many])


@pytest.mark.oracle
@pytest.mark.parametrize("typical_p", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("top_p", [0.3, 1.0])
def test_what_is_typical_stays_as_transformers_has_it(typical_p, top_p):
    """The likeliest token may go, but two stay."""
    rows = np.random.default_rng(0).normal(size=(300, 20)).astype(np.float32)
    found = truncated(jnp.array(rows), top_k=0, top_p=top_p, min_p=0.0, typical_p=typical_p, at_least_tokens=2)
    scores = torch.tensor(rows)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p, min_tokens_to_keep=2)(None, scores)
    kept = TypicalLogitsWarper(typical_p, min_tokens_to_keep=2)(None, scores).isfinite().numpy()
    np.testing.assert_array_equal(np.isfinite(found), kept)
    assert kept.sum(axis=1).min() >= 2
    assert typical_p == 0.9 or not kept[np.arange(300), rows.argmax(axis=1)].all()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"early_stopping": True}, {"early_stopping": "never", "length_penalty": 2.0}, {"end_at_limit": True},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    ],
)  # fmt: skip
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_a_row_with_a_limit_of_its_own_is_searched_as_if_alone(options, min_tokens):
    most = np.array([1, 3, 6, 4])
    fewest = np.minimum(most, min_tokens)
    table = logits(5)
    options = {"num_beams": 3, **options}
    found, scores = searched(table, 4, max_tokens=6, limits=(fewest, most), **options)
    for row, (least, limit) in enumerate(zip(fewest.tolist(), most.tolist(), strict=True)):
        alone, score = searched(table, 1, max_tokens=limit, min_tokens=least, **options)
        np.testing.assert_array_equal(found[row, :, :limit], alone[0])
        assert (found[row, :, limit:] == PAD).all()
        np.testing.assert_allclose(scores[row], score[0], rtol=1e-5)
