"""A task with LoRA through the one step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.protocols import OnlineTask, ReinforcedTask, Task
from empax.core.sharding import MeshSettings, batch_sharding, make_mesh, replicated, shard_params
from empax.core.tree import named_leaves
from empax.core.types import Batch, Generated, Mean, TrainState
from empax.models.heads import ClassificationHead, masked_mean
from empax.models.layers import logical_axes
from empax.models.lora import LoraSettings, lower
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder
from empax.training.lora import lora_task
from empax.training.optimizer import OptimizerSettings, make_optimizer
from empax.training.step import make_train_step
from tests.training.tiny import Reinforced

FIELDS = {"vocab_size": 13, "d_model": 12, "d_kv": 5, "num_heads": 3, "d_ff": 16, "num_layers": 2}
MODEL = EncoderDecoder(t5_config(FIELDS, dropout=0.0))
HEAD = ClassificationHead(num_classes=3)
SETTINGS = LoraSettings(pattern=r"attention/(query|value)$", rank=2)
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Toy:
    """A T5 with a head."""

    model: EncoderDecoder = MODEL
    head: ClassificationHead = HEAD
    whole: str = ""

    def init(self, rng, batch):
        model = self.model.init(rng, batch.source, batch.source_mask, batch.target)["params"]
        return {"model": model, "emotion": self.head.init(rng, jnp.zeros((1, 12)))["params"]}

    def loss(self, params, frozen, batch, rng, *, train):
        variables = {"params": params["model"]}
        logits = self.model.apply(variables, batch.source, batch.source_mask, batch.target)
        states = self.model.apply(variables, batch.source, batch.source_mask, method="encode")
        pooled = self.head.apply({"params": params["emotion"]}, masked_mean(states, batch.source_mask))
        loss = -jax.nn.log_softmax(logits)[..., 3] + frozen["weight"] * jnp.sum(pooled**2)
        return Mean.of(loss, batch.target_mask), {}

    def generate(self, params, frozen, batch, rng):
        tokens = self.model.apply({"params": params["model"]}, batch.source, batch.source_mask, batch.target)
        return Generated(tokens.argmax(-1)[:, None].astype(jnp.int32), jnp.zeros((2, 1)))


class OnlineToy(Toy):
    def explore(self, params, frozen, batch, rng):
        return dataclasses.replace(batch, target=self.generate(params, frozen, batch, rng).tokens[:, 0])


class ReinforcedToy(Reinforced, Toy):
    def learns_from(self, name):
        return 3 if name.startswith("emotion/") else 0

    def rollout(self, params, frozen, batch, rng):
        own, first = (self.generate(p, frozen, batch, rng).tokens[:, 0] for p in (params, frozen["reference"]))
        return dataclasses.replace(batch, target=own, source=first)


def batch():
    ids, mask = jnp.arange(10).reshape(2, 5) % 13, jnp.ones((2, 5), bool)
    return Batch(source=ids, source_mask=mask, target=ids, target_mask=mask, valid=jnp.ones(2, bool))


@pytest.fixture(scope="module")
def base():
    return jax.jit(Toy().init)(jax.random.key(0), batch())


def names(tree):
    return set(named_leaves(tree))


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("float32", "int8")), "bfloat16"]
)
def test_a_step_moves_adapters_and_named_parameters_and_keeps_state_for_no_other(base, kind):
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    toy = Toy(EncoderDecoder(dataclasses.replace(MODEL.config, dtype=dtype)), whole="^emotion/")
    task = lora_task(toy, dataclasses.replace(SETTINGS, int8=kind == "int8"), dtype=dtype)
    assert isinstance(task, Task)
    params = jax.jit(task.init)(jax.random.key(1), batch())
    frozen = task.freeze(base, {"weight": jnp.float32(0.1)})
    assert names(params["trained"]) == {name for name in names(base) if name.startswith("emotion/")}
    assert not names(frozen["base"]) & names(params["trained"])

    merged = task.merged(params, frozen)
    assert names(merged) == names(base)
    if kind != "int8":
        kept = lower(base, dtype)
        assert names(frozen["base"]) == {name for name in names(kept) if name.startswith("model/")}
        before = {name: leaf for name, leaf in named_leaves(kept).items() if name.startswith("model/")}
        for name, leaf in before.items():
            np.testing.assert_array_equal(named_leaves(merged)[name], leaf)

    optimizer = make_optimizer(OptimizerSettings(learning_rate=1e-2), params, 10)
    opt_state = optimizer.init(params)
    held = sum(leaf.size for leaf in jax.tree.leaves(opt_state) if leaf.ndim)
    assert held == 2 * sum(leaf.size for leaf in jax.tree.leaves(params))  # two moments of what is trained
    assert held < 0.5 * sum(leaf.size for leaf in jax.tree.leaves(base))

    state = TrainState(step=jnp.int32(0), params=params, opt_state=opt_state, rng=jax.random.key(0))
    started = jax.tree.map(np.asarray, params)
    kept = jax.tree.map(np.asarray, frozen)
    step = make_train_step(task, optimizer)
    losses = []
    for _ in range(3):
        state, metrics = step(state, frozen, batch())
        losses.append(float(metrics["loss"].value()))
    assert losses[2] < losses[1] < losses[0]
    for name, leaf in named_leaves(state.params).items():
        assert not np.array_equal(leaf, named_leaves(started)[name]), name
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, frozen), kept)

    # Without adapters the merged parameters are the same model.
    found = jax.jit(lambda p, f: toy.loss(task.merged(p, f), f["frozen"], batch(), KEY, train=False)[0].value())(
        state.params, frozen
    )
    expected = jax.jit(lambda p, f: task.loss(p, f, batch(), KEY, train=False)[0].value())(state.params, frozen)
    # A sum may fall to the other side of where half precision rounds.
    np.testing.assert_allclose(found, expected, rtol=2e-3 if kind == "bfloat16" else 1e-5)
    assert not np.allclose(found, losses[0], rtol=4e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_frozen_weights_are_as_small_as_the_arithmetic_allows(base):
    def types(dtype, **settings):
        task = lora_task(Toy(whole="^emotion/"), dataclasses.replace(SETTINGS, **settings), dtype=dtype)
        return {name: str(leaf.dtype) for name, leaf in named_leaves(task.freeze(base, {})["base"]).items()}

    small, query = types("bfloat16"), "model/encoder/layers/attention/query"
    wide = {name for name, dtype in small.items() if dtype == "float32"}
    assert (small[query], small["model/token_embedding"]) == ("bfloat16", "bfloat16")
    assert wide == {name for name in small if "norm" in name or name.endswith("relative_bias")}
    assert set(types("float32").values()) == {"float32"}
    eight = types("bfloat16", int8=True)
    assert (eight[f"{query}/values"], eight[f"{query}/scale"]) == ("int8", "float32")
    assert eight["model/token_embedding"] == "bfloat16"


def test_dropout_of_adapters_needs_a_key(base):
    task = lora_task(Toy(), dataclasses.replace(SETTINGS, dropout=0.5))
    params = jax.tree.map(lambda leaf: leaf + 0.3, jax.jit(task.init)(jax.random.key(1), batch()))
    assert params["trained"] == {}
    frozen = task.freeze(base, {"weight": jnp.float32(0.0)})
    loss = jax.jit(lambda rng: task.loss(params, frozen, batch(), rng, train=True)[0].value())
    plain = jax.jit(lambda: task.loss(params, frozen, batch(), KEY, train=False)[0].value())()
    assert loss(jax.random.key(0)) == loss(jax.random.key(0)) != loss(jax.random.key(1))
    merged = jax.jit(
        lambda: Toy().loss(task.merged(params, frozen), frozen["frozen"], batch(), KEY, train=False)[0].value()
    )()
    np.testing.assert_allclose(plain, merged, rtol=1e-5)


def test_exploring_is_the_tasks_own(base):
    plain, online = lora_task(Toy(), SETTINGS), lora_task(OnlineToy(), SETTINGS)
    assert not isinstance(plain, OnlineTask)
    assert isinstance(online, OnlineTask)
    params = jax.tree.map(lambda leaf: leaf + 0.3, jax.jit(online.init)(jax.random.key(1), batch()))
    frozen = online.freeze(base, {})
    arguments = (params, frozen, batch(), jax.random.key(0))
    own = jax.jit(Toy().generate)
    expected = own(jax.jit(online.merged)(params, frozen), {}, *arguments[2:]).tokens
    np.testing.assert_array_equal(jax.jit(online.explore)(*arguments).target, expected[:, 0])
    assert not np.array_equal(expected, own(base, {}, *arguments[2:]).tokens)


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_a_reinforced_task_answers_and_learns_with_the_same_adapters(base, int8):
    """Whatever dropout they had before: else the ratio of what is learnt to what was drawn would be noise."""
    task = lora_task(ReinforcedToy(), dataclasses.replace(SETTINGS, dropout=0.5, int8=int8))
    assert isinstance(task, ReinforcedTask)
    assert [task.learns_from(name) for name in ("adapters/model/a", "trained/emotion/out")] == [0, 3]
    params = jax.tree.map(lambda leaf: leaf + 0.3, jax.jit(task.init)(jax.random.key(1), batch()))
    frozen = task.freeze(base, {"weight": jnp.float32(0.0)})
    loss = jax.jit(lambda rng: task.loss(params, frozen, batch(), rng, train=True)[0].value())
    plain = jax.jit(lambda: task.loss(params, frozen, batch(), KEY, train=False)[0].value())()
    for seed in range(2):
        np.testing.assert_allclose(loss(jax.random.key(seed)), plain, rtol=1e-6)
    merged = jax.jit(task.merged)(params, frozen)
    rolled = jax.jit(task.rollout)(params, frozen, batch(), jax.random.key(0))
    for model, found in ((merged, rolled.target), (frozen["base"], rolled.source)):
        expected = jax.jit(Toy().generate)(model, {}, batch(), jax.random.key(0)).tokens[:, 0]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.multidevice
def test_a_step_on_a_mesh_is_the_step_on_one_device(base):
    settings = LoraSettings(pattern=r"attention/(query|out)$|feed_forward/", rank=2, int8=True)
    task = lora_task(Toy(whole="^emotion/"), settings)
    params = jax.tree.map(lambda leaf: leaf + 0.1, jax.jit(task.init)(jax.random.key(1), batch()))
    frozen = task.freeze(base, {"weight": jnp.float32(0.1)})
    optimizer = make_optimizer(OptimizerSettings(learning_rate=1e-2), params, 10)

    def state():
        own = jax.tree.map(jnp.copy, params)  # a step donates it
        return TrainState(step=jnp.int32(0), params=own, opt_state=optimizer.init(own), rng=jax.random.key(0))

    alone, expected = make_train_step(task, optimizer)(state(), frozen, batch())
    mesh = make_mesh(MeshSettings(data=1, fsdp=2, tensor=2))
    places = shard_params(jax.eval_shape(state), mesh, axes=logical_axes)
    spread = jax.device_put(frozen, shard_params(frozen, mesh, axes=logical_axes))
    step = make_train_step(task, optimizer, state=places, batch=batch_sharding(mesh), replicated=replicated(mesh))
    found, metrics = step(jax.device_put(state(), places), spread, batch())
    a = found.params["adapters"]["model"]["decoder"]["layers"]["feed_forward"]["wi"]["a"]
    assert a.addressable_shards[0].data.shape == (2, 6, 2)  # half of its inputs
    np.testing.assert_allclose(metrics["loss"].value(), expected["loss"].value(), rtol=1e-5)
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6), found.params, alone.params
    )
