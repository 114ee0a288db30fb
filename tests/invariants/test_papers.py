"""PAPERS.md names functions and tests, which must be where it says, and commands, which must be accepted."""

import contextlib
import importlib
import re
from ast import literal_eval
from pathlib import Path

import pytest

from empax.core.files import WorkDir
from empax.pipeline.plan import make_plan, plain
from empax.pipeline.run import find_problems
from tests.plans import changed

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "PAPERS.md").read_text(encoding="utf-8")
FUNCTIONS = sorted(set(re.findall(r"`((?:[a-z_]+\.)+[a-z_]+):([A-Za-z_.]+)`", TEXT)))


def named_tests():
    """(file, test); `::test_x` alone is in the file that was named last."""
    file = ""
    for folder, name, test in re.findall(r"`([a-z_/]+/)?(test_[a-z_]+\.py)?::(test_\w+)`", TEXT):
        file = folder + name if folder else file
        yield file, test


TESTS = sorted(set(named_tests()))


def test_there_is_something_to_check():
    assert len(FUNCTIONS) > 50
    assert len(TESTS) > 50


@pytest.mark.parametrize(("module", "name"), FUNCTIONS, ids=lambda part: part)
def test_functions_are_where_it_says(module, name):
    path = ROOT / "empax" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    for part in name.split("."):
        assert re.search(rf"(def|class) {part}\b|^{part}\b", source, re.MULTILINE), part


@pytest.mark.parametrize(("file", "name"), TESTS, ids=lambda part: part)
def test_tests_are_where_it_says(file, name):
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("flags", re.findall(r"`(--config\.[^`]+)`", TEXT))
def test_flags_are_accepted(flags, tmp_path):
    changes = dict(re.findall(r"--config\.([\w.]+)=(\S+)", flags))
    for name, value in changes.items():
        with contextlib.suppress(ValueError):  # a word
            changes[name] = literal_eval(value)
    recipe = importlib.import_module(f"configs.{next(iter(changes)).partition('.')[0]}")
    whole = plain(recipe.get_config())

    def problems(config):  # without the corpora
        return [str(one) for one in find_problems(make_plan(config), WorkDir(tmp_path / "run"), planned=True)]

    assert problems(changed(whole, changes)) == problems(whole)
