"""Decoder-only families from Hugging Face's folders and back, byte for byte."""

import dataclasses

import jax
import numpy as np
import pytest
import safetensors.numpy

from empax.core.files import DataError
from empax.core.tree import count_params
from empax.interop.architectures import ARCHITECTURES
from empax.interop.huggingface import load_pretrained
from empax.interop.parameters import export_params, import_params
from tests.interop import oracle
from tests.interop.tiny import tiny


def config_of(model):
    return ARCHITECTURES[model.config.model_type].config(model.config.to_dict())


MODELS = {
    "llama": {"tie_word_embeddings": False},
    "llama tied, biased": {"tie_word_embeddings": True, "attention_bias": True},
    "gpt2": {},
    "gpt2 untied": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3 biased": {"attention_bias": True},
    "mistral": {},
    "opt": {},
    "opt of 350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 12, "tie_word_embeddings": False},
    "opt unbiased": {"enable_bias": False, "_remove_final_layer_norm": True},
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", MODELS)
def test_folder_comes_back_byte_for_byte(tmp_path, name):
    model = tiny(name.partition(" ")[0], **MODELS[name])
    model.save_pretrained(tmp_path / "theirs")
    architecture, config, params = load_pretrained(tmp_path / "theirs")
    assert architecture == model.config.model_type
    exported = export_params(architecture, params, config)
    saved = safetensors.numpy.load_file(tmp_path / "theirs" / "model.safetensors")
    oracle.assert_same_bytes(exported, saved)

    (tmp_path / "ours").mkdir()
    safetensors.numpy.save_file(exported, tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path / "ours")
    again, report = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    oracle.assert_same_bytes(oracle.tensors_of(model), oracle.tensors_of(again))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_old_checkpoints_buffers_are_passed_over(architecture):
    """And GPT-2's first files were saved without their head: names lack their beginning."""
    model = tiny(architecture)
    config, tensors = config_of(model), oracle.tensors_of(model)
    expected = import_params(architecture, tensors, config)
    base = "transformer." if architecture == "gpt2" else "model."
    old = {name.removeprefix(base): array for name, array in tensors.items()}
    if architecture == "gpt2":
        del old["lm_head.weight"]
        old["h.0.attn.bias"] = np.ones((1, 1, 17, 17), bool)
        old["transformer.h.1.attn.masked_bias"] = np.float32(-1e4)
    elif architecture == "llama":
        old["layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    jax.tree.map(np.testing.assert_array_equal, import_params(architecture, old, config), expected)


def test_one_error_lists_everything_that_does_not_fit():
    model = tiny("gpt2")
    tensors = oracle.tensors_of(model)
    tensors["transformer.h.1.attn.c_attn.weight"] = np.zeros((20, 61), np.float32)
    del tensors["transformer.h.0.attn.c_attn.bias"]
    tensors["transformer.h.0.adapter.weight"] = np.zeros(3, np.float32)
    with pytest.raises(DataError) as caught:
        import_params("gpt2", tensors, config_of(model))
    message = str(caught.value)
    assert "3 problems" in message
    assert "transformer.h.1.attn.c_attn.weight has shape [20, 61], must be [20, 60]" in message
    assert "missing transformer.h.0.attn.c_attn.bias [60]" in message
    assert "surplus transformer.h.0.adapter.weight" in message


def test_heads_are_neither_dropped_nor_made_up():
    model = tiny("llama", tie_word_embeddings=False)
    config, tensors = config_of(model), oracle.tensors_of(model)
    tied = dataclasses.replace(config, tie_embeddings=True)
    with pytest.raises(
        DataError, match=r"lm_head\.weight is not model\.embed_tokens\.weight.*tie_word_embeddings to false"
    ):
        import_params("llama", tensors, tied)
    del tensors["lm_head.weight"]
    with pytest.raises(DataError, match=r"missing lm_head\.weight \[37, 20\]"):
        import_params("llama", tensors, config)
    assert "output_embedding" not in import_params("llama", tensors, tied)


@pytest.mark.parametrize(
    ("architecture", "name", "count"),
    [
        ("llama", "llama-3.1-8b", 8_030_261_248),
        ("llama", "llama-3.2-1b", 1_235_814_400),
        ("llama", "smollm2-135m", 134_515_008),
        ("gpt2", "gpt2", 124_439_808),
        ("gpt2", "dialogpt-medium", 354_823_168),
        ("gpt2", "dialogpt-large", 774_030_080),
    ],
)
def test_presets_have_the_published_sizes(architecture, name, count):
    config = ARCHITECTURES[architecture].config(name, dropout=0.25)
    assert config.dropout == 0.25
    assert count_params(ARCHITECTURES[architecture].shapes(config)) == count
