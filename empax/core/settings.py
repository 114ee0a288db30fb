"""What a config says of a run besides its stages."""

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
    """Where things named by the hash of their contents are kept across runs: EMPAX_CACHE_DIR or ~/.cache/empax."""
    return expand(os.environ.get("EMPAX_CACHE_DIR") or "~/.cache/empax")


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What `--mode=plan` compiles for.

    Attributes:
      topology: a TPU slice, "v5e:16x16", or "gpu", one of them; empty = nothing is compiled.
      stages: which training stages to compile for it; empty = all.
    """

    topology: str = ""
    stages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a config may say of a run besides its stages: nothing that changes a result.

    Attributes:
      profile: each training stage traces a few updates into its folder `profile`.
      sinks: trackers that get the numbers of training stages, beside metrics.jsonl and TensorBoard (`training.sinks`).
      deterministic: a GPU adds up in one order, so that runs agree bit for bit (`core.determinism`). CPUs do so anyway.
      mesh: how the devices are laid out.
      plan: what a plan of the run is made for.
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
        """Raises ConfigError naming the path, what was found, what is allowed."""
        return to_settings(cls, {name: config[name] for name in cls.names() if name in config}, where="config")


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """`config.data`.

    Attributes:
      name: the corpus; "jsonl" = files of your own (`data.own`).
      dir: folder with the corpora, as docs/data.md lays it out; empty = EMPAX_DATA_DIR, then the official download.
        With "jsonl", the folder of its files.
      beam: of "jsonl": options of Apache Beam, which then prepares the corpus; none = this process does.
      moel_compat: pairs as the MoEL lineage cuts them.
      limit: at most this many instances of each split, of dialogues drawn at random (0 = all); for trials.
      most_passes: of "jsonl": how often a training stage passes over its rows at most, so that steps follow the size of
        your corpus; 0 = as the recipe says.
    """

    name: Literal["empathetic_dialogues", "sample", "jsonl"] = "empathetic_dialogues"
    dir: str = ""
    beam: tuple[str, ...] = ()
    moel_compat: bool = False
    limit: int = 0
    most_passes: int = 10

    def __post_init__(self) -> None:
        check_numbers(self, "limit", "most_passes", least=0)
        if self.beam and self.name != "jsonl":
            raise ConfigError(f'data.beam is for data.name = "jsonl"; {self.name!r} is prepared without it.')
