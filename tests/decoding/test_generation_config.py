"""Option sets drawn at random, through `generation_config.json`: the tokens of Hugging Face's `generate`."""

import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.decoding.generation_config import read_generation_config
from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings, num_hypotheses
from empax.interop.huggingface import ARCHITECTURES, import_params
from empax.models.decoder_only import DecoderOnly, last_tokens
from empax.models.transformer import EncoderDecoder

START, EOS, PAD, VOCAB, WIDTH, ROWS = 0, 1, 2, 40, 6, 6


@functools.cache
def models(name):
    """A tiny random T5 or GPT-2 twice, with weights so large that responses differ and so small that none tie."""
    torch.manual_seed(0)
    if name == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
        theirs = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, relative_attention_num_buckets=8, **sizes))
    else:
        sizes = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 32, "n_inner": 24}
        theirs = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=EOS, eos_token_id=EOS, **sizes))
    with torch.no_grad():
        for parameter in theirs.eval().parameters():
            parameter.copy_(torch.randn_like(parameter) * (2.0 * parameter.shape[-1] ** -0.5))
        theirs.get_input_embeddings().weight[EOS] *= 1.5
    config = ARCHITECTURES[name].config(theirs.config.to_dict())
    params = import_params(name, {key: value.numpy() for key, value in theirs.state_dict().items()}, config)
    return theirs, EncoderDecoder(config) if name == "t5" else DecoderOnly(config), params


def sources():
    return np.random.default_rng(3).integers(3, VOCAB, (ROWS, WIDTH)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 4))
def decode(name, params, source, mask, settings):
    """Decodes with every token of the source known."""
    apply = functools.partial(models(name)[1].apply, {"params": params})
    sizes = {"num_hypotheses": num_hypotheses(settings), "max_length": settings.max_tokens, "method": "start_cache"}
    if name == "t5":
        cache = apply(apply(source, mask, method="encode"), mask, **sizes)
        rest = {"start_id": START, "source": (source, mask)}
    else:
        cache = apply(source, mask, **sizes)
        rest = {"start_id": last_tokens(source, mask), "prompt": (source, mask)}
    step = functools.partial(apply, method="step")
    return generate(step, cache, batch_size=len(source), eos_id=EOS, pad_id=PAD, settings=settings, **rest)


def settings_of(name, fields, folder):
    (folder / "generation_config.json").write_text(json.dumps(fields))
    known = {"encoder_decoder": name == "t5", "prompt_tokens": WIDTH}
    return read_generation_config(folder, **known).with_eos(EOS)


def ours(name, fields, folder, source=None):
    source = jnp.asarray(sources() if source is None else source)
    settings = settings_of(name, fields, folder)
    return np.asarray(decode(name, models(name)[2], source, jnp.ones_like(source, bool), settings).tokens)


def theirs(name, fields, source=None):
    """Tokens [B, K, T] of Hugging Face's search, with padding behind the end."""
    source = torch.tensor(sources() if source is None else source).long()
    out = models(name)[0].generate(
        source, attention_mask=torch.ones_like(source), generation_config=GenerationConfig(**fields)
    )
    new = out[:, 1 if name == "t5" else WIDTH :]
    return new.reshape(len(source), -1, new.shape[-1]).numpy()


def assert_same(name, fields, folder):
    found, expected = ours(name, fields, folder), theirs(name, fields)
    length = expected.shape[-1]
    np.testing.assert_array_equal(found[:, :, :length], expected, err_msg=str(fields))
    assert (found[:, :, length:] == PAD).all()
    return found


PLAIN = {"eos_token_id": EOS, "pad_token_id": PAD, "decoder_start_token_id": START, "max_new_tokens": 8}


def draw(rng, name):
    """Fields of a generation_config.json: each option in about a third of the sets."""

    def some():
        return rng.random() < 0.35

    def ids(most):
        return sorted(rng.choice(np.arange(3, VOCAB), rng.integers(1, most + 1), replace=False).tolist())

    fields = {**PLAIN, "max_new_tokens": int(rng.integers(5, 10))}
    if some():
        fields["eos_token_id"] = [EOS, *ids(3)]
    if some():
        fields["max_length"] = fields.pop("max_new_tokens") + (1 if name == "t5" else WIDTH)
    if (beams := int(rng.choice([1, 1, 2, 3, 4]))) > 1:
        fields |= {"num_beams": beams, "num_return_sequences": int(rng.integers(1, beams + 1))}
        fields["length_penalty"] = float(rng.choice([-1.0, 0.0, 0.6, 1.0, 2.0]))
        fields["early_stopping"] = [True, False, "never"][rng.integers(3)]
    options = {
        "repetition_penalty": lambda: float(rng.choice([0.8, 1.2, 2.0])),
        "encoder_repetition_penalty": lambda: float(rng.choice([0.7, 1.5])),
        "no_repeat_ngram_size": lambda: int(rng.integers(1, 4)),
        "encoder_no_repeat_ngram_size": lambda: int(rng.integers(1, 4)),
        "min_new_tokens": lambda: int(rng.integers(1, 5)),
        "min_length": lambda: int(rng.integers(1, 5)) + (0 if name == "t5" else WIDTH),
        "suppress_tokens": lambda: ids(12),
        "begin_suppress_tokens": lambda: ids(12),
        "bad_words_ids": lambda: [[EOS]] + [ids(3) for _ in range(8)],
        "forced_bos_token_id": lambda: int(rng.integers(3, VOCAB)),
        "forced_eos_token_id": lambda: EOS,
    }
    fields |= {option: make() for option, make in options.items() if some()}
    if fields.get("forced_bos_token_id") in fields.get("suppress_tokens", ()):
        del fields["suppress_tokens"]  # both at once is an error, of theirs too
    return fields


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("name", ["t5", "gpt2"])
@pytest.mark.parametrize("part", range(10))
def test_drawn_options_are_token_identical_to_hugging_face(name, part, tmp_path):
    rng = np.random.default_rng((part, name == "t5"))
    for _ in range(16):
        assert_same(name, draw(rng, name), tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_a_few_drawn_options(name, tmp_path):
    rng = np.random.default_rng(100)
    for _ in range(3):
        assert_same(name, draw(rng, name), tmp_path)
