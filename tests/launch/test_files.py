"""The files that start a run on many machines, as far as they can be checked without any."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from configs import reg_t5

FOLDER = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sh", ".sbatch"))
FAKE = """#!/usr/bin/env bash
echo "$JAX_PROCESS_ID $JAX_NUM_PROCESSES $EMPAX_DISTRIBUTED $CUDA_VISIBLE_DEVICES $(basename "$0") $*" >> "$LOG"
for word; do
  if [[ -f $word ]]; then tar -tzf "$word" > "$LOG.packed"; fi
done
"""

# Stands in for `python` where processes are told to stop: once told, the first takes its time to save.
SAVING = f"""#!{sys.executable}
import os, sys, time
from pathlib import Path
from empax.training.interruption import InterruptSignals

number, log = os.environ["JAX_PROCESS_ID"], Path(os.environ["LOG"])
with InterruptSignals() as signals:
    (log / f"{{number}}.began").touch()
    while not signals.received:
        time.sleep(0.01)
    time.sleep(0.2 if number == "1" else 1.5)
    (log / f"{{number}}.saved").touch()
sys.exit(130)
"""


@pytest.fixture
def start(tmp_path):
    """Runs a script with stand-ins for the programs that it calls; gives the lines that those leave."""

    def run(name, *arguments, fails="", **environment):
        for program in ("python", "srun", "gcloud"):
            path = tmp_path / program
            path.write_text(FAKE + ("exit 3\n" if program == fails else ""))
            path.chmod(0o755)
        log = tmp_path / "log"
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        known = {"PATH": path, "LOG": str(log), "JAX_PROCESS_ID": "", "JAX_NUM_PROCESSES": "", "EMPAX_DISTRIBUTED": ""}
        result = subprocess.run(
            ["bash", str(FOLDER / name), *arguments],
            env={**known, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        return result.returncode, sorted(log.read_text().splitlines()) if log.exists() else []

    return run


def test_every_file_is_in_the_table():
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{path.name}" in text for path in FOLDER.iterdir() if path.name != "README.md")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(path):
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    shellcheck = Path(sys.executable).with_name("shellcheck")
    result = subprocess.run([shellcheck, "--shell=bash", str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_local_processes_know_who_they_are(start):
    code, lines = start("local.sh", "3", "--config=a.py", "--config.x=1 2")
    assert code == 0
    assert lines == [f"{i} 3  {i} python -m empax.main --config=a.py --config.x=1 2" for i in range(3)]
    assert start("local.sh", "2", fails="python")[0] == 3


@pytest.mark.parametrize("words", [(), ("0",), ("2.5",), ("--config=a.py",), ("2",)])
def test_local_processes_must_be_counted_and_need_a_gpu_each(words, start):
    assert start("local.sh", *words, CUDA_VISIBLE_DEVICES="3") == (2, [])


@pytest.mark.parametrize(("visible", "gpus"), [("5,2,7", ("5", "2")), ("", ("", ""))])
def test_local_processes_share_the_gpus_that_the_user_chose(visible, gpus, start):
    code, lines = start("local.sh", "2", CUDA_VISIBLE_DEVICES=visible)
    assert code == 0
    assert lines == [f"{i} 2  {gpu} python -m empax.main" for i, gpu in enumerate(gpus)]


@pytest.fixture
def saving(tmp_path):
    """Starts `local.sh 2` with processes that save when they are told to stop; they have begun when it is given."""
    (tmp_path / "python").write_text(SAVING)
    (tmp_path / "python").chmod(0o755)
    known = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "LOG": str(tmp_path)}
    # Run in the background, the tests would hand on that Ctrl-C is ignored.
    command = ["env", "--default-signal=INT", "bash", str(FOLDER / "local.sh"), "2"]
    environment = {**os.environ, **known, "PYTHONPATH": str(FOLDER.parent)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.began"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    for one_or_all in (os.kill, os.killpg):
        try:
            one_or_all(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()


def saved(folder):
    return {path.name for path in folder.glob("*.saved")}


@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_local_waits_until_all_have_saved(number, to_all, saving, tmp_path):
    """A terminal sends Ctrl-C to all; `kill` and whatever else starts the script, to the script alone."""
    (os.killpg if to_all else os.kill)(saving.pid, number)
    assert saving.wait(timeout=30) == 130
    assert saved(tmp_path) == {"0.saved", "1.saved"}
    assert "race condition" not in saving.stderr.read()


def test_signals_on_top_of_each_other_do_not_keep_local_from_saving(saving, tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.killpg(saving.pid, number)
        time.sleep(0.02)
    assert saving.wait(timeout=30) == 130
    assert saved(tmp_path) == {"0.saved", "1.saved"}


def test_a_process_that_fails_ends_the_local_others(saving, tmp_path):
    children = subprocess.run(["pgrep", "-P", str(saving.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[1]), signal.SIGKILL)
    assert saving.wait(timeout=30) == 128 + signal.SIGKILL
    assert saved(tmp_path) == {"0.saved"}  # it was told, and waited for


def test_slurm_starts_the_command_everywhere(start):
    code, lines = start("slurm.sbatch", "--config=a.py", SLURM_CPUS_PER_TASK="32")
    command = "srun --kill-on-bad-exit=1 --cpus-per-task=32 python -m empax.main --config=a.py"
    assert (code, lines) == (0, [f"  1  {command}"])


def test_the_example_for_tpus_is_laid_out_for_a_slice():
    (argument,) = re.findall(r"configs/reg_t5\.py:(\S+)", (FOLDER / "tpu_pod.sh").read_text())
    assert reg_t5.get_config(argument).plan.topology in argument
    assert reg_t5.get_config(argument).mesh.fsdp > 1


def test_tpu_workers_get_what_they_need_of_the_folder(start, tmp_path):
    for name in (".git/HEAD", ".venv/bin/python", "runs/old/metrics.jsonl", "empax/runs/kept.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    code, lines = start("tpu_pod.sh", TPU_NAME="t", ZONE="z", PREPARE="1")
    assert (code, len(lines)) == (0, 3)
    packed = (tmp_path / "log.packed").read_text().split()
    assert {"./.git/HEAD", "./empax/runs/kept.py", "./pyproject.toml"} <= set(packed)
    assert not [name for name in packed if name.startswith(("./.venv", "./runs"))]


def test_tpu_workers_get_the_quoted_command(start):
    code, lines = start("tpu_pod.sh", "--config=a.py", "--config.x=(1, 2)", TPU_NAME="t", ZONE="z", PREPARE="1")
    assert code == 0
    assert len(lines) == 4
    (command,) = [line for line in lines if "empax.main" in line]
    assert "--worker=all" in command
    assert r"EMPAX_DISTRIBUTED=1 .venv/bin/python -m empax.main --config=a.py --config.x=\(1\,\ 2\)" in command
    assert start("tpu_pod.sh", "--config=a.py")[0] != 0


def test_tpu_workers_say_what_is_missing_without_a_command(start):
    code, lines = start("tpu_pod.sh", TPU_NAME="t", ZONE="z")
    assert code == 0  # that of the stand-in
    assert [line for line in lines if "python -m empax.main" in line]


@pytest.mark.parametrize("name", ["tpu_pod.sh", "skypilot.yaml"])
def test_what_installs_empax_brings_a_python_that_it_takes(name):
    """Images of Cloud TPUs and of SkyPilot have Python 3.10."""
    text = (FOLDER / name).read_text()
    (version,) = re.findall(r"/uv venv .*--python (\S+)", text)
    needed = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["requires-python"]
    assert SpecifierSet(needed).contains(version)
    assert "python -m empax.main" not in text.replace(".venv/bin/python", "")


def test_skypilot_has_the_keys_that_it_knows():
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    known = {"name", "num_nodes", "resources", "workdir", "envs", "file_mounts", "volumes", "setup", "run"}
    assert set(task) <= known
    assert task["num_nodes"] >= 2
    # Metrics are appended to, which a mounted bucket cannot do.
    (workdir,) = task["volumes"]
    assert f"--workdir={workdir}/" in task["run"]
    assert workdir not in task["file_mounts"]
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        assert f"export {name}=" in task["run"]
    assert subprocess.run(["bash", "-n", "-c", task["setup"] + task["run"]]).returncode == 0
