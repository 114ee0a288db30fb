"""Training by several processes that talk over loopback: the numbers of one, one writer, and what a kill leaves."""

from pathlib import Path

import numpy as np
import pytest

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.files import read_jsonl
from empax.core.sharding import MeshSettings, make_mesh
from empax.core.tree import named_leaves
from empax.training.checkpoint import load_params

DEVICES = 4
NOT_COMPARED = ("stage", "split", "seconds", "examples_per_second")


def logs_of(workdir):
    return workdir.with_name(f"{workdir.name}-logs")


def said(workdir):
    return "\n".join(path.read_text() for path in sorted(logs_of(workdir).iterdir()))


@pytest.fixture
def launch(processes):
    """Runs tiny.py in several processes of DEVICES in all."""

    def run(workdir, count, *arguments):
        words = map(str, (Path(__file__).parent / "tiny.py", workdir, *arguments))
        return processes(count, *words, devices=DEVICES // count, logs=logs_of(workdir))

    return run


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """What one process does on as many devices."""
    workdir = tmp_path_factory.mktemp("alone")
    tiny.train(workdir, mesh=make_mesh(MeshSettings(data=DEVICES)))
    return workdir


def check_same(workdir, alone):
    found, expected = (list(read_jsonl(folder / "metrics.jsonl")) for folder in (workdir, alone))
    assert [(row["step"], row["split"]) for row in found] == [(row["step"], row["split"]) for row in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - set(NOT_COMPARED):
            assert one[name] == pytest.approx(other[name], rel=1e-5), name
    ours, theirs = (named_leaves(load_params(folder / "tiny")) for folder in (workdir, alone))
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        np.testing.assert_allclose(leaf, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_train_as_one_does(count, alone, launch, tmp_path):
    workdir = tmp_path / "run"
    assert launch(workdir, count) == [0] * count, said(workdir)
    check_same(workdir, alone)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_costs_nothing_but_time(killed, alone, launch, tmp_path):
    workdir = tmp_path / "run"
    codes = launch(workdir, 2, 8, killed)
    assert codes[killed] == -9
    assert not (workdir / "tiny" / "DONE").exists()
    assert list((workdir / "tiny" / "checkpoints").glob("*/COMPLETE"))
    assert launch(workdir, 2) == [0, 0], said(workdir)
    check_same(workdir, alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, "the environment lacks JAX_PROCESS_ID; set all of"),
        ({"JAX_PROCESS_ID": "2"}, "JAX_NUM_PROCESSES = 2 and JAX_PROCESS_ID = 2 must be numbers, the second below"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES = two"),
    ],
)
def test_who_is_who_must_be_said_whole(changes, message, monkeypatch):
    values = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", **changes}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        distributed.initialize()
