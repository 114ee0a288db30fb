"""Folders of models as people have them: odd spellings, files that are not whole, tokens that are missing."""

import json

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.bpe import train_bpe
from empax.data.tokenizer_folders import load_tokenizer
from empax.interop.grown_vocabulary import check_vocabulary
from empax.interop.huggingface import load_config, load_pretrained, model_config
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.interop.readers import open_tensors
from empax.models.bert import BertEncoder
from tests.interop.tiny import tiny

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
SMALL = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2}


@pytest.fixture
def bert(tmp_path):
    model = tiny("bert", **SMALL)
    model.save_pretrained(tmp_path)
    return model


@pytest.fixture
def bpe(tmp_path):
    train_bpe(["I feel sad today", "oh no what happened"], vocab_size=290).save(tmp_path)
    return tmp_path


def change(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.oracle
def test_norms_of_old_berts_are_named_gamma_and_beta(tmp_path, bert):
    file = tmp_path / "model.safetensors"
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def old(name):
        return next((name.removesuffix(new) + other for new, other in ends.items() if name.endswith(new)), name)

    tensors = {name: tensor.clone() for name, tensor in bert.state_dict().items()}
    renamed = {old(name): tensor for name, tensor in tensors.items()}
    assert sum(name.endswith(("gamma", "beta")) for name in renamed) == 10
    save_file(renamed, file)
    read = load_pretrained(tmp_path)
    ids = np.array([[3, 4, 5, 6]])
    expected = bert(input_ids=torch.tensor(ids)).last_hidden_state.detach().numpy()
    found = BertEncoder(read.config).apply({"params": read.params}, jnp.asarray(ids), jnp.ones((1, 4), bool))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    save_file({name: tensor.clone() for name, tensor in (renamed | tensors).items()}, file)
    with pytest.raises(DataError, match=r"LayerNorm\.\w+ and .*LayerNorm\.\w+ are the same weight"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "16"}, r"config\.json: hidden_size = '16' must be a whole number"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps = nan must be a number above 0"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob = 1.0 must be a number from 0"),
        ({"is_decoder": "no"}, "is_decoder = 'no' must be true or false"),
        ({"hidden_act": ["gelu"]}, "hidden_act = .* must be a text"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish' is unknown"),
        ({"num_attention_heads": 3}, "hidden_size = 16 must be a multiple of num_attention_heads = 3"),
        ({"rope_scaling": [2.0]}, "rope_scaling = .* must be an object"),
        ({"rope_scaling": {"factor": "2"}}, r"rope_scaling\.factor = '2' must be a number above 0"),
        ({"rope_scaling": {"truncate": "no"}}, r"rope_scaling\.truncate = 'no' must be true or false"),
        ({"rope_parameters": {"rope_type": 1}}, r"rope_parameters\.rope_type = 1 must be a text"),
        ({"architectures": "BertModel"}, "architectures = 'BertModel' must be a list"),
        ({"model_type": "mamba"}, r"config\.json: model_type = 'mamba' is not read here; it must be one of t5, bert"),
        ({"model_type": ["bert"]}, r"model_type = \['bert'\] is not read here"),
    ],
)
def test_what_is_wrong_in_a_config_is_said_in_its_own_words(tmp_path, bert, changes, message):
    change(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        model_config(load_config(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; fetch the model again"),
        (POINTER, "pointer of Git LFS.*git lfs pull"),
        ("\ufeff{}", "byte-order mark; save it as UTF-8 without one"),
        ("[]", "must hold a JSON object, but is a list"),
        ("null", "but is null"),
        ('{"model_type": "be', "not valid JSON.*fetch the model again"),
        ("[" * 100_000, r"is not valid JSON \(.*; fetch the model again"),
        ('{"hidden_size": ' + "1" * 5000 + "}", "not valid JSON"),
        ("{}", "names no model_type"),
    ],
)
def test_a_config_that_is_none(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
def test_weights_that_were_not_fetched(tmp_path, name):
    for content, message in ((POINTER, "pointer of Git LFS"), ("", "is empty")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=message):
            open_tensors(tmp_path)


def test_a_folder_of_adapters_is_no_whole_model(tmp_path, bert):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    with pytest.raises(DataError, match="holds an adapter, which sits on the weights of another model"):
        open_tensors(tmp_path)


def test_a_config_of_more_layers_than_weights_takes_no_time(tmp_path, bert):
    change(tmp_path / "config.json", num_hidden_layers=10**9)
    with pytest.raises(DataError, match="asks for 1000000000 layers") as caught:
        load_pretrained(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")


@pytest.mark.oracle
@pytest.mark.parametrize("role", ["pad_token", "eos_token", "bos_token"])
def test_a_declared_token_that_the_vocabulary_lacks_is_appended(bpe, role):
    size = load_tokenizer(bpe).vocab_size
    change(bpe / "tokenizer_config.json", **{role: "<|new|>"}, start_token=None)
    tokenizer, theirs = load_tokenizer(bpe), transformers.AutoTokenizer.from_pretrained(bpe)
    assert (tokenizer.vocab_size, tokenizer.own_size, len(theirs)) == (size + 1, size, size + 1)
    ids = {"pad_token": tokenizer.pad_id, "eos_token": tokenizer.eos_id, "bos_token": tokenizer.start_id}
    assert ids[role] == theirs.convert_tokens_to_ids("<|new|>") == size
    assert tokenizer.encode("I feel sad") == theirs("I feel sad", add_special_tokens=False)["input_ids"]


def test_an_encoder_grows_by_the_tokens_that_its_tokenizer_appends(tmp_path, bert, bpe):
    change(tmp_path / "tokenizer_config.json", pad_token="<|new|>")
    with pytest.raises(ConfigError, match="only 40 rows"):
        load_encoder(EncoderSettings(pretrained=str(tmp_path)), None)
    rows = load_tokenizer(tmp_path).own_size
    tiny("bert", **SMALL | {"vocab_size": rows}).save_pretrained(tmp_path)
    encoder = load_encoder(EncoderSettings(pretrained=str(tmp_path)), None)
    assert encoder.tokenizer.pad_id == rows
    assert encoder.params["encoder"]["token_embedding"].shape == (rows + 1, 16)
    assert encoder.model.encoder.config.vocab_size == rows + 1


def test_ids_with_holes(bpe):
    file = bpe / "tokenizer.json"
    fields = json.loads(file.read_text())
    vocabulary = fields["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    size = vocabulary[last] + 1
    vocabulary[last] += 5
    file.write_text(json.dumps(fields))
    tokenizer = load_tokenizer(bpe, extra_tokens=[f"<x{i}>" for i in range(8)])
    assert (tokenizer.own_size, tokenizer.vocab_size) == (size + 5, size + 13)
    ids = tokenizer.backend.get_vocab()
    assert len(set(ids.values())) == len(ids)
    assert [tokenizer.token_id(f"<x{i}>") for i in range(8)] == list(range(size + 5, size + 13))
    assert tokenizer.encode("I" + tokenizer.mark("<x3>")) == [*tokenizer.encode("I"), size + 8]
    assert tokenizer.extends(load_tokenizer(bpe))
    with pytest.raises(ConfigError, match=f"has {size + 13} ids, but m only {size} rows"):
        check_vocabulary(tokenizer, size, "m")
    tokenizer.save(bpe / "again")
    assert load_tokenizer(bpe / "again").backend.get_vocab() == ids
    assert "<x3>" not in tokenizer.decode(tokenizer.encode("I" + tokenizer.mark("<x3>")))


def test_two_tokens_of_one_id_are_refused(bpe):
    file = bpe / "tokenizer.json"
    fields = json.loads(file.read_text())
    fields["model"]["vocab"]["\u0120sad"] = fields["model"]["vocab"]["a"]
    file.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"have the same id .*; fetch the model's tokenizer"):
        load_tokenizer(bpe)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["", POINTER, "\ufeff{}", "[]", "null", '{"a'])
def test_a_broken_file_of_a_tokenizer_is_named(bpe, name, content):
    (bpe / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_tokenizer(bpe)


@pytest.mark.parametrize("change_of", [{"type": "SuperBPE2"}, {"merges": ["zz yy"]}, {"vocab": []}])
def test_a_tokenizer_of_another_kind_is_named(bpe, change_of):
    fields = json.loads((bpe / "tokenizer.json").read_text())
    fields["model"] |= change_of
    (bpe / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"tokenizer\.json holds no tokenizer that can be read"):
        load_tokenizer(bpe)


def test_the_tokenizer_beside_a_gguf_file_is_taken_where_its_own_is_not_read(bpe):
    writer = gguf.GGUFWriter(bpe / "a.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert load_tokenizer(bpe / "a.gguf").encode("sad") == load_tokenizer(bpe).encode("sad")
    (bpe / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"put the model's tokenizer\.json beside the file"):
        load_tokenizer(bpe / "a.gguf")
    with pytest.raises(ConfigError, match="there is no such file"):
        load_tokenizer(bpe / "b.gguf")
