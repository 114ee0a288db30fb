"""Encoders and generators from settings."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from empax.core.config import ConfigError, to_settings
from empax.data.bpe import train_bpe
from empax.data.store import PlannedTokenizer
from empax.interop.architectures import ARCHITECTURES
from empax.interop.parameters import export_params
from empax.interop.pretrained import GeneratorSettings, load_generator
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder, word_embeddings
from empax.models.bert import BertEncoder
from empax.models.decoder_only import DecoderOnly
from empax.models.t5 import t5_from_scratch
from tests.interop.tiny import BART

TOKENIZER = PlannedTokenizer(500)


def test_a_random_encoder_reads_with_the_runs_tokenizer():
    loaded = load_encoder(EncoderSettings(d_model=16, num_heads=2, d_ff=32, num_layers=3, dropout=0.3), TOKENIZER)
    assert loaded.params is None
    assert loaded.tokenizer is TOKENIZER
    config = loaded.model.encoder.config
    assert (config.vocab_size, config.num_layers, config.d_model, config.dropout) == (500, 3, 16, 0.3)
    shapes = jax.eval_shape(loaded.model.init, jax.random.key(0), jnp.ones((1, 4), int), jnp.ones((1, 4), bool))
    assert jax.tree.leaves(shapes["params"]["encoder"])


def test_a_pretrained_encoder_brings_weights_and_tokenizer_and_may_be_cut(minilm):
    whole = load_encoder(EncoderSettings(pretrained="minilm", normalize=True), TOKENIZER)
    cut = load_encoder(EncoderSettings(pretrained="minilm", num_layers=2, dtype="bfloat16"), TOKENIZER)
    assert isinstance(whole.model.encoder, BertEncoder)
    assert whole.tokenizer.vocab_size == whole.model.encoder.config.vocab_size == 30522
    assert (whole.model.encoder.config.num_layers, cut.model.encoder.config.num_layers) == (6, 2)
    assert cut.model.encoder.config.dtype == "bfloat16"
    whole_leaves = jax.tree.leaves(whole.params["encoder"]["stack"])
    cut_leaves = jax.tree.leaves(cut.params["encoder"]["stack"])
    for all_layers, first in zip(whole_leaves, cut_leaves, strict=True):
        np.testing.assert_array_equal(all_layers[:2], first)
    planned = load_encoder(EncoderSettings(pretrained="minilm"), TOKENIZER, with_params=False)
    assert planned.params is None
    assert planned.model == whole.model  # the folder normalises
    plain = EncoderSettings(pretrained="minilm", normalize=False)
    assert load_encoder(plain, TOKENIZER, with_params=False).model == whole.model.clone(normalize=False)


def test_more_layers_than_there_are_cannot_be_kept(minilm):
    with pytest.raises(ConfigError, match="num_layers = 7, but minilm has 6"):
        load_encoder(EncoderSettings(pretrained="minilm", num_layers=7), TOKENIZER)


def test_a_generator_from_scratch_has_the_tokenizers_vocabulary_and_start():
    tokenizer = train_bpe(["a b"], vocab_size=300)
    settings = GeneratorSettings(d_model=16, num_heads=2, head_dim=8, d_ff=32, num_encoder_layers=1, unroll=2)
    loaded = load_generator(settings, tokenizer)
    assert loaded.params is None
    config = loaded.model.config
    assert (config.vocab_size, config.start_id) == (tokenizer.vocab_size, tokenizer.start_id)
    assert (config.num_encoder_layers, config.num_decoder_layers, config.head_dim, config.unroll) == (1, 4, 8, 2)


def test_a_generator_from_scratch_may_start_from_an_encoders_word_embeddings(minilm):
    settings = GeneratorSettings(d_model=64, head_dim=16, embeddings="minilm")
    text = ["the happy dog was glad", "a sad cat and a dog"] * 20
    tokenizer = train_bpe(text, vocab_size=400, lowercase=True)
    params = load_generator(settings, tokenizer).params
    assert params is not None
    table = params["token_embedding"]
    assert table.shape == (tokenizer.vocab_size, 64)
    np.testing.assert_allclose(table.std(), 64**-0.5, rtol=0.1)
    rows = {word: table[tokenizer.encode(word)[-1]] for word in ("happy", "glad", "dog", "cat", "was")}
    rows = {word: row / np.linalg.norm(row) for word, row in rows.items()}
    assert rows["happy"] @ rows["glad"] > rows["happy"] @ rows["was"]
    assert rows["dog"] @ rows["cat"] > rows["dog"] @ rows["was"]
    assert load_generator(settings, tokenizer, with_params=False).params is None
    # A T5 does not scale its embeddings, and begins with larger ones.
    t5 = load_generator(dataclasses.replace(settings, architecture="t5_from_scratch"), tokenizer)
    assert t5.params is not None
    np.testing.assert_allclose(t5.params["token_embedding"], 8.0 * table, rtol=1e-5)
    assert t5.model.config == t5_from_scratch(
        tokenizer.vocab_size, d_model=64, num_heads=4, head_dim=16, d_ff=1024, num_encoder_layers=4,
        num_decoder_layers=4, start_id=tokenizer.start_id,
    )  # fmt: skip
    # A small corpus has fewer tokens than dimensions.
    wide = load_generator(GeneratorSettings(d_model=384, embeddings="minilm"), tokenizer).params
    assert wide is not None
    np.testing.assert_allclose(wide["token_embedding"].std(), 384**-0.5, rtol=0.1)
    with pytest.raises(ConfigError, match="384 dimensions, d_model = 400"):
        load_generator(GeneratorSettings(d_model=400, embeddings="minilm"), tokenizer)


def test_a_piece_within_a_word_keeps_its_embedding(minilm):
    texts = ["walk", "##ing", "ing", "#", "talk"]
    few = types.SimpleNamespace(vocab_size=len(texts), decode=lambda ids: texts[ids[0]])
    found = word_embeddings("minilm", few, 384)
    loaded = load_encoder(EncoderSettings(pretrained="minilm"), TOKENIZER)
    rows = np.asarray(loaded.params["encoder"]["token_embedding"])[[*map(loaded.tokenizer.token_id, texts)]]
    products = [x @ x.T / np.square(x).sum() for x in (found, rows - rows.mean(axis=0))]
    np.testing.assert_allclose(*products, atol=1e-5)


def test_a_random_t5_grows_with_a_larger_tokenizer():
    settings = GeneratorSettings(architecture="t5", preset="t5-small", dropout=0.0)
    small = load_generator(settings, TOKENIZER)
    large = load_generator(settings, PlannedTokenizer(40_000))
    assert small.params is None
    assert small.model.config.vocab_size == 32128
    assert large.model.config.vocab_size == 40_000
    assert small.model.config.d_model == 512


def test_a_random_decoder_only_model_by_its_preset():
    settings = GeneratorSettings(architecture="gpt2", preset="dialogpt-medium", dropout=0.0, unroll=2)
    loaded = load_generator(settings, TOKENIZER)
    assert loaded.params is None
    assert isinstance(loaded.model, DecoderOnly)
    config = loaded.model.config
    assert (config.vocab_size, config.num_layers, config.dropout, config.unroll) == (50257, 24, 0.0, 2)
    assert load_generator(settings, PlannedTokenizer(60_000)).model.config.vocab_size == 60_000
    llama = GeneratorSettings(architecture="llama", preset="llama-3.2-1b", pretrained="not/here")
    assert load_generator(llama, TOKENIZER, planned=True).model.config.tie_embeddings
    with pytest.raises(ConfigError, match="'gpt2' is not a Llama preset"):
        load_generator(GeneratorSettings(architecture="llama", preset="gpt2"), TOKENIZER)


SIZES = BART | {"vocab_size": 510, "decoder_start_token_id": 3}


@pytest.mark.parametrize("architecture", ["bart", "blenderbot"])
def test_a_pretrained_generator_is_what_its_folder_says(architecture, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": architecture}))
    config = ARCHITECTURES[architecture].config(SIZES)
    weights = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 0.5, np.float32), ARCHITECTURES[architecture].shapes(config)
    )
    safetensors.numpy.save_file(export_params(architecture, weights, config), tmp_path / "model.safetensors")
    settings = GeneratorSettings(architecture="pretrained", pretrained=str(tmp_path), dropout=0.2, unroll=2)
    loaded = load_generator(settings, TOKENIZER)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, weights)
    found = loaded.model.config
    assert (found.start_id, found.dropout, found.unroll, found.pre_norm) == (3, 0.2, 2, architecture == "blenderbot")
    named = dataclasses.replace(settings, architecture=architecture)
    assert load_generator(named, TOKENIZER, with_params=False).model == loaded.model
    with pytest.raises(ConfigError, match=f"is a '{architecture}', but architecture = 't5'"):
        load_generator(dataclasses.replace(settings, architecture="t5"), TOKENIZER)
    with pytest.raises(ConfigError, match=r"511 ids, but .* only 510 rows"):
        load_generator(settings, PlannedTokenizer(511))


def test_a_folder_that_generates_no_text_is_refused(tmp_path):
    sizes = {"hidden_size": 6, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "roberta", "vocab_size": 510}))
    with pytest.raises(ConfigError, match="is a 'roberta', which generates no text"):
        load_generator(GeneratorSettings(architecture="pretrained", pretrained=str(tmp_path)), TOKENIZER)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "t5-small"}, "pretrained and preset go with architecture = 't5'"),
        ({"architecture": "t5"}, r"needs pretrained \(a folder or a Hub name\) or preset \('t5-small'\)"),
        ({"architecture": "bart", "preset": "bart-base", "embeddings": "minilm"}, "a 'bart' brings its own"),
        ({"architecture": "pretrained", "preset": "bart-base"}, r"\(a folder or a Hub name\), and no preset"),
        ({"architecture": "gpt"}, "one of 'transformer', 't5'"),
        ({"d_modle": 3}, "did you mean 'd_model'"),
    ],
)
def test_generators_that_cannot_be_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        to_settings(GeneratorSettings, values, where="config.reg.generator")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_encoder(EncoderSettings(pretrained=str(tmp_path)), TOKENIZER)
