"""Option sets drawn at random, through `generation_config.json`: the tokens of Hugging Face's `generate`."""

import dataclasses
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
from empax.decoding.generation_config import ModelDecoding, Origin, decoding_of, generation_fields_of
from empax.decoding.settings import DecodeSettings
from empax.interop.architectures import ARCHITECTURES
from empax.interop.export import Generation
from empax.interop.parameters import import_params
from empax.models.decoder_only import DecoderOnly
from empax.models.prompted import PromptedDecoder
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.decoder import Decoder

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
    return theirs, EncoderDecoder(config) if name == "t5" else PromptedDecoder(DecoderOnly(config)), params


def sources():
    return np.random.default_rng(3).integers(3, VOCAB, (ROWS, WIDTH)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 4))
def decode(name, params, source, mask, settings):
    """Decodes with every token of the source known."""
    decoder = Decoder(settings, START if name == "t5" else None, EOS, PAD)
    return decoder(models(name)[1], params, source, mask, jax.random.key(0))


def decoding_in(folder, *, changes=None, **known):
    """What a folder asks for."""
    path, fields = generation_fields_of(folder)
    origin = Origin(str(path), lambda name: f"leave {name} out")
    return decoding_of({**fields, **(changes or {})}, origin, **known)


def settings_of(name, fields, folder):
    if name == "gpt2":  # here a length counts no prompt
        fields = fields | {key: fields[key] - WIDTH for key in ("max_length", "min_length") if key in fields}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return decoding_in(folder, encoder_decoder=name == "t5").with_eos(EOS)


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
    ends = fields["eos_token_id"]
    if isinstance(ends, list) and fields.get("forced_bos_token_id") in ends:
        fields["eos_token_id"] = EOS  # else all responses are this one token, and the other hypotheses no responses
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
    """A beam with penalties of repetition, then a greedy search that reads the prompt; both force and ban tokens."""
    rng = np.random.default_rng(746)
    for _ in range(2):
        assert_same(name, draw(rng, name), tmp_path)


def read(tmp_path, fields, **options):
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    return decoding_in(tmp_path, **{"encoder_decoder": True, **options})


def test_fields_become_settings_under_our_names(tmp_path):
    found = read(
        tmp_path,
        {
            "max_length": 12,
            "min_length": 3,
            "num_beams": 4,
            "early_stopping": "never",
            "length_penalty": 2,
            "eos_token_id": [5, 7],
            "forced_eos_token_id": 7,
            "forced_bos_token_id": 0,
            "no_repeat_ngram_size": -1,
            "decoder_start_token_id": 3,
            "pad_token_id": 2,
            "bad_words_ids": [[4], [1, 2]],
            "temperature": 0.5,
        },
    )
    assert found.eos_id == 7
    assert found.settings == DecodeSettings(
        "beam", 11, 2, num_beams=4, early_stopping="never", length_penalty=2.0, num_return_sequences=1,
        more_eos_ids=(5,), end_at_limit=True, first_token=0, bad_words=((4,), (1, 2)),
    )  # fmt: skip


def test_what_nobody_says_is_as_in_transformers(tmp_path):
    assert decoding_in(tmp_path, encoder_decoder=True).settings == DecodeSettings(max_tokens=20)
    drawn = read(tmp_path, {"do_sample": True, "temperature": 0.7, "num_return_sequences": 3}, encoder_decoder=False)
    assert drawn.settings == DecodeSettings("sample", 20, num_samples=3, temperature=0.7, top_k=50)
    assert read(tmp_path, {"do_sample": True, "top_k": 0}).settings.top_k == 0


def test_a_config_json_stands_in_for_the_file(tmp_path):
    old = {"model_type": "bart", "d_model": 4, "num_beams": 3, "force_bos_token_to_be_generated": True}
    (tmp_path / "config.json").write_text(json.dumps({**old, "bos_token_id": 6}))
    found = decoding_in(tmp_path, encoder_decoder=True)
    assert (found.settings.num_beams, found.settings.first_token) == (3, 6)


def test_the_end_of_a_tokenizer_may_be_another_than_the_first(tmp_path):
    found = read(tmp_path, {"eos_token_id": [5, 7]})
    assert found.with_eos(7).more_eos_ids == (5,)
    assert found.with_eos(9).more_eos_ids == (5, 7)
    with pytest.raises(ConfigError, match="forced_eos_token_id = 5 of the model is not 7"):
        read(tmp_path, {"eos_token_id": [5, 7], "forced_eos_token_id": 5}).with_eos(7)


@pytest.mark.parametrize(
    ("fields", "message", "advised"),
    [
        ({"sequence_bias": [[[3], 1.0]]}, "sequence_bias = .* would change the text", {"sequence_bias": None}),
        ({"guidance_scale": 1.5}, "guidance_scale = 1.5", {"guidance_scale": None}),
        ({"stop_strings": ["."]}, "stop_strings", {"stop_strings": None}),
        ({"penalty_alpha": 0.6}, "penalty_alpha", {"penalty_alpha": None}),
        ({"do_sample": True, "eta_cutoff": 0.1}, "eta_cutoff", {"eta_cutoff": None}),
        ({"do_sample": True, "num_beams": 2, "top_h": 0.4}, "top_h", {"top_h": None}),
        ({"num_beams": 2, "renormalize_logits": True}, "renormalize_logits", {"renormalize_logits": None}),
        ({"num_return_sequences": 2}, "num_return_sequences = 2 has no meaning", {"num_return_sequences": None}),
        (
            {"eos_token_id": 1, "forced_eos_token_id": 3},
            "must be one of eos_token_id = 1",
            {"forced_eos_token_id": None},
        ),
        (
            {"no_repeat_ngram_size": "two"},
            "no_repeat_ngram_size = 'two' must be an integer",
            {"no_repeat_ngram_size": 2},
        ),
        ({"eos_token_id": [1, "x"]}, "eos_token_id = .* must be an integer", {"eos_token_id": [1, 2]}),
        ({"max_new_tokens": 2.5}, "max_new_tokens = 2.5 must be an integer", {"max_new_tokens": None}),
        ({"suppress_tokens": 3}, "suppress_tokens = 3 must be a list", {"suppress_tokens": [3]}),
        ({"num_beams": 2.0}, "num_beams = 2.0 is of type float", {"num_beams": 2}),
        ({"top_p": 2.0, "do_sample": True}, "top_p = 2.0", {"top_p": 0.5}),
    ],
)
def test_what_would_change_the_text_and_is_not_here_is_refused_by_name(fields, message, advised, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, fields, encoder_decoder=False)
    assert read(tmp_path, fields, encoder_decoder=False, changes=advised)


def test_what_changes_no_text_is_read_over_and_what_nobody_knows_is_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        same = {"use_cache": False, "output_scores": True, "eta_cutoff": 0.1, "guidance_scale": 1, "top_p": 0.5}
        assert read(tmp_path, same).settings == DecodeSettings(max_tokens=20)
        assert not caplog.records
        assert read(tmp_path, {"no_repeat_ngrams": 3}).settings == DecodeSettings(max_tokens=20)
    assert "no_repeat_ngrams is not a known decoding option" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        DecodeSettings("beam", 9, 2, num_beams=4, num_beam_groups=2, diversity_penalty=0.5, num_return_sequences=1,
                       repetition_penalty=1.2, encoder_repetition_penalty=0.8, no_repeat_ngram=3,
                       encoder_no_repeat_ngram=2, suppress_tokens=(4, 5), begin_suppress_tokens=(6,),
                       bad_words=((7,), (8, 9)), more_eos_ids=(10,), first_token=3, end_at_limit=True),
        DecodeSettings("sample", 9, num_samples=3, temperature=0.5, top_k=0, top_p=0.9, min_p=0.1, typical_p=0.8),
        DecodeSettings("beam", 9, num_beams=3, draw_beams=True, num_return_sequences=1, top_k=5, temperature=0.7,
                       length_penalty=2.0, early_stopping=True),
        DecodeSettings("greedy", 9),
    ],
    ids=lambda settings: settings.method,
)  # fmt: skip
def test_what_an_export_writes_comes_back_the_same(settings, tmp_path):
    fields = Generation(dataclasses.asdict(settings), start_id=0, eos_id=1, pad_id=2).fields()
    assert read(tmp_path, fields) == ModelDecoding(settings, eos_id=1)
    assert set(fields) <= set(GenerationConfig().to_dict())


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json"):
        decoding_in(tmp_path, encoder_decoder=True)
