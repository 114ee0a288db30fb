"""Batches as a pure function of (seed, step): the step is the whole state of the input pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Int

from empax.core.config import ConfigError
from empax.core.protocols import Examples
from empax.core.types import AnyBatch, Batch, Instance
from empax.data.features import pad

T = TypeVar("T")

_TARGET_MULTIPLE = 8

WINDOW_BATCHES = 64
"""Examples are sorted by bucket within windows of this many batches: little padding, and nearly random batches."""


def padded_lengths(longest: int, *, least: int, most: int | None = None) -> tuple[int, ...]:
    """Returns lengths to pad to, so that few shapes are compiled: from `least`, doubled up to one that fits `longest`.

    None is longer than `most`, the maximum that a model has positions for; None = unlimited.
    """
    sizes = [least]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return tuple(size if most is None else min(size, most) for size in sizes)


class BatchPlan:
    """The examples and the padded source length of each step's batch.

    Each epoch is a seeded permutation, sorted by bucket within windows and split into batches, whose order is shuffled
    again; it contains every example exactly once. Filler rows (-1) complete one batch. Its few examples, each of which
    counts more there, are drawn from all: they are not sorted.

    Targets stay in random order. A loss is the mean over the target tokens of its batch: in a batch of short targets
    alone, each token would count more, and the model would learn to answer too briefly.

    `lengths` are as in `core.protocols.Examples`; `order_lengths` are those to sort by, if `lengths` change within an
    epoch. `batch_size` counts rows over all processes. `buckets` are padded source lengths, ascending: each needs one
    compilation, and longer examples use the last.

    Raises ConfigError if there are no examples, or values are out of range.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batch_size: int,
        buckets: Sequence[int],
        seed: int,
        *,
        order_lengths: np.ndarray | None = None,
    ):
        _check(len(lengths), batch_size, buckets)
        if seed < 0:
            raise ConfigError(f"seed = {seed} must be at least 0.")
        self.batch_size, self.buckets, self.seed = batch_size, tuple(buckets), seed
        self.lengths = _source_lengths(lengths)
        self._ranks = _bucket_numbers(lengths if order_lengths is None else order_lengths, self.buckets)
        self.steps_per_epoch = -(-len(self.lengths) // batch_size)
        self._epochs: dict[int, np.ndarray] = {}

    def plan(self, step: int) -> tuple[Int[np.ndarray, " B"], int]:
        """Returns the example of each row (-1 = filler), and the padded source length."""
        epoch, position = divmod(step, self.steps_per_epoch)
        indices = self._epoch(epoch)[position]
        return indices, bucket_of(int(self.lengths[indices[indices >= 0]].max()), self.buckets)

    def _epoch(self, epoch: int) -> np.ndarray:
        """Returns [steps_per_epoch, batch_size]; caches two epochs, since threads may be in different epochs."""
        epochs = self._epochs
        if epoch not in epochs:
            kept = dict([*epochs.items()][-1:])
            kept[epoch] = self._shuffle(epoch)
            # One assignment: other threads see the old table or the new one.
            self._epochs = epochs = kept
        return epochs[epoch]

    def _shuffle(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.lengths))
        window, whole = WINDOW_BATCHES * self.batch_size, len(order) - len(order) % self.batch_size
        for start in range(0, whole, window):
            part = order[start : min(start + window, whole)]
            order[start : start + len(part)] = part[np.argsort(self._ranks[part], kind="stable")]
        full = np.full(self.steps_per_epoch * self.batch_size, -1, np.int64)
        full[: len(order)] = order
        return rng.permutation(full.reshape(self.steps_per_epoch, self.batch_size))


def _source_lengths(lengths: np.ndarray) -> Int[np.ndarray, " N"]:
    return lengths if lengths.ndim == 1 else lengths[:, 0]


def _bucket_numbers(lengths: np.ndarray, buckets: Sequence[int]) -> Int[np.ndarray, " N"]:
    return np.searchsorted(buckets, np.minimum(_source_lengths(lengths), buckets[-1]))


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """Returns the smallest bucket that holds `length`, or the largest if none does."""
    return next((bucket for bucket in buckets if length <= bucket), buckets[-1])


def train_batches(
    examples: Examples, *, batch_size: int, buckets: Sequence[int], seed: int, start_step: int, stop_step: int
) -> Iterator[Batch]:
    """Yields the batches of steps `start_step` to `stop_step` - 1, prefetched in a thread, which calls `collate`.

    The batch of a step depends on `seed` and the step alone, not on the first step. With several processes, each makes
    the whole batch, so that shapes and random draws agree, and places its own rows (`core.distributed.place`). For the
    arguments see `BatchPlan`; the random draws of `collate` depend on `seed` too. Raises ConfigError if values are out
    of range.
    """
    order = getattr(examples, "order_lengths", None)
    plan = BatchPlan(examples.lengths, batch_size, buckets, seed, order_lengths=order)

    def make(step: int) -> Batch:
        indices, length = plan.plan(step)
        return examples.collate(indices, length, np.random.default_rng([seed, step]))

    if stop_step <= start_step:
        return iter(())
    import grain  # slow to import, and only needed for training

    steps = grain.MapDataset.range(start_step, stop_step).map(make)
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)))


def eval_batches(
    examples: Examples, *, batch_size: int, buckets: Sequence[int]
) -> Iterator[tuple[Int[np.ndarray, " B"], Batch]]:
    """Yields every example once, with the example of each row (-1 = filler, in the last batch).

    They are sorted by bucket, then by target length if there is one (else the source's). Raises ConfigError if there
    are no examples, or values are out of range.
    """
    _check(len(examples), batch_size, buckets)
    lengths = _source_lengths(examples.lengths)
    order = np.lexsort((examples.lengths.reshape(len(lengths), -1)[:, -1], _bucket_numbers(examples.lengths, buckets)))

    def make(number: int) -> tuple[Int[np.ndarray, " B"], Batch]:
        rows = order[number * batch_size : (number + 1) * batch_size]
        indices = np.pad(rows, (0, batch_size - len(rows)), constant_values=-1)
        length = bucket_of(int(lengths[rows].max()), buckets)
        return indices, examples.collate(indices, length, np.random.default_rng([0, number]))

    return map(make, range(-(-len(order) // batch_size)))


def _check(num_examples: int, batch_size: int, buckets: Sequence[int]) -> None:
    if num_examples < 1:
        raise ConfigError("there are no examples to make batches of; check the split and the data folder.")
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size} must be at least 1.")
    if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
        raise ConfigError(f"buckets = {tuple(buckets)} must be ascending lengths, at least one.")


class _Some:
    """A subset of `examples`."""

    def __init__(self, examples: Examples, rows: np.ndarray) -> None:
        self._examples, self._rows = examples, rows
        self.lengths = examples.lengths[rows]

    def __len__(self) -> int:
        return len(self._rows)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> AnyBatch:
        return self._examples.collate(np.where(indices < 0, -1, self._rows[indices]), length, rng)


def some_of(examples: Examples, limit: int | None, *, seed: int) -> Examples:
    """Draws at most `limit` examples with `seed`, in their original order; None = all."""
    if limit is None or limit >= len(examples):
        return examples
    return _Some(examples, draw_rows(len(examples), limit, seed=seed))


def draw_rows(count: int, most: int, *, seed: int = 0) -> Int[np.ndarray, " n"]:
    """Draws at most `most` of `count` rows with `seed`, in ascending order; 0 = all."""
    return np.sort(np.random.default_rng(seed).permutation(count)[: most or None])


def draw(items: Sequence[T], most: int) -> list[T]:
    """Draws at most `most` items, in their original order, independent of the run's seed; 0 = all.

    The first rows of a corpus are not a representative sample: ReflectDiffu's emotion head is right for 38.7% of the
    first thousand validation contexts of EmpatheticDialogues, and for 47.5% of the sampled ones.
    """
    return [items[row] for row in draw_rows(len(items), most)]


DRAWN = "of dialogues drawn at random"
"""Describes the choice of `draw_dialogues` in records and reports."""


def draw_dialogues(instances: Sequence[Instance], most: int, *, seed: int = 0) -> list[Instance]:
    """Draws dialogues with at most `most` instances in total, in their original order; the last is truncated. 0 = all.

    Independent of the run's seed unless `seed` is given, so that runs are compared on the same rows.
    """
    if not most or most >= len(instances):
        return list(instances)
    numbers: dict[str, int] = {}
    dialogues = np.array([numbers.setdefault(i.dialogue_id, len(numbers)) for i in instances])
    places = np.random.default_rng(seed).permutation(len(numbers))
    rows = np.argsort(places[dialogues], kind="stable")[:most]
    return [instances[row] for row in np.sort(rows)]


class SequenceExamples:
    """Pairs of token ids as random-access examples (`core.protocols.Examples`).

    A source longer than its bucket keeps its last ids. A target includes the end-of-sequence id; it keeps its first
    `max_target_tokens` ids, and is padded to the next multiple of 8, or to that.
    """

    def __init__(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], *, pad_id: int, max_target_tokens: int
    ):
        self.sources = sources
        self.targets = [list(ids[:max_target_tokens]) for ids in targets]
        self.pad_id, self.max_target_tokens = pad_id, max_target_tokens
        self.lengths = np.fromiter(map(len, sources), np.int64, len(sources))

    def __len__(self) -> int:
        return len(self.sources)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> Batch:
        """Collates the rows `indices` (-1 = filler: all padding, not valid) as numpy arrays; does not use `rng`."""
        del rng
        sources = [self.sources[i][-length:] if i >= 0 else [] for i in indices]
        targets = [self.targets[i] if i >= 0 else [] for i in indices]
        longest = max(map(len, targets), default=1)
        columns = min(max(-(-longest // _TARGET_MULTIPLE), 1) * _TARGET_MULTIPLE, self.max_target_tokens)
        source, source_mask = pad(sources, length, self.pad_id)
        target, target_mask = pad(targets, columns, self.pad_id)
        # NumPy arrays until they are placed on devices; the annotations of Batch are those in the training step.
        return Batch(source, source_mask, target, target_mask, np.asarray(indices) >= 0)  # pyright: ignore
