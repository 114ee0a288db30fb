from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Bool, Float, Int

from empax.core.sharding import MeshSettings, batch_sharding, make_mesh, replicated, shard_params
from empax.core.types import Batch, Mean, TrainState
from empax.training.optimizer import OptimizerSettings, ParamGroup, make_optimizer, trained_mask
from empax.training.step import make_eval_step, make_explore_step, make_train_step


def state_of(task, optimizer, batch, seed=0):
    @jax.jit
    def make(batch):
        params = task.init(jax.random.key(seed), batch)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key(seed + 1))

    return make(batch)


def stepped(tiny, task, optimizer, batch, /, **options):
    """State and metrics after one update."""
    return make_train_step(task, optimizer, **options)(state_of(task, optimizer, batch), tiny.frozen(), batch)


def batch_of(tiny, rows):
    examples = tiny.TinyExamples(8)
    return examples.collate(np.asarray(rows), tiny.LENGTH, np.random.default_rng(0))


def test_eight_rows_are_four_micro_batches_of_two(tiny):
    """The rows differ in their number of tokens, so a mean of means would be wrong."""
    task, optimizer, batch = tiny.TinyTask(), optax.sgd(0.5), batch_of(tiny, range(8))
    assert len(set(batch.target_mask.sum(1))) > 1
    whole, split = (stepped(tiny, task, optimizer, batch, accumulate=n) for n in (1, 4))
    for name in ("loss", "accuracy", "grad_norm"):
        np.testing.assert_allclose(split[1][name].value(), whole[1][name].value(), rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(split[1][name].weight, whole[1][name].weight, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), split[0].params, whole[0].params)


@flax.struct.dataclass
class CountedBatch:
    values: Float[Array, " B"]
    valid: Bool[Array, " B"]
    step: Int[Array, ""] | None = None


class Counting:
    """Its loss is the number of updates that its batch is told."""

    def init(self, rng, batch):
        return {"weight": jnp.zeros(())}

    def loss(self, params, frozen, batch, rng, *, train):
        told = jnp.zeros(()) if batch.step is None else batch.step.astype(jnp.float32)
        seen = Mean.of(batch.values, batch.valid)
        return Mean.of(batch.values * params["weight"] + told, batch.valid), {"seen": seen}


def test_every_epoch_has_every_row_once_and_every_part_is_an_update():
    batch, optimizer = CountedBatch(10.0 ** jnp.arange(4), jnp.ones(4, bool)), optax.sgd(0.0)
    step = make_train_step(Counting(), optimizer, epochs=2, minibatches=2)
    state, metrics = step(state_of(Counting(), optimizer, batch), {}, batch)
    assert (float(metrics["seen"].total), float(metrics["seen"].weight)) == (2222.0, 8.0)
    assert float(metrics["loss"].total) == 2 * (0 + 1 + 2 + 3)  # two rows in each of four updates
    assert int(state.step) == 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_asks_is_told_the_updates_made(accumulate):
    batch, optimizer = CountedBatch(jnp.zeros(4), jnp.ones(4, bool)), optax.sgd(0.1)
    step = make_train_step(Counting(), optimizer, accumulate=accumulate)
    state, found = state_of(Counting(), optimizer, batch), []
    for _ in range(3):
        state, metrics = step(state, {}, batch)
        found.append(float(metrics["loss"].value()))
    assert found == [0.0, 1.0, 2.0]
    assert make_eval_step(Counting())(state.params, {}, batch, jax.random.key(0))["loss"].value() == 0.0


def test_the_gradient_is_that_of_the_mean(tiny):
    task, optimizer, batch = tiny.TinyTask(), optax.sgd(1.0), batch_of(tiny, range(8))
    state = state_of(task, optimizer, batch)
    expected = jax.grad(
        lambda params: task.loss(params, tiny.frozen(), batch, jax.random.key(0), train=False)[0].value()
    )(state.params)
    before = jax.tree.map(np.asarray, state.params)
    after, metrics = make_train_step(task, optimizer)(state, tiny.frozen(), batch)
    moved = jax.tree.map(lambda a, b: a - np.asarray(b), before, after.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), moved, expected)
    np.testing.assert_allclose(metrics["grad_norm"].value(), optax.tree.norm(expected), rtol=1e-5)
    assert int(after.step) == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_filler_rows_change_nothing(tiny, accumulate):
    task, optimizer = tiny.TinyTask(), optax.adam(0.1)
    results = []
    for rows in ([0, 1, 2, 3], [0, 1, 2, 3, -1, -1, -1, -1]):
        results.append(stepped(tiny, task, optimizer, batch_of(tiny, rows), accumulate=accumulate))
    (a, metrics_a), (b, metrics_b) = results
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a.params, b.params)
    assert float(metrics_a["loss"].weight) == float(metrics_b["loss"].weight)


def test_a_batch_of_fillers_only_gives_numbers(tiny):
    task, optimizer, batch = tiny.TinyTask(), optax.sgd(1.0), batch_of(tiny, [-1, -1])
    state = state_of(task, optimizer, batch)
    before = jax.tree.map(np.asarray, state.params)
    after, metrics = make_train_step(task, optimizer)(state, tiny.frozen(), batch)
    jax.tree.map(np.testing.assert_array_equal, after.params, before)
    assert float(metrics["loss"].value()) == 0.0


def test_frozen_parameters_stay_without_state_and_the_others_move(tiny):
    task, batch = tiny.TinyTask(), batch_of(tiny, range(8))
    settings = OptimizerSettings(learning_rate=0.1, weight_decay=0.1, groups=(ParamGroup("^embed/", frozen=True),))
    params = jax.jit(task.init)(jax.random.key(0), batch)
    optimizer = make_optimizer(settings, params, 10)
    before = jax.tree.map(np.asarray, params)
    step = make_train_step(task, optimizer, trained=trained_mask(settings, params))
    metrics_free = stepped(tiny, task, optax.sgd(0.1), batch)[1]
    state = state_of(task, optimizer, batch)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.opt_state)]
    assert before["embed"]["table"].shape not in shapes
    assert shapes.count(before["out"]["kernel"].shape) == 2
    after, metrics = step(state, tiny.frozen(), batch)
    np.testing.assert_array_equal(after.params["embed"]["table"], before["embed"]["table"])
    for group, name in (("hidden", "kernel"), ("hidden", "bias"), ("out", "kernel")):
        assert np.all(np.asarray(after.params[group][name]) != before[group][name])
    assert float(metrics["grad_norm"].value()) < float(metrics_free["grad_norm"].value())


def test_dropout_depends_on_the_step_alone_and_the_state_is_donated(tiny):
    task, optimizer, batch = tiny.TinyTask(dropout=0.5), optax.sgd(0.0), batch_of(tiny, range(8))
    step = make_train_step(task, optimizer)
    start = state_of(task, optimizer, batch)
    state, first = step(start, tiny.frozen(), batch)
    assert start.params["embed"]["table"].is_deleted()
    _, second = step(state, tiny.frozen(), batch)
    _, again = step(state_of(task, optimizer, batch), tiny.frozen(), batch)
    assert float(first["loss"].total) == float(again["loss"].total)
    assert float(first["loss"].total) != float(second["loss"].total)
    params = jax.jit(task.init)(jax.random.key(0), batch)
    evaluated = make_eval_step(task)(params, tiny.frozen(), batch, jax.random.key(0))
    expected, _ = task.loss(params, tiny.frozen(), batch, jax.random.key(0), train=False)
    np.testing.assert_allclose(evaluated["loss"].value(), expected.value(), rtol=1e-6)


def test_micro_batches_draw_different_masks(tiny):
    """Two equal rows in two micro-batches: the same mask twice would give twice the same loss."""

    @dataclasses.dataclass(frozen=True)
    class Noise:
        def init(self, rng, batch):
            return {"w": jnp.ones(1)}

        def loss(self, params, frozen, batch, rng, *, train):
            noise = jax.random.normal(rng, batch.valid.shape)
            return Mean.of(noise * params["w"], batch.valid), {"square": Mean.of(noise**2, batch.valid)}

    batch, optimizer = batch_of(tiny, [0, 0]), optax.sgd(0.0)
    _, metrics = make_train_step(Noise(), optimizer, accumulate=2)(state_of(Noise(), optimizer, batch), {}, batch)
    assert float(metrics["square"].value()) != pytest.approx(float(metrics["loss"].value()) ** 2, rel=1e-3)


@pytest.mark.multidevice
def test_every_micro_batch_lies_on_every_device(tiny):
    task, optimizer = tiny.TinyTask(), optax.sgd(0.5)
    mesh = make_mesh(MeshSettings(data=4))
    batch = batch_of(tiny, range(8))
    alone = stepped(tiny, task, optimizer, batch, accumulate=2)
    places = {"batch": batch_sharding(mesh), "replicated": replicated(mesh)}
    places["state"] = shard_params(jax.eval_shape(lambda: state_of(task, optimizer, batch)), mesh)
    together = stepped(tiny, task, optimizer, batch, accumulate=2, **places)
    np.testing.assert_allclose(together[1]["loss"].value(), alone[1]["loss"].value(), rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), together[0].params, alone[0].params
    )


def test_explore_gives_the_batch_to_learn_from(tiny):
    class Explorer(tiny.TinyTask):
        def explore(self, params, frozen, batch, rng):
            drawn = jax.random.randint(rng, batch.target.shape, 0, tiny.VOCABULARY)
            return dataclasses.replace(batch, target=drawn)

    task, batch, optimizer = Explorer(), batch_of(tiny, range(8)), optax.sgd(0.5)
    state = state_of(task, optimizer, batch)
    explore = make_explore_step(task)
    first = explore(state, tiny.frozen(), batch)
    assert isinstance(first, Batch)
    np.testing.assert_array_equal(first.target, explore(state, tiny.frozen(), batch).target)
    later = explore(dataclasses.replace(state, step=state.step + 1), tiny.frozen(), batch)
    assert (np.asarray(first.target) != np.asarray(later.target)).any()


def test_an_evaluation_draws_by_its_key_alone(tiny):
    @dataclasses.dataclass(frozen=True)
    class Drawn(tiny.TinyTask):
        def loss(self, params, frozen, batch, rng, *, train):
            assert not train
            return Mean.of(jax.random.normal(rng, batch.valid.shape), batch.valid), {}

    task, batch = Drawn(dropout=0.5), batch_of(tiny, range(8))
    step = make_eval_step(task)
    first, again, other = (step({}, {}, batch, jax.random.key(seed))["loss"].total for seed in (0, 0, 1))
    assert first == again != other
