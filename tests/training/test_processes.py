"""Training by several processes that talk over loopback: the numbers of one, one writer, and what a kill leaves."""

import os
import socket
import subprocess
import sys
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


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_train_as_one_does(count, alone, launch, tmp_path):
    workdir = tmp_path / "run"
    assert launch(workdir, count) == [0] * count, said(workdir)
    check_same(workdir, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "killed"), [(2, 0), (2, 1), (4, 2)])
def test_a_killed_process_costs_nothing_but_time(count, killed, alone, launch, tmp_path):
    workdir = tmp_path / "run"
    codes = launch(workdir, count, 8, killed)
    assert codes[killed] == -9
    assert not (workdir / "tiny" / "result.json").exists()
    assert list((workdir / "tiny" / "checkpoints").glob("*/COMPLETE"))
    assert launch(workdir, count) == [0] * count, said(workdir)
    check_same(workdir, alone)


# The first process, which completes a checkpoint, takes longer for it than others wait for it when they end.
SLOW_WRITER = """
import os, signal, sys, time
from pathlib import Path

import jax, tiny
from empax.core import distributed
from empax.core.sharding import make_mesh
from empax.training import checkpoint, loop

def stop():
    if jax.process_index() == 0:
        checksums = checkpoint._checksums
        checkpoint._checksums = lambda path: time.sleep(2) or checksums(path)
    else:
        os.kill(os.getpid(), signal.SIGTERM)

distributed._LEAVING_SECONDS = 1
distributed.initialize()
loop.ProgressBar = tiny.stop_at(4, stop)
tiny.train(Path(sys.argv[1]), mesh=make_mesh())
"""


@pytest.mark.slow
def test_processes_leave_once_the_checkpoint_counts(processes, tmp_path):
    """The first one that ends has the launcher end the others."""
    workdir = tmp_path / "run"
    path = os.pathsep.join((str(Path(__file__).parents[2]), str(Path(__file__).parent)))
    codes = processes(2, "-c", SLOW_WRITER, str(workdir), devices=1, logs=logs_of(workdir), PYTHONPATH=path)
    assert 0 not in codes
    assert "stopped and saved after step 4" in said(workdir)
    assert (workdir / "tiny" / "checkpoints" / "4" / "COMPLETE").exists(), said(workdir)


DEVICES_SEEN = """
import jax
from empax.core import distributed

distributed.initialize()
seen = [jax.config.read(f"jax_{kind}_visible_devices") for kind in ("cuda", "rocm")]
print(jax.process_index(), jax.process_count(), *seen)
"""


@pytest.fixture
def on_slurm():
    """What tasks of SLURM take for themselves: their number, how many they are, and the GPUs of those they see."""

    def run(tasks, nodes, known=None):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        running = []
        for task in range(tasks):
            slurm = {"NTASKS": tasks, "STEP_NUM_NODES": nodes, "PROCID": task, "LOCALID": task % (tasks // nodes)}
            slurm |= {"JOB_ID": 1, "STEP_NODELIST": "127.0.0.1"}
            who = {f"SLURM_{name}": str(value) for name, value in slurm.items()} | {"JAX_COORDINATOR_PORT": port}
            if known is None:
                who["EMPAX_DISTRIBUTED"] = "1"
            else:
                who |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(tasks)}
                who |= {"JAX_PROCESS_ID": str(task), **known}
            environment = {**os.environ, **who, "JAX_PLATFORMS": "cpu"}
            command = [sys.executable, "-c", DEVICES_SEEN]
            running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return [process.communicate(timeout=120)[0].split() for process in running]

    return run


@pytest.mark.parametrize(
    ("tasks", "nodes", "known", "gpus"),
    [
        pytest.param(1, 1, None, ["all"], marks=pytest.mark.slow),
        pytest.param(2, 2, None, ["all", "all"], marks=pytest.mark.slow),
        (2, 1, None, ["0", "1"]),
        pytest.param(2, 2, {}, ["all", "all"], marks=pytest.mark.slow),  # who is who is said by the three variables
        (2, 2, {"JAX_LOCAL_DEVICE_IDS": "0,1"}, ["0,1", "0,1"]),
    ],
)
def test_a_task_of_slurm_takes_all_gpus_of_its_node(tasks, nodes, known, gpus, on_slurm):
    assert on_slurm(tasks, nodes, known) == [[str(i), str(tasks), gpu, gpu] for i, gpu in enumerate(gpus)]


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
