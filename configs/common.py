"""What recipes share: the sections that every run has, and how to shrink them."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict


def base(*, system: str, data: str, seed: int = 0) -> ConfigDict:
    """An empty recipe: system, data, seed."""
    config = ConfigDict()
    config.system = system
    config.seed = seed
    config.data = ConfigDict({"name": data, "dir": "", "moel_compat": False, "limit": 0})
    return config


def train(*, task: str, steps: int, batch_size: int, learning_rate: float, **more: Any) -> ConfigDict:
    """A training stage; `more` are settings of the loop or of the task."""
    optimizer = {"learning_rate": learning_rate, "clip_norm": 1.0, **more.pop("optimizer", {})}
    return ConfigDict(
        {"kind": "train", "task": task, "steps": steps, "batch_size": batch_size, "optimizer": optimizer, **more},
        convert_dict=True,
    )
