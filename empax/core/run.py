"""A run as its stages see it, and what a system hands to the training loop."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from empax.core.config import ConfigError, check_numbers, to_settings
from empax.core.files import WorkDir
from empax.core.paths import expand
from empax.core.protocols import Examples, Task
from empax.core.sharding import MeshSettings
from empax.core.types import Params

if TYPE_CHECKING:
    from empax.core.system import System, TaskSpec

S = TypeVar("S")


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
      deterministic: a GPU adds up in one order, so that runs agree bit for bit (`core.determinism`). CPUs do so anyway.
      mesh: how the devices are laid out.
      plan: what a plan of the run is made for.
    """

    profile: bool = False
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
      dir: folder with the corpora, as README.md lays it out; empty = EMPAX_DATA_DIR, then the official download.
        With "jsonl", the folder of its files.
      beam: of "jsonl": options of Apache Beam, which then prepares the corpus; none = this process does.
      moel_compat: pairs as the MoEL lineage cuts them.
      limit: at most this many instances of each split, of dialogues drawn at random (0 = all); for trials.
    """

    name: Literal["empathetic_dialogues", "sample", "jsonl"] = "empathetic_dialogues"
    dir: str = ""
    beam: tuple[str, ...] = ()
    moel_compat: bool = False
    limit: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, "limit", least=0)
        if self.beam and self.name != "jsonl":
            raise ConfigError(f'data.beam is for data.name = "jsonl"; {self.name!r} is prepared without it.')


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a run.

    Attributes:
      kind: a key of `pipeline.run:KINDS`.
      settings: of that kind; of a training stage, those of its task.
      task: what a training stage trains, "SYSTEM.TASK"; empty = it is no training stage.
      spec: of that task.
      loop: `LoopSettings` of a training stage.
      seed: of the stage alone; None = the run's.
    """

    name: str
    kind: str
    settings: Any
    task: str = ""
    spec: TaskSpec[Any] | None = None
    loop: Any = None
    seed: int | None = None


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A config, parsed.

    Attributes:
      config: the whole resolved config as plain values.
      system: what the run's own tasks belong to.
      system_settings: the section that all stages share, of the type `system.settings`.
      stages: by name, in the order of the run.
    """

    config: Mapping[str, Any]
    system: System
    system_settings: Any
    data: DataSettings
    options: RunOptions
    stages: Mapping[str, Stage]
    seed: int


@dataclasses.dataclass(frozen=True)
class RunContext:
    """One stage of one run.

    Attributes:
      files: the work directory.
      plan: the run's config, parsed.
      stage: name of the stage that is running.
      planned: whether nothing may be fetched from elsewhere, as in `--mode=plan`.
    """

    files: WorkDir
    plan: RunPlan
    stage: str
    planned: bool = False

    @property
    def seed(self) -> int:
        """The stage's own, whatever the run's, if its section gives one."""
        stage = self.plan.stages.get(self.stage)
        return self.plan.seed if stage is None or stage.seed is None else stage.seed

    @property
    def directory(self) -> Path:
        return self.files.stage(self.stage)

    @property
    def shared(self) -> str:
        """Path of the section that all stages share, "config.NAME"."""
        return f"config.{self.plan.system.name}"

    def at(self, stage: str) -> RunContext:
        """The same run at another stage."""
        return dataclasses.replace(self, stage=stage)

    def named(self, name: str) -> Stage:
        """The stage `name`; ConfigError if the run has none of that name."""
        if name not in self.plan.stages:
            raise ConfigError(f"config.{self.stage} refers to config.{name}, which is no stage of this run.")
        return self.plan.stages[name]

    def settings(self, name: str, kind: type[S]) -> S:
        """The settings of the stage `name`.

        Raises:
          ConfigError: the run has no such stage, or its settings are of another kind; names both sections.
        """
        stage = self.named(name)
        if not isinstance(stage.settings, kind):
            found = f"trains {stage.task!r}" if stage.task else f"is of kind {stage.kind!r}"
            raise ConfigError(
                f"config.{self.stage} refers to config.{name}, which {found}; name a stage that has {kind.__name__}."
            )
        return stage.settings

    def shared_settings(self, kind: type[S]) -> S:
        """The settings that all stages share.

        Raises:
          ConfigError: the run's system has others.
        """
        if not isinstance(self.plan.system_settings, kind):
            raise ConfigError(
                f"config.{self.stage} needs {kind.__name__}, but the system {self.plan.system.name!r} has "
                f"{type(self.plan.system_settings).__name__} in {self.shared}; take a task of that system."
            )
        return self.plan.system_settings

    def before(self) -> list[str]:
        """The stages of the run that come before this one."""
        stages = list(self.plan.stages)
        return stages[: stages.index(self.stage)] if self.stage in stages else stages

    def earlier(
        self,
        setting: str,
        name: str,
        *,
        kind: str = "train",
        tasks: Sequence[str] = (),
        able: tuple[str, Callable[[TaskSpec[Any]], bool]] | None = None,
    ) -> Stage:
        """The stage `name`, to which `setting` of this stage refers.

        Args:
          setting: of this stage.
          name: its value.
          kind: of the other stage.
          tasks: what that may train, "TASK" or "SYSTEM.TASK"; none = anything.
          able: what its task must be able to do, in words ("answers"), and whether one is.

        Raises:
          ConfigError: the run has no such stage before this one; the message names stages that fit.
        """

        def fits(stage: Stage) -> bool:
            known = not tasks or stage.task in tasks or stage.task.rpartition(".")[2] in tasks
            return stage.kind == kind and known and (able is None or (stage.spec is not None and able[1](stage.spec)))

        stages, before = self.plan.stages, self.before()
        if name in before and fits(stages[name]):
            return stages[name]
        wanted = f"a stage that trains {' or '.join(map(repr, tasks))}" if tasks else f"a stage of kind {kind!r}"
        wanted = f"a stage whose task {able[0]}" if able else wanted
        found = "config.run has no such stage"
        if name in before:
            task = stages[name].task
            found = f"that stage trains {task!r}" if task else "that stage trains nothing"
            found = found if kind == "train" else f"that stage is of kind {stages[name].kind!r}"
        elif name in stages:
            found = "that stage does not come before this one"
        fitting = ", ".join(stage for stage in before if fits(stages[stage])) or "none"
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
