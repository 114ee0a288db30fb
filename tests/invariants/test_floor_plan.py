"""Where files stand: what one system alone uses stands in its folder."""

import graphlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "empax"
SHARED = sorted(path for floor in ("models", "losses", "data") for path in (ROOT / floor).glob("[!_]*.py"))
SHARED.remove(ROOT / "data" / "chat_rendering.py")  # a program, which data/chat.py starts
SOURCES = {path: path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}


def imported(source: str) -> set[str]:
    """The modules that a source names in imports, each name of a package beside the package."""
    found = set()
    for package, names in re.findall(r"from (empax[\w.]*) import (\([^)]*\)|[^\n]*)", source):
        found |= {package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))}
    return found


@pytest.mark.parametrize("path", SHARED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shared_file_is_no_systems_own(path):
    module = f"empax.{path.parent.name}.{path.stem}"
    users = {other for other, source in SOURCES.items() if other != path and module in imported(source)}
    folders = {other.relative_to(ROOT).parts[:2] for other in users}
    assert users, f"nobody uses {module}; delete it"
    assert len(folders) > 1 or next(iter(folders))[0] != "systems", f"only {folders} uses {module}; move it there"


def test_no_module_imports_itself_by_way_of_others():
    names = {
        ".".join(path.with_suffix("").relative_to(ROOT.parent).parts).removesuffix(".__init__") for path in SOURCES
    }
    graph = {}
    for path, source in SOURCES.items():
        name = ".".join(path.with_suffix("").relative_to(ROOT.parent).parts).removesuffix(".__init__")
        found = imported(source) & names
        graph[name] = {one for one in found if not any(other.startswith(f"{one}.") for other in found)} - {name}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_contracts_on_packages_from_elsewhere_hold_for_every_module():
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {one["name"]: one for one in settings["tool"]["importlinter"]["contracts"]}
    for name in ("No PyTorch, no TensorFlow", "Transformers for tokenizers alone"):
        assert contracts[name]["source_modules"] == ["empax"]
