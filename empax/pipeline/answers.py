"""Stores the answers of an evaluation in progress, so that an interrupted one resumes after them."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.cache import is_sound, seal
from empax.core.files import hash_json, read_jsonl, write_jsonl
from empax.core.manifest import read_done
from empax.core.system import RunContext
from empax.core.types import Instance, Prediction

log = logging.getLogger("empax")

PART_SECONDS = 30.0
"""Interval between writes."""


def identify(run: RunContext, settings: Any, instances: Sequence[Instance]) -> str:
    """Hashes everything that affects the answers: earlier stages, settings, seed and instances."""
    done = [name for name in run.before() if run.files.done(name).is_file()]
    results = {name: read_done(run.files.stage(name))["result"] for name in done}
    return hash_json([results, dataclasses.asdict(settings), run.seed, [i.id for i in instances]])


class KeptAnswers:
    """Answers by batch number (`core.protocols.AnswerStore`), in files of a folder.

    Args:
      folder: folder of one evaluation; need not exist.
      identity: hash of the evaluation; answers of another one are ignored.
      name: name for messages; empty = that of the folder's stage.
    """

    def __init__(self, folder: Path, identity: str, name: str = "") -> None:
        self._folder, self._identity = folder, identity
        self._known: dict[int, dict[int, Prediction]] = {}
        self._new: dict[int, Mapping[int, Prediction]] = {}
        self._since = time.monotonic()
        self.seconds = 0.0
        """Time spent on all answers, over all restarts."""
        for path in sorted(folder.glob("*.jsonl")):
            self._read(path)
        if self._known:
            log.info("%s: continuing after %d saved answers.", name or folder.parent.name, len(self))

    def __len__(self) -> int:
        """Returns the number of answers that were stored at the start."""
        return sum(map(len, self._known.values()))

    def get(self, batch: int) -> Mapping[int, Prediction] | None:
        return self._known.get(batch)

    def add(self, batch: int, answers: Mapping[int, Prediction]) -> None:
        self._new[batch] = answers
        if time.monotonic() - self._since >= PART_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes the answers added since the last call.

        Raises:
          DataError: an answer holds nan or infinity.
        """
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self.seconds += seconds
        if not self._new:
            return
        rows = ({"batch": n, "row": i, **vars(one)} for n, made in self._new.items() for i, one in made.items())
        path = self._folder / f"{min(self._new):08d}.jsonl"
        write_jsonl(path, [{"identity": self._identity, "seconds": seconds}, *rows])
        seal(path)
        self._new = {}

    def remove(self) -> None:
        """Deletes the answers, once they are in the file of predictions."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, path: Path) -> None:
        if not is_sound(path):
            return
        about, *rows = read_jsonl(path)
        if about["identity"] != self._identity:
            log.warning("%s holds answers from another evaluation; generating them again.", path)
            return
        self.seconds += about["seconds"]
        for row in rows:
            batch, place = row.pop("batch"), row.pop("row")
            self._known.setdefault(batch, {})[place] = Prediction(
                **{**row, "context": tuple(row["context"]), "exemplars": tuple(row["exemplars"])}
            )
