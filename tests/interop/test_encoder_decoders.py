"""T5, BART and BlenderBot against PyTorch: values, gradients, round trips, folders."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.interop.architectures import ARCHITECTURES
from empax.interop.huggingface import load_pretrained
from empax.interop.parameters import export_params, import_params
from empax.models.t5 import T5Encoder, t5_config
from tests.interop import oracle
from tests.interop.tiny import T5, VOCAB, tiny

# T5 v1.0 is "t5", v1.1 "gated".
KINDS = ["bart", "bart-untied", "t5", "gated", "blenderbot", "t5-untied", "gated-tied"]
UNTIED = {"bart-untied", "t5-untied", "gated"}
EMBEDDINGS = {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}


@functools.cache
def made(kind):
    """A tiny random model of Hugging Face, and our settings for it."""
    family, _, _ = kind.partition("-")
    if family in ("t5", "gated"):  # ties what v1.0 says, and v1.1
        gated = family == "gated"
        changes = {"feed_forward_proj": "gated-gelu" if gated else "relu", "tie_word_embeddings": not gated}
    else:
        changes = {"scale_embedding": kind != "bart-untied"}
    model = tiny("t5" if family == "gated" else family, own_head=kind in UNTIED, **changes)
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight) == (kind not in UNTIED)
    fields = model.config.to_dict()
    return model, ARCHITECTURES[fields["model_type"]].config(fields, tie_embeddings=kind not in UNTIED)


def copies(config):
    """Tensors that are the token embedding once more; an untied BART is written with its own."""
    head = {"lm_head.weight"} if config.tie_embeddings else set()
    written = set() if config.tie_embeddings else EMBEDDINGS
    return (head | EMBEDDINGS | {name.removeprefix("model.") for name in EMBEDDINGS}) - written


@pytest.mark.oracle
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (n > 3)) for n, kind in enumerate(KINDS)]
)
def test_logits_and_gradients_match_torch_and_the_round_trip_is_exact(kind):
    model, config = made(kind)
    name = model.config.model_type
    assert config.tie_embeddings == (kind not in UNTIED)
    tensors = oracle.tensors_of(model)
    params = import_params(name, tensors, config)
    exported = export_params(name, params, config)
    assert set(exported) == set(tensors) - copies(config)
    oracle.assert_same_bytes(exported, tensors, surplus=True)

    source, source_mask = oracle.ids_and_mask(3, 17, VOCAB, pad=model.config.pad_token_id)
    target = np.random.default_rng(2).integers(1, VOCAB, size=(3, 6))
    ours = oracle.assert_generators_match(
        model, config, params, name=name, source=source, source_mask=source_mask, target=target,
        frozen={"final_logits_bias"} | EMBEDDINGS,
    )  # fmt: skip
    if "final_logits_bias" in ours:  # a buffer: whoever trains the rest must not train it
        assert not ours["final_logits_bias"].any()


def test_folder_of_a_model_saved_without_its_head(tmp_path):
    model, config = made("bart")
    model.model.save_pretrained(tmp_path)  # as facebook/bart-base is
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BartModel"]
    name, read, params = load_pretrained(tmp_path)
    assert (name, read) == ("bart", config)
    assert not params["output_bias"].any()
    exported = export_params(name, params, config)
    expected = model.model.state_dict()["decoder.layers.2.encoder_attn.k_proj.weight"].numpy()
    np.testing.assert_array_equal(exported["model.decoder.layers.2.encoder_attn.k_proj.weight"], expected)


@pytest.mark.parametrize("kind", ["bart", "blenderbot"])
def test_what_does_not_fit_is_listed(kind):
    model, config = made(kind)
    tensors = oracle.tensors_of(model)
    del tensors["model.encoder.layers.1.fc1.bias"]
    tensors["model.decoder.embed_positions.weight"] = np.zeros((5, 21), np.float32)
    tensors["model.decoder.layers.0.adapter.weight"] = np.zeros(3, np.float32)
    with pytest.raises(DataError) as caught:
        import_params(kind, tensors, config)
    message = str(caught.value)
    assert "3 problems" in message
    for part in ("missing model.encoder.layers.1.fc1.bias [26]", "has shape [5, 21]", "surplus model.decoder.layers.0"):
        assert part in message


def test_two_embeddings_are_not_taken_for_one():
    model, config = made("bart")
    tensors = oracle.tensors_of(model)
    tensors["model.decoder.embed_tokens.weight"] = tensors["model.decoder.embed_tokens.weight"] + 1
    with pytest.raises(DataError, match=r"model\.decoder\.embed_tokens\.weight is not model\.shared\.weight"):
        import_params("bart", tensors, config)


@pytest.mark.parametrize("scaled", [False, True])
def test_own_output_weights_are_not_dropped_silently(scaled):
    model, config = made("gated")
    tied = dataclasses.replace(config, tie_embeddings=True, output_scale=scaled)
    advice = "set tie_word_embeddings to false" + (" and scale_decoder_outputs to true" if scaled else "")
    with pytest.raises(DataError, match=rf"lm_head\.weight is not shared\.weight.*{advice}$"):
        import_params("t5", oracle.tensors_of(model), tied)


@pytest.mark.oracle
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["t5", "gated"])
def test_folder_as_transformers_saves_it(tmp_path, kind, shards):
    model, _ = made(kind)
    model.save_pretrained(tmp_path, max_shard_size="8KB" if shards > 1 else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards > 1)
    architecture, config, params = load_pretrained(tmp_path)
    assert (architecture, config.tie_embeddings, config.output_scale) == ("t5", kind == "t5", kind == "t5")
    exported = export_params("t5", params, config)
    oracle.assert_same_bytes(exported, oracle.tensors_of(model), surplus=True)
    assert ("lm_head.weight" in exported) == (kind == "gated")


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["bart", "gated-tied"])
def test_the_encoder_alone_is_the_models(kind):
    model, config = made(kind)
    params = import_params(model.config.model_type, oracle.tensors_of(model), config)
    del params["decoder"]
    ids, mask = oracle.ids_and_mask(3, 17, VOCAB, pad=model.config.pad_token_id)
    with torch.no_grad():
        expected = model.get_encoder()(torch.tensor(ids), attention_mask=torch.tensor(mask).long()).last_hidden_state
    apply = jax.jit(lambda params: T5Encoder(config).apply({"params": params}, jnp.asarray(ids), jnp.asarray(mask)))
    oracle.assert_close(apply(params), expected.numpy())


def test_a_t5_as_each_version_of_transformers_writes_it():
    plain = {name: value for name, value in T5.items() if name != "decoder_start_token_id"}
    for said, tied, scaled in (
        ({}, True, True),
        ({"tie_word_embeddings": None}, True, True),
        ({"tie_word_embeddings": False}, False, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, True, True),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, False, True),
    ):
        config = t5_config(plain | said)
        assert (config.tie_embeddings, config.output_scale) == (tied, scaled)
    with pytest.raises(ConfigError, match="gated-gelu"):
        t5_config(plain | {"feed_forward_proj": "gated-tanh"})


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("t5-small", 60.5),
        ("t5-base", 222.9),
        ("flan-t5-base", 247.6),
        ("t5-3b", 2851.6),
        ("t5-large", 737.7),
        ("t5-11b", 11307.3),
        ("flan-t5-small", 77.0),
        ("google/flan-t5-large", 783.2),
        ("flan-t5-xl", 2849.8),
        ("t5-v1_1-xxl", 11135.3),
        ("facebook/bart-base", 139.4),
        ("bart-large", 406.3),
        ("blenderbot-400M-distill", 364.8),
        ("blenderbot-3B", 2696.3),
    ],
)
def test_presets_have_the_published_sizes(name, millions):
    family = next(family for family in ("bart", "blenderbot", "t5") if family in name)
    shapes = ARCHITECTURES[family].shapes(ARCHITECTURES[family].config(name))
    shapes.pop("output_bias", None)  # a buffer there
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
    assert abs(count / 1e6 - millions) < 0.1
