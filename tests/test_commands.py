"""One console command, and a wheel with the recipes inside."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

import empax as empax_package
from empax.core.config import ConfigError
from empax.core.recipe import load_recipe, recipes

ROOT = Path(__file__).resolve().parent.parent


def test_the_commands_are_listed_and_passed_on(command):
    listed = command("-m", "empax")
    assert listed.returncode == 0
    for name in ("run", "plan", "evaluate", "chat", "export", "judges", "rate"):
        assert f"\n  {name} " in listed.stdout
    wrong = command("-m", "empax", "fly")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: 'fly' is not a command of empax.")
    planned = command("-m", "empax", "plan", "reg_transformer:tiny", "--config.seed=x")
    assert planned.returncode == 2
    assert "config.seed = 'x' does not fit" in planned.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "{long}.jsonl"),
        ("judges", "--data={long}"),
        ("export", "--workdir={long}", "--output={tmp}/out"),
        ("chat", "--workdir={long}"),
        ("main", "--config={long}.py"),
        ("main", "--config=configs/quickstart.py", "--workdir={tmp}/{long}"),
    ],
    ids=" ".join,
)
def test_what_the_system_refuses_is_one_line_with_file_and_reason(words, command, tmp_path):
    name, *rest = (word.format(long="x" * 300, tmp=tmp_path) for word in words)
    ran = command("-m", f"empax.{name}", *rest)
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: ")
    assert "xxx" in line
    assert "File name too long" in line


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("empax.parts.knowledge.atomic", ("{tmp}", "{tmp}/pairs"), "holds no v4_atomic_trn.csv"),
        ("empax.parts.knowledge.quality", ("--data={tmp}", "--model=comet"), "holds no v4_atomic_trn.csv"),
        ("tools.convert_facts", ("nec", "facts.pkl", "{tmp}/facts", "--data={tmp}"), "{tmp}"),
        ("tools.emotion_head", ("{tmp}", "{tmp}/head"), "{tmp}"),
        ("tools.publish_judge", ("{tmp}", "{tmp}/judge"), "{tmp}"),
        ("tools.neighbours", ("{tmp}", "copy"), "{tmp}"),
    ],
)
def test_a_wrong_folder_is_one_line_for_scripts_too(module, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, *(word.format(tmp=tmp_path) for word in words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said.format(tmp=tmp_path) in line


def test_a_recipe_is_a_file_or_a_name_and_may_import_its_neighbours(tmp_path):
    assert {"reg_transformer", "reg_t5", "quickstart"} <= set(recipes())
    assert load_recipe("reg_transformer:tiny") == load_recipe(f"{ROOT}/configs/reg_transformer.py:tiny")
    (tmp_path / "shared.py").write_text("STEPS = 7\n")
    (tmp_path / "mine.py").write_text("from . import shared\n\ndef get_config():\n    return {'steps': shared.STEPS}\n")
    assert load_recipe(str(tmp_path / "mine.py")) == {"steps": 7}
    with pytest.raises(ConfigError, match="'reg_t5' alone names the one that comes with empax"):
        load_recipe("elsewhere/reg_t5.py:tiny")
    with pytest.raises(ConfigError, match="Did you mean 'quickstart'"):
        load_recipe("quickstrat")


def test_the_wheel_has_every_package():
    here = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "empax").rglob("*.py")}
    assert set(find_packages(str(ROOT), include=["empax", "empax.*"])) == here  # what setup.py lists


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with nothing of the repository but what its wheel installs."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    kept = ("empax", "configs", "weights", "pyproject.toml", "setup.py", "README.md", "LICENSE")
    for name in kept:
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, (source.mkdir(exist_ok=True) or source) / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "--wheel-dir", str(folder), str(source)], check=True, timeout=600)
    (wheel,) = folder.glob("empax-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True, timeout=600
    )
    return folder


def python(installed, *words):
    """Python in a folder where the wheel is installed and nothing of the repository lies."""
    environment, options = {**os.environ, "PYTHONPATH": str(installed / "site")}, {"text": True, "timeout": 900}
    return subprocess.run([sys.executable, *words], cwd=installed, env=environment, capture_output=True, **options)


def empax(installed, *words):
    """The console script of the installed wheel."""
    return python(installed, str(installed / "site" / "bin" / "empax"), *words)


def test_an_installed_wheel_knows_its_recipes(installed):
    assert {path.name for path in (installed / "site").iterdir() if path.suffix != ".dist-info"} == {"bin", "empax"}
    weights = ROOT / "weights"
    files = {path.relative_to(weights) for path in weights.rglob("*") if path.is_file()}
    inside = installed / "site" / "empax" / "weights"
    assert {path.relative_to(inside) for path in inside.rglob("*") if path.is_file()} == files
    found = empax(installed, "run", "reg_transformr:tiny")
    assert found.returncode == 2
    assert "Did you mean 'reg_transformer'" in found.stderr
    where = python(installed, "-c", "import empax, empax.recipes.reg_transformer; print(empax.__file__)")
    assert where.stdout.startswith(str(installed / "site")), where.stderr


@pytest.mark.slow
def test_an_installed_wheel_runs_a_recipe(installed, tmp_path):
    found = empax(installed, "run", "reg_transformer:tiny", f"--workdir={tmp_path / 'run'}")
    assert found.returncode == 0, found.stderr[-2000:]
    assert (tmp_path / "run" / "report.html").is_file()


def flags_of(text):
    return set(re.findall(r"^  --(?:\[no\])?(\w+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "module", "some"),
    [
        ("run", "main", {"config", "workdir", "reuse", "redo", "mode"}),
        ("plan", "main", {"config", "workdir"}),
        ("sweep", "sweep", {"config", "grid", "seeds", "workdir", "mode"}),
        ("evaluate", "evaluate", {"predictions", "output", "compare", "metrics", "bootstrap_samples"}),
        ("chat", "chat", {"workdir", "exemplars", "safety"}),
        ("export", "export", {"workdir", "output", "stage", "lora", "push"}),
        ("judges", "judges", {"data", "workdir", "output"}),
    ],
)
def test_help_of_a_command_lists_all_its_flags(command, name, module, some):
    found, alone = command("-m", "empax", name, "--help"), command("-m", f"empax.{module}", "--help")
    assert (found.returncode, alone.returncode) == (0, 0)
    assert some <= flags_of(found.stdout)
    assert found.stdout == alone.stdout
    assert "python -m empax" in found.stdout


def test_help_and_the_version_are_said_at_any_place(command):
    said = command("-m", "empax", "--version")
    assert (said.returncode, said.stdout) == (0, f"empax {empax_package.__version__}\n")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"].get("version", empax_package.__version__) == empax_package.__version__
    behind = command("-m", "empax", "run", "reg_transformer:tiny", "--config.seed=1", "-h")
    assert "workdir" in flags_of(behind.stdout)


def test_a_recipe_that_needs_an_argument_says_so(tmp_path):
    with pytest.raises(ConfigError, match="finetune needs a model; write finetune:FOLDER"):
        load_recipe("finetune")
    (tmp_path / "mine.py").write_text("def get_config(form):\n    return {'form': form}\n")
    with pytest.raises(ConfigError, match=r"needs an argument; write .*mine\.py:ARGUMENT"):
        load_recipe(f"{tmp_path}/mine.py")
    assert load_recipe(f"{tmp_path}/mine.py:small") == {"form": "small"}
