"""Identifies the source code of a result: hashes of the empax modules that a stage imports, and the commit."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]

# `ast` would take seconds for all modules. A sentence that looks like an import does no harm.
_IMPORT = re.compile(r"\bfrom\s+(empax[\w.]*)\s+import\s+(\([^)]*\)|[^\n]*)|\bimport\s+(empax[\w.]*)")
_WORD = re.compile(r"\w+")


def code_of(roots: Iterable[str]) -> dict[str, str]:
    """Hashes the source of all modules that `roots` import, directly or indirectly, including inside functions.

    Roots are names, "empax.a.b". All modules of a package of empax count, but only one of another package.
    """
    found: dict[str, str] = {}
    waiting = [module for root in roots for module in _modules_in(root)]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module], imports = _source(module)
            waiting += imports
    return dict(sorted(found.items()))


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Lists modules whose source differs, or that only one of the two has."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def has_source(module: str) -> bool:
    """Whether a module can be imported from a file; false for a module defined in a notebook."""
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).is_file()


def commit(root: Path = _PACKAGE.parent) -> str | None:
    """Returns the commit of empax's source tree, with "-dirty" if it has changes; None outside a source tree.

    A repository that only contains an installed empax, such as a project with a virtual environment, does not count.
    """
    try:
        name = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        if name == "empax" and Path(_git(root, "rev-parse", "--show-toplevel")).samefile(root):
            return _git(root, "describe", "--always", "--dirty")
    except (OSError, subprocess.CalledProcessError, tomllib.TOMLDecodeError, KeyError):
        pass
    return None


def _git(root: Path, *words: str) -> str:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # set in a git hook
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=outside).stdout.strip()


def _modules_in(root: str) -> list[str]:
    path = _path(root)
    if path is None or path.name != "__init__.py" or _PACKAGE not in path.parents:
        return [root]
    return [_name(file) for file in path.parent.rglob("*.py")]


@functools.cache
def _source(module: str) -> tuple[str, tuple[str, ...]]:
    """Returns the hash of a module's source, and the empax modules that it imports."""
    path = _path(module) or _elsewhere(module)
    source = path.read_bytes()
    names: set[str] = set()
    for match in _IMPORT.finditer(source.decode("utf-8")):
        package, imported, plain = match.groups()
        names |= {plain} if plain else {package, *(f"{package}.{name}" for name in _WORD.findall(imported))}
    return hashlib.sha256(source).hexdigest()[:12], tuple(sorted(name for name in names if _path(name)))


def _path(module: str) -> Path | None:
    """Returns the file of a module of empax; None for any other module."""
    first, *parts = module.split(".")
    if first != _PACKAGE.name:
        return None
    folder = _PACKAGE.joinpath(*parts)
    candidates = (folder.with_suffix(".py"), folder / "__init__.py") if parts else (folder / "__init__.py",)
    return next((path for path in candidates if path.is_file()), None)


def _elsewhere(module: str) -> Path:
    """Returns the file of another package's module, which must be importable."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin)


def _name(path: Path) -> str:
    parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
