"""Adapters written here against PEFT."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.tree import named_leaves
from empax.interop.huggingface import import_params
from empax.interop.peft import adapter_tensors, export_adapters
from empax.models.bert import BertConfig
from empax.models.lora import LoraSettings, adapt, init_adapters
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder

SETTINGS = LoraSettings(pattern=r"attention/(query|out)$|decoder/layers/feed_forward/", rank=3, alpha=5.0, dropout=0.1)


def tiny_t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "d_model": 20, "d_kv": 5, "num_heads": 3, "d_ff": 28, "num_layers": 2}
    fields = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    theirs = transformers.T5ForConditionalGeneration(fields).eval()
    config = t5_config(fields.to_dict())
    params = import_params("t5", {name: value.numpy() for name, value in theirs.state_dict().items()}, config)
    adapters = init_adapters(jax.random.key(0), params, SETTINGS)
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, jnp.float32), adapters)
    return theirs, config, params, adapters


@pytest.mark.oracle
def test_peft_loads_the_adapters_to_the_same_logits_and_gradients(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        peft = pytest.importorskip("peft")
    theirs, config, params, adapters = tiny_t5()
    export_adapters(tmp_path / "out", "t5", adapters, config, SETTINGS, base="google/t5", card="# Adapters\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing or surplus key is a warning
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's calls of transformers
        loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "out", is_trainable=True).eval()
    rng = np.random.default_rng(1)
    source, target = rng.integers(2, 37, (2, 3, 9))
    mask = np.arange(9)[None] < np.array([9, 6, 2])[:, None]
    model = EncoderDecoder(config)

    @jax.jit
    def ours(adapters):
        def loss(adapters):
            variables = {"params": adapt(params, adapters, SETTINGS)}
            logits = model.apply(variables, *map(jnp.asarray, (source, mask, target)))
            return jnp.sum(jnp.sin(logits)), logits

        return jax.grad(loss, has_aux=True)(adapters)

    grads, found = ours(adapters)
    inputs = {"input_ids": torch.tensor(source), "attention_mask": torch.tensor(mask).long()}
    expected = loaded(**inputs, labels=torch.tensor(target)).logits
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.sin(expected).sum().backward()
    grads = adapter_tensors("t5", grads, config)
    compared = 0
    for name, parameter in loaded.named_parameters():
        if parameter.requires_grad:
            wanted = parameter.grad.numpy()
            np.testing.assert_allclose(
                grads[name.replace(".default", "")], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max()
            )
            compared += 1
    assert compared == len(grads) == 2 * 2 * (2 + 4 + 3)


def test_layout_and_names(tmp_path):
    _, config, _, adapters = tiny_t5()
    export_adapters(tmp_path / "out", "t5", adapters, config, SETTINGS, base="google/t5", card="# Adapters\n")
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "adapter_model.safetensors")
    first = "base_model.model.decoder.block.1.layer.1.EncDecAttention."
    leaves = named_leaves(adapters)
    a = leaves["decoder/layers/cross_attention/out/a"][1]  # [H, N, r]
    np.testing.assert_array_equal(tensors[f"{first}o.lora_A.weight"], np.asarray(a).reshape(15, 3).T)
    b = leaves["decoder/layers/cross_attention/query/b"][1]  # [r, H, N]
    np.testing.assert_array_equal(tensors[f"{first}q.lora_B.weight"], np.asarray(b).reshape(3, 15).T)
    fields = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["lora_dropout"]) == (3, 5.0, 0.1)
    assert (fields["task_type"], fields["base_model_name_or_path"]) == ("SEQ_2_SEQ_LM", "google/t5")
    assert (tmp_path / "out" / "README.md").read_text() == "# Adapters\n"


def test_what_cannot_be_written_is_refused(tmp_path):
    _, config, _, adapters = tiny_t5()
    with pytest.raises(
        DataError, match=r"a t5 has no model/decoder/layers/attention/out, .*adapters of the model alone"
    ):
        export_adapters(tmp_path / "out", "t5", {"model": adapters}, config, SETTINGS)
    with pytest.raises(ConfigError, match="adapters of a 'gpt9' cannot be written; those of t5, bert can"):
        export_adapters(tmp_path / "out", "gpt9", adapters, config, SETTINGS)
    bert = BertConfig(vocab_size=9, d_model=8, num_heads=2, d_ff=8, num_layers=2)
    with pytest.raises(DataError, match="a bert has no decoder/"):
        adapter_tensors("bert", adapters, bert)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        export_adapters(tmp_path / "full", "t5", adapters, config, SETTINGS)
