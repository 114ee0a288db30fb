"""Every training stage on every mesh: one loss curve, and checkpoints that do not know where they were written."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from configs import emprl_transformer, reg_transformer
from empax.core.files import WorkDir, read_jsonl
from empax.core.sharding import AXES
from empax.core.system import RunContext
from empax.pipeline import train
from empax.pipeline.plan import make_plan, plain
from empax.training import loop

pytestmark = [
    pytest.mark.multidevice,
    pytest.mark.slow,  # eight devices on two cores, stage by stage
    pytest.mark.usefixtures("own_cache"),  # what one run embeds, no other takes
]

REG = ("attributes", "generator", "emotions", "retriever", "joint")
STAGES = (*REG, "identifiers", "ppo")
ONE = (1, 1, 1)
STEPS, STOP = 6, 3
TINY = Path(__file__).resolve().parents[1] / "training" / "tiny.py"


def config_of(stage, mesh):
    """The tiny recipe with every step in the log, in float32: bfloat16 rounds sums by their order."""
    config = plain((reg_transformer if stage in REG else emprl_transformer).get_config("tiny"))
    config["mesh"] = dict(zip(AXES, mesh, strict=True))
    for model in (config[config["system"]]["generator"], config[stage].get("encoder", {})):
        model["dtype"] = "float32"
    config[stage].update(
        steps=STEPS, batch_size=16, log_every_steps=1, eval_every_steps=STEPS, max_eval_examples=16,
        checkpoint_every_steps=STEPS,
    )  # fmt: skip
    if stage == "ppo":
        config[stage]["refresh_every_steps"] = 0  # its replies change nothing
    return config


def train_on(workdir, stage, mesh):
    config = config_of(stage, mesh)
    plan = make_plan(config)
    train.run(plan.stages[stage].settings, RunContext(WorkDir(workdir), plan, stage))


def curve(workdir):
    """Split and step → loss."""
    return {(row["split"], row["step"]): row["loss"] for row in read_jsonl(workdir / "metrics.jsonl")}


class Workdirs:
    """Work directories in which single stages can be trained, because all that they build on is there."""

    def __init__(self, finished, factory):
        self.finished, self.factory, self.made = finished, factory, {}

    def new(self, stage):
        workdir = self.factory.mktemp(stage)
        for path in self.finished.iterdir():
            if path.is_dir() and path.name not in (stage, "tensorboard"):
                (workdir / path.name).symlink_to(path)
        if stage == "ppo":
            (workdir / "identifiers").symlink_to(self.of_one_device("identifiers") / "identifiers")
        return workdir

    def of_one_device(self, stage):
        """Where one device has trained `stage`."""
        if stage not in self.made:
            self.made[stage] = self.new(stage)
            train_on(self.made[stage], stage, ONE)
        return self.made[stage]


@pytest.fixture(scope="module")
def workdirs(finished, tmp_path_factory):
    return Workdirs(finished, tmp_path_factory)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("first", "second"),
    [((2, 2, 2), ONE), ((8, 1, 1), (2, 4, 1)), ((2, 4, 1), (2, 2, 2)), (ONE, (8, 1, 1))],
    ids=lambda mesh: "x".join(map(str, mesh)),
)
def test_a_stage_that_moves_from_mesh_to_mesh_has_the_curve_of_one_device(
    first, second, stage, workdirs, load_module, monkeypatch, caplog
):
    expected = curve(workdirs.of_one_device(stage))
    assert len(set(expected.values())) == STEPS + 1  # every step counts
    workdir = workdirs.new(stage)
    with monkeypatch.context() as patch:
        interrupt = load_module(TINY).stop_at(STOP, lambda: os.kill(os.getpid(), signal.SIGINT))
        patch.setattr(loop, "ProgressBar", interrupt)
        with pytest.raises(loop.Interrupted, match=f"{stage}: stopped and saved after step {STOP}"):
            train_on(workdir, stage, first)
    assert len(curve(workdir)) == STOP
    caplog.clear()
    with caplog.at_level("INFO", logger="empax"):
        train_on(workdir, stage, second)
    assert f"parameters, from step {STOP}." in caplog.text
    found = curve(workdir)
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        np.testing.assert_allclose(found[step], loss, rtol=1e-5, atol=1e-6, err_msg=str(step))
