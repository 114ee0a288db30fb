"""Adapters that PEFT wrote on encoders, with heads and without, against the weights that PEFT merges."""

import dataclasses
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
from empax.core.tree import named_leaves
from empax.interop.huggingface import load_adapted, load_config, load_pretrained, model_config
from empax.interop.parameters import export_params, import_params
from empax.interop.peft import export_adapters
from empax.models.lora import LoraSettings, init_adapters

peft = pytest.importorskip("peft", reason="the oracle for adapters is not installed")

SIZES = {"vocab_size": 37, "hidden_size": 20, "num_attention_heads": 4, "intermediate_size": 27}
SIZES |= {"num_hidden_layers": 2, "max_position_embeddings": 23, "pad_token_id": 1}
DISTILBERT = {"vocab_size": 37, "dim": 20, "n_heads": 4, "hidden_dim": 27, "n_layers": 2, "max_position_embeddings": 23}
MAKERS = {
    "BertModel": transformers.BertConfig(**SIZES),
    "BertForMaskedLM": transformers.BertConfig(**SIZES),
    "RobertaModel": transformers.RobertaConfig(**SIZES),
    "XLMRobertaForMaskedLM": transformers.XLMRobertaConfig(**SIZES),
    "DistilBertModel": transformers.DistilBertConfig(**DISTILBERT),
    "DistilBertForMaskedLM": transformers.DistilBertConfig(**DISTILBERT),
    "ElectraModel": transformers.ElectraConfig(**SIZES, embedding_size=14),
    "ElectraForPreTraining": transformers.ElectraConfig(**SIZES, embedding_size=20),
    "MPNetModel": transformers.MPNetConfig(**SIZES),
    "MPNetForMaskedLM": transformers.MPNetConfig(**SIZES),
    "DPRContextEncoder": transformers.DPRConfig(**SIZES),
}
QUERIES = {"DistilBert": "q_lin", "MPNet": "q"}


def of_queries(kind):
    return [next((name for start, name in QUERIES.items() if kind.startswith(start)), "query")]


@pytest.fixture(scope="module")
def bases(tmp_path_factory, oracle):
    """A folder for each kind of encoder."""
    root = tmp_path_factory.mktemp("encoders")
    for kind, config in MAKERS.items():
        torch.manual_seed(0)
        oracle.perturbed(getattr(transformers, kind)(config)).save_pretrained(root / kind)
    return root


@pytest.fixture
def written(bases, tmp_path, oracle):
    """Makes an adapter of PEFT's on one of the encoders; gives its folder and what PEFT merges."""

    def write(kind, **settings):
        model = getattr(transformers, kind).from_pretrained(bases / kind)
        adapted = oracle.lora_of(model, tmp_path / "adapter", **settings)
        return tmp_path / "adapter", oracle.merged(adapted)

    return write


def assert_read_as_merged(folder, merged, base):
    """All weights are PEFT's; gives the names of those that are not as in `base`."""
    kind, config, params = load_pretrained(folder)
    expected = export_params(kind, import_params(kind, merged, config), config)
    plain = export_params(kind, load_pretrained(base).params, model_config(load_config(base)))
    found = export_params(kind, params, config)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    return {name for name, value in expected.items() if np.abs(value - plain[name]).max() > 1e-3}


@pytest.mark.oracle
@pytest.mark.parametrize("kind", MAKERS)
def test_every_linear_layer_is_read_as_peft_merges_it(kind, written, bases):
    patterns = {"rank_pattern": {r"1\..*": 2}, "alpha_pattern": {"|".join(of_queries(kind)): 9}, "use_rslora": True}
    folder, merged = written(kind, target_modules="all-linear", **patterns)
    changed = assert_read_as_merged(folder, merged, bases / kind)
    assert len(changed) == 12 + (kind == "ElectraModel")  # six in each layer, and the projection of its embeddings


@pytest.mark.oracle
@pytest.mark.parametrize("kind", MAKERS)
def test_one_layer_with_embeddings_and_norms_saved(kind, written, bases):
    saved = ["word_embeddings", "position_embeddings", "LayerNorm", "layer_norm"]
    folder, merged = written(kind, target_modules=of_queries(kind), layers_to_transform=[1], modules_to_save=saved)
    changed = assert_read_as_merged(folder, merged, bases / kind)
    # One query, two embeddings, five norms with their biases.
    assert len(changed) == 1 + 2 + 2 * 5


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["BertForMaskedLM", "DistilBertModel", "MPNetModel"])
def test_adapters_on_embeddings_are_merged(kind, written, bases):
    embeddings = ["word_embeddings", "position_embeddings", "relative_attention_bias"]
    folder, merged = written(kind, target_modules=of_queries(kind) + embeddings)
    changed = assert_read_as_merged(folder, merged, bases / kind)
    assert len(changed) == 2 + (3 if kind == "MPNetModel" else 2)


@pytest.mark.parametrize("kind", ["BertModel", "DistilBertForMaskedLM"])
def test_what_is_excluded_by_a_whole_name_is_not_missing(kind, written, bases):
    """Where the model has a head, names have one part more in front."""
    front = "" if kind == "BertModel" else "distilbert.transformer."
    excluded = rf"{front.replace('.', '[.]')}(encoder[.])?layer[.]0[.].*"
    folder, merged = written(kind, target_modules=of_queries(kind), exclude_modules=excluded)
    assert len(assert_read_as_merged(folder, merged, bases / kind)) == 1


def test_what_is_written_here_comes_back(bases, tmp_path):
    kind, config, params = load_pretrained(bases / "BertModel")
    settings = LoraSettings(pattern="attention/(query|out)$", rank=2)
    adapters = jax.tree.map(lambda leaf: leaf + 0.5, init_adapters(jax.random.key(0), params, settings))
    export_adapters(tmp_path / "out", kind, adapters, config, settings, base=str(bases / "BertModel"))
    jax.tree.map(np.testing.assert_array_equal, load_adapted(tmp_path / "out").adapters, adapters)


def test_a_cut_encoder_has_the_adapters_of_its_first_layers(written, bases):
    folder, _ = written("BertModel", target_modules=["query"], modules_to_save=["LayerNorm"])
    _, config, whole = load_pretrained(folder)
    cut = named_leaves(load_pretrained(folder, dataclasses.replace(config, num_layers=1)).params)
    for name, value in named_leaves(whole).items():
        np.testing.assert_array_equal(cut[name], value[:1] if "/layers/" in name else value, err_msg=name)


def test_a_pooler_is_left_out_and_said(written, bases, caplog):
    folder, merged = written("BertModel", target_modules=["dense"])
    with caplog.at_level(logging.WARNING, "empax"):
        assert len(assert_read_as_merged(folder, merged, bases / "BertModel")) == 6
    assert "the adapter is also on pooler.dense, not read here" in caplog.text


def test_an_adapter_on_nothing_that_is_read_is_refused(written):
    folder, _ = written("BertModel", target_modules=["pooler.dense"])
    with pytest.raises(DataError, match=r"it adapts nothing but pooler\.dense"):
        load_pretrained(folder)


def test_layers_that_the_config_does_not_count_are_refused(bases, tmp_path):
    """A file with more layers is another model; its first layers are taken where `num_layers` asks for them."""
    folder = tmp_path / "short"
    transformers.BertModel.from_pretrained(bases / "BertModel").save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 1}))
    with pytest.raises(DataError, match=r"surplus encoder\.layer\.1\.attention\.self\.query\.weight"):
        load_pretrained(folder)


def test_one_weight_under_two_names_is_refused(bases, tmp_path, oracle):
    tensors = oracle.tensors_of(transformers.BertModel.from_pretrained(bases / "BertModel"))
    name = "encoder.layer.0.attention.self.query.weight"
    config = model_config(load_config(bases / "BertModel"))
    with pytest.raises(DataError, match=rf"{name} and bert\.{name} are one and the same weight"):
        import_params("bert", tensors | {f"bert.{name}": tensors[name] + 1}, config)


def test_one_adapter_under_two_names_is_refused(written):
    folder, _ = written("BertModel", target_modules=["query"])
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "encoder.layer.0.attention.self.query.lora_A.weight"
    tensors[f"base_model.model.bert.{name}"] = tensors[f"base_model.model.{name}"] + 1
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(DataError, match=r"query and .*query are one and the same part of a model"):
        load_pretrained(folder)


def test_a_head_for_classes_is_refused_by_name(bases, tmp_path, oracle):
    """And the encoder can be had without it, as the message says."""
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification.from_pretrained(bases / "BertModel")
    adapted = oracle.lora_of(model, tmp_path / "adapter", task_type="SEQ_CLS", target_modules=["query"])
    with pytest.raises(
        ConfigError, match=r"brings classifier\.bias, classifier\.weight, .* heads for classes"
    ) as caught:
        load_pretrained(tmp_path / "adapter")
    names = {"BASE": str(bases / "BertModel"), "FOLDER": str(tmp_path / "adapter"), "OUT": str(tmp_path / "out")}
    oracle.follow(str(caught.value), names)
    _, _, params = load_pretrained(tmp_path / "out")
    expected = oracle.merged(adapted)["bert.encoder.layer.1.attention.self.query.weight"]
    found = params["stack"]["layers"]["attention"]["query"][1]
    np.testing.assert_allclose(found.reshape(20, 20).T, expected, rtol=1e-5, atol=1e-6)
