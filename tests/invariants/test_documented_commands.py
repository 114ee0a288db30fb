"""What documents and docstrings tell to type is accepted: recipes and their forms, settings, flags."""

import contextlib
import dataclasses
import functools
import re
import shlex
from pathlib import Path

import pytest

from empax.core.config import ConfigError
from empax.core.recipe import load_recipe, override, recipes, split_overrides
from empax.pipeline.plan import make_plan, plain
from empax.rating.study import StudySettings

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = (
    *("*.md", "docs/**/*.md", "results/**/*.md", "weights/*/*.md", "launch/*", "notebooks/*.md", "notebooks/*.py"),
    *("configs/*.py", "empax/*.py", "empax/parts/knowledge/*.py", "tools/*.py", "benchmarks/*.py"),
)
TEXTS = {
    str(path.relative_to(ROOT)): re.sub(r" *\\\n *", " ", path.read_text(encoding="utf-8"))
    for pattern in PATTERNS
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md" and "generated" not in path.parts  # the first tells of earlier commands, too
}
_MODULE = re.compile(r"python -m ((?:empax|tools|benchmarks)(?:\.\w+)+) ([^`\n]*)")
_COMMAND = re.compile(r"\bempax ([a-z]+) ([^`\n]*)")
_VALUE = r"""(?:'[^'\n]*'|"[^"\n]*"|[^\s`'"]+)"""
_SETTINGS = re.compile(rf"(?:--config\.[a-z][\w.]*={_VALUE} ?)+")
_SPEC = re.compile(rf"(?<![\w/])(?:configs/)?({'|'.join(recipes())})(?:\.py)?:([\w.,=:-]*\w)")
_FLAG = re.compile(r'(?:DEFINE_\w+\(\s*"|"--)([\w-]+)"')
_FORMS = ("classic:case", "classic:empdg_critics", "nec:scratch", "reg_transformer:reasons", "emprl_t5:dpo")
"""Recipes with settings that no default has."""


def commands(text):
    """The module that a command runs, and the rest of its line."""
    found = _MODULE.findall(text)
    for name, line in _COMMAND.findall(text):
        module = {"run": "main", "plan": "main"}.get(name, name)
        begins_with_recipe = module in ("main", "sweep") and re.match(r"\w+[: ]", line)
        found.append((f"empax.{module}", f"--config={line}" if begins_with_recipe else line))
    return [(module, line) for module, line in found if source_of(module).is_file()]


def source_of(module):
    return ROOT / f"{module.replace('.', '/')}.py"


@functools.cache
def accept(spec, settings):
    """Raises ConfigError unless the recipe takes the settings, as on a command line."""
    name, colon, argument = spec.partition(":")
    argument = re.sub("FOLDER|MODEL", "smollm2" if name.endswith("_llm") else "flan-t5-small-titles", argument)
    config = load_recipe(name + colon + argument.replace("NAME", "moel"))
    override(config, split_overrides(shlex.split(settings))[1])
    make_plan(plain(config))


@pytest.mark.parametrize("file", TEXTS)
def test_recipes_take_the_forms_and_the_settings_of_commands(file):
    for name, argument in _SPEC.findall(TEXTS[file]):
        if f"def {argument}(" not in recipes()[name].read_text():  # `configs/nec.py:generator` is a function
            accept(f"{name}:{argument}", "")
    for _, line in commands(TEXTS[file]):
        for path, argument in re.findall(r"--config=(?!FILE|RECIPE)([\w./]+)((?::[\w.,=:-]+)?)(?![^\s\"'])", line):
            assert path in recipes() or (ROOT / path).is_file(), f"{file}: there is no recipe {path}"
            grid = " ".join(f"--config.{one}" for one in re.findall(r"--grid[ =](\w[\w.]*=[^,\s]+)", line))
            accept(f"{Path(path).stem}{argument}", f"{' '.join(_SETTINGS.findall(line))} {grid}")


@pytest.mark.parametrize("file", TEXTS)
def test_a_recipe_takes_the_settings_named_alone(file):
    for settings in _SETTINGS.findall(TEXTS[file]):
        if re.search(r"\.\.\.|VALUE|my_functions:questions|\{output", settings):  # no setting yet, or a user's module
            continue
        settings = re.sub(r"=N\b", "=1", settings.rstrip(" .,:;"))
        for spec in (*recipes(), *_FORMS):
            with contextlib.suppress(ConfigError):
                accept(spec, settings)
                break
        else:
            pytest.fail(f"{file}: no recipe takes {settings}")


@pytest.mark.parametrize("file", TEXTS)
def test_flags_are_those_of_their_commands(file):
    for module, line in commands(TEXTS[file]):
        shared = ("benchmarks.paired", "benchmarks.texts") if module.startswith("benchmarks") else ()
        known = {flag for one in (module, *shared) for flag in _FLAG.findall(source_of(one).read_text())}
        known |= {field.name for field in dataclasses.fields(StudySettings)} if module == "empax.rate" else set()
        for flag in re.findall(r"(?<!\S)\[?--(?!config\.)([\w-]+)", re.sub(r"\s# .*", "", line)):
            assert {flag, flag.removeprefix("no")} & known, f"{file}: {module} has no --{flag}"


def test_there_is_something_to_check():
    assert sum(len(commands(text)) for text in TEXTS.values()) > 200
    assert sum(len(_SPEC.findall(text)) for text in TEXTS.values()) > 150
