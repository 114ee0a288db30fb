"""Training by several processes that talk over loopback: the numbers of one, one writer, and what a kill leaves."""

import os
import socket
import subprocess
import sys
import time
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


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(workdir, processes, *arguments):
    """Runs tiny.py in several processes of DEVICES in all; when one dies, ends the others, as launchers do."""
    script = Path(__file__).parent / "tiny.py"
    address, running = f"127.0.0.1:{free_port()}", []
    for number in range(processes):
        who = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": processes, "JAX_PROCESS_ID": number}
        who |= {"JAX_NUM_CPU_DEVICES": DEVICES // processes, "JAX_PLATFORMS": "cpu"}
        environment = {**os.environ, **{name: str(value) for name, value in who.items()}}
        command = [sys.executable, str(script), str(workdir), *map(str, arguments)]
        with (workdir.parent / f"{workdir.name}-{number}.log").open("w") as log:
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    while any(process.poll() is None for process in running):
        if any(process.poll() for process in running):
            for process in running:
                process.kill()
        time.sleep(0.1)
    return [process.returncode for process in running]


def said(workdir):
    return "\n".join(path.read_text() for path in sorted(workdir.parent.glob(f"{workdir.name}-*.log")))


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


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_train_as_one_does(processes, alone, tmp_path):
    workdir = tmp_path / "run"
    assert launch(workdir, processes) == [0] * processes, said(workdir)
    check_same(workdir, alone)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_costs_nothing_but_time(killed, alone, tmp_path):
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
