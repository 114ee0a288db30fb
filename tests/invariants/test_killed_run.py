"""A run that is killed in every training stage, and interrupted in one, ends like a run that never stopped."""

import shutil

import jax
import numpy as np
import pytest

from empax.core.files import read_json, read_jsonl
from empax.training.checkpoint import load_params

BETWEEN = ("prepare", "annotate", "index", "reindex")
STAGES = ("generator", "attributes", "exemplars", "emotions", "retriever", "joint")

RECIPE = """
from configs import reg_transformer

def get_config():
    config = reg_transformer.get_config("tiny")
    config.run = config.run[: config.run.index("joint") + 1]
    del config.evaluate, config.swaps, config.report
    return config
"""

# One signal for each process, in the order of the stages; checkpoints are made after steps 2 and 4, the joint stage
# refreshes before step 3.
STOPS = (
    *((f"{stage}:3:SIGKILL", -9) for stage in STAGES),
    ("joint:3:SIGINT", 130),  # saves after step 3: what it goes on from lies between two refreshes
)

TIMING = {"seconds", "examples_per_second"}


def history(workdir):
    rows = [{k: v for k, v in row.items() if k not in TIMING} for row in read_jsonl(workdir / "metrics.jsonl")]
    return {stage: [row for row in rows if row["stage"] == stage] for stage in STAGES}


@pytest.mark.slow
def test_a_run_killed_in_every_stage_ends_with_the_same_bits(finished, recipe, tmp_path):
    workdir, config = tmp_path / "run", tmp_path / "config.py"
    config.write_text(RECIPE)
    for name in BETWEEN:  # what they make of the training stages is compared below, with those
        shutil.copytree(finished / name, workdir / name)
    for stop, code in STOPS:
        result = recipe(workdir, f"--stop={stop}", config=str(config), code=code)
        assert not (workdir / stop.split(":")[0] / "DONE").exists()
    assert "joint: stopped and saved after step 3; run again to continue." in result.stderr
    result = recipe(workdir, config=str(config))
    assert "parameters, from step 3." in result.stderr
    for stage in STAGES:
        for which in ("best", "last"):
            whole, broken = (load_params(folder / stage, which) for folder in (finished, workdir))
            assert jax.tree.structure(whole) == jax.tree.structure(broken)
            jax.tree.map(np.testing.assert_array_equal, whole, broken)
        assert read_json(finished / stage / "DONE")["best_step"] == read_json(workdir / stage / "DONE")["best_step"]
    assert history(workdir) == history(finished)


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on_and_leaves_the_same_bytes(finished, recipe, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir, ignore=shutil.ignore_patterns("evaluate", "report*", "predictions*", "outputs*"))
    recipe(workdir, "--stop=evaluate:2:SIGKILL", code=-9)
    assert list((workdir / "evaluate" / "parts").glob("*.jsonl"))
    result = recipe(workdir)
    assert "evaluate: continuing after" in result.stderr
    for name in ("predictions.jsonl", "outputs.jsonl.gz"):
        assert (workdir / name).read_bytes() == (finished / name).read_bytes()
