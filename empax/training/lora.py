"""Wraps any task with its model frozen and low-rank adapters in its place, for the same training step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from empax.core.protocols import OnlineTask, ReinforcedTask, Task, untrained_by
from empax.core.types import AnyBatch, Mean, Metrics, Params
from empax.models.lora import LoraSettings, adapt, init_adapters, lower, merge, quantize

_DROPOUT_STREAM = 2**31 - 2  # the task splits its key and never folds in such a large number


@runtime_checkable
class AdaptableTask(Task, Protocol):
    """A task that supports low-rank adapters."""

    whole: ClassVar[str]
    """Regular expression of the parameters that are trained in full (a new head); empty = none."""


@runtime_checkable
class AdaptablePolicy(ReinforcedTask, AdaptableTask, Protocol):
    """A `ReinforcedTask` that supports low-rank adapters."""


def is_adapted(params: Params) -> bool:
    """Whether the parameters belong to a LoraTask."""
    return "adapters" in params


def trained_whole(params: Params) -> Params:
    """Returns the parameters trained in full: without adapters, all of them."""
    return params["trained"] if is_adapted(params) else params


@dataclasses.dataclass(frozen=True)
class LoraTask:
    """`task` with LoRA.

    Parameters are {"adapters", "trained"}: only they have gradients, optimizer state and a place in checkpoints. The
    base weights are in `frozen`, see `freeze`.

    Attributes:
      task: task to train; its `whole` selects the parameters trained in full.
      settings: selects the weights to adapt.
      dtype: compute type of the adapted model.
    """

    task: AdaptableTask
    settings: LoraSettings
    dtype: str = "float32"

    @property
    def untrained(self) -> str:
        """The task's own (`core.protocols.untrained_by`), for the names here."""
        own = untrained_by(self.task)
        return f"(trained|adapters)/({own})" if own else ""

    def init(self, rng: jax.Array, batch: AnyBatch) -> Params:
        """Initialises adapters with no effect yet, and new parameters where the task trains them in full."""
        first, second = jax.random.split(rng)
        whole = jax.jit(lambda rng: self.task.init(rng, batch))  # traced once for shapes and values
        shapes = jax.eval_shape(whole, first)
        trained: Params = {}
        if self.task.whole:
            # Compiled together, so that discarded parameters are never created.
            trained = jax.jit(lambda rng: self._split(whole(rng))[0])(first)
        return {"adapters": init_adapters(second, self._split(shapes)[1], self.settings), "trained": trained}

    def freeze(self, params: Params, frozen: Params) -> Params:
        """Builds this task's `frozen`: the task's untrained parameters and its own `frozen`.

        Weights are in the compute type, or in eight bits.

        Args:
          params: pretrained parameters of `task`, without those trained in full.
          frozen: the `frozen` of `task` itself.
        """
        base = self._split(params)[1]
        base = quantize(base) if self.settings.int8 else base
        return {"base": lower(base, self.dtype), "frozen": frozen}

    def merged(self, params: Params, frozen: Params) -> Params:
        """Merges the adapters into parameters of `task`, for decoding and export."""
        return _join(merge(frozen["base"], params["adapters"], self.settings), params["trained"])

    def loss(
        self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        own = self._adapted(params, frozen, rng if train else None)
        return self.task.loss(own, frozen["frozen"], batch, rng, train=train)

    def _adapted(self, params: Params, frozen: Params, rng: jax.Array | None) -> Params:
        rng = None if rng is None else jax.random.fold_in(rng, _DROPOUT_STREAM)
        return _join(adapt(frozen["base"], params["adapters"], self.settings, rng), params["trained"])

    def _split(self, params: Params) -> tuple[Params, Params]:
        """Splits parameters into those trained in full and the rest."""
        trained, rest = {}, {}
        for path, leaf in flatten_dict(params).items():
            whole = self.task.whole and re.search(self.task.whole, "/".join(path))
            (trained if whole else rest)[path] = leaf
        return unflatten_dict(trained), unflatten_dict(rest)


@dataclasses.dataclass(frozen=True)
class OnlineLoraTask(LoraTask):
    """A `LoraTask` of an OnlineTask."""

    def explore(self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array) -> AnyBatch:
        assert isinstance(self.task, OnlineTask)
        return self.task.explore(self._adapted(params, frozen, None), frozen["frozen"], batch, rng)


@dataclasses.dataclass(frozen=True)
class ReinforcedLoraTask(LoraTask):
    """A `LoraTask` of a ReinforcedTask, without adapter dropout; the base weights are the reference."""

    task: AdaptablePolicy

    @property
    def rates_on_host(self) -> bool:
        return self.task.rates_on_host

    def learns_from(self, name: str) -> int:
        return self.task.learns_from(name.removeprefix("trained/"))

    def init_memory(self) -> Any:
        return self.task.init_memory()

    def loss(
        self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        # Without dropout, whatever `settings` say: `rollout` has none, and the ratio of the two would be noise.
        return self.task.loss(self._adapted(params, frozen, None), frozen["frozen"], batch, rng, train=train)

    def rollout(self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array) -> AnyBatch:
        # Sums weights and adapters once, not again for every token, if that is as exact as `loss`; eight-bit weights
        # stay eight-bit.
        summed = self.dtype == "float32" and not self.settings.int8
        own = self.merged(params, frozen) if summed else self._adapted(params, frozen, None)
        return self.task.rollout(own, {**frozen["frozen"], "reference": frozen["base"]}, batch, rng)

    def rate(self, frozen: Params, batch: AnyBatch) -> AnyBatch:
        return self.task.rate(frozen["frozen"], batch)

    def credit(self, frozen: Params, batch: AnyBatch, memory: Any) -> tuple[AnyBatch, Any, Metrics]:
        return self.task.credit(frozen["frozen"], batch, memory)

    def check_start(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.task.check_start(metrics, step=step)

    def check_progress(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.task.check_progress(metrics, step=step)


def lora_task(task: AdaptableTask, settings: LoraSettings, dtype: str = "float32") -> LoraTask:
    """Wraps `task` with LoRA, as an online or reinforced task if `task` is one."""
    if isinstance(task, ReinforcedTask):
        return ReinforcedLoraTask(cast(AdaptablePolicy, task), settings, dtype)
    return (OnlineLoraTask if isinstance(task, OnlineTask) else LoraTask)(task, settings, dtype)


def _join(one: Params, two: Params) -> Params:
    """Joins two disjoint trees."""
    return unflatten_dict({**flatten_dict(one), **flatten_dict(two)})
