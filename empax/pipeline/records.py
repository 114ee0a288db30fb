"""Records of a work directory's stages: `BEGUN` before a stage, `DONE` after it, and checks that they still hold.

`DONE` holds the stage's metrics and
  files: path in the work directory → size and SHA-256, for every file that the stage made;
  settings: hash of all settings that the stage reads, including the seed;
  code: module of empax → hash of its source, for all modules that the stage imports;
  inputs: files that the stage reads from outside the work directory, with their SHA-256 (`core.inputs`);
  result: hash of the output for other stages (a training stage's parameters), the same in every run of the stage;
  built_on: earlier stage → hash of its settings and result;
  checksum: checksum of the file itself.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from empax.core.files import DataError, WorkDir, hash_json, is_temporary, metric_rows, write_text
from empax.core.inputs import Input, Inputs
from empax.core.manifest import (
    ROOT_FILES,
    describe,
    files_of,
    read_done,
    read_sealed,
    remedy,
    result_of,
    verify_stage,
    write_sealed,
)
from empax.core.settings import RunOptions
from empax.core.system import RunPlan, Stage
from empax.pipeline.code import changed, code_of

log = logging.getLogger("empax")

PLACE_ONLY = ("config.data.dir", "config.report.peers", *(f"config.{name}" for name in RunOptions.names()))
"""Settings that change no result, such as paths: they may differ when a run resumes."""


def settings_hash(stage: Stage) -> str:
    """Hashes all config values that a stage reads and that may change its result."""
    return hash_json({part: _lasting(value, f"config.{part}") for part, value in stage.reads.items()})


def _lasting(value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        name: _lasting(item, f"{path}.{name}") for name, item in value.items() if f"{path}.{name}" not in PLACE_ONLY
    }


def differences(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Yields differences between two configs except PLACE_ONLY: path ("config.a.b"), first value, second value."""
    if ".".join(("config", *path)) in PLACE_ONLY:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), (*path, key))
    elif old != new:
        yield ".".join(("config", *path)), old, new


def difference(path: str, was: Any, now: Any) -> str:
    """Formats one of `differences`; of a section that only one config has, the beginning."""
    there, here = (
        f"{one!r:.40}…" if isinstance(one, Mapping) and len(repr(one)) > 40 else repr(one) for one in (was, now)
    )
    return f"{path}: {there} there, {here} here"


def has_begun(files: WorkDir, name: str) -> bool:
    """Whether a stage has left any file besides its `BEGUN`."""
    folder = files.stage(name)
    return any(path.is_file() and path != files.begun(name) and not is_temporary(path) for path in folder.rglob("*"))


def recorded(files: WorkDir, name: str) -> dict[str, Any]:
    """Returns the `DONE` of a stage, or else its `BEGUN`.

    Raises:
      DataError: both are missing or damaged.
    """
    if files.done(name).is_file():
        return read_done(files.stage(name))
    try:
        return read_sealed(files.begun(name))
    except FileNotFoundError as error:
        raise DataError(f"{files.begun(name)} is gone.") from error


def recorded_inputs(files: WorkDir, name: str) -> dict[str, Input]:
    """Returns the external inputs recorded at a stage's start; empty without a record.

    Raises:
      DataError: `DONE` is damaged.
    """
    try:
        inputs = recorded(files, name).get("inputs", {})
    except DataError:
        if files.done(name).is_file():
            raise
        return {}
    return {what: Input(**one) for what, one in inputs.items()}


def check_origins(files: WorkDir, stages: Iterable[Stage]) -> None:
    """Checks that finished stages were made with these settings and from the current stages.

    Raises:
      DataError: a stage was not.
    """
    identities: dict[str, str] = {}
    for stage in stages:
        name = stage.name
        if not files.done(name).is_file():
            continue
        done = read_done(files.stage(name))
        if done["settings"] != settings_hash(stage):
            raise DataError(
                f"{files.stage(name)} was made with settings other than config.{name}, or by a version of empax in "
                f"which its code has another name. In the latter case, a new --workdir with --reuse={files.root} keeps "
                f"it. {remedy(name)}"
            )
        for other, identity in done["built_on"].items():
            if identities.get(other, identity) != identity:
                raise DataError(
                    f"{files.stage(name)} was made from a different {other} than the present one. {remedy(name)}"
                )
        identities[name] = _identity(done)


def record_anew(files: WorkDir, stages: Sequence[Stage]) -> None:
    """Updates the records of finished stages from another work directory to the settings that `stages` read.

    `stages` are the stages that both runs share, in order, under the current names of the code.
    """
    identities: dict[str, str] = {}
    for stage in stages:
        done = read_done(files.stage(stage.name))
        built_on = {other: identities.get(other, identity) for other, identity in done["built_on"].items()}
        settings = settings_hash(stage)
        if (done["settings"], done["built_on"]) != (settings, built_on):
            write_sealed(files.done(stage.name), {**done, "settings": settings, "built_on": built_on})
        identities[stage.name] = _identity({**done, "settings": settings})


def _identity(done: Mapping[str, Any]) -> str:
    return hash_json([done["settings"], done["result"]])


class Records:
    """The records of one run, in the process that writes them; `inputs` come from `pipeline.run.find_inputs`."""

    def __init__(self, files: WorkDir, plan: RunPlan, inputs: Mapping[str, Inputs] = MappingProxyType({})) -> None:
        self._files, self._stages, self._package, self._inputs = files, plan.stages, plan.package, inputs
        self._code = {name: code_of(stage.modules) for name, stage in plan.stages.items()}
        self._before: dict[Path, Any] = {}

    def check(self, *, first: bool = False) -> None:
        """Checks the output of all finished stages; the `first` time, also logs warnings.

        Raises:
          DataError: a file is damaged or inconsistent; the message names it and the remedy.
        """
        done = [name for name in self._stages if self._files.done(name).is_file()]
        check_origins(self._files, self._stages.values())
        for name in done:
            lost = verify_stage(self._files.stage(name))
            if first and lost:
                log.warning("%s: %s (%d files in all). No stage reads them any more.", name, lost[0], len(lost))
        self._restore_metrics(done)
        if first:
            self._compare_code(done)

    def begin(self, name: str) -> None:
        """Records the start of a stage."""
        for path in (*self._files.root.glob(".*"), *self._files.stage(name).rglob(".*")):
            if path.is_file() and is_temporary(path):  # from a killed process
                path.unlink(missing_ok=True)
        inputs = self._inputs.get(name, {})
        now = {"settings": settings_hash(self._stages[name]), "code": self._code[name], "inputs": inputs}
        begun = self._files.begun(name)
        try:
            before = read_sealed(begun)["code"] if has_begun(self._files, name) else None
        except (FileNotFoundError, DataError):
            before = None
        if before is None:
            write_sealed(begun, now)
        elif modules := changed(before, self._code[name]):
            log.warning("%s: the code has changed since it began (%s); continuing.", name, _few(modules))
        self._before = self._root_files()

    def finish(self, name: str, note: Mapping[str, Any]) -> None:
        """Writes `DONE`, once all files of the stage exist; `note` holds its metrics.

        A `result` in `note` replaces the hash of the files.
        """
        files = self._files
        if lines := self._lines(name):
            write_text(files.stage(name) / "metrics.jsonl", "".join(lines))
        changed_here = [path for path, about in self._root_files().items() if self._before.get(path) != about]
        described = describe(files.root, [*files_of(files, name), *changed_here])
        earlier = itertools.takewhile(lambda other: other != name, self._stages)
        earlier = [] if self._stages[name].alone else [other for other in earlier if files.done(other).is_file()]
        began = read_sealed(files.begun(name))
        mixed = dict.fromkeys(changed(began["code"], self._code[name]), "changed while the stage was running")
        write_sealed(
            files.done(name),
            {
                "result": result_of(described, name),
                **note,
                "files": described,
                "settings": settings_hash(self._stages[name]),
                "code": {**self._code[name], **mixed},
                "inputs": began.get("inputs", {}),
                "built_on": {other: _identity(read_done(files.stage(other))) for other in earlier},
            },
        )

    def _compare_code(self, done: Sequence[str]) -> None:
        stale = {name: self._changed_code(name) for name in done}
        if names := [name for name in done if stale[name]]:
            modules = sorted({module for name in names for module in stale[name]})
            log.warning(
                "THE CODE HAS CHANGED since these stages were made: %s (%s). Their old results are used. "
                "--redo=%s makes them anew. What EMPAX_CACHE_DIR keeps (annotations, facts, embeddings) is used again, "
                "whatever the code: set it to an empty folder to have that made anew, too.",
                ", ".join(names), _few(modules), names[0],
            )  # fmt: skip

    def _changed_code(self, name: str) -> list[str]:
        before, now = read_done(self._files.stage(name))["code"], self._code[name]
        by_system = any(module.startswith(("empax.systems.", "empax.parts.")) for module in before)
        if by_system and self._package not in before:
            # A run of another system made it (--reuse): modules that only that system imports have not changed.
            before = {module: source for module, source in before.items() if module in now}
            now = {module: now[module] for module in before}
        return changed(before, now)

    def _restore_metrics(self, done: Sequence[str]) -> None:
        """Rewrites metrics.jsonl if its rows differ from a finished stage's own copy."""
        copies = {name: self._files.stage(name) / "metrics.jsonl" for name in done}
        copies = {name: path.read_text(encoding="utf-8") for name, path in copies.items() if path.is_file()}
        if all("".join(self._lines(name)) == text for name, text in copies.items()):
            return
        log.warning("%s was damaged; rewriting it from the copies of the stages.", self._files.metrics)
        rows = [copies.get(name) or "".join(self._lines(name)) for name in self._stages]
        write_text(self._files.metrics, "".join(rows))

    def _lines(self, stage: str) -> list[str]:
        """Returns the unchanged lines of a stage in metrics.jsonl."""
        return [f"{line}\n" for line, row in metric_rows(self._files.metrics) if row["stage"] == stage]

    def _root_files(self) -> dict[Path, Any]:
        """Returns files beside the stages' folders, with the file attributes that change on a write."""
        found = [path for name in ROOT_FILES if (path := self._files.root / name).is_file()]
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


def _few(modules: Sequence[str]) -> str:
    more = f" and {len(modules) - 4} more" if len(modules) > 4 else ""
    return ", ".join(modules[:4]) + more
