"""Any task with its model frozen and low-rank adapters in its place: a task like any other, for the one step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from empax.core.protocols import OnlineTask, ReinforcedTask, Task
from empax.core.types import AnyBatch, Mean, Metrics, Params
from empax.models.lora import LoraSettings, adapt, init_adapters, lower, merge, quantize

_DROPOUT_STREAM = 2**31 - 2  # the task splits its key and never folds in a number that large


@runtime_checkable
class AdaptableTask(Task, Protocol):
    """A task that says what low-rank adapters leave to it."""

    whole: ClassVar[str]
    """Regular expression of the parameters that are trained as they are (a new head); empty = none."""


@runtime_checkable
class AdaptablePolicy(ReinforcedTask, AdaptableTask, Protocol):
    """Both at once."""


def is_adapted(params: Params) -> bool:
    """Whether parameters are those of a LoraTask."""
    return "adapters" in params


def trained_whole(params: Params) -> Params:
    """The parameters that training has changed as they are: without adapters, all of them."""
    return params["trained"] if is_adapted(params) else params


@dataclasses.dataclass(frozen=True)
class LoraTask:
    """`task` with LoRA.

    Parameters are {"adapters", "trained"}: only they have gradients, optimizer state and a place in checkpoints. What
    they sit on is in `frozen`, see `freeze`.

    Attributes:
      task: what is trained; `whole` says which of its parameters as they are.
      settings: which weights are adapted.
      dtype: what the adapted model computes in.
    """

    task: AdaptableTask
    settings: LoraSettings
    dtype: str = "float32"

    def init(self, rng: jax.Array, batch: AnyBatch) -> Params:
        """Adapters that change nothing yet, and fresh parameters where the task says so."""
        first, second = jax.random.split(rng)
        whole = jax.jit(lambda rng: self.task.init(rng, batch))  # traced once for shapes and values
        shapes = jax.eval_shape(whole, first)
        trained: Params = {}
        if self.task.whole:
            # Compiled as one, so that what is not kept is never made.
            trained = jax.jit(lambda rng: self._split(whole(rng))[0])(first)
        return {"adapters": init_adapters(second, self._split(shapes)[1], self.settings), "trained": trained}

    def freeze(self, params: Params, frozen: Params) -> Params:
        """The `frozen` of this task: of the task's own parameters what is not trained, and its own `frozen`.

        Weights are in the type of the arithmetic there, or in eight bits.

        Args:
          params: of `task`, pretrained, without the ones that it trains whole.
          frozen: what `task` itself wants.
        """
        base = self._split(params)[1]
        base = quantize(base) if self.settings.int8 else base
        return {"base": lower(base, self.dtype), "frozen": frozen}

    def merged(self, params: Params, frozen: Params) -> Params:
        """Parameters of `task` alone, without adapters: to decode with, to export."""
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
        """What is trained as it is, and the rest."""
        trained, rest = {}, {}
        for path, leaf in flatten_dict(params).items():
            whole = self.task.whole and re.search(self.task.whole, "/".join(path))
            (trained if whole else rest)[path] = leaf
        return unflatten_dict(trained), unflatten_dict(rest)


@dataclasses.dataclass(frozen=True)
class OnlineLoraTask(LoraTask):
    """`LoraTask` of an OnlineTask."""

    def explore(self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array) -> AnyBatch:
        assert isinstance(self.task, OnlineTask)
        return self.task.explore(self._adapted(params, frozen, None), frozen["frozen"], batch, rng)


@dataclasses.dataclass(frozen=True)
class ReinforcedLoraTask(LoraTask):
    """`LoraTask` of a ReinforcedTask; its adapters know no dropout, and what they sit on is the reference."""

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
        # The sums of weights and adapters once, not again for every token, where they are no less exact than `loss` is;
        # and eight bits stay eight bits.
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
    """`task` with LoRA; it explores, or answers and learns from that, if `task` does."""
    if isinstance(task, ReinforcedTask):
        return ReinforcedLoraTask(cast(AdaptablePolicy, task), settings, dtype)
    return (OnlineLoraTask if isinstance(task, OnlineTask) else LoraTask)(task, settings, dtype)


def _join(one: Params, two: Params) -> Params:
    """Both trees in one; no leaf is in both."""
    return unflatten_dict({**flatten_dict(one), **flatten_dict(two)})
