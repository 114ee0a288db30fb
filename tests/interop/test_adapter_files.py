"""Adapters that PEFT wrote, read and merged, against PEFT's own results."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.tree import named_leaves
from empax.interop.huggingface import load_adapted, load_config, load_pretrained
from empax.interop.parameters import export_params
from empax.interop.peft import base_beneath, export_adapters
from empax.interop.pretrained import check_weights
from empax.models.lora import LoraSettings, init_adapters, merge
from tests.interop import oracle
from tests.interop.tiny import VOCAB, class_of

peft = oracle.import_peft()
NAMES = ("t5", "bart", "gpt2", "llama")


@pytest.fixture
def bases(saved):
    """A folder for each kind of model; the Llama has a head of its own, T5's layers are gated."""
    changes = {"t5": {"feed_forward_proj": "gated-gelu"}, "llama": {"tie_word_embeddings": False}}
    return {name: saved(name, **changes.get(name, {})) for name in NAMES}


@pytest.fixture
def written(adapter, bases):
    """Makes an adapter of PEFT's on one of the models."""

    def write(name, folder="adapter", **settings):
        return adapter(name, folder, base=bases[name], **settings)

    return write


EVERY = {"target_modules": "all-linear"}
CASES = {
    "t5-list": ("t5", {"target_modules": ["q", "v"]}),
    "t5-all-rank-stabilised": ("t5", {**EVERY, "use_rslora": True}),
    "bart-regex": ("bart", {"target_modules": r".*decoder.*\.(k_proj|fc2|out_proj)"}),
    "bart-excluded": ("bart", {**EVERY, "exclude_modules": ["fc1"]}),
    "gpt2-patterns": (
        "gpt2",
        {
            "target_modules": ["c_attn", "c_proj", "c_fc"],
            "rank_pattern": {"c_attn": 4, r"h\.1\.mlp\.c_proj": 2},
            "alpha_pattern": {"c_fc": 11, r"0\.attn\.c_proj": 2},
            "use_rslora": True,
            "fan_in_fan_out": True,
        },
    ),
    "llama-patterns": (
        "llama",
        {**EVERY, "rank_pattern": {"q_proj": 6, "1.mlp.up_proj": 1}, "alpha_pattern": {"v": 9}},
    ),
    "llama-saved": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "model.norm", "up_proj"]}),
    "llama-one-layer": ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "llama-layers-by-name": (
        "llama",
        {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": r"lay\w+"},
    ),
    "t5-one-block": ("t5", {"target_modules": ["v"], "layers_to_transform": [1]}),
    "llama-head-and-embedding": ("llama", {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
    "t5-biases": ("t5", {"target_modules": ["q", "relative_attention_bias"]}),
    "llama-saved-by-ends": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
}


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_merged_as_peft_merges_it(case, bases, tmp_path, written):
    name, settings = CASES[case]
    theirs = written(name, **settings)
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    kept, merged = load_adapted(tmp_path / "adapter"), load_pretrained(tmp_path / "merged")
    kind, config, found = kept.merged()
    assert (kind, config) == (name, merged.config)
    found, base, replaced = named_leaves(found), named_leaves(base_of(bases[name])), named_leaves(kept.params)
    oracle.assert_same_weights(named_leaves(merged.params), found)
    changed = {key for key, value in base.items() if np.abs(found[key] - value).max() > 1e-3}
    replaced = {key for key, value in replaced.items() if not np.array_equal(value, base[key])}
    assert changed == {key.rpartition("/")[0] for key in named_leaves(kept.adapters)} | replaced
    assert len(replaced) == {
        "llama-saved": 3,
        "llama-saved-by-ends": 3,
        "llama-head-and-embedding": 2,
        "t5-biases": 2,
    }.get(case, 0)


@functools.cache
def base_of(folder):
    return load_pretrained(folder).params


def test_a_file_of_pytorch_holds_the_same(plain):
    expected = load_pretrained(plain).params
    file = plain / "adapter_model.safetensors"
    torch.save({k: torch.tensor(v) for k, v in safetensors.numpy.load_file(file).items()}, file.with_suffix(".bin"))
    file.unlink()
    oracle.assert_same_bytes(load_pretrained(plain).params, expected)


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_of_a_grown_vocabulary(name, tmp_path, written):
    """BART's has a bias that grows with it, and is in no file."""
    target = {"gpt2": "c_attn", "t5": "v"}.get(name, "v_proj")
    theirs = written(
        name,
        target_modules=[target],
        change=lambda model: model.resize_token_embeddings(VOCAB + 3, mean_resizing=False),
    )
    assert load_config(tmp_path / "adapter")["vocab_size"] == VOCAB + 3
    kind, config, params = load_pretrained(tmp_path / "adapter")
    oracle.assert_same_weights(export_params(kind, params, config), oracle.merged(theirs))


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_what_is_written_here_comes_back_the_same(name, bases, tmp_path):
    """Also of GPT-2, whose queries and values become parts of one adapter."""
    _, config, params = load_pretrained(bases[name])
    settings = LoraSettings(pattern="attention/(query|value|out)$|wi$", rank=3, alpha=5.0, dropout=0.25)
    adapters = oracle.drawn_adapters(params, settings)
    export_adapters(tmp_path / "out", name, adapters, config, settings, base=str(bases[name]))
    kept = load_adapted(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, kept.adapters, adapters)
    assert (kept.settings.rank, kept.settings.alpha, kept.settings.dropout) == (3, 5.0, 0.25)
    again = init_adapters(jax.random.key(0), {"model": params}, kept.settings)["model"]
    assert jax.tree.map(jnp.shape, again) == jax.tree.map(jnp.shape, adapters)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "opt"])
def test_peft_merges_what_is_written_here_of_other_decoders(name, tmp_path, saved):
    _, config, params = load_pretrained(saved(name))
    settings = LoraSettings(pattern="attention/|feed_forward/", rank=2, alpha=3.0)
    adapters = oracle.drawn_adapters(params, settings)
    export_adapters(tmp_path / "out", name, adapters, config, settings, base=str(saved(name)))
    expected = merge(params, adapters, settings)
    loaded = oracle.loaded_by(peft.PeftModel, class_of(name).from_pretrained(saved(name)), tmp_path / "out")
    oracle.assert_same_weights(export_params(name, expected, config), oracle.merged(loaded))
    oracle.assert_same_weights(named_leaves(load_pretrained(tmp_path / "out").params), named_leaves(expected))


def edited(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def plain(tmp_path, written):
    written("llama", "plain", target_modules=["q_proj", "v_proj"])
    return tmp_path / "plain"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora = True is not read here, only LoRA and rank-.*merge_and_unload"),
        ({"bias": "lora_only"}, "bias = 'lora_only' is not read here"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not read here"),
        ({"lora_bias": True, "target_parameters": ["w"]}, r"lora_bias = True; target_parameters = \['w'\] is not"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa', which changes the weights"),
        ({"of_next_year": {"x": 1}}, "of_next_year = {'x': 1} is not read here"),
    ],
)
def test_adapters_of_another_kind_are_refused_by_name(changes, message, plain):
    edited(plain, **changes)
    with pytest.raises(ConfigError, match=message):
        load_pretrained(plain)
    with pytest.raises(ConfigError, match=message):
        check_weights(str(plain))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 4}, r"q_proj has A \[3, 20\] and B \[24, 3\], which must be \[4, 20\] and \[24, 4\]"),
        ({"r": True}, "r = True must be a whole number from 1 to"),
        ({"use_rslora": "yes"}, "use_rslora = 'yes' must be true or false"),
        ({"lora_dropout": 1}, "lora_dropout = 1 must be a number from 0 to below 1"),
        ({"lora_alpha": 0}, "lora_alpha = 0 must be a number from 1e-06 to"),
        ({"rank_pattern": [1]}, "rank_pattern = .* must be an object of numbers"),
        ({"target_modules": None}, "target_modules = None must be a list of names or a regular expression"),
        ({"target_modules": "q_proj("}, "'q_proj\\(' is not a regular expression"),
        ({"target_modules": ["q_proj"]}, r"2 problems.*v_proj has an adapter, but target_modules"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, r"missing model\.layers\.0\.self_attn\.k_proj\.lora_A"),
        ({"base_model_name_or_path": None}, "does not say which model .* set base_model_name_or_path"),
        ({"modules_to_save": "lm_head"}, "modules_to_save = 'lm_head' must be a list of names"),
        ({"modules_to_save": ["lm_head"]}, r"missing lm_head\.weight"),
        ({"layers_to_transform": [1]}, r"layers\.0\.self_attn\.q_proj has an adapter, but"),
        ({"layers_to_transform": [True]}, r"layers_to_transform = \[True\] must be layer numbers"),
        ({"target_modules": ".*q_proj", "layers_to_transform": 0}, "layers_to_transform needs a list of names"),
    ],
)
def test_adapters_that_do_not_fit_are_errors(changes, message, plain):
    edited(plain, **changes)
    with pytest.raises(DataError, match=f"(?s){message}"):
        load_pretrained(plain)


def test_half_an_adapter_is_an_error(plain):
    file = plain / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(DataError, match=r"layers\.1\.self_attn\.q_proj lacks lora_B"):
        load_pretrained(plain)


def test_files_that_are_missing_or_belong_to_another_model(plain, bases, tmp_path):
    edited(plain, base_model_name_or_path=str(bases["gpt2"]))
    with pytest.raises(DataError, match=r"q_proj is not a linear layer that LoRA adapts here"):
        load_pretrained(plain)
    edited(plain, base_model_name_or_path="somebody/model", revision="v2")
    with pytest.raises(ConfigError, match=r"revision 'v2' of somebody/model; fetch that, and set base_model_name"):
        load_pretrained(plain)
    edited(plain, base_model_name_or_path=str(tmp_path / "nowhere"), revision=None)
    with pytest.raises(ConfigError, match=r"adapter_config\.json, base_model_name_or_path: .* is neither a folder nor"):
        load_pretrained(plain)
    edited(plain, base_model_name_or_path=str(plain))
    with pytest.raises(DataError, match="which is an adapter itself"):
        load_pretrained(plain)
    (plain / "adapter_model.safetensors").unlink()
    with pytest.raises(DataError, match=r"neither adapter_model\.safetensors nor adapter_model\.bin"):
        check_weights(str(plain))


def test_what_adapters_sit_on_that_are_trained_further(plain, bases, tmp_path, written):
    config = load_pretrained(bases["llama"]).config

    def beneath(folder, *, kept, config=config):
        return base_beneath(str(folder), config, kept=kept, instead="merge them")

    assert beneath(bases["llama"], kept=False) == str(bases["llama"])
    assert beneath(plain, kept=True) == str(bases["llama"])
    with pytest.raises(ConfigError, match="weights that no folder holds: merge them"):
        beneath(plain, kept=False)
    for name, settings in (("saved", {"modules_to_save": ["lm_head"]}), ("on", {"target_modules": ["lm_head"]})):
        written("llama", name, **({"target_modules": ["q_proj"]} | settings))
        with pytest.raises(ConfigError, match="weights that no folder holds: merge them"):
            beneath(tmp_path / name, kept=True)
    with pytest.raises(ConfigError, match=r"added 2 rows to the embedding of llama, .* merge them"):
        beneath(bases["llama"], kept=False, config=dataclasses.replace(config, vocab_size=VOCAB + 2))


def test_the_tokenizer_is_the_models_where_an_adapter_has_none(tmp_path, bases):
    from empax.data.bpe import train_bpe
    from empax.data.tokenizer_folders import load_tokenizer

    shutil.copytree(bases["llama"], tmp_path / "base")
    train_bpe(["a b"], vocab_size=300).save(tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    assert load_tokenizer(folder).extends(load_tokenizer(tmp_path / "base"))
    train_bpe(["c d"], vocab_size=290, special_tokens=["<own>"]).save(folder)
    assert load_tokenizer(folder).token_id("<own>")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no model that has one; save the tokenizer"):
        load_tokenizer(tmp_path / "other")
