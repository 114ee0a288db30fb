"""Adapters that PEFT wrote on encoders, with heads and without, against the weights that PEFT merges."""

import json
import logging

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.interop.huggingface import load_adapted, load_config, load_pretrained, model_config
from empax.interop.parameters import export_params, import_params
from empax.interop.peft import export_adapters
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.models.lora import LoraSettings
from tests.interop import oracle

oracle.import_peft()
KINDS = ("BertModel", "BertForMaskedLM", "RobertaModel", "XLMRobertaForMaskedLM", "DistilBertModel")
KINDS += ("DistilBertForMaskedLM", "ElectraModel", "ElectraForPreTraining", "MPNetModel", "MPNetForMaskedLM")
KINDS += ("DPRContextEncoder",)
QUERIES = {"DistilBert": "q_lin", "MPNet": "q"}


def of_queries(kind):
    return [next((name for start, name in QUERIES.items() if kind.startswith(start)), "query")]


@pytest.fixture
def written(adapter, tmp_path):
    """Makes an adapter of PEFT's on one of the encoders; gives its folder and what PEFT merges."""

    def write(kind, **settings):
        return tmp_path / "adapter", oracle.merged(adapter(kind, **settings))

    return write


def assert_read_as_merged(folder, merged, base):
    """All weights are PEFT's; gives the names of those that are not as in `base`."""
    kind, config, params = load_pretrained(folder)
    expected = export_params(kind, import_params(kind, merged, config), config)
    plain = export_params(kind, load_pretrained(base).params, model_config(load_config(base)))
    found = export_params(kind, params, config)
    oracle.assert_same_weights(expected, found)
    return {name for name, value in expected.items() if np.abs(value - plain[name]).max() > 1e-3}


@pytest.mark.oracle
@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_is_read_as_peft_merges_it(kind, written, saved):
    patterns = {"rank_pattern": {r"1\..*": 2}, "alpha_pattern": {"|".join(of_queries(kind)): 9}, "use_rslora": True}
    folder, merged = written(kind, target_modules="all-linear", **patterns)
    changed = assert_read_as_merged(folder, merged, saved(kind))
    assert len(changed) == 12 + kind.startswith("Electra")  # six in each layer, and the projection of its embeddings


@pytest.mark.oracle
@pytest.mark.parametrize(
    "kind", ["BertForMaskedLM", "DistilBertModel", "ElectraModel", "MPNetModel", "DPRContextEncoder"]
)
def test_one_layer_with_embeddings_and_norms_saved(kind, written, saved):
    kept = ["word_embeddings", "position_embeddings", "LayerNorm", "layer_norm"]
    folder, merged = written(kind, target_modules=of_queries(kind), layers_to_transform=[1], modules_to_save=kept)
    changed = assert_read_as_merged(folder, merged, saved(kind))
    # One query, two embeddings, five norms with their biases.
    assert len(changed) == 1 + 2 + 2 * 5


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["BertForMaskedLM", "DistilBertModel", "MPNetModel"])
def test_adapters_on_embeddings_are_merged(kind, written, saved):
    embeddings = ["word_embeddings", "position_embeddings", "relative_attention_bias"]
    folder, merged = written(kind, target_modules=of_queries(kind) + embeddings)
    changed = assert_read_as_merged(folder, merged, saved(kind))
    assert len(changed) == 2 + (3 if kind == "MPNetModel" else 2)


@pytest.mark.parametrize("kind", ["BertModel", "DistilBertForMaskedLM"])
def test_what_is_excluded_by_a_whole_name_is_not_missing(kind, written, saved):
    """Where the model has a head, names have one part more in front."""
    front = "" if kind == "BertModel" else "distilbert.transformer."
    excluded = rf"{front.replace('.', '[.]')}(encoder[.])?layer[.]0[.].*"
    folder, merged = written(kind, target_modules=of_queries(kind), exclude_modules=excluded)
    assert len(assert_read_as_merged(folder, merged, saved(kind))) == 1


def test_an_adapter_on_an_encoder_that_is_cut_is_refused_before_any_work(written):
    folder, _ = written("BertModel", target_modules=["query"])
    settings = EncoderSettings(pretrained=str(folder), num_layers=1)
    with pytest.raises(ConfigError, match=r"num_layers = 1 cuts an encoder, but .* is an adapter on all of its layers"):
        load_encoder(settings, None, with_params=False)


def test_a_pooler_is_left_out_and_said(written, saved, caplog):
    folder, merged = written("BertModel", target_modules=["dense"])
    with caplog.at_level(logging.WARNING, "empax"):
        assert len(assert_read_as_merged(folder, merged, saved("BertModel"))) == 6
    assert "the adapter is also on pooler.dense, not read here" in caplog.text


def test_an_adapter_on_nothing_that_is_read_is_refused(written):
    folder, _ = written("BertModel", target_modules=["pooler.dense"])
    with pytest.raises(DataError, match=r"it adapts nothing but pooler\.dense"):
        load_pretrained(folder)


def test_layers_that_the_config_does_not_count_are_refused(saved, tmp_path):
    """A file with more layers is another model; its first layers are taken where `num_layers` asks for them."""
    folder = tmp_path / "short"
    transformers.BertModel.from_pretrained(saved("BertModel")).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 1}))
    with pytest.raises(DataError, match=r"surplus encoder\.layer\.1\.attention\.self\.query\.weight"):
        load_pretrained(folder)


def test_one_adapter_under_two_names_is_refused(written):
    folder, _ = written("BertModel", target_modules=["query"])
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "encoder.layer.0.attention.self.query.lora_A.weight"
    tensors[f"base_model.model.bert.{name}"] = tensors[f"base_model.model.{name}"] + 1
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(DataError, match=r"query and .*query are the same part of a model"):
        load_pretrained(folder)


def test_a_head_for_classes_is_refused_by_name(saved, tmp_path):
    """And the encoder can be had without it, as the message says."""
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification.from_pretrained(saved("BertModel"))
    adapted = oracle.lora_of(model, tmp_path / "adapter", task_type="SEQ_CLS", target_modules=["query"])
    with pytest.raises(
        ConfigError, match=r"brings classifier\.bias, classifier\.weight, .* classification heads"
    ) as caught:
        load_pretrained(tmp_path / "adapter")
    names = {"BASE": str(saved("BertModel")), "FOLDER": str(tmp_path / "adapter"), "OUT": str(tmp_path / "out")}
    oracle.follow(str(caught.value), names)
    _, _, params = load_pretrained(tmp_path / "out")
    expected = oracle.merged(adapted)["bert.encoder.layer.1.attention.self.query.weight"]
    found = params["stack"]["layers"]["attention"]["query"][1]
    np.testing.assert_allclose(found.reshape(20, 20).T, expected, rtol=1e-5, atol=1e-6)


def test_what_is_written_here_comes_back(saved, tmp_path):
    kind, config, params = load_pretrained(saved("BertModel"))
    settings = LoraSettings(pattern="attention/(query|out)$", rank=2)
    adapters = oracle.drawn_adapters(params, settings)
    export_adapters(tmp_path / "out", kind, adapters, config, settings, base=str(saved("BertModel")))
    jax.tree.map(np.testing.assert_array_equal, load_adapted(tmp_path / "out").adapters, adapters)
