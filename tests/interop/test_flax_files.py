"""`flax_model.msgpack`, as Transformers 4 wrote it: the same logits as the PyTorch model that it was made of."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as t
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict

from empax.core.files import DataError
from empax.interop.huggingface import load_pretrained
from empax.interop.readers import open_tensors
from empax.models.bert import BertEncoder
from empax.models.decoder_only import DecoderOnly
from empax.models.transformer import EncoderDecoder

VOCAB, PAD = 31, 1
SIZES = {"attention_heads": 4, "ffn_dim": 28}
BART = {"vocab_size": VOCAB, "d_model": 20, "max_position_embeddings": 17, "encoder_layers": 2, "decoder_layers": 3}
BART |= {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in SIZES.items()}
BERT = {"vocab_size": VOCAB, "hidden_size": 20, "num_attention_heads": 4, "intermediate_size": 27}
BERT |= {"num_hidden_layers": 2, "max_position_embeddings": 17}
T5 = {"vocab_size": VOCAB, "d_model": 20, "d_kv": 5, "num_heads": 3, "d_ff": 28, "num_layers": 2}
T5 |= {"decoder_start_token_id": 0, "num_decoder_layers": 3}
LLAMA = BERT | {"num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False}
GPT2 = {"vocab_size": VOCAB, "n_embd": 20, "n_head": 4, "n_layer": 2, "n_positions": 17}
MODELS = {
    "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5)),
    "t5 1.1": lambda: untied(t.T5ForConditionalGeneration(t.T5Config(**T5, feed_forward_proj="gated-gelu"))),
    "bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**BART)),
    "blenderbot": lambda: t.BlenderbotForConditionalGeneration(t.BlenderbotConfig(**BART)),
    "bert": lambda: t.BertModel(t.BertConfig(**BERT), add_pooling_layer=False),
    "roberta": lambda: t.RobertaModel(t.RobertaConfig(**BERT), add_pooling_layer=False),
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)),
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
}


def untied(model):
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 20))
    model.config.tie_word_embeddings = False
    model.config.scale_decoder_outputs = False
    return model


@functools.cache
def made(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    with torch.no_grad():  # away from the initial ones and zeros, or errors would hide
        for value in [*model.parameters(), *(b for name, b in model.named_buffers() if name == "final_logits_bias")]:
            value.add_(0.1 * torch.randn_like(value))
    head = getattr(model, "lm_head", None)
    if head is not None:
        shared = torch.equal(head.weight, model.get_input_embeddings().weight)
        assert shared == (kind not in ("t5 1.1", "llama"))
    return model


def written(folder, model, tree):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(tree))
    return folder


@pytest.mark.oracle
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_pytorch(kind, tmp_path, oracle):
    model = made(kind)
    folder = written(tmp_path / "flax", model, oracle.flax_tree(model))
    _, config, params = load_pretrained(folder)
    ids, mask = oracle.ids_and_mask(3, 7, VOCAB, pad=PAD)
    encoder_decoder = model.config.is_encoder_decoder
    if kind in ("gpt2", "llama", "roberta"):  # where padding on the left has a position of its own
        ids[1], mask[1] = np.maximum(ids[1], PAD + 1), True
    target = ids[:, ::-1].copy()
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    if encoder_decoder:
        start = np.full((3, 1), model.config.decoder_start_token_id)
        inputs["decoder_input_ids"] = torch.tensor(np.concatenate([start, target[:, :-1]], axis=1))
    with torch.no_grad():
        expected = model(**inputs)[0].numpy()
    ours = {True: EncoderDecoder, False: BertEncoder if "bert" in kind else DecoderOnly}[encoder_decoder](config)
    given = (ids, mask, target) if encoder_decoder else (ids, mask)
    found = jax.jit(ours.apply)({"params": params}, *map(jnp.asarray, given))
    assert expected.std() > 0.1
    real = np.ones_like(mask) if encoder_decoder else mask
    np.testing.assert_allclose(np.asarray(found)[real], expected[real], rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_the_values_are_those_of_the_file_bit_by_bit_in_half_precision_too(tmp_path, oracle):
    model = made("t5")
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), oracle.flax_tree(model))
    tensors = open_tensors(written(tmp_path / "flax", model, {"params": tree}))
    for name, value in model.named_parameters():
        assert tensors[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(tensors[name], np.asarray(value.detach().numpy(), jnp.bfloat16))


def test_shards_are_read_by_their_index_and_a_missing_one_is_named(tmp_path, oracle):
    model = made("bart")
    tree = oracle.flax_tree(model)
    whole = open_tensors(written(tmp_path / "whole", model, tree))
    folder = written(tmp_path / "shards", model, {})
    (folder / "flax_model.msgpack").unlink()
    flat = flatten_dict(tree, sep="/")
    names = sorted(flat)
    places = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"flax_model-0000{number}-of-00002.msgpack"
        shard = unflatten_dict({name: flat[name] for name in part}, sep="/")
        (folder / file).write_bytes(serialization.to_bytes(shard))
        places |= dict.fromkeys(part, file)
    (folder / "flax_model.msgpack.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found = open_tensors(folder)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(found[name], tensor)
    (folder / "flax_model-00002-of-00002.msgpack").unlink()
    with pytest.raises(DataError, match=r"flax_model-00002-of-00002\.msgpack is missing"):
        open_tensors(folder)


def whole_bytes():
    return serialization.to_bytes({"shared": {"embedding": np.ones((3, 2), np.float32)}})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (whole_bytes()[:-5], "not a whole msgpack file"),
        (whole_bytes() + b"\x00", "not a whole msgpack file"),
        (b"\xc1" + whole_bytes(), "not a whole msgpack file"),
        (b"PK\x03\x04 no message at all", "not a whole msgpack file"),
        (serialization.msgpack_serialize({"a": {"b": 3}}), "a/b of a Flax model is a int"),
        (serialization.msgpack_serialize([1, 2]), "no parameters by name but a list"),
        (serialization.msgpack_serialize({}), "holds no array"),
        (
            serialization.msgpack_serialize({"layers": {"q": {"kernel": np.ones((2, 3, 4))}}}),
            r"layers/q/kernel of shape \[2, 3, 4\] is of layers that were scanned",
        ),
        (serialization.msgpack_serialize({"FlaxScanLayers": {"bias": np.ones(2)}}), "layers that were scanned"),
    ],
)
def test_what_is_no_flax_model_is_refused_by_name(content, said, tmp_path):
    (tmp_path / "flax_model.msgpack").write_bytes(content)
    with pytest.raises(DataError, match=rf"flax_model\.msgpack.*{said}|{said}"):
        open_tensors(tmp_path)
