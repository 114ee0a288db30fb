"""The files that start a run on many machines, as far as they can be checked without any."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sh", ".sbatch"))
FAKE = (
    '#!/usr/bin/env bash\necho "$JAX_PROCESS_ID $JAX_NUM_PROCESSES $EMPAX_DISTRIBUTED $(basename "$0") $*" >> "$LOG"\n'
)


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
            ["bash", str(FOLDER / name), *arguments], env={**known, **environment}, capture_output=True, text=True
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
    assert lines == [f"{i} 3  python -m empax.main --config=a.py --config.x=1 2" for i in range(3)]
    assert start("local.sh", "2", fails="python")[0] == 3
    assert start("local.sh")[0] != 0


def test_slurm_starts_the_command_everywhere(start):
    code, lines = start("slurm.sbatch", "--config=a.py")
    assert (code, lines) == (0, ["  1 srun --kill-on-bad-exit=1 python -m empax.main --config=a.py"])


def test_tpu_workers_get_the_quoted_command(start):
    code, lines = start("tpu_pod.sh", "--config=a.py", "--config.x=(1, 2)", TPU_NAME="t", ZONE="z", PREPARE="1")
    assert code == 0
    assert len(lines) == 3
    (command,) = [line for line in lines if "empax.main" in line]
    assert "--worker=all" in command
    assert r"EMPAX_DISTRIBUTED=1 python -m empax.main --config=a.py --config.x=\(1\,\ 2\)" in command
    assert start("tpu_pod.sh", "--config=a.py")[0] != 0


def test_skypilot_has_the_keys_that_it_knows():
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert set(task) <= {"name", "num_nodes", "resources", "workdir", "envs", "file_mounts", "setup", "run"}
    assert task["num_nodes"] >= 2
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        assert f"export {name}=" in task["run"]
    assert subprocess.run(["bash", "-n", "-c", task["setup"] + task["run"]]).returncode == 0
