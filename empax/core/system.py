"""What a system offers: tasks to train, and what each of them can do once it is trained."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from empax.core.config import ConfigError
from empax.core.plugins import load_named
from empax.core.protocols import Answering, InstanceEncoder
from empax.core.run import Assembly, RunContext, Sketch

S = TypeVar("S")


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
        alone are wanted (`systems.dialogue.trained.Trained`).
      unread: names in the section of the system that change nothing of what is trained.
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


def load_system(name: str, where: str = "config.system") -> System:
    """The `SYSTEM` of the module `empax.systems.NAME`, or what "module:name" names.

    Raises:
      ConfigError: there is no such system.
    """
    try:
        found = load_named(name, where) if ":" in name else _system_of(f"empax.systems.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"empax.systems.{name}":
            raise
        raise ConfigError(
            f"{where} = {name!r} is no module of empax/systems; a system of your own is 'module:name'."
        ) from error
    if not isinstance(found, System):
        raise ConfigError(f"{where} = {name!r} names no System; see empax.core.system.")
    return found


def _system_of(module: str) -> Any:
    return getattr(importlib.import_module(module), "SYSTEM", None)


def find_task(name: str, system: str, where: str) -> tuple[System, str]:
    """The system that has the task, and the task's name in it.

    Args:
      name: "TASK" of the run's own system, or "SYSTEM.TASK" ("module:name.TASK").
      system: the run's own.
      where: section that names the task.

    Raises:
      ConfigError: there is no such system or task.
    """
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
