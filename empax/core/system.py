"""The interface of a system, a run as its stages see it, and the input of the training loop."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from empax.core.config import ConfigError
from empax.core.files import WorkDir
from empax.core.plugins import load_named
from empax.core.protocols import Answering, Examples, InstanceEncoder, Task
from empax.core.settings import DataSettings, RunOptions
from empax.core.types import Params

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A task with everything needed to train it (`training.loop.fit`).

    Attributes:
      task: for an `OnlineTask`, `explore` is called on every batch before the update; a `ReinforcedTask` makes several
        updates from its answers to a batch, see there.
      validation: None = no evaluation, and the last parameters count as best.
      frozen: passed to the task unchanged; no gradient flows.
      initial: maps newly initialised parameters to the starting ones (pretrained ones, another stage's); same structure
        and shapes. Not called on resuming from a checkpoint.
      on_refresh: called as (n, params) before step n (from 0) for every positive multiple n of `refresh_every_steps`.
        It may change the data in `train` for later steps, must store its result by n, and must copy any `params` that
        it keeps. A run that resumes between two multiples calls it as (n, None) for the earlier one: "load the stored
        result". It can be called twice for one n with the same parameters.
      on_end: called by one process as (steps, the parameters that `fit` returns) before the stage counts as done; it
        can be called twice with the same arguments.
    """

    task: Task
    train: Examples
    validation: Examples | None
    frozen: Params = dataclasses.field(default_factory=dict)
    initial: Callable[[Params], Params] | None = None
    on_refresh: Callable[[int, Params | None], None] | None = None
    on_end: Callable[[int, Params], None] | None = None


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A task with the shapes of a batch, for plans. Its arrays hold no data.

    Attributes:
      batch: batch that the loss receives.
      given: batch that the task receives before an update, to sample answers; None = `batch`.
      answer_tokens: maximum length of an answer made before an update.
    """

    task: Task
    batch: Any
    frozen: Params = dataclasses.field(default_factory=dict)
    given: Any = None
    answer_tokens: int = 1


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """Settings for answering with a trained stage.

    Attributes:
      stage: name of the stage.
      index: index stage to search; unused by tasks without search.
      buckets: source lengths in tokens to pad to; empty = one context at a time, with the same compiled program for
        every answer.
      params: parameters of the stage, as in `training.checkpoint.load_params`.
    """

    stage: str
    index: str
    buckets: Sequence[int] = ()
    params: Literal["best"] | int = "best"


@dataclasses.dataclass(frozen=True)
class TaskSpec(Generic[S]):
    """A task of a system.

    Attributes:
      settings: dataclass of the task's settings.
      check: raises ConfigError or DataError for problems detectable before any work; reads no weights.
      build: builds the task and its data, once the stages before it are done.
      sketch: builds the task for batches of (batch size, source tokens) from the config alone.
      answer: loads the answering model of a finished stage; None = the task trains none.
      check_evaluation: raises ConfigError if a stage cannot be evaluated with the settings of an evaluation (lengths,
        decoding, index). `run` is at the evaluation, with its decoding; the stage may have finished before.
      searches: whether `answer` needs an index stage.
      reads_exemplars: whether a stage with these settings answers with exemplars and accepts others
        (`core.protocols.ExemplarAnswering`).
      encoder: loads the encoder that the named stage of the task has trained, for index stages; None = it trains none.
      marker: loads the model that the named stage has trained to mark reasons: contexts → the `data.spans.Span`s of
        each; None = it trains none.
      models: models for `export`, by name, the main one first; each is called with settings, run and whether to load
        the adapters alone (`parts.generator.trained.Trained`).
      unread: names in the section of the system that do not affect training.
      reads_sources: whether the buckets of a stage are lengths of the generator's input, though it has no `answer`.
      alone: whether a stage with these settings reads no output of other stages but the data; None = none does.
      refreshes: whether `build` returns an `on_refresh`.
    """

    settings: type[S]
    check: Callable[[S, RunContext], None]
    build: Callable[[S, RunContext], Assembly]
    sketch: Callable[[S, RunContext, int, int], Sketch]
    answer: Callable[[S, RunContext, AnswerOptions], Answering] | None = None
    check_evaluation: Callable[[S, RunContext], None] = lambda settings, run: None
    searches: bool = False
    reads_exemplars: Callable[[S], bool] = lambda _: False
    encoder: Callable[[RunContext, str], InstanceEncoder] | None = None
    marker: Callable[[RunContext, str], Callable[[Sequence[Sequence[str]]], Sequence[Any]]] | None = None
    models: Mapping[str, Callable[[S, RunContext, bool], Any]] = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()
    reads_sources: bool = False
    alone: Callable[[S], bool] | None = None
    refreshes: bool = False


@dataclasses.dataclass(frozen=True)
class System:
    """A system: its settings and tasks.

    Attributes:
      name: name of its section in a config, and prefix of its tasks elsewhere ("NAME.TASK").
      settings: dataclass of that section, shared by all stages.
      tasks: tasks by name.
      encoder: loads the pretrained encoder, for index stages that name no training stage; None = there is none.
      index_unread: names in that section that do not affect an index.
      check: raises an error for problems with the models that all stages share; reads no weights.
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
      kind: a key of `pipeline.plan:KINDS`.
      settings: settings of that kind; for a training stage, those of its task.
      task: task of a training stage, "SYSTEM.TASK"; empty = not a training stage.
      spec: the task's `TaskSpec`.
      loop: `LoopSettings` of a training stage.
      seed: seed of the stage alone; None = the run's.
      reads: config values that the stage reads, by the path below `config`; the shared section is "system".
      alone: whether it reads no output of other stages but the data.
      modules: modules that run it, including modules of "module:name" settings; a package stands for all its modules.
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
    """A parsed config.

    Attributes:
      config: the resolved config as plain values, for storage and comparison; no code reads settings from it.
      system: the system of the run's own tasks.
      package: the module or package of that system.
      system_settings: the section shared by all stages, of the type `system.settings`.
      stages: stages by name, in the order of the run.
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
    """A stage of a run.

    Attributes:
      files: the work directory.
      plan: the parsed config of the run.
      stage: name of the running stage.
      planned: whether downloads are forbidden, as in `--mode=plan`.
      redone: finished stages that this run will make anew.
    """

    files: WorkDir
    plan: RunPlan
    stage: str
    planned: bool = False
    redone: Sequence[str] = ()

    @property
    def seed(self) -> int:
        """Seed of the stage's section, if it gives one; otherwise the run's."""
        stage = self.plan.stages.get(self.stage)
        return self.plan.seed if stage is None or stage.seed is None else stage.seed

    @property
    def directory(self) -> Path:
        return self.files.stage(self.stage)

    @property
    def shared(self) -> str:
        """Path of the section shared by all stages, "config.NAME"."""
        return f"config.{self.plan.system.name}"

    def at(self, stage: str) -> RunContext:
        """Returns the same run at another stage."""
        return dataclasses.replace(self, stage=stage)

    def named(self, name: str) -> Stage:
        """Returns the stage `name`; raises ConfigError if the run has none of that name."""
        if name not in self.plan.stages:
            raise ConfigError(f"config.{self.stage} refers to config.{name}, which is not a stage of this run.")
        return self.plan.stages[name]

    def settings(self, name: str, kind: type[S]) -> S:
        """Returns the settings of the stage `name`.

        Raises:
          ConfigError: the stage does not exist, or its settings are of another kind; the message names both sections.
        """
        stage = self.named(name)
        if not isinstance(stage.settings, kind):
            found = f"trains {stage.task!r}" if stage.task else f"is of kind {stage.kind!r}"
            raise ConfigError(
                f"config.{self.stage} refers to config.{name}, which {found}; name a stage that has {kind.__name__}."
            )
        return stage.settings

    def shared_settings(self, kind: type[S]) -> S:
        """Returns the settings shared by all stages.

        Raises:
          ConfigError: the run's system has settings of another kind.
        """
        if not isinstance(self.plan.system_settings, kind):
            raise ConfigError(
                f"config.{self.stage} needs {kind.__name__}, but the system {self.plan.system.name!r} has "
                f"{type(self.plan.system_settings).__name__} in {self.shared}; choose a task of that system."
            )
        return self.plan.system_settings

    def before(self) -> list[str]:
        """Lists the stages of the run that come before this one."""
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
        """Returns the stage `name`, to which `setting` refers; it must be of kind `kind`.

        It may train any of `tasks`, "TASK" or "SYSTEM.TASK"; without any, every task that is `able`: the required
        ability in words ("answers"), and its predicate. `setting` is a name in the section of this stage, or, for one
        that all stages share, its path (f"{run.shared}.NAME").

        Raises:
          ConfigError: the run has no such stage before this one; the message lists suitable stages.
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
        apart = setting.startswith("config.")
        where = f"config.{self.stage} reads {setting}" if apart else f"config.{self.stage}.{setting}"
        raise ConfigError(f"{where} = {name!r}: {found}; name {wanted} before this one (there are: {fitting}).")


def module_of(name: str) -> str:
    """Returns a system's module: NAME in empax/systems or empax/parts; for "module:name", the part before the colon."""
    if ":" in name:
        return name.partition(":")[0]
    homes = [f"empax.{home}.{name}" for home in ("systems", "parts")]
    return next((home for home in homes if name.isidentifier() and importlib.util.find_spec(home)), homes[0])


def load_system(name: str, where: str = "config.system") -> System:
    """Returns the `SYSTEM` of the module of `name`, or the object "module:name".

    Raises:
      ConfigError: the system does not exist, or has another name than its module.
    """
    _check_text(name, where)
    module = module_of(name)
    try:
        found = load_named(name, where) if ":" in name else getattr(importlib.import_module(module), "SYSTEM", None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{where} = {name!r} is not a module of empax/systems; write your own system as 'module:name'."
        ) from error
    if not isinstance(found, System):
        raise ConfigError(f"{where} = {name!r} names no System; see empax.core.system.")
    if ":" not in name and found.name != name:
        raise ConfigError(f"{where} = {name!r}: {module}.SYSTEM has the name {found.name!r}; give it its module's.")
    return found


def _check_text(name: object, where: str) -> None:
    if not isinstance(name, str):  # a config may hold anything
        raise ConfigError(f"{where} = {name!r} must be a text.")


def find_task(name: str, system: str, where: str) -> tuple[System, str]:
    """Returns the system that has the task, and the task's name in it.

    The section `where` names the task: "TASK" of `system`, the run's own, or "SYSTEM.TASK" ("module:name.TASK").

    Raises:
      ConfigError: the system or the task does not exist.
    """
    _check_text(name, f"{where}.task")
    owner, _, task = name.rpartition(".")
    found = load_system(owner, f"{where}.task") if owner else load_system(system)
    if task not in found.tasks:
        raise ConfigError(f"{where}.task = {name!r} is unknown; {owner or system} has {', '.join(found.tasks)}.")
    return found, task


def load_encoder_of(run: RunContext, stage: str) -> InstanceEncoder:
    """Loads the encoder trained by the stage `stage`, or, if that is empty, the pretrained encoder of the run's system.

    The checks of the stages have made sure that there is one.
    """
    if not stage:
        assert run.plan.system.encoder is not None
        return run.plan.system.encoder(run)
    spec = run.named(stage).spec
    assert spec is not None
    assert spec.encoder is not None
    return spec.encoder(run, stage)
