"""Answers as re-ranking sees them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.types import Generated
from empax.decoding.settings import DecodeSettings
from empax.models.prompted import FusionInPrompt, PromptedDecoder
from empax.models.transformer import EncoderDecoder, scratch
from empax.parts.generator import decoder as decoders
from empax.parts.generator.decoder import Decoder
from tests.parts.generator.tiny import EOS, PAD, PROMPTED, START

MODEL = EncoderDecoder(
    scratch(12, d_model=8, num_heads=1, head_dim=8, d_ff=8, num_encoder_layers=1, num_decoder_layers=1, start_id=START)
)


def test_a_hypothesis_is_compared_as_one_text_where_prompts_hold_exemplars(monkeypatch):
    kept = []
    monkeypatch.setattr(decoders, "make_reranker", lambda *_: lambda found: kept.append(found) or jnp.zeros((2, 2)))
    fusion = FusionInPrompt(PROMPTED.model, (3,), START, split=4)
    source = jnp.full((2, 3, 7), 4)
    params = jax.jit(fusion.init)(jax.random.key(0), source, source > 0, source[:, 0])["params"]
    settings = DecodeSettings("sample", 3, num_samples=2, rerank="similarity")
    ids = jnp.array([[5, 6, PAD]])  # shorter than an exemplar's columns
    prompted = PromptedDecoder(PROMPTED.model, (3,), START)

    @jax.jit
    def encoded(params):
        Decoder(settings, START, EOS, PAD)(fusion, params, source, source > 0, jax.random.key(1))
        alone = prompted.apply({"params": params}, ids[:, :2], ids[:, :2] > 0, method="encode")
        return kept[0].encode(ids, ids > 0), alone.hidden

    found, hidden = encoded(params)
    np.testing.assert_allclose(found, hidden.mean(axis=1), atol=1e-5)


def test_the_turns_of_a_chat_count_for_no_reply():
    read = jnp.full((1, 3), 4), jnp.ones((1, 3), bool)
    settings = DecodeSettings("greedy", 3, no_repeat_ngram=3)
    for start_id, counts, given in ((None, True, True), (None, False, False), (START, True, False)):
        prompt = Decoder(settings, start_id, EOS, PAD, counts_prompt=counts).looked_at(*read)["prompt"]
        assert (prompt is not None) is given


@pytest.mark.parametrize(
    ("forced", "most", "expected"),
    [(False, None, [True] * 3), (True, None, [False, True, True]), (True, 3, [False, True, False])],
)
def test_an_answer_that_is_forced_to_end_at_the_limit_has_not_ended(forced, most, expected, monkeypatch):
    """As BART's folders force it; else consensus would prefer what the limit cut."""
    tokens, seen = jnp.array([[[4, 4, 4, EOS], [4, EOS, PAD, PAD], [4, 4, EOS, PAD]]]), []
    search = types.SimpleNamespace(
        begin=lambda cache: None, go_on=lambda state: None, found=lambda state: Generated(tokens, jnp.zeros((1, 3)))
    )
    monkeypatch.setattr(Decoder, "search", lambda *_, **__: search)
    monkeypatch.setattr(Decoder, "cache", lambda *_, **__: None)
    monkeypatch.setattr(decoders, "make_reranker", lambda *_: lambda made: seen.append(made) or jnp.zeros((1, 3)))
    settings = DecodeSettings("sample", 4, num_samples=3, rerank="consensus", end_at_limit=forced)
    limits = None if most is None else (jnp.array([0]), jnp.array([most]))
    mask = jnp.ones((1, 2), bool)
    Decoder(settings, START, EOS, PAD).from_states(None, {}, None, mask, jax.random.key(0), limits=limits)
    assert seen[0].ended.tolist() == [expected]


@pytest.mark.parametrize("more", [(), (5, 7)])
def test_every_end_token_is_an_end_and_no_word(monkeypatch, more):
    seen = []

    def kept(hypotheses):
        seen.append(hypotheses)
        return jnp.zeros((2, 4))

    monkeypatch.setattr(decoders, "make_reranker", lambda *_: kept)
    settings = DecodeSettings("sample", 6, num_samples=4, rerank="consensus", more_eos_ids=more)
    source = jnp.full((2, 3), 4)
    params = jax.jit(MODEL.init)(jax.random.key(0), source, source > 0, source)["params"]

    @jax.jit
    def said(params):
        Decoder(settings, START, EOS, PAD)(MODEL, params, source, source > 0, jax.random.key(1))
        return seen[0].tokens, seen[0].mask, seen[0].ended

    tokens, mask, ended = map(np.asarray, said(params))
    assert np.isin(tokens, (5, 7)).any()
    np.testing.assert_array_equal(mask, ~np.isin(tokens, (EOS, PAD, *more)))
    np.testing.assert_array_equal(ended, np.isin(tokens, (EOS, *more)).any(axis=2))
