"""Faults that tests once did not notice are noticed."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.mutation import mutate


@pytest.mark.parametrize("fault", mutate.planted_faults(), ids=lambda fault: f"{fault.module.stem}: {fault.why}")
def test_every_fault_can_be_planted(fault):
    """Its line still stands once in its module, and the module with the fault is a program whose tests are there."""
    assert ast.dump(ast.parse(fault.apply())) != ast.dump(ast.parse(fault.source()))
    assert mutate.tests_of(fault.module)


def test_every_line_whose_change_is_harmless_is_there():
    for row in map(json.loads, mutate.HARMLESS.read_text(encoding="utf-8").splitlines()):
        lines = (mutate.ROOT / row["module"]).read_text(encoding="utf-8").splitlines()
        assert row["line"] in map(str.strip, lines), row


@pytest.mark.slow
def test_no_planted_fault_survives_the_tests_of_its_module(tmp_path):
    kept = shutil.ignore_patterns(".git", ".venv", "runs", "results", "__pycache__", ".jax_cache")
    tree = shutil.copytree(mutate.ROOT, tmp_path / "tree", ignore=kept)
    command = [sys.executable, str(tree / "tests" / "mutation" / "mutate.py"), "--planted", "--limit_seconds=900"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    found = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
