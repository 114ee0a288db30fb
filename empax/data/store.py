"""What earlier stages of a run left for later ones: instances with their notes, and candidate exemplars."""

from __future__ import annotations

import dataclasses

import numpy as np

from empax.core.config import ConfigError
from empax.core.files import DataError, read_jsonl
from empax.core.run import RunContext
from empax.core.types import Instance
from empax.data.dialogues import instance_from_row


def load_instances(run: RunContext, split: str) -> list[Instance]:
    """The instances of a split, with the notes that annotate added where it ran."""
    instances = [instance_from_row(row) for row in read_jsonl(run.files.instances(split))]
    path = run.files.annotations(split)
    if not path.exists():
        return instances
    notes = {row.pop("id"): row for row in read_jsonl(path)}
    if missing := [i.id for i in instances if i.id not in notes]:
        raise DataError(
            f"{path} lacks {len(missing)} instances, the first is {missing[0]}; delete {path.parent} and run again."
        )
    return [dataclasses.replace(i, notes={**i.notes, **notes[i.id]}) for i in instances]


def load_candidates(run: RunContext, index: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Which instances of a split were searched, [n], and their candidates, [n, M] (rows of the index, -1 = none).

    Raises:
      ConfigError: the index stage searched no such split.
    """
    path = run.files.stage(index) / f"candidates_{split}.npz"
    if not path.exists():
        raise ConfigError(f"{path} is not there: {run.stage} needs {split!r} among config.{index}.queries.")
    with np.load(path) as arrays:
        return arrays["positions"], arrays["ids"]
