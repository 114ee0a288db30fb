"""What a stage gets to see of the run that it belongs to, and what a system hands to the training loop."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir
from empax.core.paths import expand
from empax.core.protocols import Examples, Task
from empax.core.sharding import MeshSettings
from empax.core.types import Params


def cache_dir() -> Path:
    """Where things named by the hash of their contents are kept across runs: EMPAX_CACHE_DIR or ~/.cache/empax."""
    return expand(os.environ.get("EMPAX_CACHE_DIR") or "~/.cache/empax")


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What `--mode=plan` compiles for.

    Attributes:
      topology: a TPU slice, "v5e:16x16"; empty = nothing is compiled.
      stages: which training stages to compile for it; empty = all.
    """

    topology: str = ""
    stages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a config may say of a run besides its stages: nothing that changes a result.

    Attributes:
      profile: each training stage traces a few updates and prints what took longest.
      mesh: how the devices are laid out.
      plan: what a plan of the run is made for.
    """

    profile: bool = False
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
class RunContext:
    """One stage of one run.

    Attributes:
      files: the work directory.
      config: the whole resolved config as plain values.
      stage: name of the stage that is running.
      planned: whether nothing may be fetched from elsewhere, as in `--mode=plan`.
    """

    files: WorkDir
    config: Mapping[str, Any]
    stage: str
    planned: bool = False

    @property
    def seed(self) -> int:
        """The stage's own, whatever the run's, if its section gives one."""
        return self.config.get(self.stage, {}).get("seed", self.config["seed"])

    @property
    def directory(self) -> Path:
        return self.files.stage(self.stage)

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the config; ConfigError if the recipe has none of that name."""
        if name not in self.config:
            raise ConfigError(f"config.{self.stage} refers to config.{name}, which the config file does not have.")
        return self.config[name]

    def before(self) -> list[str]:
        """The stages of the run that come before this one."""
        stages = list(self.config["run"])
        return stages[: stages.index(self.stage)] if self.stage in stages else stages

    def task(self, stage: str) -> str:
        """What a stage trains, "SYSTEM.TASK"; empty if it is no training stage."""
        section = self.section(stage)
        if section["kind"] != "train":
            return ""
        owner, _, task = section["task"].rpartition(".")
        return f"{owner or self.config['system']}.{task}"

    def earlier(self, setting: str, name: str, *, kind: str = "train", tasks: Sequence[str] = ()) -> Mapping[str, Any]:
        """The section of the stage `name`, to which `setting` of this stage refers.

        Args:
          setting: of this stage.
          name: its value.
          kind: of the other stage.
          tasks: what that may train, "TASK" or "SYSTEM.TASK"; none = anything.

        Raises:
          ConfigError: the run has no such stage before this one; names those that fit.
        """

        def fits(stage: str) -> bool:
            task = self.task(stage)
            known = not tasks or task in tasks or task.rpartition(".")[2] in tasks
            return self.config[stage]["kind"] == kind and known

        before = self.before()
        if name in before and fits(name):
            return self.config[name]
        wanted = f"a stage that trains {' or '.join(map(repr, tasks))}" if tasks else f"a stage of kind {kind!r}"
        found = "config.run has no such stage"
        if name in before:
            found = f"that stage trains {self.task(name)!r}" if self.task(name) else "that stage trains nothing"
            found = found if kind == "train" else f"that stage is of kind {self.config[name]['kind']!r}"
        elif name in self.config["run"]:
            found = "that stage does not come before this one"
        fitting = ", ".join(stage for stage in before if fits(stage)) or "none"
        raise ConfigError(
            f"config.{self.stage}.{setting} = {name!r}: {found}; name {wanted} before this one (there are: {fitting})."
        )


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A task with everything that training it takes.

    Attributes:
      frozen: parameters that the loss needs and nobody trains.
      initial: puts pretrained or earlier weights into freshly initialised parameters; None = train from scratch.
      on_refresh: called between steps on the schedule of the stage (see `training.loop.fit`).
      on_end: called with the parameters that the stage gives, before it counts as done (likewise).
    """

    task: Task
    train: Examples
    validation: Examples
    frozen: Params = dataclasses.field(default_factory=dict)
    initial: Callable[[Params], Params] | None = None
    on_refresh: Callable[[int, Params | None], None] | None = None
    on_end: Callable[[int, Params], None] | None = None


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A task with the shapes of a batch: what a plan is made of. No array of it holds anything.

    Attributes:
      batch: as the loss sees it.
      given: as the task sees it before an update, to try something out; None = `batch`.
      answer_tokens: how long an answer may get that is made before an update.
    """

    task: Task
    batch: Any
    frozen: Params = dataclasses.field(default_factory=dict)
    given: Any = None
    answer_tokens: int = 1


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """How a system offers a task.

    Attributes:
      settings: the dataclass of its settings.
      check: raises ConfigError or DataError for whatever is known to be wrong before any work; reads no weights.
      build: makes it, with its data, once the stages before it are done.
      sketch: makes it for batches of (batch size, source tokens) from the config alone.
      unread: names in the section of the system that change nothing of what is trained.
    """

    settings: type
    check: Callable[[Any, RunContext], None]
    build: Callable[[Any, RunContext], Assembly]
    sketch: Callable[[Any, RunContext, int, int], Sketch]
    unread: tuple[str, ...] = ()
