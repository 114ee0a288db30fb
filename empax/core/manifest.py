"""Checksums of a run's files: in `DONE` for the files of a stage, in CHECKSUMS for config.json and run.json.

Readers of a finished stage's file compare it with `DONE` first. A process hashes a file once, as long as its size,
times and inode stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from empax.core.files import DataError, WorkDir, hash_file, hash_json, is_temporary, json_text, read_json, write_json

BY_PRODUCTS = ("BEGUN", "checkpoints", "refresh", "profile", "parts", "sinks")
"""Parts of a stage's folder that are not read after the stage has finished."""

ROOT_FILES = ("predictions.jsonl", "outputs.jsonl.gz", "report.json", "report.md", "report.html")
"""Files that stages write in the work directory itself; any other file there, such as a log, is the user's."""

_VOLATILE = ("index.json", "evaluate.json", "metrics.jsonl")
"""Files of a stage that contain times, so another run of the same stage writes different ones."""

_Signature = tuple[int, int, int, int]
_hashed: dict[Path, tuple[_Signature, str]] = {}
_records: dict[Path, tuple[_Signature, dict[str, Any]]] = {}


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object with its checksum, which covers the values as read back (null for nan)."""
    plain = json.loads(json_text(value))
    write_json(path, {**plain, "checksum": hash_json(plain)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Reads a file of `write_sealed`.

    Raises:
      DataError: the file is damaged.
    """
    found = read_json(path)
    if not isinstance(found, dict) or found.pop("checksum", None) != hash_json(found):
        raise DataError(f"{path} is damaged: its checksum differs.")
    return found


def remedy(stage: str) -> str:
    return f"Run again with --redo={stage}, which redoes this stage and all later ones."


def read_done(stage: Path) -> dict[str, Any]:
    """Reads the `DONE` of the stage in the folder `stage`.

    Raises:
      DataError: the file is damaged, or another version wrote it.
    """
    path = stage / "DONE"
    signature = _signature(path)
    if (known := _records.get(path)) and known[0] == signature:
        return known[1]
    try:
        found = read_sealed(path)
    except DataError as error:
        raise DataError(f"{error} {remedy(stage.name)}") from error
    if "files" not in found:
        raise DataError(f"{path} lists no files: another version of empax wrote it. {remedy(stage.name)}")
    _records[path] = (signature, found)
    return found


def describe(root: Path, paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Returns size and SHA-256 of files, by their path below `root`."""
    return {
        path.relative_to(root).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(paths)
    }


def files_of(files: WorkDir, stage: str) -> list[Path]:
    """Lists all files in the folders of a stage except `DONE`."""
    found = [*files.stage(stage).rglob("*"), *files.tensorboard(stage).rglob("*")]
    return [path for path in found if path.is_file() and path != files.done(stage) and not is_temporary(path)]


def result_of(described: Mapping[str, Mapping[str, Any]], stage: str) -> str:
    """Hashes the files of a stage that are the same in every run of it."""
    lasting = {
        name: entry["sha256"]
        for name, entry in described.items()
        if not is_by_product(name, stage) and name not in {f"{stage}/{volatile}" for volatile in _VOLATILE}
    }
    return hash_json(lasting)


def is_by_product(name: str, stage: str) -> bool:
    """Whether the file `name` (a path in the work directory) is not read after `stage` has finished."""
    parts = Path(name).parts
    return parts[0] == "tensorboard" or (parts[0] == stage and parts[1] in BY_PRODUCTS)


def verify(path: Path, *, stage: Path | None = None) -> None:
    """Compares a file or folder with the `DONE` of the stage that made it; an unfinished stage has none.

    `stage` is the folder of that stage; None = the nearest one around `path`.

    Raises:
      DataError: a file is missing, truncated, changed or of other origin; the message names it and the remedy.
    """
    path = path.absolute()
    around = path.parents[:3] if stage is None else [stage.absolute()]
    found = next((folder for folder in around if (folder / "DONE").is_file()), None)
    if found is None:
        return
    name = path.relative_to(found.parent).as_posix()
    entries = {
        known: entry
        for known, entry in read_done(found)["files"].items()
        if known == name or known.startswith(f"{name}/")
    }
    if path.exists() and not entries:
        raise DataError(f"{path} is not listed in {found / 'DONE'}. {remedy(found.name)}")
    if problems := _problems(found.parent, entries):
        raise DataError(f"{_listed(problems)}. {remedy(found.name)}")


def verify_stage(stage: Path) -> list[str]:
    """Compares all files of a finished stage with its `DONE`.

    Returns:
      Problems with files that are no longer read.

    Raises:
      DataError: see `verify`.
    """
    done = read_done(stage)
    problems = _problems(stage.parent, done["files"])
    if needed := {name: text for name, text in problems.items() if not _is_outdated(name, stage.name, done)}:
        raise DataError(f"{_listed(needed)}. {remedy(stage.name)}")
    return list(problems.values())


def _is_outdated(name: str, stage: str, done: Mapping[str, Any]) -> bool:
    """Whether a file is a by-product, or belongs to parameters that are no longer the best."""
    best = f"{stage}/best/"
    surpassed = "best_step" in done and name.startswith(best) and not name.startswith(f"{best}{done['best_step']}/")
    return surpassed or is_by_product(name, stage)


def write_config(files: WorkDir, config: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Writes config.json and run.json with their checksums."""
    write_json(files.provenance, run)
    write_json(files.config, config)
    sums = {path.name: hash_file(path) for path in (files.provenance, files.config)}
    write_sealed(files.checksums, sums)


def read_config(files: WorkDir) -> dict[str, Any]:
    """Reads the config of a run and compares it with its checksum.

    Raises:
      DataError: the file is damaged.
    """
    advice = "Run its recipe in this work directory again: that compares the settings with the stages, and repairs it."
    try:
        config = read_json(files.config)
        if files.checksums.is_file():
            read_sealed(files.checksums)
    except DataError as error:
        raise DataError(f"{error} {advice}") from error
    lost = not files.checksums.is_file()  # then the settings are in the finished stages
    if not isinstance(config, dict) or not (lost or is_known(files, files.config)):
        raise DataError(f"{files.config} is damaged: it is not what the run wrote. {advice}")
    if lost and not {"system", "run"} <= set(config):
        raise DataError(f"{files.config} is not a run's config: it lacks run or system.")
    return config


def is_known(files: WorkDir, path: Path) -> bool:
    """Whether config.json or run.json is unchanged."""
    try:
        return hash_file(path) == read_sealed(files.checksums).get(path.name)
    except (FileNotFoundError, DataError):
        return False


def _problems(root: Path, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    found = {name: _problem(root / name, entry) for name, entry in entries.items()}
    return {name: text for name, text in found.items() if text}


def _problem(path: Path, entry: Mapping[str, Any]) -> str:
    if not path.is_file():
        return f"{path} is gone"
    if (size := path.stat().st_size) != entry["bytes"]:
        return f"{path} has {size} bytes instead of {entry['bytes']}"
    if _digest(path) != entry["sha256"]:
        return f"{path} has changed: its checksum differs"
    return ""


def _listed(problems: Mapping[str, str]) -> str:
    more = f", and {len(problems) - 3} more files are damaged" if len(problems) > 3 else ""
    return "; ".join(list(problems.values())[:3]) + more


def _digest(path: Path) -> str:
    path, signature = path.absolute(), _signature(path)
    known = _hashed.get(path)
    if known is None or known[0] != signature:
        known = _hashed[path] = (signature, hash_file(path))
    return known[1]


def _signature(path: Path) -> _Signature:
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
