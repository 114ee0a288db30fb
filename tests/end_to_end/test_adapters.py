"""Adapters of encoder-decoders: trained in a recipe, exported, read by PEFT, read here."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
import transformers

from empax.core.files import read_json
from empax.core.tree import named_leaves
from empax.data.features import SPECIAL_TOKENS
from empax.data.tokenizer_folders import load_tokenizer
from empax.interop.huggingface import load_pretrained
from empax.serving.export import ExportSettings, export_run

RECIPE = """
from ml_collections import ConfigDict
from configs import common, reg_t5

def get_config():
    config = common.shrink(reg_t5.get_config("sft"))
    pretrained = {{"architecture": "pretrained", "pretrained": {folder!r}}}
    config.reg.generator = ConfigDict(pretrained)
    config.reg.lora = ConfigDict({{"rank": 4, "alpha": 8.0, "pattern": "attention/(query|value)$|feed_forward/wo$"}})
    config.prepare.tokenizer = ConfigDict({{"pretrained": {folder!r}, "tags": True}})
    config.generator.optimizer = ConfigDict({{"learning_rate": 1e-2}})
    config.evaluate.update({{"limit": 8, "head_examples": 8}})
    return config
"""
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
BART = {"d_model": 32, "max_position_embeddings": 256, "decoder_start_token_id": 2, "forced_eos_token_id": None}
for stack in ("encoder", "decoder"):
    BART |= {f"{stack}_layers": 2, f"{stack}_attention_heads": 2, f"{stack}_ffn_dim": 48}
IDS = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # with room for the tags
MAKERS = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **IDS)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART, **IDS)),
}


def logits(model):
    source, target = np.random.default_rng(0).integers(3, 380, (2, 2, 7))
    with torch.no_grad():
        return model(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target)).logits.numpy()


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("name", MAKERS)
def test_an_exported_adapter_is_pefts(name, t5, recipe, tmp_path):
    base = tmp_path / f"base-{name}"
    shutil.copytree(t5, base)  # its tokenizer
    load_tokenizer(base, extra_tokens=SPECIAL_TOKENS).save(base)  # adapters alone hold no rows of new tokens
    torch.manual_seed(0)
    MAKERS[name]().save_pretrained(base)
    config, workdir = tmp_path / "first.py", tmp_path / "first"
    config.write_text(RECIPE.format(folder=str(base)))
    recipe(workdir, config=str(config))
    folder, merged = tmp_path / "adapters", tmp_path / "merged"
    export_run(workdir, folder, ExportSettings(lora="adapters"))
    export_run(workdir, merged, ExportSettings())

    plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(base).eval()
    before = logits(plain)
    expected = logits(transformers.AutoModelForSeq2SeqLM.from_pretrained(merged).eval())
    assert np.abs(expected - before).max() > 1e-2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        peft = pytest.importorskip("peft")
        theirs = peft.PeftModel.from_pretrained(plain, folder).eval()
    np.testing.assert_allclose(logits(theirs), expected, rtol=1e-4, atol=1e-5)

    fields = read_json(folder / "adapter_config.json")
    assert fields["base_model_name_or_path"] == base.name  # where it lies is nobody's business
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"base_model_name_or_path": str(base)}))
    whole = named_leaves(load_pretrained(merged).params)
    for key, value in named_leaves(load_pretrained(folder).params).items():
        np.testing.assert_allclose(value, whole[key], rtol=1e-5, atol=1e-6, err_msg=key)
