"""Batches: a pure function of seed and step, every example once an epoch, no loss over processes."""

import collections
import threading

import jax
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.protocols import Examples
from empax.core.types import Instance
from empax.data.batches import (
    BatchPlan,
    SequenceExamples,
    bucket_of,
    draw,
    draw_dialogues,
    eval_batches,
    some_of,
    train_batches,
)

BUCKETS = (8, 16, 32)
PAD = 0


def make_examples(number=101):
    """Example i: a source of 1 to 40 times i + 1, and a target of 1 to 10 ids that ends with -1."""
    rng = np.random.default_rng(0)
    sources = [[i + 1] * int(n) for i, n in enumerate(rng.integers(1, 41, number))]
    targets = [[i + 1] * int(n) + [-1] for i, n in enumerate(rng.integers(0, 10, number))]
    return SequenceExamples(sources, targets, pad_id=PAD, max_target_tokens=8)


def make_batches(examples, start, stop, **kwargs):
    settings = {"batch_size": 8, "buckets": BUCKETS, "seed": 3} | kwargs
    return list(train_batches(examples, start_step=start, stop_step=stop, **settings))


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def which(batch):
    """The examples in a batch's valid rows, read off its sources."""
    return (np.asarray(batch.source)[np.asarray(batch.valid), 0] - 1).tolist()


@pytest.mark.parametrize("number", [96, 101, 5])
def test_each_epoch_holds_every_example_once(number):
    examples = make_examples(number)
    plan = BatchPlan(examples.lengths, 8, BUCKETS, seed=0)
    assert plan.steps_per_epoch == -(-number // 8)
    epochs = []
    for epoch in range(3):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        rows = np.concatenate([plan.plan(step)[0] for step in steps])
        assert sorted(rows[rows >= 0]) == list(range(number))
        epochs.append(rows.tolist())
    assert epochs[0] != epochs[1] != epochs[2]


def test_an_epoch_whose_lengths_change_within_it_holds_every_example_once():
    examples = make_examples(901)
    examples.order_lengths = examples.lengths
    steps = -(-901 // 8)
    first = make_batches(examples, 0, steps // 2, buckets=(8, 40))
    whole = make_batches(examples, 0, steps, buckets=(8, 40))
    examples.lengths = examples.lengths[::-1].copy()  # exemplars were found anew
    rest = make_batches(examples, steps // 2, steps, buckets=(8, 40))
    assert sorted(i for batch in (*first, *rest) for i in which(batch)) == list(range(901))
    assert [which(batch) for batch in (*first, *rest)] == [which(batch) for batch in whole]
    assert any(one.source.shape != other.source.shape for one, other in zip(rest, whole[steps // 2 :], strict=True))


def test_bucket_is_the_smallest_that_fits():
    plan = BatchPlan(make_examples().lengths, 8, BUCKETS, seed=0)
    seen = set()
    for step in range(plan.steps_per_epoch):
        indices, bucket = plan.plan(step)
        longest = plan.lengths[indices[indices >= 0]].max()
        assert bucket == bucket_of(longest, BUCKETS)
        assert longest <= bucket or bucket == 32
        assert bucket == 8 or longest > bucket // 2
        seen.add(bucket)
    assert seen == set(BUCKETS)
    for lengths in ([30, 2, 3], [[30, 2], [2, 9], [3, 1]]):  # the first row counts as well, and no target does
        assert BatchPlan(np.array(lengths), 4, BUCKETS, seed=0).plan(0)[1] == 32


def test_sorting_in_windows_saves_padding():
    lengths = np.random.default_rng(0).integers(1, 33, 1024)  # one window
    plan = BatchPlan(lengths, 16, tuple(range(1, 33)), seed=0)
    buckets = [plan.plan(step)[1] for step in range(plan.steps_per_epoch)]
    assert 16 * sum(buckets) < 1.1 * lengths.sum()  # 1.9 times as much without
    assert np.sum(np.diff(buckets) < 0) > 10  # but steps do not go from short to long


def test_batches_of_training_have_about_equally_many_target_tokens():
    """In a batch of short targets alone, each token would count more in the mean over its tokens."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 41, (4096, 2))
    plan = BatchPlan(lengths, 32, BUCKETS, seed=0)
    means = [lengths[plan.plan(step)[0], 1].mean() for step in range(plan.steps_per_epoch)]
    assert np.std(means) < 1.15 * lengths[:, 1].std() / np.sqrt(32)  # as in random batches


def test_an_incomplete_batch_holds_contexts_of_all_lengths():
    """Its examples count more, each in a mean over few: here as much as the other 32 together."""
    lengths = np.repeat([4, 20], [22, 11])
    plan = BatchPlan(lengths, 32, BUCKETS, seed=0)
    batches = [plan.plan(step)[0] for step in range(2 * 400)]
    alone = np.concatenate([rows[rows >= 0] for rows in batches if np.sum(rows >= 0) == 1])
    assert len(alone) == 400
    assert np.mean(lengths[alone] == 20) == pytest.approx(1 / 3, abs=0.1)  # 1, if the last of a sorted epoch are left


def test_targets_of_like_length_share_a_batch_of_an_evaluation():
    made = make_examples(400)
    made.lengths = np.stack([made.lengths, list(map(len, made.targets))], axis=1)
    found = [made.lengths[rows[rows >= 0]] for rows, _ in eval_batches(made, batch_size=8, buckets=BUCKETS)]
    assert sum(np.ptp(rows[:, 1]) > 1 for rows in found) <= len(BUCKETS)


def test_batches_do_not_depend_on_the_first_step():
    examples = make_examples()
    whole = make_batches(examples, 0, 30)
    assert len(whole) == 30
    for one, other in zip(make_batches(examples, 17, 30), whole[17:], strict=True):
        assert_same(one, other)
    assert which(make_batches(examples, 0, 1, seed=4)[0]) != which(whole[0])
    assert make_batches(examples, 7, 7) == []


def test_the_next_batch_is_made_while_the_last_one_is_learnt_from():
    """As a device does, and as one answers before an update: the caller asks for one batch alone."""
    made = threading.Semaphore(0)

    class Told(SequenceExamples):
        def collate(self, indices, length, rng):
            made.release()
            return super().collate(indices, length, rng)

    examples = make_examples()
    told = Told(examples.sources, examples.targets, pad_id=PAD, max_target_tokens=10)
    next(batches := train_batches(told, batch_size=8, buckets=BUCKETS, seed=0, start_step=0, stop_step=4))
    assert all(made.acquire(timeout=60.0) for _ in range(3))
    assert len(list(batches)) == 3


class Noisy(SequenceExamples):
    """Draws from the generator it is given, and records."""

    def collate(self, indices, length, rng):
        batch = super().collate(indices, length, rng)
        return batch.replace(source=batch.source + 1000 * rng.integers(9, size=batch.source.shape, dtype=np.int32))


def test_random_draws_belong_to_the_step():
    examples = Noisy([[1]] * 8, [[1]] * 8, pad_id=PAD, max_target_tokens=4)
    one, two = make_batches(examples, 0, 2)
    assert not np.array_equal(one.source, two.source)
    assert_same(two, make_batches(examples, 1, 2)[0])
    expected = np.random.default_rng([3, 1]).integers(9, size=two.source.shape, dtype=np.int32)
    np.testing.assert_array_equal(two.source // 1000, expected)


def test_eval_holds_every_example_once_shortest_first():
    examples = make_examples()
    found = list(eval_batches(examples, batch_size=8, buckets=BUCKETS))
    order = np.concatenate([indices for indices, _ in found])
    assert sorted(order[order >= 0]) == list(range(101))
    assert np.all(np.diff(examples.lengths[order[order >= 0]]) >= 0)
    assert (order[101:] == -1).all()
    for indices, batch in found:
        assert which(batch) == indices[indices >= 0].tolist()
        np.testing.assert_array_equal(batch.valid, indices >= 0)


def test_collate():
    examples = SequenceExamples([[5, 6, 7], [8]], [[5, 9], [6] * 20 + [9]], pad_id=PAD, max_target_tokens=12)
    assert isinstance(examples, Examples)
    rng = np.random.default_rng(0)
    batch = examples.collate(np.array([1, -1]), 4, rng)
    np.testing.assert_array_equal(batch.source, [[8, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.source_mask, [[1, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.target, [[6] * 12, [0] * 12])
    np.testing.assert_array_equal(batch.target_mask.sum(axis=1), [12, 0])
    np.testing.assert_array_equal(batch.valid, [True, False])
    # Targets go up to a multiple of 8; a source that is too long keeps its newest ids.
    batch = examples.collate(np.array([0]), 2, rng)
    np.testing.assert_array_equal(batch.source, [[6, 7]])
    assert batch.target.shape == (1, 8)
    assert {leaf.dtype for leaf in jax.tree.leaves(batch)} == {np.dtype(np.int32), np.dtype(bool)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        *(({"buckets": buckets}, "ascending") for buckets in ((16, 8), (8, 8), (0, 8))),
        ({"buckets": ()}, "at least one"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_bad_settings_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        make_batches(make_examples(), 0, 1, **wrong)


def test_no_examples_are_refused():
    with pytest.raises(ConfigError, match="no examples"):
        make_batches(SequenceExamples([], [], pad_id=PAD, max_target_tokens=4), 0, 1)


def test_some_examples_are_drawn_in_their_order_and_stay_the_same():
    examples = make_examples()
    assert some_of(examples, None, seed=0) is some_of(examples, 101, seed=0) is examples
    some = some_of(examples, 10, seed=1)
    assert len(some) == 10
    batch = some.collate(np.array([0, 9, -1]), 40, np.random.default_rng(0))
    assert batch.valid.tolist() == [True, True, False]
    first, last = which(batch)
    assert first < last
    assert some.lengths[[0, 9]].tolist() == examples.lengths[[first, last]].tolist()


def test_some_items_are_drawn_from_all_of_them_and_stay_in_order():
    items = [f"item {n}" for n in range(1000)]
    assert draw(items, 0) == draw(items, 1000) == draw(items, 2000) == items
    some = draw(items, 100)
    places = [items.index(item) for item in some]
    assert places == sorted(set(places))
    assert len(some) == 100
    assert 400 < np.mean(places) < 600  # the first ones would have 49.5
    assert draw(items, 100) == some
    assert draw([], 5) == []


def test_dialogues_are_drawn_whole_but_for_the_last_and_stay_in_order():
    instances = [Instance(f"d{i // 3}#{2 * (i % 3) + 2}", ("x",), "y", "") for i in range(300)]
    assert all(draw_dialogues(instances, most) == instances for most in (0, 300, 1000))
    some = draw_dialogues(instances, 31)
    assert some == [i for i in instances if i in some]
    turns = collections.Counter(i.dialogue_id for i in some)
    assert sorted(turns.values()) == [1, *[3] * 10]
    assert next(i for i in some if turns[i.dialogue_id] == 1).id.endswith("#2")
    assert sum(int(name[1:]) >= 50 for name in turns) > 2  # not the first
    fewer = draw_dialogues(instances, 10)
    assert fewer == [i for i in some if i in fewer]  # part of a larger one
    assert draw_dialogues(instances, 31, seed=1) != some
    assert draw_dialogues([], 5) == []
