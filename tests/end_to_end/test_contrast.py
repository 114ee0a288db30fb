"""REG and LEMPEx with NEC's contrast as a loss and its re-ranking as decoding: by their recipes' settings alone."""

import pytest

from empax.core.files import read_json, read_jsonl
from empax.serving.session import Session
from empax.training.checkpoint import load_params
from tests.end_to_end.promises import assert_gold_is_not_read

pytestmark = pytest.mark.slow

RECIPE = """
from ml_collections import ConfigDict

from configs import {module}


def get_config():
    config = {module}.get_config("{form}")
    config.{stage}.contrast = ConfigDict({{"weight": 1.0}})
    rerank = {{"rerank": "similarity", "rerank_similarity": 0.7}}
    config.{section}.decoding = ConfigDict({{"method": "beam", "num_beams": 3, "max_tokens": 8, **rerank}})
    return config
"""
MIXES = {
    "reg": {"module": "reg_transformer", "form": "tiny", "stage": "joint", "section": "reg"},
    "lempex": {"module": "lempex", "form": "no_judges,tiny", "stage": "generator", "section": "lempex"},
}


@pytest.mark.parametrize("system", MIXES)
def test_a_system_learns_a_contrast_and_answers_by_it(recipe, finished, tmp_path, system):
    mix, config, workdir = MIXES[system], tmp_path / "mix.py", tmp_path / "run"
    config.write_text(RECIPE.format(**mix))
    reused = [f"--reuse={finished}"] if system == "reg" else []
    recipe(workdir, *reused, config=str(config))
    logged = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["stage"] == mix["stage"]]
    assert all(row["contrast"] > 0 for row in logged)
    params = load_params(workdir / mix["stage"])
    assert "contrast" in (params["generator"] if system == "reg" else params)
    assert len(list(read_jsonl(workdir / "predictions.jsonl"))) == 62
    assert read_json(workdir / "report.json")["metrics"]["top5_share"]["value"] > 0
    assert Session.load(workdir).reply(["I lost my dog."]).response is not None
    assert_gold_is_not_read(workdir)
