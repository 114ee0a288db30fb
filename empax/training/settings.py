"""Settings of the training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from empax.core.config import ConfigError, check_numbers
from empax.core.settings import DataSettings
from empax.training.optimizer import OptimizerSettings

LONGEST_BUCKET = 1_000_000
"""In tokens; no model here reads more."""


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """Settings of the training loop: its length, its batches and its evaluations.

    Attributes:
      steps: maximum number of batches; each gives one update, or `epochs * minibatches` of them.
      batch_size: examples per batch.
      buckets: source lengths in tokens to pad batches to, ascending.
      accumulate: micro-batches per update.
      epochs: for a ReinforcedTask: number of passes over each batch of answers.
      minibatches: for a ReinforcedTask: updates per epoch, each from different answers.
      eval_batch_size: examples per evaluation batch; None = batch_size.
      seed: seed of initial parameters, dropout and the order of the examples; a recipe's stage without one takes the
        run's.
      log_every_steps: steps per row of metrics.jsonl.
      eval_every_steps: steps between evaluations; the last step is always evaluated.
      checkpoint_every_steps: steps between checkpoints; the last step always makes one.
      keep_every_steps: steps between parameters that are kept for evaluations (`evaluate.step`), in `STAGE/kept`; 0 =
        none.
      patience: consecutive evaluations without improvement before training stops; None = no early stopping.
      best_metric: metric that selects the best parameters: a metric of the task, or "loss"; None = the last parameters.
      best_mode: whether `best_metric` is better when smaller ("min") or larger ("max").
      max_eval_examples: number of validation examples, chosen once at random; None = all.
      refresh_every_steps: steps between calls of `on_refresh`; 0 = none.
      optimizer: settings of the optimizer.
    """

    steps: int
    batch_size: int
    buckets: tuple[int, ...]
    accumulate: int = 1
    epochs: int = 1
    minibatches: int = 1
    eval_batch_size: int | None = None
    seed: int = 0
    log_every_steps: int = 50
    eval_every_steps: int = 500
    checkpoint_every_steps: int = 500
    keep_every_steps: int = 0
    patience: int | None = None
    best_metric: str | None = "loss"
    best_mode: Literal["min", "max"] = "min"
    max_eval_examples: int | None = None
    refresh_every_steps: int = 0
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)

    def __post_init__(self) -> None:
        check_numbers(
            self, "steps", "batch_size", "accumulate", "epochs", "minibatches", "log_every_steps", "eval_every_steps",
            "checkpoint_every_steps", "eval_batch_size", "patience", "max_eval_examples", least=1,
        )  # fmt: skip
        check_numbers(self, "keep_every_steps", "refresh_every_steps", "seed", least=0)
        check_buckets(self.buckets)
        if self.best_metric == "":
            raise ConfigError("best_metric = '' must be a metric, 'loss', or None for the last parameters.")
        if self.patience is not None and self.best_metric is None:
            raise ValueError("patience needs a best_metric to judge by.")
        if self.batch_size % (self.accumulate * self.minibatches):
            raise ValueError(
                f"batch_size = {self.batch_size} is not divisible by accumulate * minibatches = {self.accumulate} * "
                f"{self.minibatches}."
            )

    @property
    def updates(self) -> int:
        """Number of updates in all batches."""
        return self.steps * self.updates_per_batch

    @property
    def updates_per_batch(self) -> int:
        return self.epochs * self.minibatches

    def segments(self, start: int) -> Iterator[tuple[int, int]]:
        """Splits [start, steps) where `on_refresh` is called."""
        every = self.refresh_every_steps
        while start < self.steps:
            stop = min(self.steps, (start // every + 1) * every) if every else self.steps
            yield start, stop
            start = stop


def kept_steps(settings: LoopSettings) -> range:
    """Returns the steps whose parameters are kept for evaluations."""
    every = settings.keep_every_steps
    return range(every, settings.steps + 1, every) if every else range(0)


def within_passes(settings: LoopSettings, num_examples: int, most: int) -> LoopSettings:
    """Returns settings with fewer steps, if the given ones make more than `most` passes over the examples.

    Warm-ups and intervals in steps become shorter by the same factor. `most` = 0: any number of passes.
    """
    steps = max(most * -(-num_examples // settings.batch_size), 1)
    if not most or steps >= settings.steps:
        return settings

    def shorter(updates: int) -> int:
        return max(round(updates * steps / settings.steps), 1) if updates else 0

    optimizer = settings.optimizer
    groups = tuple(
        group if group.warmup_steps is None else dataclasses.replace(group, warmup_steps=shorter(group.warmup_steps))
        for group in optimizer.groups
    )
    every = ("log_every_steps", "eval_every_steps", "checkpoint_every_steps", "refresh_every_steps")
    return dataclasses.replace(
        settings,
        steps=steps,
        optimizer=dataclasses.replace(optimizer, warmup_steps=shorter(optimizer.warmup_steps), groups=groups),
        **{name: shorter(getattr(settings, name)) for name in every},
    )


def steps_on(data: DataSettings, settings: LoopSettings, num_examples: int) -> int:
    """Returns a stage's number of steps: that of its settings, or fewer for the user's corpus; see `within_passes`."""
    return within_passes(settings, num_examples, data.passes).steps


def check_buckets(buckets: Sequence[int]) -> None:
    """Raises ConfigError unless `buckets` are ascending lengths in tokens, each at most LONGEST_BUCKET."""
    if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] > LONGEST_BUCKET:
        raise ConfigError(
            f"buckets = {tuple(buckets)} must be ascending lengths in tokens, at least one, at most {LONGEST_BUCKET:,}."
        )


def check_whole_batches(settings: LoopSettings, task: object, *, where: str) -> None:
    """Raises ConfigError if batches with interacting examples are split; `where` is the stage's section.

    Such a task has `splits_batches = False`; otherwise the loss of a batch is the mean of the losses of its parts.
    """
    cut = [name for name in ("accumulate", "minibatches") if getattr(settings, name) > 1]
    if cut and not getattr(task, "splits_batches", True):
        raise ConfigError(
            f"{where}.{cut[0]} = {getattr(settings, cut[0])} splits a batch of {settings.batch_size}, but here the "
            f"examples of a batch are each other's negatives, and each would have fewer of them; set {cut[0]} = 1, "
            "with a smaller batch_size if memory is short."
        )


def check_batch_sizes(settings: LoopSettings, shards: int, *, where: str) -> None:
    """Raises ConfigError if a batch cannot be split over `shards` devices; `where` is the stage's section."""
    parts = settings.accumulate * settings.minibatches
    sizes = {"batch_size / (accumulate * minibatches)": settings.batch_size // parts}
    if settings.eval_batch_size is not None:
        sizes["eval_batch_size"] = settings.eval_batch_size
    for name, size in sizes.items():
        if size % shards:
            raise ConfigError(
                f"{where}: {name} = {size} cannot be split over {shards} devices; make it a multiple of {shards}, or "
                "use fewer devices (mesh.data, mesh.fsdp)."
            )
