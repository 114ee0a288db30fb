"""Recipes: a config file with an optional argument, and `--config.a.b=VALUE` on the command line."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.machinery
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from empax.core.config import ConfigError
from empax.core.machine import has_gpu
from empax.core.paths import expand


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separates `--config.a.b=VALUE` and `--config.a.b VALUE` from a command line.

    Returns:
      The remaining words, and the values by path ("a.b").

    Raises:
      ConfigError: a setting without a value.
    """
    rest, overrides = [], {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.lstrip("-").startswith("config.") or not name.startswith("-"):
            rest.append(word)
            continue
        if not equals:
            following = next(words, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"{name} has no value; write {name}=VALUE.")
            value = following
        overrides[name.lstrip("-").removeprefix("config.")] = value
    return rest, overrides


def load_recipe(spec: str) -> Any:
    """Calls `get_config()` of a recipe, or `get_config(ARG)` for "RECIPE:ARG".

    A recipe is a file, or the name of one that comes with empax ("reg_transformer").

    Raises:
      ConfigError: the recipe or its `get_config` does not exist, or it rejects the argument.
    """
    name, _, argument = spec.partition(":")
    path = _find(name, spec)
    get_config = getattr(_module(path), "get_config", None)
    if get_config is None:
        raise ConfigError(f"--config={spec}: {path} defines no get_config().")
    parameters = inspect.signature(get_config).parameters.values()
    if argument and not parameters:
        raise ConfigError(f"--config={spec}: {path} takes no argument; leave out ':{argument}'.")
    if not argument and any(parameter.default is parameter.empty for parameter in parameters):
        raise ConfigError(f"--config={spec}: {path} needs an argument; write {name}:ARGUMENT.")
    try:
        return get_config(argument) if argument else get_config()
    except ValueError as error:
        raise ConfigError(f"--config={spec}: {error}") from error


def sized_for_this_machine(spec: str) -> str:
    """Adds "machine=gpu" to `spec` if there is a GPU, the recipe lists it in MACHINES, and `spec` names no machine.

    A trial ("tiny") fits any machine. Raises ConfigError like `load_recipe`.
    """
    if not has_gpu():
        return spec
    name, _, argument = spec.partition(":")
    words = [word.strip() for word in argument.split(",") if word.strip()]
    if "tiny" in words or any(word.startswith("machine=") for word in words):
        return spec
    known = getattr(_module(_find(name, spec)), "MACHINES", ())
    return f"{name}:{','.join([*words, 'machine=gpu'])}" if "gpu" in known else spec


def run_name(spec: str) -> str:
    """Returns a folder name for "RECIPE:ARG": "reg_t5-base-tiny" for "configs/reg_t5.py:base,tiny"."""
    name, _, argument = spec.partition(":")
    return re.sub(r"[^\w.]+", "-", f"{Path(name).stem} {argument}").strip("-")


def recipes() -> dict[str, Path]:
    """Lists the recipes that come with empax, by name: in an installed package, or in a clone's folder `configs`."""
    package = Path(__file__).resolve().parent.parent
    folder = package / "recipes"
    folder = folder if folder.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem not in _SHARED}


_SHARED = ("__init__", "common", "layouts")
"""Modules that recipes import."""


def _find(name: str, spec: str) -> Path:
    path, known = expand(name), recipes()
    if path.is_file() and path.suffix != ".py":
        raise ConfigError(f"--config={spec}: {path} is not a recipe: its name must end in .py.")
    if path.is_file():
        return path
    if name in known:
        return known[name]
    there = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() and path.suffix == ".py" else []
    hint = _nearest(str(path), there or known)
    if path.stem in known:
        hint = f"{path.stem!r} alone names the one that comes with empax."
    raise ConfigError(f"--config={spec}: there is no file {path}. {hint}")


def _module(path: Path) -> ModuleType:
    """Imports the file as a module of a package for its folder, so that a recipe may import its neighbours."""
    folder = path.resolve().parent
    package = ModuleType(f"empax_recipes_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}")
    package.__path__ = [str(folder)]
    sys.modules.setdefault(package.__name__, package)
    loader = importlib.machinery.SourceFileLoader(f"{package.__name__}.{path.stem}", str(path))
    module = ModuleType(loader.name)
    module.__file__, module.__package__ = str(path), package.__name__
    loader.exec_module(module)
    return module


def override(config: Any, values: Mapping[str, str]) -> None:
    """Sets `values` (by path) in a ConfigDict; settings that the recipe does not list, or lists as None, may be added.

    Whether a setting exists is checked later, against its dataclass.

    Raises:
      ConfigError: the path names no section, or a value differs in type from the recipe's.
    """
    for path, text in values.items():
        *sections, name = path.split(".")
        node, where = config, "config"
        for section in sections:
            if section not in node or node[section] is None:  # None = the part is left out
                if node is config:
                    raise ConfigError(
                        f"{where}.{section} is not a section of this recipe. {_nearest(section, node.keys())}"
                    )
                with node.unlocked():
                    node[section] = type(config)()
            node, where = node[section], f"{where}.{section}"
            if not hasattr(node, "unlocked"):
                raise ConfigError(f"{where} = {node!r} is a value, not a section, so {path} cannot be set.")
        if node is config and name not in node:
            raise ConfigError(f"config.{name} is not a setting of this recipe. {_nearest(name, node.keys())}")
        old = node[name] if name in node else None  # noqa: SIM401  # a ConfigDict's get has another meaning
        if old is not None and hasattr(old, "unlocked"):
            raise ConfigError(f"{where}.{name} is a section; set one of its keys: {', '.join(sorted(old.keys()))}.")
        with node.unlocked():
            try:
                node[name] = _parse(text, old)
            except (TypeError, ValueError) as error:
                kind = type(old).__name__
                raise ConfigError(
                    f"{where}.{name} = {text!r} does not fit: it must be {kind}, like {old!r}."
                ) from error


def _parse(text: str, old: Any) -> Any:
    if isinstance(old, str):
        return None if text == "None" else text  # "none" is a value of some settings
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return [word.strip() for word in text.split(",") if word.strip()] if isinstance(old, (tuple, list)) else text
    if isinstance(old, (tuple, list)) and not isinstance(value, (tuple, list)):
        return [value]
    return float(value) if isinstance(old, float) and type(value) is int else value


def _nearest(name: str, allowed: Any) -> str:
    allowed = sorted(allowed)
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}There are: {', '.join(allowed) or 'none'}."
