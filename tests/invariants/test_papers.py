"""PAPERS.md names functions and tests: they must be where it says."""

import re
from pathlib import Path

import pytest

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
