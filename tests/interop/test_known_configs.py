"""Fields of config.json: every one that transformers has is known, and no other is dropped without a word."""

import json
import logging
import re
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from empax.core.config import ConfigError
from empax.data.model_files import unknown_fields, warn_once
from empax.interop.architectures import ARCHITECTURES
from empax.interop.config_fields import ALIASES, check_fields, known_fields
from empax.interop.huggingface import load_config, model_config

FILE = Path("config.json")


@pytest.fixture(autouse=True)
def fresh():
    warn_once.cache_clear()


def warnings_of(caplog, fields):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="empax"):
        known_fields(fields, FILE)
    return caplog.text


@pytest.mark.oracle
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_field_of_transformers_is_known(name, caplog):
    kind = CONFIG_MAPPING[name]
    assert kind.attribute_map == ALIASES.get(name, {})
    assert warnings_of(caplog, {**kind().to_dict(), "model_type": name}) == ""
    module = name.replace("-", "_")
    source = (Path(transformers.__file__).parent / "models" / module / f"modeling_{module}.py").read_text()
    read = {*re.findall(r"config\.(\w+)", source), *re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source)}
    read -= {"hidden_dropout", "summary_last_dropout"}  # of heads that are not here
    said = dict.fromkeys(read - ALIASES.get(name, {}).keys() - {"is_decoder", "add_cross_attention"}, 1)
    assert warnings_of(caplog, {**said, "model_type": name}) == ""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_unknown_field_is_named_once(name, caplog):
    fields = {"model_type": name, "logit_scale": 0.5, "nothing": None, "none": []}
    assert "config.json sets logit_scale = 0.5, which is unknown here" in warnings_of(caplog, fields)
    assert warnings_of(caplog, fields) == ""


def test_what_says_something():
    assert unknown_fields({"a": 0, "b": False, "c": "", "d": None, "e": [], "f": {}, "g": 1}, ["g"]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
            "quantization_config = .* must be null",
        ),
        ({"model_type": "bert", "pruned_heads": {"0": [1]}}, "pruned_heads = "),
        (
            {"model_type": "bart", "is_decoder": True},
            "is_decoder = True is not supported here; it must be null or false",
        ),
        ({"model_type": "roberta", "add_cross_attention": True}, "add_cross_attention = True"),
        ({"model_type": "qwen2", "use_mrope": True}, "use_mrope = True"),
        ({"model_type": "gpt2", "n_embd": 32, "hidden_size": 64}, "hidden_size = 64 and n_embd = 32 mean the same"),
        ({"model_type": "bart", "encoder_layers": 6, "num_hidden_layers": 12}, "num_hidden_layers = 12 and enc"),
        (
            {"model_type": "t5", "feed_forward_proj": "gated-gelu", "dense_act_fn": "relu"},
            "dense_act_fn = 'relu' does not go with feed_forward_proj = 'gated-gelu'",
        ),
        ({"model_type": "mt5", "feed_forward_proj": "relu", "is_gated_act": True}, "is_gated_act = True does not go"),
        (
            {
                "model_type": "llama",
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
            },
            "rope_scaling and rope_parameters differ in rope_type",
        ),
    ],
)
def test_what_would_change_the_numbers_is_refused(fields, message):
    with pytest.raises(ConfigError, match=f"^config.json: .*{message}"):
        known_fields(fields, FILE)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt2", {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 64}),
        ("t5", {"hidden_size": 32, "num_attention_heads": 2, "num_layers": 3, "head_dim": 16, "d_ff": 40}),
        ("distilbert", {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3, "hidden_dim": 40}),
    ],
)
def test_other_names_of_a_field_are_taken_as_transformers_takes_them(name, fields, tmp_path):
    fields |= {"model_type": name, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs = CONFIG_MAPPING[name].from_pretrained(tmp_path)
    written = theirs.to_dict()
    assert model_config(load_config(tmp_path)) == model_config({**written, "model_type": name})


def test_a_null_in_a_scaling_is_as_absent():
    check_fields({"model_type": "llama", "rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}}, FILE)


def test_a_distilbert_has_the_epsilon_of_transformers_whatever_its_file_says():
    fields = {"model_type": "distilbert", "vocab_size": 50, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 40}
    assert model_config(fields | {"layer_norm_eps": 0.1}).layer_norm_eps == 1e-12


def test_a_file_is_told_of_when_it_is_loaded(tmp_path, caplog):
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, "alibi": True}))
    with caplog.at_level(logging.WARNING, logger="empax"):
        load_config(tmp_path)
    assert f"{tmp_path / 'config.json'} sets alibi = True" in caplog.text
