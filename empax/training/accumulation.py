"""Counters of a run: metrics, summed on the device so that the host need not wait for every step, and its progress."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from empax.core.config import UserError
from empax.core.types import Mean, Metrics

_RUN_AHEAD_STEPS = 4  # steps that may wait on the device: enough to keep it busy, few enough to stop quickly


class TrainingError(UserError, RuntimeError):
    """Training cannot continue; the message names the problem and the remedy. Checkpoints predate it."""


class NonFiniteError(TrainingError):
    """A metric became NaN or infinite; the message names the step and the metric."""


@flax.struct.dataclass
class Window:
    """Sums of metrics over some steps, on the device."""

    sums: Metrics
    bad_step: dict[str, Int[Array, ""]]  # first step with a non-finite metric; -1 = none

    @classmethod
    def starting_from(cls, sums: Metrics) -> Window:
        return cls(sums=sums, bad_step={name: jnp.full((), -1, jnp.int32) for name in sums})

    @classmethod
    def restored(cls, totals: Mapping[str, list[float]]) -> Window:
        """Restores the result of `fetch`, bit for bit."""
        return cls.starting_from(
            {name: Mean(total=jnp.float32(t), weight=jnp.float32(w)) for name, (t, w) in totals.items()}
        )

    def fetch(self) -> dict[str, list[float]]:
        """Waits for the device and returns total and weight of each metric.

        Raises:
          NonFiniteError: a metric was not finite; `loss` is named before the metrics that depend on it.
        """
        sums, bad_step = jax.device_get((self.sums, self.bad_step))
        bad = [(int(step), name != "loss", name) for name, step in bad_step.items() if step >= 0]
        if bad:
            step, _, name = min(bad)
            raise NonFiniteError(f"{name} is not finite at step {step}")
        return {name: [float(mean.total), float(mean.weight)] for name, mean in sums.items()}


@jax.jit
def _add(window: Window, metrics: Metrics, step: Any) -> Window:
    def first_bad(name: str) -> jax.Array:
        found = (window.bad_step[name] < 0) & ~jnp.isfinite(metrics[name].value())
        return jnp.where(found, step, window.bad_step[name])

    sums = {name: window.sums[name] + metric for name, metric in metrics.items()}
    return Window(sums=sums, bad_step={name: first_bad(name) for name in metrics})


def add_metrics(window: Window, metrics: Metrics, step: int) -> Window:
    """Adds the metrics of step number `step` to `window`, without waiting for the device."""
    if not window.sums:
        window = Window.starting_from({name: Mean.zero() for name in metrics})
    return _add(window, metrics, np.int32(step))


def averages(totals: Mapping[str, list[float]]) -> dict[str, float]:
    """Returns total / weight by name; 0 for a zero weight."""
    return {name: total / max(weight, 1e-9) for name, (total, weight) in totals.items()}


class RunAhead:
    """Blocks on an array dispatched a few calls ago, so that the host does not run too far ahead of the device.

    On a CPU it blocks on the last one: the CPU is host and device, and every waiting step allocates its buffers early.
    """

    def __init__(self) -> None:
        self._arrays: collections.deque[jax.Array] = collections.deque()
        self._steps = 0 if jax.default_backend() == "cpu" else _RUN_AHEAD_STEPS

    def push(self, array: jax.Array) -> None:
        self._arrays.append(array)
        if len(self._arrays) > self._steps:
            jax.block_until_ready(self._arrays.popleft())


@dataclasses.dataclass
class Counters:
    """The state of a run besides its `TrainState`; saved with it as JSON."""

    best_value: float | None = None
    best_step: int = 0
    evaluations_without_improvement: int = 0
    seconds: float = 0.0
    examples: int = 0
    logged_seconds: float = 0.0  # `seconds` and `examples` at the last row of metrics.jsonl
    logged_examples: int = 0
    window: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # total and weight since that row

    def rate_since_row(self) -> float:
        """Returns examples per second since the last row, and starts the next interval."""
        examples, seconds = self.examples - self.logged_examples, self.seconds - self.logged_seconds
        self.logged_examples, self.logged_seconds = self.examples, self.seconds
        return examples / max(seconds, 1e-9)

    def improves(self, value: float, step: int, mode: Literal["min", "max"]) -> bool:
        """Whether `value` is the best so far; if not, counts the failed evaluation."""
        best = self.best_value
        if best is not None and not (value < best if mode == "min" else value > best):
            self.evaluations_without_improvement += 1
            return False
        self.best_value, self.best_step, self.evaluations_without_improvement = value, step, 0
        return True
