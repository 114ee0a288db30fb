"""T5, BART and BlenderBot: their embeddings, their encoder alone, and what their settings say."""

import dataclasses
import functools

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


@functools.cache
def made(name, **changes):
    """A tiny random model of Hugging Face, our settings for it, and its tensors."""
    model = tiny(name, **changes)
    return model, ARCHITECTURES[name].config(model.config.to_dict()), oracle.tensors_of(model)


def gated(**changes):
    """A T5 v1.1."""
    return made("t5", feed_forward_proj="gated-gelu", **changes)


def test_two_embeddings_are_not_taken_for_one():
    _, config, tensors = made("bart")
    name = "model.decoder.embed_tokens.weight"
    with pytest.raises(DataError, match=r"model\.decoder\.embed_tokens\.weight is not model\.shared\.weight"):
        import_params("bart", tensors | {name: tensors[name] + 1}, config)


@pytest.mark.parametrize("scaled", [False, True])
def test_own_output_weights_are_not_dropped_silently(scaled):
    _, config, tensors = gated(own_head=True)
    tied = dataclasses.replace(config, tie_embeddings=True, output_scale=scaled)
    advice = "set tie_word_embeddings to false" + (" and scale_decoder_outputs to true" if scaled else "")
    with pytest.raises(DataError, match=rf"lm_head\.weight is not shared\.weight.*{advice}$"):
        import_params("t5", tensors, tied)


@pytest.mark.oracle
def test_shards_as_transformers_saves_them(tmp_path):
    model, _, tensors = gated(own_head=True)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _, config, params = load_pretrained(tmp_path)
    oracle.assert_same_bytes(export_params("t5", params, config), tensors, surplus=True)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["bart", "gated"])
def test_the_encoder_alone_is_the_models(kind):
    model, config, tensors = made("bart") if kind == "bart" else gated()
    params = import_params(model.config.model_type, tensors, config)
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
