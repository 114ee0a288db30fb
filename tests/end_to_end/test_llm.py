"""REG on a decoder-only model with adapters, in small: all stages, then the forms without retrieval."""

import dataclasses
import importlib.util
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from configs import reg_llm
from empax.core.files import read_json, read_jsonl
from empax.core.tree import count_params
from empax.models.decoder_only import DecoderOnly
from empax.parts.generator.parts import GeneratorParts
from empax.serving.export import ExportSettings, export_run
from empax.serving.session import Session
from empax.systems.reg.settings import RetrieverTaskSettings
from empax.systems.reg.stages import build_retriever
from empax.training.checkpoint import load_params
from tests.plans import context_of

RECIPE = """
from configs import common, reg_llm

def get_config():
    config = reg_llm.get_config({argument!r})
    tokenizer, layout = config.prepare.tokenizer, dict(config.reg.layout)
    config = common.shrink(config)
    config.prepare.tokenizer = tokenizer
    config.reg.layout.update({{"max_context_tokens": 136, "max_passage_tokens": 24}})  # attributes take 60
    config.evaluate.update({{"limit": 8, "head_examples": 8}})
    for name in ("generator", "exemplars", "retriever", "joint", "evaluate"):
        if name in config:
            config[name].buckets = (160,)
    if "joint" in config:
        config.joint.batch_size = config.retriever.batch_size = 8
    return config
"""


@pytest.fixture
def run_form(recipe, tmp_path, llama):
    def run(form):
        config, workdir = tmp_path / f"{form or 'reg'}.py", tmp_path / (form or "reg")
        config.write_text(RECIPE.format(argument=",".join(filter(None, (str(llama), form)))))
        recipe(workdir, config=str(config))
        return workdir, list(read_jsonl(workdir / "predictions.jsonl"))

    return run


@pytest.mark.slow
def test_all_stages_train_adapters_alone_and_the_answers_come_from_them(run_form, llama):
    workdir, predictions = run_form("")
    assert len(predictions) == 8
    assert all(len(row["exemplars"]) == 2 and row["attributes"] for row in predictions)
    run = context_of(workdir, "joint")
    parts = GeneratorParts.of(run)
    for stage, inner in (("generator", lambda p: p), ("joint", lambda p: p["generator"])):
        saved = load_params(workdir / stage)
        assert set(saved) == {"adapters", "trained"}  # a checkpoint does not hold the model
        merged = inner(parts.stage_params(run, stage))["model"]
        changed = {
            name
            for name in ("query", "key", "value", "out")
            if not np.array_equal(
                merged["layers"]["attention"][name], parts.generator.params["layers"]["attention"][name]
            )
        }
        assert changed == {"query", "key", "value", "out"}
        np.testing.assert_array_equal(merged["token_embedding"], parts.generator.params["token_embedding"])
    judge = build_retriever(RetrieverTaskSettings(), dataclasses.replace(run, stage="retriever")).frozen["generator"][
        "model"
    ]
    assert judge["layers"]["attention"]["query"].dtype == judge["token_embedding"].dtype == jnp.bfloat16
    assert judge["final_norm"]["scale"].dtype == jnp.float32
    metrics = read_json(workdir / "report.json")["metrics"]
    assert {"bleu_2", "perplexity", "exemplar_emotion_match", "emotion_accuracy"} <= set(metrics)

    export_run(workdir, workdir / "exported", ExportSettings())
    run_example(workdir / "exported", {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(workdir / "exported")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = theirs(ids).logits.numpy()
    config = dataclasses.replace(parts.generator.model.config, dtype="float32")
    found = DecoderOnly(config).apply(
        {"params": jax.tree.map(jnp.asarray, merged)}, jnp.asarray(ids.numpy()), jnp.ones((1, 37), bool)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    adapters_alone_are_the_same_model(workdir, llama, ids, expected)


def run_example(folder, names):
    """Runs the example of a card; gives the card and what the example has made."""
    card = (folder / "README.md").read_text()
    names = {"FOLDER": folder, **names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT's imports
        exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names)
    return card, names


def adapters_alone_are_the_same_model(workdir, llama, ids, expected):
    folder = workdir / "adapters"
    line = export_run(workdir, folder, ExportSettings(lora="adapters"))
    saved = load_params(workdir / "joint")["adapters"]
    assert f"adapters of stage joint, {count_params(saved):,} parameters" in line
    files = {"adapter_model.safetensors", "adapter_config.json", "generation_config.json", "README.md"}
    assert {file.name for file in folder.iterdir()} == files | {"tokenizer.json", "tokenizer_config.json"}
    assert read_json(folder / "adapter_config.json")["base_model_name_or_path"] == llama.name
    if importlib.util.find_spec("peft") is None:
        return
    card, names = run_example(folder, {"BASE": llama})
    assert "library_name: peft" in card
    assert "rank 16, alpha 32." in card
    assert str(llama) not in card
    with torch.no_grad():
        np.testing.assert_allclose(names["model"](ids).logits.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_model_that_is_shown_exemplars_and_asked_first_is_not_trained(recipe, tmp_path):
    """The form without questions has the same stages."""
    recipe(tmp_path / "run", config="configs/reg_llm.py:two_stages,tiny")
    predictions = list(read_jsonl(tmp_path / "run" / "predictions.jsonl"))
    assert all(row["exemplars"] for row in predictions)
    assert all(set(row["notes"]["told"]) <= {"emotion", "intent"} for row in predictions if "told" in row["notes"])
    assert any("told" in row["notes"] for row in predictions)
    tuned, shown = (load_params(tmp_path / "run" / stage) for stage in ("generator", "exemplars"))
    jax.tree.map(np.testing.assert_array_equal, tuned["model"], shown["generator"]["model"])
    shown = reg_llm.get_config("in_context")
    assert shown.run == reg_llm.get_config("two_stages").run
    assert {shown[name].optimizer.learning_rate for name in ("generator", "exemplars")} == {0.0}


@pytest.mark.slow
def test_prompting_leaves_the_model_as_it_is(run_form):
    workdir, predictions = run_form("prompted")
    assert not any(row["exemplars"] for row in predictions)
    # The emotion head was never trained: what it says is not shown as if it meant something.
    assert {row["emotion_prediction"] for row in predictions} == {""}
    report = read_json(workdir / "report.json")
    assert "emotion_accuracy" not in report["metrics"]
    assert "emotion" not in report["confusion"]
    assert set(report["history"]["generator"]).isdisjoint({"emotion_accuracy", "emotion_loss"})
    assert {"bleu_1", "distinct_1", "perplexity"} <= set(report["metrics"])
    assert Session.load(workdir).reply(["I lost my job."]).emotion_prediction == ""
    parts = GeneratorParts.of(run := context_of(workdir, "generator"))
    merged = parts.stage_params(run, "generator")["model"]
    same = [
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(parts.generator.params), strict=True)
    ]
    assert all(same)
