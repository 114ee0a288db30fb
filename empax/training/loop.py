"""The training loop: steps, logs, evaluations, checkpoints. A run killed at any step resumes without any difference.

The result is bitwise equal if the device sums reproducibly: a CPU does, a GPU does with `config.deterministic`.

The state of a run is the `TrainState` and a few host-side numbers in `Counters`; every checkpoint holds both. Batches
are a function of (seed, step), so there is no other state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.manifest import read_sealed, remedy, write_sealed
from empax.core.memory import HostMemory, give_back_freed_memory
from empax.core.progress import Progress
from empax.core.protocols import Examples, ReinforcedTask, SummarizingTask
from empax.core.sharding import LOGICAL, batch_sharding, batch_shards, make_mesh, shard_params
from empax.core.system import Assembly
from empax.core.tree import count_params
from empax.core.types import AnyBatch, Metrics, Params, TrainState
from empax.data.batches import eval_batches, some_of, train_batches
from empax.models.layers import logical_axes
from empax.training.accumulation import Counters, NonFiniteError, RunAhead, Window, add_metrics, averages
from empax.training.checkpoint import RESULT, Checkpointer, load_params, meet
from empax.training.interruption import Interrupted, InterruptSignals
from empax.training.metrics_log import MetricsLog, ProgressBar
from empax.training.profiling import Profiler
from empax.training.programs import Compiling, make_programs
from empax.training.settings import LoopSettings, check_batch_sizes, check_whole_batches
from empax.training.sinks import open_sinks

log = logging.getLogger("empax")


@dataclasses.dataclass(frozen=True)
class FitResult:
    """The result of a finished stage.

    Attributes:
      params: the best parameters by validation, or the last ones without validation; numpy arrays.
      step: number of batches trained on.
      best_step: step of `params`.
      best_value: `best_metric` of `params`; None without validation.
      seconds: time spent on updates, over all restarts, without evaluations and saving.
      examples_per_second: training speed in that time.
    """

    params: Params
    step: int
    best_step: int
    best_value: float | None
    seconds: float
    examples_per_second: float


def fit(
    assembly: Assembly,
    *,
    settings: LoopSettings,
    directory: Path,
    mesh: Mesh | None = None,
    logical: Mapping[str, str] = LOGICAL,
    profile: Path | None = None,
    sinks: Sequence[str] = (),
) -> FitResult:
    """Trains until `settings.steps` or until patience ends; resumes from the newest checkpoint if there is one.

    Args:
      assembly: the task, its data and its initial weights.
      settings: settings of the loop.
      directory: folder of the stage, named after it: checkpoints, and `result.json` after training. The run's
        metrics.jsonl and TensorBoard's files in `tensorboard/STAGE` are beside it.
      mesh: None = all devices along `data`.
      logical: name of a parameter's axis → mesh axis that it is split over.
      profile: folder for a trace of a few updates (with several processes, one subfolder each); None = no trace.
      sinks: trackers that also receive the metrics, see `training.sinks`.

    Raises:
      ConfigError: the settings do not fit the devices, the parameter names or the metrics.
      NonFiniteError: a metric is NaN or infinite. TrainingError: a ReinforcedTask found a problem.
      CheckpointError: a checkpoint cannot be written.
      Interrupted: Ctrl-C or SIGTERM, after saving.
    """
    ended, stage = directory / RESULT, directory.name
    if ended.exists():
        return FitResult(params=load_params(directory), **read_sealed(ended))
    mesh = make_mesh() if mesh is None else mesh
    check_batch_sizes(settings, batch_shards(mesh), where=f"config.{stage}")
    check_whole_batches(settings, assembly.task, where=f"config.{stage}")
    if settings.refresh_every_steps and assembly.on_refresh is None:
        raise ConfigError(f"refresh_every_steps = {settings.refresh_every_steps}, but {stage} has nothing to refresh.")
    with contextlib.ExitStack() as stack:
        run = _Run(
            stack, assembly, settings, directory=directory, mesh=mesh, logical=logical, profile=profile, sinks=sinks
        )
        run.train_to_end()
    result = run.result()
    if distributed.is_writer():
        if assembly.on_end is not None:
            assembly.on_end(run.step, load_params(directory))
        write_sealed(ended, result)
    distributed.wait_for(ended)
    return FitResult(params=load_params(directory), **result)


class _Run:
    """One call of `fit`: its parts, its state, and the actions between two steps."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        assembly: Assembly,
        settings: LoopSettings,
        *,
        directory: Path,
        mesh: Mesh,
        logical: Mapping[str, str],
        profile: Path | None,
        sinks: Sequence[str],
    ) -> None:
        """Creates or restores the state, and opens the resources that `stack` closes.

        Meanwhile the first update is compiled, and the first evaluation if that takes longer.
        """
        self.task = task = assembly.task
        self.train, self.validation, self.on_refresh = assembly.train, assembly.validation, assembly.on_refresh
        self.settings, self.mesh = settings, mesh
        self.stage = stage = directory.name
        if self.validation is not None:
            self.validation = some_of(self.validation, settings.max_eval_examples, seed=settings.seed)
        places = shard_params(assembly.frozen, mesh, axes=logical_axes, logical=logical)
        self.frozen = distributed.place(assembly.frozen, places)
        self.step = 0  # batches trained on; the device may lag behind
        self.counters, self.window = Counters(), Window.starting_from({})
        self.ahead, self.memory = RunAhead(), HostMemory()
        # Until the first answers of this process have been checked.
        self.unchecked = task if isinstance(task, ReinforcedTask) else None

        self.checkpointer = stack.enter_context(contextlib.closing(Checkpointer(directory)))
        self.compiling = stack.enter_context(contextlib.closing(Compiling()))
        meet(stage)  # earlier work may take longer in some processes
        first = next(iter(self._batches(0, 1)))
        self.programs = make_programs(task, settings, first, mesh=mesh, logical=logical)
        restored = self.checkpointer.restore_latest(self.programs.template)
        rows: list[str] | None = None  # lines of metrics.jsonl up to the restored step
        if restored is not None:
            self.step, self.state, extra = restored
            rows = extra.pop("rows")
            self.counters = Counters(**extra)
            self.window = Window.restored(self.counters.window)
        self._compile_update()
        if restored is None:
            self.state = self.programs.first_state(assembly.initial)
        if self.compiling.busy or settings.best_metric not in (None, "loss"):
            self._compile_evaluation()
        log.info("%s: %d parameters, from step %d.", stage, count_params(self.programs.template.params), self.step)

        self.log: MetricsLog | None = None  # only in the writing process
        if distributed.is_writer():
            path, board = directory.parent / "metrics.jsonl", directory.parent / "tensorboard" / stage
            trackers = open_sinks(sinks, directory, dataclasses.asdict(settings))
            opened = MetricsLog(
                path, stage=stage, resume_step=self.step, rows=rows, tensorboard=board, trackers=trackers
            )
            self.log = stack.enter_context(opened)
        self.bar = stack.enter_context(contextlib.closing(ProgressBar(stage, steps=settings.steps, initial=self.step)))
        self.signals = stack.enter_context(InterruptSignals())
        self.train_step: Callable[[TrainState, Params, AnyBatch], tuple[TrainState, Metrics]] = self.programs.train
        if profile is not None:
            if jax.process_count() > 1:
                profile = profile / f"process_{jax.process_index()}"  # or they would share files on one machine
            self.train_step = stack.enter_context(contextlib.closing(Profiler(profile))).watch(self.train_step)
        self.since = time.monotonic()

    def _compile_update(self) -> None:
        # With several processes, GPUs choose kernels together, and so in one order.
        if jax.process_count() > 1 or self._is_over():
            return
        batch = next(iter(self._batches(self.step, self.step + 1)))
        placed = distributed.place(batch, batch_sharding(self.mesh))
        self.compiling.begin(*self.programs.lower_update(self.frozen, placed))

    def _compile_evaluation(self) -> None:
        if self.validation is None:
            return
        _, batch = next(self._eval_batches(self.validation))
        placed = distributed.place(batch, batch_sharding(self.mesh))
        params, rng = self.programs.template.params, jax.random.key(self.settings.seed)
        lowered = self.programs.evaluate.lower(params, self.frozen, placed, rng)
        names = dict.fromkeys(lowered.out_info, 1.0)
        self._check_best_metric(self.task.summarize(names) if isinstance(self.task, SummarizingTask) else names)
        if self.compiling.busy:
            self.compiling.begin(lowered)

    def _check_best_metric(self, values: Mapping[str, float]) -> None:
        best = self.settings.best_metric
        if best is not None and best not in values:
            names = ", ".join(sorted(values))
            raise ConfigError(f"best_metric = {best!r} is not a metric of {self.stage}; it has {names}.")

    def train_to_end(self) -> None:
        self.since = time.monotonic()
        for start, stop in self.settings.segments(self.step):
            if self._is_over():
                break
            self._refresh(start)
            # A new iterator for each segment: no batch may be made before a refresh that it depends on.
            for batch in self._batches(start, stop):
                self._update(batch)
                self._after_update()
                if self._is_over():
                    break
        judged = self.validation is not None and self.settings.best_metric is not None
        if not judged and self.counters.best_step < self.step:
            self.counters.best_step = self.step
            self.checkpointer.save_best(self.step, self._judged_params(), None)
        self.checkpointer.wait()
        if distributed.agreed(self.signals.received):  # after the last step, with nothing left to stop
            meet(f"{self.stage}: saved")
            raise Interrupted(f"{self.stage}: saved after its last step; run again to continue.", step=self.step)

    def result(self) -> dict[str, Any]:
        counters = self.counters
        return {
            "step": self.step,
            "best_step": counters.best_step,
            "best_value": counters.best_value,
            "seconds": counters.seconds,
            "examples_per_second": counters.examples / max(counters.seconds, 1e-9),
        }

    def _batches(self, start: int, stop: int) -> Iterator[AnyBatch]:
        s = self.settings
        return iter(
            train_batches(
                self.train, batch_size=s.batch_size, buckets=s.buckets, seed=s.seed, start_step=start, stop_step=stop
            )
        )

    def _eval_batches(self, validation: Examples) -> Iterator[tuple[np.ndarray, AnyBatch]]:
        size = self.settings.eval_batch_size or self.settings.batch_size
        return eval_batches(validation, batch_size=size, buckets=self.settings.buckets)

    def _update(self, batch: AnyBatch) -> None:
        examples = int(np.sum(batch.valid))
        on_host = jax.default_backend() == "cpu"
        saved = on_host and self.checkpointer.wait()  # a step during a save would hold the state twice
        self.memory.before(str(jax.tree.map(np.shape, batch)), on_host=on_host, freed=saved)
        batch = distributed.place(batch, batch_sharding(self.mesh))
        self.compiling.wait()
        if self.programs.explore is not None:
            batch = self.programs.explore(self.state, self.frozen, batch)
        logged: Metrics = {}
        if self.programs.begin is not None:
            self.state, batch, logged = self.programs.begin(self.state, self.frozen, batch)
            self._check_start(batch)
        self.state, metrics = self.train_step(self.state, self.frozen, batch)
        metrics = distributed.local({**logged, **metrics})
        self.window = add_metrics(self.window, metrics, self.step + 1)
        self.ahead.push(metrics["loss"].total)
        self.counters.examples += examples
        self.step += 1
        self.bar.advance()

    def _check_start(self, batch: AnyBatch) -> None:
        """Checks that `loss` agrees with `rollout` on the first answers.

        An update may round differently: it also computes gradients, in another program.
        """
        if self.unchecked is None:
            return
        rng = jax.random.key(self.settings.seed)
        metrics = distributed.local(self.programs.evaluate(self.state.params, self.frozen, batch, rng))
        window = add_metrics(Window.starting_from({}), metrics, self.step + 1)
        self.unchecked.check_start(averages(window.fetch()), step=self.step)
        self.unchecked = None

    def _after_update(self) -> None:
        """Logs, evaluates, keeps, saves and exits, as due."""
        settings, step = self.settings, self.step
        last = step == settings.steps
        if last or step % settings.log_every_steps == 0:
            self._log()
        if self.validation is not None and (last or step % settings.eval_every_steps == 0):
            self._evaluate(self.validation)
        if settings.keep_every_steps and step % settings.keep_every_steps == 0:
            self.checkpointer.keep(step, self._judged_params())
        over, interrupted = self._is_over(), self._is_interrupted()
        if over and self.window.sums:  # patience has ended between two rows
            self._log()
        if over or interrupted or step % settings.checkpoint_every_steps == 0:
            self._save()
        if interrupted and not over:
            self.checkpointer.wait()
            meet(f"{self.stage}: saved")  # the first process completes the checkpoint once the others have finished
            raise Interrupted(f"{self.stage}: stopped and saved after step {step}; run again to continue.", step=step)

    def _is_over(self) -> bool:
        patience = self.settings.patience
        tired = patience is not None and self.counters.evaluations_without_improvement >= patience
        return tired or self.step >= self.settings.steps

    def _is_interrupted(self) -> bool:
        """Whether to stop; processes agree at logged steps, where they wait anyway, since agreement takes time."""
        if jax.process_count() > 1 and self.step % self.settings.log_every_steps:
            return False
        return distributed.agreed(self.signals.received)

    def _refresh(self, start: int) -> None:
        every = self.settings.refresh_every_steps
        if not every or start < every or self.on_refresh is None:
            return
        self._sync()
        self.on_refresh(start - start % every, None if start % every else distributed.whole(self.state.params))
        give_back_freed_memory()
        self.since = time.monotonic()

    def _sync(self) -> dict[str, list[float]]:
        """Waits for the device and returns total and weight of each metric since the last row.

        Raises:
          NonFiniteError: some update since then made a metric non-finite.
        """
        try:
            totals = self.window.fetch()
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{self.stage}: {error}; nothing was saved since. Try a lower optimizer.learning_rate, more "
                f"warmup_steps or a smaller clip_norm. {remedy(self.stage)}"
            ) from error
        now = time.monotonic()
        self.counters.seconds += now - self.since
        self.since = now
        return totals

    def _log(self) -> None:
        window, counters = self._sync(), self.counters
        values = averages(window)
        values["learning_rate"] = float(self.programs.learning_rate(self.step * self.settings.updates_per_batch - 1))
        if isinstance(self.task, ReinforcedTask):
            self.task.check_progress(values, step=self.step)
        rate = counters.rate_since_row()
        if self.log is not None:
            self.log.write(self.step, "train", {**values, "examples_per_second": rate, "seconds": counters.seconds})
        self.bar.show(loss=values["loss"], examples_per_second=rate)
        self.window = Window.starting_from({})
        self.checkpointer.check()

    def _evaluate(self, validation: Examples) -> None:
        self._sync()
        give_back_freed_memory()  # an evaluation needs buffers of other sizes
        counters, window = self.counters, Window.starting_from({})
        params = self._judged_params()
        rng = jax.random.key(self.settings.seed)
        with Progress(f"{self.stage}: validation", total=len(validation), unit="examples") as progress:
            for number, (_, batch) in enumerate(self._eval_batches(validation)):
                rows = int(np.sum(batch.valid))
                batch = distributed.place(batch, batch_sharding(self.mesh))
                metrics = self.programs.evaluate(params, self.frozen, batch, jax.random.fold_in(rng, number))
                metrics = distributed.local(metrics)
                window = add_metrics(window, metrics, self.step)
                self.ahead.push(metrics["loss"].total)
                progress.advance(rows)
        try:
            values = averages(window.fetch())
        except NonFiniteError as error:
            raise NonFiniteError(f"{self.stage}: in the evaluation, {error}.") from error
        if isinstance(self.task, SummarizingTask):
            values = self.task.summarize(values)
        rate = len(validation) / max(time.monotonic() - self.since, 1e-9)
        if self.log is not None:
            self.log.write(
                self.step, "validation", {**values, "examples_per_second": rate, "seconds": counters.seconds}
            )
        self._compare(values)
        give_back_freed_memory()
        self.since = time.monotonic()

    def _judged_params(self) -> Params:
        """Returns the parameters to evaluate and keep: the last update's, or the running mean."""
        if not self.settings.optimizer.ema_decay:
            return self.state.params
        return self.programs.average(self.state.opt_state, self.state.params)

    def _compare(self, values: dict[str, float]) -> None:
        """Keeps the parameters if they are the best so far."""
        settings = self.settings
        if settings.best_metric is None:
            return
        self._check_best_metric(values)
        value = values[settings.best_metric]
        if self.counters.improves(value, self.step, settings.best_mode):
            self.checkpointer.save_best(self.step, self._judged_params(), value)

    def _save(self) -> None:
        self.counters.window = self._sync()
        rows = self.log.rows if self.log is not None else []
        self.checkpointer.save(self.step, self.state, {**dataclasses.asdict(self.counters), "rows": list(rows)})
        self.since = time.monotonic()
