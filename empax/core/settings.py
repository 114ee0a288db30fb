"""The settings of a run besides its stages."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from empax.core.config import ConfigError, check_numbers, to_settings
from empax.core.paths import expand
from empax.core.sharding import MeshSettings


def cache_dir() -> Path:
    """Returns the folder for files cached across runs, named by content hashes: EMPAX_CACHE_DIR or ~/.cache/empax."""
    return expand(os.environ.get("EMPAX_CACHE_DIR") or "~/.cache/empax")


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The target of compilation for `--mode=plan`.

    Attributes:
      topology: a TPU slice such as "v5e:16x16", or "gpu", a single GPU; empty = compile nothing.
      stages: training stages to compile; empty = all.
    """

    topology: str = ""
    stages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Settings of a run besides its stages: none of them changes a result.

    Attributes:
      profile: whether each training stage traces a few updates into its folder `profile`.
      sinks: trackers that receive training metrics, besides metrics.jsonl and TensorBoard (`training.sinks`).
      deterministic: whether a GPU sums in a fixed order, for bitwise equal runs (`core.determinism`). CPUs always do.
      mesh: layout of the devices.
      plan: target of a plan of the run.
    """

    profile: bool = False
    sinks: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    deterministic: bool = False
    mesh: MeshSettings = dataclasses.field(default_factory=MeshSettings)
    plan: PlanOptions = dataclasses.field(default_factory=PlanOptions)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RunOptions:
        """Builds the options from a config; a ConfigError names the path, the value found and the values allowed."""
        return to_settings(cls, {name: config[name] for name in cls.names() if name in config}, where="config")


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """`config.data`.

    Attributes:
      name: the corpus; "jsonl" = your own files (`data.own`).
      dir: folder of the corpora, laid out as in docs/data.md; empty = EMPAX_DATA_DIR, then the official download. With
        "jsonl", the folder of its files.
      beam: for "jsonl": options of Apache Beam, which then prepares the corpus; none = this process does.
      moel_compat: whether pairs are split as in the MoEL lineage; not for "jsonl".
      limit: maximum number of instances per split, from randomly drawn dialogues (0 = all); for trials.
      most_passes: for "jsonl": maximum number of epochs of a training stage, so that steps follow the size of your
        corpus; 0 = as in the recipe.
    """

    name: Literal["empathetic_dialogues", "sample", "jsonl"] = "empathetic_dialogues"
    dir: str = ""
    beam: tuple[str, ...] = ()
    moel_compat: bool = False
    limit: int = 0
    most_passes: int = 10

    @property
    def passes(self) -> int:
        """Maximum number of epochs of a training stage; 0 = as in the recipe."""
        return self.most_passes if self.name == "jsonl" else 0

    def __post_init__(self) -> None:
        check_numbers(self, "limit", "most_passes", least=0)
        if self.beam and self.name != "jsonl":
            raise ConfigError(f'data.beam is for data.name = "jsonl"; {self.name!r} is prepared without it.')
        if self.moel_compat and self.name == "jsonl":
            raise ConfigError("data.moel_compat = True follows the order of EmpatheticDialogues; set it to False.")
