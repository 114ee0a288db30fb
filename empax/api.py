"""Scores, comparisons and runs from Python: the same as the command lines, with values instead of flags and files."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from ml_collections import ConfigDict

from empax.core.cache import enable_compilation_cache
from empax.core.config import ConfigError, UserError
from empax.core.determinism import make_deterministic
from empax.core.files import DataError
from empax.core.machine import check_gpu
from empax.core.paths import expand, given_folder
from empax.core.recipe import load_recipe, override, sized_for_this_machine
from empax.core.settings import RunOptions
from empax.core.types import Prediction
from empax.evaluation.comparing import compare_systems
from empax.evaluation.rows import read_all, to_prediction
from empax.evaluation.scoring import METRICS, VARIANTS, Scores, ScoringSettings
from empax.evaluation.scoring import score as score_predictions
from empax.pipeline.plan import plain
from empax.pipeline.run import run as run_recipe

Rows: TypeAlias = Path | str | Iterable[Prediction | Mapping[str, Any]]
"""A file of predictions, or its rows: `Prediction`s, mappings with `context`, `response`, `reference`, or a pandas
table with these columns."""


def score(rows: Rows, *, own: Sequence[str] = (), settings: ScoringSettings | None = None) -> Scores:
    """Computes every metric whose inputs the rows have, with 95% intervals; see `evaluation.scoring.score`.

    Args:
      rows: predictions.
      own: your own metrics, "module:name" ("__main__:name" in a notebook), in addition to those in `settings`.
      settings: see `evaluation.scoring.ScoringSettings`.

    Raises:
      DataError: there are no rows, or a row is not a prediction.
      ConfigError: one of your own metrics does not exist or fails.
    """
    _check_names(own, "own")
    settings = settings or ScoringSettings()
    settings = dataclasses.replace(settings, own=(*settings.own, *own))
    return score_predictions(_predictions(rows), settings=settings)


def compare(
    systems: Mapping[str, Rows], *, metrics: Sequence[str] = METRICS, settings: ScoringSettings | None = None
) -> dict[str, Any]:
    """Tests every pair of systems against each other on the rows that both have.

    Args:
      systems: rows by system name.
      metrics: metrics to compare; "module:name" is your own metric.
      settings: see `evaluation.scoring.ScoringSettings`.

    Returns:
      The result of `evaluation.comparing.compare_systems`: each system's values, and under "pairs" differences with
      intervals and p-values, corrected for multiple comparisons (Holm).

    Raises:
      DataError: there are fewer than two systems, or their rows do not match.
      ConfigError: a metric does not exist or does not support comparison.
    """
    _check_names(metrics, "metrics")
    if not isinstance(systems, Mapping):
        raise ConfigError(f"systems is a {type(systems).__name__}; it must map the name of each system to its rows.")
    if unknown := [name for name in metrics if name not in (*METRICS, *VARIANTS) and ":" not in name]:
        raise ConfigError(
            f"metrics: {unknown[0]!r} is not one of {', '.join(METRICS)}, a variant in docs/metrics.md, or module:name."
        )
    read = {name: _predictions(rows) for name, rows in systems.items()}
    if len(read) < 2:
        raise DataError(f"{len(read)} systems; give at least two to compare.")
    return compare_systems(read, settings=settings, names=metrics)


def run(
    recipe: str | Any,
    workdir: Path | str,
    *,
    settings: Mapping[str, Any] | None = None,
    reuse: Path | str | None = None,
    redo: Sequence[str] = (),
) -> Path:
    """Runs a recipe, as `python -m empax.main` does. After an interruption, the same call resumes the run.

    Args:
      recipe: FILE.py or FILE.py:ARGUMENT, or a ConfigDict (or a mapping like one).
      workdir: folder of the run.
      settings: changed settings by path: `{"generator.steps": 100}`.
      reuse: a run whose finished stages are reused where they match.
      redo: stages to redo, with all later ones; leave it out to resume.

    Returns:
      The work directory, for `Session.load`.

    Raises:
      ConfigError: the recipe or a setting is wrong, or JAX does not use the GPU that the recipe was sized for.
    """
    _check_names(redo, "redo")
    if not isinstance(settings, Mapping | None) or not all(isinstance(path, str) for path in settings or {}):
        raise ConfigError(f"settings = {settings!r} must map paths, such as 'generator.steps', to values.")
    changes = {path: str(value) for path, value in (settings or {}).items()}
    workdir, reuse = given_folder(workdir, "workdir"), None if reuse is None else expand(reuse)
    command, given = "", recipe
    try:
        if isinstance(recipe, str):
            recipe = sized_for_this_machine(recipe)
            flags = {"config": recipe, "workdir": workdir, **({} if reuse is None else {"reuse": reuse})}
            flags |= {f"config.{path}": value for path, value in changes.items()}
            command = f"python -m empax.main {shlex.join(f'--{name}={value}' for name, value in flags.items())}"
        config = load_recipe(recipe) if isinstance(recipe, str) else _copied(recipe)
        override(config, changes)
        values = plain(config)
        if isinstance(recipe, str) and recipe != given:
            if RunOptions.of(values).deterministic:
                make_deterministic()  # before the check, which starts JAX's backend
            check_gpu(recipe)
        enable_compilation_cache()
        run_recipe(values, workdir, reuse=reuse, redo=redo, command=command)
    except UserError as error:
        error.args = (_in_python(str(error)),)
        raise
    return workdir


def _check_names(names: object, name: str) -> None:
    if isinstance(names, str):
        raise ConfigError(f"{name} is one text ({names!r}); it must be a list of names.")


def _copied(recipe: object) -> ConfigDict:
    if isinstance(recipe, ConfigDict):
        return recipe.copy_and_resolve_references()
    if isinstance(recipe, Mapping):
        return ConfigDict(dict(recipe))
    raise ConfigError(f"recipe = {recipe!r} must be a text or a ConfigDict.")


def _in_python(message: str) -> str:
    """Replaces command-line flags in a message with the arguments of `run`."""
    message = re.sub(r"--redo=([\w-]+)", r'redo=["\1"]', message)
    message = message.replace("--config=", "recipe ")
    message = re.sub(r"--config\.([\w.]+)=(\S+)", r'settings={"\1": "\2"}', message)
    message = re.sub(r"--config\.([\w.]+)", r'settings["\1"]', message)
    return re.sub(r"--(workdir|reuse|redo)\b", r"\1", message)


def _predictions(rows: Rows) -> list[Prediction]:
    if isinstance(rows, str | Path):
        return read_all(expand(rows))
    table: Any = rows
    if hasattr(rows, "columns"):  # a pandas table, where NaN marks a missing value
        rows = [
            {key: value for key, value in row.items() if not (isinstance(value, float) and math.isnan(value))}
            for row in table.to_dict("records")
        ]
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"{type(rows).__name__} is neither a file of predictions nor a list of them.")
    found = []
    for number, row in enumerate(rows):
        if not isinstance(row, Prediction | Mapping):
            raise DataError(f"row {number} is a {type(row).__name__}; it must be a mapping or a Prediction.")
        try:
            found.append(row if isinstance(row, Prediction) else to_prediction(_listed(row)))
        except DataError as error:
            raise DataError(f"row {number}: {error}") from error
    return found


def _listed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row as JSON would have it: turns in a list, complete texts, Python's numbers."""
    row = {name: _plain(value) for name, value in given.items()}
    if isinstance(row.get("context"), Iterable) and not isinstance(row["context"], str | bytes | Mapping | set):
        row["context"] = list(row["context"])
    turns = row["context"] if isinstance(row.get("context"), list) else []
    texts = ("response", "reference", "emotion", "emotion_prediction")
    for name, text in [*(("context", turn) for turn in turns), *((name, row.get(name)) for name in texts)]:
        if isinstance(text, str) and not text.isascii() and text.encode(errors="ignore").decode() != text:
            raise DataError(f"{name!r} has half of a surrogate pair, which is not a character: {text[:40]!a}")
    return row


def _plain(value: Any) -> Any:
    """Returns NumPy's numbers and texts as Python's, those within mappings and lists too."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
