"""Where files stand: what one system alone uses stands in its folder. What they import stands in pyproject.toml."""

import ast
import graphlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "empax"
SHARED = sorted(path for floor in ("models", "losses", "data") for path in (ROOT / floor).glob("[!_]*.py"))
SHARED.remove(ROOT / "data" / "chat_rendering.py")  # a program, which data/chat.py starts
SOURCES = {path: path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
SETTINGS = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))


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
    contracts = {one["name"]: one for one in SETTINGS["tool"]["importlinter"]["contracts"]}
    for name in ("No PyTorch, no TensorFlow", "Transformers for tokenizers alone"):
        assert contracts[name]["source_modules"] == ["empax"]


def packages(extras):
    """The packages that empax asks for with these extras."""
    found = [*SETTINGS["project"]["dependencies"]]
    found += [one for name in extras for one in SETTINGS["project"]["optional-dependencies"][name]]
    return {plain_name(re.split(r"[^\w.-]", one)[0]) for one in found}


def plain_name(package):
    return re.sub(r"[-_.]+", "-", package).lower()


FOR_DEVELOPERS = {"benchmarks", "docs", "mutation", "test"}


@pytest.mark.parametrize("folder", ["empax", "configs", "tools", "benchmarks", "tests"])
def test_every_package_that_is_imported_is_declared(folder):
    extras = set(SETTINGS["project"]["optional-dependencies"])
    declared = packages(extras - FOR_DEVELOPERS if folder in ("empax", "configs") else extras)
    modules = set()
    for path in (ROOT.parent / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            modules |= {name.partition(".")[0] for name in names}
    ours = {"empax", "configs", "tools", "benchmarks", "tests"}
    providers = importlib.metadata.packages_distributions()
    for module in modules - ours - sys.stdlib_module_names:
        named = {plain_name(one) for one in providers.get(module, [module])}  # by its own name if it is not installed
        assert named & declared, f"{folder} imports {module}, which pyproject.toml leaves to other packages"
