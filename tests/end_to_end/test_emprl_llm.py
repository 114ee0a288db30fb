"""EmpRL on a decoder-only model in small: with adapters on a model in a folder, then a random one by itself."""

import jax
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import read_json, read_jsonl
from empax.core.tree import named_leaves
from empax.interop.huggingface import load_pretrained
from empax.parts.generator.parts import GeneratorParts
from empax.parts.generator.stages import generator_params
from empax.serving.export import ExportSettings, export_run
from empax.systems.emprl.stages import policy_model
from empax.training.checkpoint import load_params
from tests.plans import context_of

STAGES = ("prepare", "identifiers", "assess", "generator", "ppo", "evaluate", "report")
RECIPE = "configs/emprl_llm.py"

pytestmark = pytest.mark.slow


def completed(workdir, least=0.0):
    assert tuple(read_json(workdir / "config.json")["run"]) == STAGES
    assert all((workdir / stage / "DONE").is_file() for stage in STAGES)
    report = read_json(workdir / "report.json")
    assert {"empathy_f1", "distinct_2", "perplexity"} <= set(report["metrics"])
    rows = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["stage"] == "ppo"]
    assert all(least < row["reward"] <= 1.0 for row in rows if row["split"] == "train")
    return context_of(workdir, "ppo")


@pytest.fixture(scope="module")
def adapted(recipe, llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted") / "run"
    recipe(folder, "--check", config=f"{RECIPE}:{llama},tiny")
    return folder


def test_a_policy_is_adapters_on_the_fine_tuned_model(adapted):
    run = completed(adapted)
    parts = GeneratorParts.of(run)
    tuned, policy = generator_params(parts, run, "generator"), load_params(adapted / "ppo")
    assert set(policy) == {"adapters", "trained"}  # a checkpoint does not hold the model
    assert set(policy["trained"]) == {"value"}
    pretrained, before = parts.generator.params, tuned["model"]
    after = jax.tree.map(np.asarray, policy_model(parts, policy, tuned, 1.0))
    for one, other in ((pretrained, before), (before, after)):
        moved = {name: np.abs(leaf - named_leaves(other)[name]).max() for name, leaf in named_leaves(one).items()}
        assert {name for name, size in moved.items() if size} == {
            name for name in moved if name.startswith(("layers/attention/", "layers/feed_forward/"))
        }
        assert max(moved.values()) < 0.1  # a few updates
    rows = list(read_jsonl(adapted / "predictions.jsonl"))
    assert len(rows) == 16
    assert not any(row["exemplars"] for row in rows)


def test_adapted_policies_are_exported_whole(adapted, tmp_path):
    run = context_of(adapted, "ppo")
    parts = GeneratorParts.of(run, with_params=False)
    expected = policy_model(parts, load_params(adapted / "ppo"), generator_params(parts, run, "generator"), 1.0)
    assert "of stage ppo" in export_run(adapted, tmp_path / "out", ExportSettings())
    found = load_pretrained(tmp_path / "out", parts.generator.model.config).params
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    with pytest.raises(ConfigError, match="stage 'ppo' has no adapters that sit on pretrained weights"):
        export_run(adapted, tmp_path / "adapters", ExportSettings(lora="adapters"))


def test_groups_need_no_value_head_and_the_reference_has_eight_bits_where_the_policy_has(recipe, llama, tmp_path):
    recipe(tmp_path / "run", "--config.emprl.lora.int8=True", config=f"{RECIPE}:{llama},grpo,tiny")
    completed(tmp_path / "run")


@pytest.mark.parametrize(("form", "least"), [("", 0.0), (",expected", -1.0)])
def test_a_random_model_needs_nothing(recipe, tmp_path, form, least):
    recipe(tmp_path / "run", config=f"{RECIPE}:tiny{form}")
    run = completed(tmp_path / "run", least)
    assert GeneratorParts.of(run).generator.params is None
    assert set(load_params(tmp_path / "run" / "ppo")) == {"model", "value"}
