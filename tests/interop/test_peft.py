"""Adapters written here against PEFT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from flax import serialization
from flax.traverse_util import unflatten_dict

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.wheels import NAMED
from empax.interop.architectures import ARCHITECTURES
from empax.interop.huggingface import load_pretrained
from empax.interop.parameters import export_params, import_params
from empax.interop.peft import adapter_tensors, base_beneath, export_adapters
from empax.models.bert import BertConfig, BertEncoder
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.lora import LoraSettings, adapt, merge
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder, TransformerConfig
from tests.interop import oracle
from tests.interop.tiny import SIZES, class_of, tiny

ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "mpnet", "dpr")
NEAR = ("mbart", "pegasus", "xlm-roberta", "distilbert", "electra")
"""What differs from another in names or norms alone."""
ALL = ("t5", "bart", "blenderbot", "mbart", "pegasus", "llama", "gpt2", *ENCODERS)
SETTINGS = LoraSettings(pattern=r"attention/(query|out)$|decoder/layers/feed_forward/", rank=3, alpha=5.0, dropout=0.1)


PARTS = LoraSettings(pattern=r"attention/(query|value|out)$|feed_forward/wi$", rank=3, alpha=5.0, dropout=0.1)


def t5_adapters():
    config = t5_config(SIZES["t5"] | {"feed_forward_proj": "gated-gelu"})
    return config, oracle.drawn_adapters(ARCHITECTURES["t5"].shapes(config), SETTINGS)


def inputs_of(config):
    """Arguments of our model, keywords of theirs, and the places of the result that mean anything."""
    rng = np.random.default_rng(1)
    source, target = rng.integers(2, 37, (2, 3, 9))
    mask = np.arange(9)[None] < np.array([9, 6, 2])[:, None]
    source = np.where(mask, source, 1)
    theirs = {"input_ids": torch.tensor(source), "attention_mask": torch.tensor(mask).long()}
    if not isinstance(config, TransformerConfig):
        return (source, mask), theirs, mask
    start = np.full((3, 1), config.start_id)
    theirs["decoder_input_ids"] = torch.tensor(np.concatenate([start, target[:, :-1]], axis=1))
    return (source, mask, target), theirs, np.ones((3, 9), bool)


@pytest.mark.oracle
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in NEAR)) for name in ALL])
def test_peft_loads_the_adapters_to_the_same_results_and_gradients(name, tmp_path):
    theirs = tiny(name)
    config = ARCHITECTURES[name].config(theirs.config.to_dict())
    params = import_params(name, oracle.tensors_of(theirs), config)
    adapters = oracle.drawn_adapters(params, PARTS)
    export_adapters(tmp_path / "out", name, adapters, config, PARTS)
    peft_model = oracle.import_peft().PeftModel
    loaded = oracle.loaded_by(peft_model, theirs, tmp_path / "out", is_trainable=True).eval()
    arguments, keywords, real = inputs_of(config)
    kinds = {TransformerConfig: EncoderDecoder, DecoderOnlyConfig: DecoderOnly, BertConfig: BertEncoder}
    model = kinds[type(config)](config)

    @jax.jit
    def ours(adapters):
        def loss(adapters):
            result = model.apply({"params": adapt(params, adapters, PARTS)}, *map(jnp.asarray, arguments))
            return jnp.sum(jnp.where(real[..., None], jnp.sin(result), 0.0)), result

        return jax.grad(loss, has_aux=True)(adapters)

    grads, found = ours(adapters)
    result = loaded(**keywords, output_hidden_states=True)
    expected = result.hidden_states[-1] if isinstance(config, BertConfig) else result.logits
    oracle.assert_close(np.asarray(found)[real], expected.detach().numpy()[real])
    torch.sin(expected[torch.tensor(real)]).sum().backward()
    grads = adapter_tensors(name, grads, config)
    # Where weights are parts of one there, B has entries that are nobody's here.
    own = adapter_tensors(name, jax.tree.map(jnp.ones_like, adapters), config)
    compared = set()
    for key, parameter in loaded.named_parameters():
        if parameter.requires_grad:
            key = key.replace(".default", "")
            oracle.assert_close(grads[key], parameter.grad.numpy() * own[key], err_msg=key)
            compared.add(key)
    assert compared == set(grads)
    modules = 2 * (3 if name == "gpt2" else 4) + (3 * 7 if isinstance(config, TransformerConfig) else 0)
    assert len(grads) == 2 * modules  # A and B


@pytest.mark.oracle
@pytest.mark.parametrize("name", [*ENCODERS, "dpr-question"])
def test_peft_finds_an_encoder_by_what_its_adapters_say(name, tmp_path, saved):
    """Without a class that somebody names, down to the encoder of questions or of passages of a DPR."""
    kind = "DPRQuestionEncoder" if name == "dpr-question" else name
    name, _, _ = name.partition("-question")
    folder = saved(kind)
    _, config, params = load_pretrained(folder)
    adapters = oracle.drawn_adapters(params, PARTS)
    base = base_beneath(str(folder), config, kept=False, instead="merge them")
    export_adapters(tmp_path / "out", name, adapters, config, PARTS, base=base)
    peft = oracle.import_peft()
    auto = peft.AutoPeftModel if name == "dpr" else peft.AutoPeftModelForFeatureExtraction
    loaded = oracle.loaded_by(auto, tmp_path / "out")
    assert type(loaded.get_base_model()) is class_of(kind)
    found = export_params(name, merge(params, adapters, PARTS), config)
    oracle.assert_same_weights(found, oracle.merged(loaded))


def test_adapters_name_only_a_wheel_or_a_model_that_transformers_loads(tmp_path, monkeypatch):
    """A folder of Flax is none, but what it becomes by the advice is."""
    made = DecoderOnly(ARCHITECTURES["gpt2"].config(SIZES["gpt2"]))
    ids = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(made.init)(jax.random.key(0), ids, ids == 0)["params"]
    tensors = export_params("gpt2", params, made.config)
    flax = tmp_path / "flax"
    flax.mkdir()
    transformers.GPT2Config(**SIZES["gpt2"]).save_pretrained(flax)
    tree = unflatten_dict({tuple(name.split(".")): value for name, value in tensors.items()})
    (flax / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(tree))
    with pytest.raises(
        ConfigError, match=r'cannot load .*flax\. .*`empax\.load\(.*flax.\)\.save\("BASE"\)`, and train'
    ):
        base_beneath(str(flax), made.config, kept=False, instead="merge them")
    # A wheel that transformers cannot load keeps its name: the adapters stay on the weights that they were trained on.
    monkeypatch.setitem(NAMED, "smollm2", lambda: flax)
    base = base_beneath("smollm2", made.config, kept=False, instead="merge them")
    assert base == "smollm2"
    adapters = oracle.drawn_adapters(params, PARTS)
    export_adapters(tmp_path / "out", "gpt2", adapters, made.config, PARTS, base=base)
    found, expected = load_pretrained(tmp_path / "out").params, merge(params, adapters, PARTS)
    oracle.assert_same_weights(*(export_params("gpt2", one, made.config) for one in (found, expected)))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "`BASE` is the folder that `empax.load('smollm2').save('BASE')` writes." in card
    assert base_beneath(str(tmp_path / "out"), made.config, kept=True, instead="merge them") == "smollm2"
    safetensors.numpy.save_file(tensors, flax / "model.safetensors")
    assert base_beneath(str(flax), made.config, kept=False, instead="merge them") == str(flax)


def test_what_cannot_be_written_is_refused(tmp_path):
    config, adapters = t5_adapters()
    with pytest.raises(
        DataError, match=r"a t5 has no model/decoder/layers/attention/out, .*adapters of the model alone"
    ):
        export_adapters(tmp_path / "out", "t5", {"model": adapters}, config, SETTINGS)
    with pytest.raises(ConfigError, match=r"'gpt9' is not a known architecture; it must be one of t5, bert, .*, bart"):
        export_adapters(tmp_path / "out", "gpt9", adapters, config, SETTINGS)
    bert = BertConfig(vocab_size=9, d_model=8, num_heads=2, d_ff=8, num_layers=2)
    with pytest.raises(DataError, match="a bert has no decoder/"):
        adapter_tensors("bert", adapters, bert)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        export_adapters(tmp_path / "full", "t5", adapters, config, SETTINGS)
