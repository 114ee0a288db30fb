"""What a system offers, a run of it as stages see it, and what a stage hands to the training loop."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from empax.core.config import ConfigError
from empax.core.files import WorkDir
from empax.core.plugins import load_named
from empax.core.protocols import Answering, Examples, InstanceEncoder, Task
from empax.core.settings import DataSettings, RunOptions
from empax.core.types import Params

S = TypeVar("S")


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
class AnswerOptions:
    """How a trained stage is to answer.

    Attributes:
      stage: its name.
      index: the index stage to search; unused by tasks that search none.
      buckets: source lengths in tokens to pad to; empty = one context is answered at a time, and every answer takes the
        same compiled program.
    """

    stage: str
    index: str
    buckets: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class TaskSpec(Generic[S]):
    """How a system offers a task.

    Attributes:
      settings: the dataclass of its settings.
      check: raises ConfigError or DataError for whatever is known to be wrong before any work; reads no weights.
      build: makes it, with its data, once the stages before it are done.
      sketch: makes it for batches of (batch size, source tokens) from the config alone.
      answer: loads what answers once the stage is done; None = the task trains nothing that answers.
      searches: whether `answer` needs an index stage.
      reads_exemplars: whether what a stage of these settings trains answers with exemplars, and can be given others
        (`core.protocols.ExemplarAnswering`).
      encoder: loads the encoder that a stage of the task, by its name, has trained, for index stages; None = it trains
        none.
      marker: loads what a stage of the task has trained to mark reasons in contexts, contexts to the `data.spans.Span`s
        of each; None = it marks none.
      models: by name, what `export` can write, the main one first: of the trained stage, and whether its adapters
        alone are wanted (`parts.generator.trained.Trained`).
      unread: names in the section of the system that change nothing of what is trained.
      reads_sources: whether the buckets of a stage are lengths of what the run's generator reads.
      alone: whether a stage of these settings reads nothing that other stages make but the data; None = none does.
    """

    settings: type[S]
    check: Callable[[S, RunContext], None]
    build: Callable[[S, RunContext], Assembly]
    sketch: Callable[[S, RunContext, int, int], Sketch]
    answer: Callable[[S, RunContext, AnswerOptions], Answering] | None = None
    searches: bool = False
    reads_exemplars: Callable[[S], bool] = lambda _: False
    encoder: Callable[[RunContext, str], InstanceEncoder] | None = None
    marker: Callable[[RunContext, str], Callable[[Sequence[Sequence[str]]], Sequence[Any]]] | None = None
    models: Mapping[str, Callable[[S, RunContext, bool], Any]] = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()
    reads_sources: bool = False
    alone: Callable[[S], bool] | None = None


@dataclasses.dataclass(frozen=True)
class System:
    """One system.

    Attributes:
      name: of its section in a config, and of its tasks elsewhere ("NAME.TASK").
      settings: the dataclass of that section, which all stages share.
      tasks: by name.
      encoder: makes the encoder as pretrained, for index stages that name no training stage; None = there is none.
      index_unread: names in that section that change nothing of an index.
      check: raises what is known to be wrong with the models that all stages share; reads no weights.
    """

    name: str
    settings: type
    tasks: Mapping[str, TaskSpec[Any]]
    encoder: Callable[[RunContext], InstanceEncoder] | None = None
    index_unread: tuple[str, ...] = ()
    check: Callable[[RunContext], None] | None = None


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
      reads: what it reads of the config, by the path below `config`; the section that all stages share as "system".
      alone: whether it reads nothing that other stages make but the data.
      modules: what runs it, modules of the config's "module:name" among them; a package stands for all in it.
    """

    name: str
    kind: str
    settings: Any
    task: str = ""
    spec: TaskSpec[Any] | None = None
    loop: Any = None
    seed: int | None = None
    reads: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alone: bool = False
    modules: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A config, parsed.

    Attributes:
      config: the whole resolved config as plain values, to be kept and compared; nobody reads settings from it.
      system: what the run's own tasks belong to.
      package: the module or package of that system.
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
    package: str = ""


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

    @property
    def evaluations(self) -> list[Stage]:
        """The stages that evaluate this one."""
        stages = self.plan.stages.values()
        return [one for one in stages if one.kind == "evaluate" and one.settings.stage == self.stage]

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


def module_of(name: str) -> str:
    """The module of a system: NAME of empax/systems or empax/parts; of "module:name", what stands before the colon."""
    if ":" in name:
        return name.partition(":")[0]
    homes = [f"empax.{home}.{name}" for home in ("systems", "parts")]
    return next((home for home in homes if name.isidentifier() and importlib.util.find_spec(home)), homes[0])


def load_system(name: str, where: str = "config.system") -> System:
    """The `SYSTEM` of `module_of` a name, or what "module:name" names.

    Raises:
      ConfigError: there is no such system.
    """
    _check_text(name, where)
    module = module_of(name)
    try:
        found = load_named(name, where) if ":" in name else getattr(importlib.import_module(module), "SYSTEM", None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{where} = {name!r} is no module of empax/systems; a system of your own is 'module:name'."
        ) from error
    if not isinstance(found, System):
        raise ConfigError(f"{where} = {name!r} names no System; see empax.core.system.")
    return found


def _check_text(name: object, where: str) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"{where} = {name!r} must be a text.")


def find_task(name: str, system: str, where: str) -> tuple[System, str]:
    """The system that has the task, and the task's name in it.

    Args:
      name: "TASK" of the run's own system, or "SYSTEM.TASK" ("module:name.TASK").
      system: the run's own.
      where: section that names the task.

    Raises:
      ConfigError: there is no such system or task.
    """
    _check_text(name, f"{where}.task")
    owner, _, task = name.rpartition(".")
    found = load_system(owner, f"{where}.task") if owner else load_system(system)
    if task not in found.tasks:
        raise ConfigError(f"{where}.task = {name!r} is unknown; {owner or system} has {', '.join(found.tasks)}.")
    return found, task


def load_encoder_of(run: RunContext, stage: str) -> InstanceEncoder:
    """The encoder that the training stage `stage` left, or that of the run's system as pretrained if that is empty.

    Raises:
      ConfigError: the stage trains no encoder, or the system has none.
    """
    if stage:
        spec = run.named(stage).spec
        if spec is not None and spec.encoder is not None:
            return spec.encoder(run, stage)
        raise ConfigError(f"config.{run.stage} refers to config.{stage}, which leaves no encoder for an index.")
    if run.plan.system.encoder is None:
        raise ConfigError(
            f"config.{run.stage} embeds texts, but the system {run.plan.system.name!r} has no encoder; leave "
            "that stage out, or name a stage that trains one."
        )
    return run.plan.system.encoder(run)
