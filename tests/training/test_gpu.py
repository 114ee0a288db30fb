"""On a GPU, with `config.deterministic`, a run that is killed ends with the bits of one that never was."""

import shutil

import jax
import numpy as np
import pytest

from empax.core.files import read_jsonl
from empax.training.checkpoint import load_params

RECIPE = """
from configs import reg_t5

def get_config():
    config = reg_t5.get_config("no_retrieval,tiny")
    config.run = ("prepare", "generator")
    del config.longer, config.evaluate, config.report
    config.deterministic = True
    return config
"""

TIMING = {"seconds", "examples_per_second"}


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU: tests/invariants/test_killed_run.py has a CPU's")
def test_a_run_killed_on_a_gpu_ends_with_the_same_bits(recipe, tmp_path):
    config, whole, broken = (tmp_path / name for name in ("config.py", "whole", "broken"))
    config.write_text(RECIPE)
    recipe(whole, config=str(config))
    broken.mkdir()
    shutil.copytree(whole / "prepare", broken / "prepare")
    recipe(broken, "--stop=generator:3:SIGKILL", config=str(config), code=-9)
    assert not (broken / "generator" / "DONE").exists()
    assert "parameters, from step 2." in recipe(broken, config=str(config)).stderr
    params = [load_params(folder / "generator", "last") for folder in (whole, broken)]
    jax.tree.map(np.testing.assert_array_equal, *params)
    rows = [read_jsonl(folder / "metrics.jsonl") for folder in (whole, broken)]
    same = [[{name: row[name] for name in row.keys() - TIMING} for row in some] for some in rows]
    assert same[0] == same[1]
