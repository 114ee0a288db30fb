"""Search through our T5 and its cache against Hugging Face's T5: same weights, same tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings, num_hypotheses
from empax.interop.parameters import import_params
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder

EOS, PAD, VOCAB, LENGTH = 1, 0, 64, 10

SETTINGS = [
    DecodeSettings("greedy", LENGTH, min_tokens=3, no_repeat_ngram=2),
    DecodeSettings("beam", LENGTH, num_beams=2, length_penalty=0.6, no_repeat_ngram=3),
    DecodeSettings("beam", LENGTH, num_beams=4, length_penalty=1.0),
    DecodeSettings("beam", LENGTH, min_tokens=2, num_beams=4, length_penalty=2.0, early_stopping=True),
]


@functools.cache
def models():
    """A tiny random T5 twice; its output weights are scaled up so that responses differ and end."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=24,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=PAD,
    )
    theirs = T5ForConditionalGeneration(config).eval()
    # The config ties the two in silence, whatever it is told.
    theirs.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, config.d_model))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 * 1.5)
        theirs.lm_head.weight[EOS] *= 2.0
    assert not torch.equal(theirs.lm_head.weight, theirs.shared.weight)
    ours = t5_config({**config.to_dict(), "tie_word_embeddings": False})
    params = import_params("t5", {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}, ours)
    return theirs, EncoderDecoder(ours), params


def prompts(num=16, width=9):
    rng = np.random.default_rng(0)
    source = rng.integers(2, VOCAB, (num, width)).astype(np.int32)
    mask = np.arange(width)[None] < rng.integers(2, width + 1, (num, 1))
    return np.where(mask, source, PAD), mask


@pytest.mark.oracle
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_and_scores_are_hugging_faces(settings):
    theirs, model, params = models()
    source, mask = prompts()
    num = num_hypotheses(settings)

    @jax.jit
    def decode(params, source, mask):
        apply = functools.partial(model.apply, {"params": params})
        states = apply(source, mask, method="encode")
        cache = apply(states, mask, num_hypotheses=num, max_length=LENGTH, method="start_cache")
        return generate(
            functools.partial(apply, method="step"),
            cache,
            batch_size=len(source),
            start_id=PAD,
            eos_id=EOS,
            pad_id=PAD,
            settings=settings,
        )

    found = decode(params, jnp.asarray(source), jnp.asarray(mask))
    beam = {"length_penalty": settings.length_penalty, "early_stopping": settings.early_stopping} if num > 1 else {}
    config = GenerationConfig(
        max_new_tokens=LENGTH,
        min_new_tokens=settings.min_tokens or None,
        no_repeat_ngram_size=settings.no_repeat_ngram or None,
        num_beams=num,
        num_return_sequences=num,
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        **beam,
    )
    out = theirs.generate(
        torch.tensor(source, dtype=torch.long), attention_mask=torch.tensor(mask).long(), generation_config=config
    )
    new = out.sequences[:, 1:].reshape(len(source), num, -1).numpy()
    expected = np.full((len(source), num, LENGTH), PAD)
    expected[:, :, : new.shape[-1]] = new
    ended = np.cumsum(expected == EOS, axis=-1) - (expected == EOS) > 0
    expected[ended] = PAD  # theirs fills with the end token where the padding id is 0
    np.testing.assert_array_equal(found.tokens, expected)
    assert ended.any()
    assert len(np.unique(expected[:, 0], axis=0)) > len(source) // 2
    if num > 1:
        lengths = np.where((expected == EOS).any(-1), (expected == EOS).argmax(-1) + 1, LENGTH)
        scores = out.sequences_scores.reshape(len(source), num).numpy()
        np.testing.assert_allclose(found.log_probs / lengths**settings.length_penalty, scores, rtol=1e-4)
