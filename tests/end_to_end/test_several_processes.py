"""Whole recipes by two processes over loopback: what one process with as many devices leaves behind, made once."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from empax.core.files import read_json, read_jsonl

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DRIVER = str(ROOT / "tests" / "end_to_end" / "drive.py")
DEVICES = 2
TIMING = ("seconds", "examples_per_second")


@pytest.fixture
def run(processes, tmp_path):
    """Runs a recipe in `count` processes, with caches of its own: nothing that another one made is taken over."""
    compiled = tmp_path / "xla"
    compiled.mkdir()

    def run(count, workdir, *flags):
        logs, cache = (workdir.with_name(f"{workdir.name}-{what}") for what in ("logs", "cache"))
        cache.mkdir()
        (cache / "xla").symlink_to(compiled)
        words = (DRIVER, *flags, f"--workdir={workdir}")
        known = {"EMPAX_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
        codes = processes(count, *words, devices=DEVICES // count, logs=logs, **known)
        return codes, [path.read_text() for path in sorted(logs.iterdir())]

    return run


def history(workdir):
    return [{k: v for k, v in row.items() if k not in TIMING} for row in read_jsonl(workdir / "metrics.jsonl")]


def check_same(found, expected):
    """Numbers to 1e-5, all else exactly."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            wanted = other[name]
            assert value == (pytest.approx(wanted, rel=1e-5, abs=1e-6) if isinstance(wanted, float) else wanted), name


# One part of this reward is compiled, the other asks a function that must be asked once: its answers change.
REWARD = """
import itertools

count = itertools.count()

def score(contexts, responses, references):
    return [len(response.split()) / 10 + next(count) / 100 for response in responses]
"""
REWARDS = '({"kind": "empathy"}, {"kind": "text", "function": "a_reward:score", "weight": 0.5})'


@pytest.mark.parametrize(
    ("recipe", "flags"), [("reg_transformer", ()), ("emprl_transformer", (f"--config.ppo.rewards={REWARDS}",))]
)
def test_two_processes_leave_what_one_does(recipe, flags, run, tmp_path):
    (tmp_path / "a_reward.py").write_text(REWARD)
    workdirs = {count: tmp_path / f"of-{count}" for count in (1, 2)}
    for count, workdir in workdirs.items():
        codes, said = run(count, workdir, f"--config=configs/{recipe}.py:tiny", *flags)
        assert codes == [0] * count, "\n".join(said)
    one, two = workdirs.values()
    check_same(history(two), history(one))
    # Cut to digits, numbers of the same size may differ in the last one.
    answers = [[(row["id"], row["response"], row["emotion_prediction"], row["attributes"])
                for row in read_jsonl(workdir / "predictions.jsonl")] for workdir in (two, one)]  # fmt: skip
    assert answers[0] == answers[1]
    reports = [read_json(workdir / "report.json") for workdir in (two, one)]
    for part in ("data", "counts"):
        assert reports[0][part] == reports[1][part]
    metrics = [list(report["metrics"].values()) for report in reports]
    assert reports[0]["metrics"].keys() == reports[1]["metrics"].keys()
    check_same(*metrics)
    # One writer: the same files, nothing half-written, and the other process had nothing to tell.
    names = [{path.relative_to(workdir) for path in workdir.rglob("*.json*")} for workdir in (two, one)]
    assert names[0] == names[1]
    assert not [path for path in two.rglob(".*") if path.is_file()]
    assert "begins" in said[0]
    assert "begins" not in said[1]


@pytest.fixture
def launched(tmp_path):
    """Starts `launch/local.sh 2 FLAGS...` in a session of its own, of which nothing is left in the end."""
    started = []

    def start(*flags):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{found.getsockname()[1]}"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        known = {"PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "EMPAX_CACHE_DIR": str(tmp_path)}
        known |= {"JAX_NUM_CPU_DEVICES": "1", "JAX_COORDINATOR_ADDRESS": address}
        # Run in the background, the tests would hand on that Ctrl-C is ignored.
        command = ["env", "--default-signal=INT", "bash", "launch/local.sh", "2", *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        started.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **known}, **pipes))
        return started[-1]

    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_what_stops_the_first_process_alone_stops_them_all(launched, tmp_path):
    """The corpus is looked for by the first one; the other waits for what it makes of it."""
    missing = tmp_path / "nowhere"
    flags = ("--config=configs/reg_transformer.py:tiny", f"--workdir={tmp_path / 'run'}")
    process = launched(*flags, "--config.data.name=jsonl", f"--config.data.dir={missing}")
    said, _ = process.communicate(timeout=300)  # ends once nobody is left who could say something
    assert process.returncode != 0
    assert "error: " in said
    assert str(missing) in said
    assert not (tmp_path / "run" / "prepare" / "DONE").exists()


def test_ctrl_c_has_all_save_and_leave(launched, tmp_path):
    workdir = tmp_path / "run"
    flags = ("--config=configs/reg_transformer.py:tiny", f"--workdir={workdir}")
    rhythm = ("steps=100000", "eval_every_steps=100000", "checkpoint_every_steps=100000")  # nothing is saved unasked
    process = launched(*flags, *(f"--config.generator.{setting}" for setting in rhythm))
    deadline = time.monotonic() + 300
    metrics = workdir / "metrics.jsonl"
    while not metrics.exists() or not metrics.stat().st_size:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: the script and the processes at once
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "generator: stopped and saved after step" in said
    assert list((workdir / "generator" / "checkpoints").glob("*/COMPLETE"))
