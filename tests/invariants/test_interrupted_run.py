"""Ctrl-C at any moment of a run, and two runs in one work directory: one line, an exit code, nothing lost."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = "--config=configs/reg_transformer.py:tiny"
LINE = "Interrupted; finished work is kept; run again to continue."


@pytest.fixture
def start(shared_tmp):
    """Starts `empax.main`, its words in a file; all that was started ends with the test."""
    running = []

    def begin(workdir):
        log = workdir.with_name(f"{workdir.name}-{len(running)}.log")
        environment = {**os.environ, "EMPAX_CACHE_DIR": str(shared_tmp / "cache"), "PYTHONPATH": str(ROOT)}
        with log.open("w") as file:
            command = [sys.executable, "-m", "empax.main", TINY, f"--workdir={workdir}"]
            running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file))
        return running[-1], log

    yield begin
    for process in running:
        process.kill()
        process.wait()


def wait(process, reached):
    deadline = time.monotonic() + 300
    while not reached():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def interrupted(process, log):
    """What the process had said when Ctrl-C ended it."""
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    said = log.read_text()
    assert "Traceback" not in said
    assert said.count(LINE) == 1
    assert said.rstrip().endswith(LINE)
    return said


def test_ctrl_c_while_importing_and_before_the_first_stage_and_a_second_run_meanwhile(start, tmp_path, command):
    process, log = start(tmp_path / "a")
    maps = Path(f"/proc/{process.pid}/maps")
    wait(process, lambda: "jaxlib" in maps.read_text() if maps.exists() else False)
    interrupted(process, log)
    workdir = tmp_path / "b"
    process, log = start(workdir)
    wait(process, (workdir / "LOCK").exists)
    wait(process, lambda: (workdir / "LOCK").read_text())
    process.send_signal(signal.SIGSTOP)
    second = command("-m", "empax.main", TINY, f"--workdir={workdir}")
    assert second.returncode == 2
    assert f"is in use: process {process.pid} on " in second.stderr
    assert "Traceback" not in second.stderr
    process.send_signal(signal.SIGCONT)
    interrupted(process, log)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.5, 2.0, 5.0])
def test_ctrl_c_in_evaluate_and_again_ends_with_the_same_predictions(finished, start, recipe, tmp_path, seconds):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    for stage in ("evaluate", "report"):
        shutil.rmtree(workdir / stage)
    (workdir / "predictions.jsonl").unlink()
    process, log = start(workdir)
    wait(process, lambda: "evaluate: begins" in log.read_text())
    time.sleep(seconds)
    if process.poll() is None:
        interrupted(process, log)
    recipe(workdir)
    assert (workdir / "predictions.jsonl").read_bytes() == (finished / "predictions.jsonl").read_bytes()
