"""The examples of docs/where-did-my-flax-t5-go.md run as they stand, on tiny models in the place of those they name."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from flax import serialization

from empax.interop import architectures, huggingface
from tests.interop import oracle
from tests.interop.tiny import tiny

PAGE = (Path(__file__).parents[2] / "docs" / "where-did-my-flax-t5-go.md").read_text(encoding="utf-8")
ANSWERS, LEARNS, EMBEDS, FIRST, *EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NEAR = {
    "mt5": "mt5",
    "gtr-t5": "T5EncoderModel",
    "mbart": "mbart",
    "opus-mt": "marian",
    "pegasus": "pegasus",
    "xlm-roberta": "xlm-roberta",
    "distilbert": "distilbert",
    "electra": "electra",
}
FAMILIES = NEAR | {name: name for name in ("t5", "bart", "blenderbot", "roberta", "mpnet", "dpr")}
FAMILIES |= {"contriever": "bert", "Qwen": "qwen2", "Llama": "llama", "GPT": "gpt2"}


def model_for(name, folder, **changes):
    """A random model of the kind that `name` is, which is written to `folder`."""
    model = tiny(next(kind for family, kind in FAMILIES.items() if family in name), **changes)
    model.save_pretrained(folder)
    if "flax" in name:
        (folder / "model.safetensors").unlink()
        (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(oracle.flax_tree(model)))
    return model


NAMES = [re.search(r'resolve\("(.*?)"\)', text)[1] for text in EXAMPLES]
ENCODERS = ("gtr-t5", "roberta", "distilbert", "electra", "mpnet", "contriever", "dpr")


@pytest.fixture
def entered(tmp_path, monkeypatch, load_module):
    """Makes the folder that the page names, with a tiny model, and goes to where it is."""

    def enter(name, folder):
        positions = {} if "t5" in name else {"max_position_embeddings": 128}
        model_for(name, tmp_path / folder, vocab_size=384, **positions)
        load_module(Path(__file__).parents[1] / "end_to_end" / "conftest.py").write_tokenizer(tmp_path / folder)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return enter


def test_a_flax_folder_answers_in_three_lines(entered, capsys):
    entered("my-flax-t5", "my-flax-t5")
    exec(ANSWERS, {})  # the page is ours
    assert capsys.readouterr().out.startswith("[")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_front_door_is_open_to_every_architecture(name, entered, capsys):
    encodes = any(family in name for family in ENCODERS)
    here = entered(name, "contriever" if encodes else "my-flax-t5")
    exec(EMBEDS if encodes else ANSWERS + LEARNS, {})  # the page is ours
    assert (here / ("encoder" if encodes else "tuned") / "model.safetensors").is_file()
    assert encodes or float(capsys.readouterr().out.splitlines()[-1]) > 1


def test_the_page_has_an_example_for_every_architecture_that_is_known(tmp_path):
    shown = {model_for(name, tmp_path).config.model_type for name in NAMES}
    # Those of one section share an example.
    alike = {"mt5", "blenderbot", "pegasus", "xlm-roberta", "distilbert", "electra", "mpnet", "qwen3", "mistral", "opt"}
    assert shown | alike == set(architectures.ARCHITECTURES)


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
def test_an_example_runs_and_gives_what_torch_gives(example, tmp_path, monkeypatch):
    models = {}

    def resolve(name):
        models[name] = model_for(name, tmp_path)
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
