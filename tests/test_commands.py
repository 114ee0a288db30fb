"""One console command, and a wheel with the recipes inside."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
    assert wrong.stderr.startswith("error: 'fly' is no command of empax.")
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


def test_a_recipe_is_a_file_or_a_name_and_may_import_its_neighbours(tmp_path):
    assert {"reg_transformer", "reg_t5", "quickstart"} <= set(recipes())
    assert load_recipe("reg_transformer:tiny") == load_recipe(f"{ROOT}/configs/reg_transformer.py:tiny")
    (tmp_path / "shared.py").write_text("STEPS = 7\n")
    (tmp_path / "mine.py").write_text(
        "from . import shared\n\n\ndef get_config():\n    return {'steps': shared.STEPS}\n"
    )
    assert load_recipe(str(tmp_path / "mine.py")) == {"steps": 7}
    with pytest.raises(ConfigError, match="'reg_t5' alone names the one that comes with empax"):
        load_recipe("elsewhere/reg_t5.py:tiny")
    with pytest.raises(ConfigError, match="Did you mean 'quickstart'"):
        load_recipe("quickstrat")


def test_the_wheel_has_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    here = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "empax").rglob("*.py")}
    assert set(settings["packages"]) == here | {"empax.recipes"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with nothing of the repository but what its wheel installs."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    kept = ("empax", "configs", "pyproject.toml", "README.md", "LICENSE")
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


def empax(installed, *words):
    """The console script of the installed wheel, run in another folder."""
    environment = {**os.environ, "PYTHONPATH": str(installed / "site")}
    script = installed / "site" / "bin" / "empax"
    return subprocess.run(
        [sys.executable, str(script), *words],
        cwd=installed,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_an_installed_wheel_knows_its_recipes(installed):
    assert sorted(path.name for path in (installed / "site").iterdir() if path.suffix != ".dist-info") == [
        "bin",
        "empax",
    ]
    found = empax(installed, "run", "reg_transformr:tiny")
    assert found.returncode == 2
    assert "Did you mean 'reg_transformer'" in found.stderr
    program = "import empax, empax.recipes.reg_transformer; print(empax.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed / "site")}
    where = subprocess.run(
        [sys.executable, "-c", program], cwd=installed, env=environment, capture_output=True, text=True, check=True
    )
    assert where.stdout.startswith(str(installed / "site"))


@pytest.mark.slow
def test_an_installed_wheel_runs_a_recipe(installed, tmp_path):
    found = empax(installed, "run", "reg_transformer:tiny", f"--workdir={tmp_path / 'run'}")
    assert found.returncode == 0, found.stderr[-2000:]
    assert (tmp_path / "run" / "report.html").is_file()
