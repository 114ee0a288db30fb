"""The examples of docs/where-did-my-flax-t5-go.md run as they stand, on tiny models in the place of those they name."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from flax import serialization

from empax.interop import architectures, huggingface

PAGE = (Path(__file__).parents[2] / "docs" / "where-did-my-flax-t5-go.md").read_text(encoding="utf-8")
ANSWERS, LEARNS, EMBEDS, FIRST, *EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SIZES = {"vocab_size": 31, "hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
STACKS = {
    f"{stack}_{key}": value
    for stack in ("encoder", "decoder")
    for key, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
}
SEQ2SEQ = {"vocab_size": 31, "d_model": 12, "max_position_embeddings": 16, **STACKS}
T5 = {"vocab_size": 31, "d_model": 12, "d_kv": 6, "d_ff": 16, "num_layers": 1, "num_heads": 2}
START = {"decoder_start_token_id": 30, "pad_token_id": 30}
NEAR = {
    "mt5": lambda: transformers.MT5ForConditionalGeneration(transformers.MT5Config(**T5)),
    "gtr-t5": lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)),
    "mbart": lambda: transformers.MBartForConditionalGeneration(
        transformers.MBartConfig(**SEQ2SEQ, decoder_start_token_id=7)
    ),
    "opus-mt": lambda: transformers.MarianMTModel(transformers.MarianConfig(**SEQ2SEQ, **START)),
    "pegasus": lambda: transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(**SEQ2SEQ)),
    "xlm-roberta": lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**SIZES)),
    "distilbert": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(vocab_size=SIZES["vocab_size"], dim=12, n_heads=2, n_layers=1, hidden_dim=16)
    ),
    "electra": lambda: transformers.ElectraModel(transformers.ElectraConfig(**SIZES, embedding_size=8)),
}


def tiny(name):
    """A random model of the kind that `name` is."""
    t = transformers
    for family, make in NEAR.items():
        if family in name:
            return make()
    if "t5" in name:
        return t.T5ForConditionalGeneration(t.T5Config(**T5, decoder_start_token_id=0))
    if "bart" in name:
        return t.BartForConditionalGeneration(t.BartConfig(**SEQ2SEQ))
    if "blenderbot" in name:
        return t.BlenderbotForConditionalGeneration(t.BlenderbotConfig(**SEQ2SEQ))
    if "contriever" in name:
        return t.BertModel(t.BertConfig(**SIZES))
    if "roberta" in name:
        return t.RobertaModel(t.RobertaConfig(**SIZES))
    if "mpnet" in name:
        return t.MPNetModel(t.MPNetConfig(**SIZES))
    if "dpr" in name:
        return t.DPRContextEncoder(t.DPRConfig(**SIZES))
    if "Qwen" in name:
        return t.Qwen2ForCausalLM(t.Qwen2Config(**SIZES, num_key_value_heads=1))
    if "Llama" in name:
        return t.LlamaForCausalLM(t.LlamaConfig(**SIZES))
    return t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=SIZES["vocab_size"], n_embd=12, n_head=2, n_layer=1, eos_token_id=1)
    )


NAMES = [re.search(r'resolve\("(.*?)"\)', text)[1] for text in EXAMPLES]
ENCODERS = ("gtr-t5", "roberta", "distilbert", "electra", "mpnet", "contriever", "dpr")


@pytest.fixture
def entered(tmp_path, monkeypatch, oracle, load_module):
    """Makes the folder that the page names, with a tiny model, and goes to where it is."""

    def enter(name, folder):
        return _enter(name, tmp_path / folder, monkeypatch, oracle, load_module)

    return enter


def _enter(name, folder, monkeypatch, oracle, load_module):
    for sizes in (SIZES, SEQ2SEQ, T5):
        monkeypatch.setitem(sizes, "vocab_size", 384)
    monkeypatch.setitem(SEQ2SEQ, "max_position_embeddings", 128)
    torch.manual_seed(0)
    model = tiny(name)
    model.save_pretrained(folder)
    load_module(Path(__file__).parents[1] / "end_to_end" / "conftest.py").write_tokenizer(folder)
    if "flax" in name:
        (folder / "model.safetensors").unlink()
        (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(oracle.flax_tree(model)))
    monkeypatch.chdir(folder.parent)
    return folder.parent


def test_a_flax_folder_answers_in_three_lines(entered, capsys):
    entered("my-flax-t5", "my-flax-t5")
    exec(ANSWERS, {})  # the page is ours
    assert capsys.readouterr().out.startswith("[")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_front_door_is_open_to_every_architecture(name, entered, capsys):
    encodes = any(family in name for family in ENCODERS)
    here = entered(name, "contriever" if encodes else "my-flax-t5")
    exec(EMBEDS if encodes else ANSWERS + LEARNS, {})  # the page is ours
    assert (here / ("encoder" if encodes else "tuned") / "model.safetensors").is_file()
    assert encodes or float(capsys.readouterr().out.splitlines()[-1]) > 1


def test_the_page_has_an_example_for_every_architecture_that_is_known():
    shown = {tiny(name).config.model_type for name in NAMES}
    # Those of one section share an example.
    assert shown | {"qwen3", "mistral", "opt"} == set(architectures.ARCHITECTURES)


def test_the_table_lists_every_architecture_that_is_known_and_no_other():
    _, *rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z].*?)`", row)}
    assert named == set(architectures.ARCHITECTURES)


def example_of(name, text):
    """An example by the name of its model; slow if it is of a family that test_families.py looks at."""
    slow = any(family in name for family in NEAR) and "t5-base" not in name
    return pytest.param(text, id=name, marks=[pytest.mark.slow] * slow)


@pytest.mark.oracle
@pytest.mark.parametrize("example", [example_of(*one) for one in zip(NAMES, EXAMPLES, strict=True)])
def test_an_example_runs_and_gives_what_torch_gives(example, tmp_path, monkeypatch, oracle):
    torch.manual_seed(0)
    models = {}

    def resolve(name):
        models[name] = tiny(name).eval()
        models[name].save_pretrained(tmp_path)
        if "flax" in name:
            (tmp_path / "model.safetensors").unlink()
            tree = oracle.flax_tree(models[name])
            (tmp_path / "flax_model.msgpack").write_bytes(serialization.to_bytes(tree))
        return tmp_path

    monkeypatch.setattr(huggingface, "resolve", resolve)
    names = {}
    exec(FIRST + example, names)  # the page is ours
    (model,) = models.values()
    ids = torch.tensor(np.asarray(names["ids"])).long()
    with torch.no_grad():
        if "states" in names:
            inner = model.ctx_encoder.bert_model if hasattr(model, "ctx_encoder") else model
            expected, found = inner(ids).last_hidden_state, names["states"]
        else:
            more = {}
            if model.config.is_encoder_decoder:
                start = torch.tensor([[model.config.decoder_start_token_id]])
                more = {"decoder_input_ids": torch.cat([start, ids[:, :-1]], dim=1)}
            expected, found = model(ids, **more).logits, names["logits"]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)
