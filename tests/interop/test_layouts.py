"""Checkpoints of FiD and Atlas, with names as their code gives them."""

import argparse
import logging

import jax
import numpy as np
import pytest
import torch

from empax.core.files import DataError
from empax.interop.huggingface import load_pretrained
from empax.interop.layouts import plain_names
from empax.interop.parameters import import_params
from empax.models.bert import bert_config
from empax.models.t5 import t5_config
from tests.interop import oracle
from tests.interop.tiny import tiny


@pytest.fixture(scope="module")
def t5():
    return tiny("t5")


@pytest.fixture(scope="module")
def bert():
    return tiny("bert")


def fid_state(t5, bias=None):
    """The state dict of a T5 as FiD wraps it: the encoder in an `encoder`, each of its blocks in a `module`."""
    state = {}
    for name, tensor in t5.state_dict().items():
        if name.startswith("encoder.block."):
            number, rest = name.removeprefix("encoder.block.").split(".", 1)
            name = f"encoder.encoder.block.{number}.module.{rest}"
        elif name.startswith("encoder."):
            name = f"encoder.{name}"
        state[name] = tensor
    if bias is not None:
        state["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = bias
    return state


def same(params, expected):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.oracle
def test_fid_is_a_t5(tmp_path, t5):
    torch.save(fid_state(t5), tmp_path / "pytorch_model.bin")
    t5.config.save_pretrained(tmp_path)
    tensors = oracle.tensors_of(t5)
    same(load_pretrained(tmp_path).params, import_params("t5", tensors, t5_config(t5.config.to_dict())))


@pytest.mark.parametrize(("bias", "warns"), [(torch.zeros(8, 3) + torch.arange(3.0), False), (torch.eye(8, 3), True)])
def test_a_cross_attention_bias_that_mattered_is_told(t5, caplog, bias, warns):
    with caplog.at_level(logging.WARNING, logger="empax"):
        plain = plain_names(fid_state(t5, bias), "t5")
    assert ("differs by up to 1 between distances" in caplog.text) == warns
    import_params("t5", plain, t5_config(t5.config.to_dict()))


@pytest.mark.oracle
def test_the_retriever_of_fid_is_a_bert(bert):
    config = bert_config(bert.config.to_dict())
    tensors = oracle.tensors_of(bert)
    wrapped = {f"model.{name}": tensor for name, tensor in tensors.items()}
    same(import_params("bert", plain_names(wrapped, "bert"), config), import_params("bert", tensors, config))


@pytest.mark.oracle
@pytest.mark.parametrize("parallel", ["", "module."])
def test_atlas_gives_its_reader_and_its_retriever(tmp_path, t5, bert, parallel):
    state = {f"reader.{parallel}{name}": tensor for name, tensor in t5.state_dict().items()}
    state |= {f"retriever.{parallel}contriever.{name}": tensor for name, tensor in bert.state_dict().items()}
    options = argparse.Namespace(reader_model_type="google/t5-base-lm-adapt", device=torch.device("cpu"))
    torch.save({"step": 1, "model": state, "optimizer": None, "opt": options}, tmp_path / "model.pth.tar")
    for model, config in ((t5, t5_config), (bert, bert_config)):
        model.config.save_pretrained(tmp_path)
        tensors = oracle.tensors_of(model)
        expected = import_params(model.config.model_type, tensors, config(model.config.to_dict()))
        same(load_pretrained(tmp_path).params, expected)
    (tmp_path / "config.json").unlink()
    with pytest.raises(DataError, match=r"an Atlas checkpoint, but no config\.json"):
        load_pretrained(tmp_path)


def test_parts_of_atlas_that_are_not_there(bert):
    tensors = {f"retriever.contriever.{name}": tensor.numpy() for name, tensor in bert.state_dict().items()}
    with pytest.raises(DataError, match="has no reader"):
        plain_names(tensors, "t5")
    with pytest.raises(DataError, match="not a gpt2"):
        plain_names(tensors, "gpt2")
    two = {name.replace("contriever", f"{side}_contriever"): 0 for name in tensors for side in ("query", "passage")}
    with pytest.raises(DataError, match="one retriever for queries and one for passages"):
        plain_names(two, "bert")


def test_other_models_keep_their_names(t5, bert):
    for model in (t5, bert):
        state = model.state_dict()
        assert plain_names(state, model.config.model_type) == state
