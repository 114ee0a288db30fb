"""Adapters and eight-bit weights against explicit formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.sharding import MeshSettings, make_mesh, shard_params
from empax.core.tree import count_bytes, map_named, named_leaves
from empax.interop.architectures import ARCHITECTURES
from empax.models.arithmetic import contract
from empax.models.bert import BertConfig, BertEncoder
from empax.models.decoder_only import DecoderOnly
from empax.models.layers import logical_axes
from empax.models.lora import Int8, LoraSettings, LowRank, adapt, init_adapters, lower, merge, quantize
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder, TransformerConfig
from tests.interop.tiny import SIZES
from tests.systems.learning import random_like

ALL = LoraSettings(pattern="layers/", rank=3, alpha=6.0)
IDS, MASK, TARGET = jnp.arange(10).reshape(2, 5) % 7, jnp.ones((2, 5), bool), jnp.arange(8).reshape(2, 4) % 7


def model_and_params(**changes):
    fields = {"vocab_size": 13, "d_model": 12, "d_kv": 5, "num_heads": 3, "d_ff": 16, "num_layers": 2}
    model = EncoderDecoder(t5_config(fields, dropout=0.0, **changes))
    shapes = jax.eval_shape(model.init, jax.random.key(0), IDS, MASK, TARGET)["params"]
    return model, random_like(shapes, 0)


def drawn(base, settings, seed):
    """Adapters that are no zeros."""
    return random_like(jax.eval_shape(lambda: init_adapters(jax.random.key(0), base, settings)), seed)


def sums(base, adapters, factor):
    """W + factor A B, written out for every name."""
    pairs = named_leaves(adapters)
    specs = {"query": "ldr,lrhn->ldhn", "out": "lhnr,lrd->lhnd", "wi": "ldr,lrf->ldf"}
    specs |= {"key": specs["query"], "value": specs["query"], "wo": specs["wi"]}

    def add(name, leaf):
        if f"{name}/a" not in pairs:
            return leaf
        return leaf + factor * jnp.einsum(specs[name.rsplit("/", 1)[1]], pairs[f"{name}/a"], pairs[f"{name}/b"])

    return map_named(add, base)


def objective(model, params):
    return jnp.sum(jnp.sin(model.apply({"params": params}, IDS, MASK, TARGET)))


@pytest.mark.parametrize("frozen", [lambda base: base, quantize], ids=["floats", "int8"])
def test_merged_weights_are_the_sums_written_out(frozen):
    base = frozen(model_and_params()[1])
    adapters = drawn(merge(base, {}, ALL), ALL, seed=1)
    assert len(named_leaves(adapters)) == 2 * (4 + 2 + 8 + 2)  # every matrix of both stacks, nothing else
    merged, wanted = named_leaves(merge(base, adapters, ALL)), named_leaves(sums(merge(base, {}, ALL), adapters, 2.0))
    assert merged.keys() == wanted.keys()
    for name, leaf in merged.items():
        np.testing.assert_allclose(leaf, wanted[name], rtol=1e-6, atol=1e-6)


def test_no_gradient_flows_to_an_adapted_weight_and_fresh_adapters_change_nothing():
    model, base = model_and_params()
    settings = dataclasses.replace(ALL, pattern=r"attention/(query|out)$")
    adapters = init_adapters(jax.random.key(0), base, settings)
    value, grads = jax.jit(jax.value_and_grad(lambda b: objective(model, adapt(b, adapters, settings))))(base)
    np.testing.assert_allclose(value, jax.jit(lambda b: objective(model, b))(base), rtol=1e-6)
    adapted = {name.rpartition("/")[0] for name in named_leaves(adapters)}
    for name, grad in named_leaves(grads).items():
        assert (np.abs(grad).max() == 0) == (name in adapted), name


def test_adapters_begin_normal_and_zero():
    base = {"layers": {"attention": {"query": jnp.zeros((3, 400, 4, 5)), "out": jnp.zeros((3, 4, 50, 8))}}}
    adapters = named_leaves(init_adapters(jax.random.key(0), base, LoraSettings(pattern="attention", rank=6)))
    assert adapters["layers/attention/query/a"].shape == (3, 400, 6)
    assert adapters["layers/attention/query/b"].shape == (3, 6, 4, 5)
    assert adapters["layers/attention/out/a"].shape == (3, 4, 50, 6)
    assert adapters["layers/attention/out/b"].shape == (3, 6, 8)
    np.testing.assert_allclose(np.std(adapters["layers/attention/query/a"]), 400**-0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(adapters["layers/attention/out/a"]), 200**-0.5, rtol=0.05)
    assert not np.array_equal(*adapters["layers/attention/query/a"][:2])
    assert not any(np.any(leaf) for name, leaf in adapters.items() if name.endswith("/b"))


def test_an_encoder_outside_of_an_encoder_decoder_has_adapters_too():
    bert = BertEncoder(BertConfig(vocab_size=11, d_model=8, num_heads=2, d_ff=12, num_layers=2, max_positions=9))
    base = random_like(jax.eval_shape(bert.init, jax.random.key(0), IDS, MASK)["params"], 3)
    adapters = drawn(base, ALL, seed=4)
    assert len(named_leaves(adapters)) == 2 * 6  # no bias among them, though those of heads have two axes
    one = jax.jit(lambda p: bert.apply({"params": p}, IDS, MASK))
    np.testing.assert_allclose(one(adapt(base, adapters, ALL)), one(merge(base, adapters, ALL)), rtol=1e-4, atol=1e-5)


def test_dropout_takes_inputs_of_adapters_and_nothing_without_a_key():
    base = {"attention": {"query": jnp.zeros((200, 2, 3))}}
    settings = LoraSettings(pattern="query", rank=2, alpha=2.0, dropout=0.25)
    adapters = drawn(base, settings, seed=1)
    whole = merge(base, adapters, settings)["attention"]["query"]
    dropped = adapt(base, adapters, settings, jax.random.key(1))["attention"]["query"].summed()
    gone = np.all(np.asarray(dropped) == 0, axis=(1, 2))
    assert 30 < gone.sum() < 70
    np.testing.assert_allclose(dropped[~gone], whole[~gone] / 0.75, rtol=1e-5, atol=1e-7)
    other = adapt(base, adapters, settings, jax.random.key(2))["attention"]["query"].summed()
    assert not np.array_equal(np.all(np.asarray(other) == 0, axis=(1, 2)), gone)


def test_eight_bits_are_off_by_half_a_step_of_each_output_at_most():
    _, base = model_and_params()
    base["encoder"]["layers"]["attention"]["out"] = (
        base["encoder"]["layers"]["attention"]["out"].at[:, :, :, 2].set(0.0)
    )
    base["encoder"]["layers"]["attention"]["query"] *= jnp.array([1.0, 1e3, 1e-3])[None, None, :, None]
    boxes = quantize(base)
    inputs = {"query": (1,), "key": (1,), "value": (1,), "out": (1, 2), "wi": (1,), "wo": (1,)}
    quantised = 0
    for name, leaf in named_leaves(base).items():
        box = boxes
        for part in name.split("/"):
            box = box[part]
        part = name.split("/")[-1]
        if part not in inputs:
            assert box is leaf, name
            continue
        quantised += 1
        assert isinstance(box, Int8)
        assert box.values.dtype == jnp.int8
        largest = np.abs(leaf).max(axis=inputs[part], keepdims=True)
        assert box.scale.shape == largest.shape
        error = np.abs(np.asarray(box.unbox()) - np.asarray(leaf))
        assert np.all(error <= largest / 254 * (1 + 1e-5)), name
        assert np.abs(box.values).max() == 127
    assert quantised == 16
    assert not np.any(boxes["encoder"]["layers"]["attention"]["out"].unbox()[:, :, :, 2])


@pytest.mark.slow
def test_eight_bits_take_a_quarter_and_a_step_never_holds_all_floats():
    """Deep and wide enough for the weights to outweigh everything else."""
    fields = {"vocab_size": 8, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 256, "num_layers": 12}
    model = EncoderDecoder(t5_config(fields, dropout=0.0, remat="full"))
    base = jax.eval_shape(model.init, jax.random.key(0), IDS, MASK, TARGET)["params"]
    settings = LoraSettings(pattern="attention/(query|value)$", rank=2)
    boxes = jax.eval_shape(quantize, base)
    adapters = jax.eval_shape(lambda rng: init_adapters(rng, base, settings), jax.random.key(0))
    assert 0.25 <= count_bytes(boxes) / count_bytes(base) < 0.27

    def memory(frozen, params):
        def loss(adapters, frozen):
            return objective(model, params(frozen, adapters))

        compiled = jax.jit(jax.value_and_grad(loss)).lower(adapters, frozen).compile()
        found = compiled.memory_analysis()
        return found.temp_size_in_bytes, found.argument_size_in_bytes

    temporary, arguments = memory(boxes, lambda frozen, a: adapt(frozen, a, settings))
    outside, _ = memory(boxes, lambda frozen, a: merge(frozen, a, settings))
    assert arguments < 0.3 * count_bytes(base)
    assert temporary < 0.25 * count_bytes(base)
    assert outside > count_bytes(base)  # what making all floats ahead of the layers would cost


FIELDS = {
    "t5": {},
    "t5 1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": {"scale_embedding": True},
    "marian": {"scale_embedding": True},
    "llama": {"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "gpt2": {},
}


def made(name, dtype):
    """A model that computes in `dtype`, float32 parameters, and what gives its logits."""
    kind = name.partition(" ")[0]
    config = ARCHITECTURES[kind].config(SIZES[kind] | FIELDS[name], dropout=0.0, dtype=dtype)
    model = (EncoderDecoder if isinstance(config, TransformerConfig) else DecoderOnly)(config)
    inputs = (IDS, MASK, TARGET) if isinstance(model, EncoderDecoder) else (IDS, MASK)
    params = random_like(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"], 0)
    return params, jax.jit(lambda params: model.apply({"params": params}, *inputs))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("t5", "llama"))) for name in FIELDS]
)
def test_lowered_weights_are_those_that_the_model_rounds_anyway(name):
    params, logits = made(name, "bfloat16")
    small = lower(params, "bfloat16")
    kept = {part for part, leaf in named_leaves(small).items() if leaf.dtype == jnp.float32}
    positions = name in ("bart", "marian", "gpt2")  # added to the embeddings of tokens in float32
    assert ("token_embedding" in kept) == positions
    for part, leaf in named_leaves(small).items():
        before = named_leaves(params)[part]
        assert leaf.dtype == (jnp.float32 if part in kept else jnp.bfloat16)
        np.testing.assert_array_equal(leaf, before.astype(leaf.dtype))
        matrix = part.rsplit("/", 1)[-1] in ("query", "key", "value", "out", "wi", "wo", "gate", "output_embedding")
        assert matrix or part in kept or part == "token_embedding"
        assert not (matrix and part in kept), part
    assert count_bytes(small) < 0.65 * count_bytes(params)
    np.testing.assert_allclose(logits(small), logits(params), rtol=0, atol=1e-6)
    assert not np.array_equal(logits(params), made(name, "float32")[1](params))  # that is how much rounding does


def test_float32_and_eight_bits_are_left_alone():
    params, _ = made("t5", "float32")
    assert lower(params, jnp.float32) is params
    boxes = lower(quantize(params), "bfloat16")
    query = boxes["encoder"]["layers"]["attention"]["query"]
    assert isinstance(query, Int8)
    assert (query.values.dtype, query.scale.dtype) == (jnp.int8, jnp.float32)
    assert boxes["token_embedding"].dtype == jnp.bfloat16
    assert boxes["encoder"]["relative_bias"].dtype == jnp.float32
    shapes = jax.eval_shape(lambda params: lower(params, "bfloat16"), params)
    assert shapes["decoder"]["layers"]["feed_forward"]["wi"].dtype == jnp.bfloat16


def test_a_half_precision_sum_is_rounded_once():
    base = random_like({"wi": jnp.zeros((40, 30))}, 0)["wi"].astype(jnp.bfloat16)
    pair = random_like({"a": jnp.zeros((40, 3)), "b": jnp.zeros((3, 30))}, 1)
    found = LowRank(base, pair["a"], 1e-2 * pair["b"], 2.0).summed()
    wide = {name: np.asarray(leaf, np.float64) for name, leaf in {"base": base, **pair}.items()}
    exact = wide["base"] + 2e-2 * wide["a"] @ wide["b"]
    assert found.dtype == jnp.bfloat16
    # Half a unit in the last of 8 bits; a change that were rounded before it is added could be off by more.
    assert np.all(np.abs(np.asarray(found, np.float64) - exact) <= np.abs(exact) * 2.0**-8 * 1.001)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("spec", "shape"), [("BTD,DHN->BTHN", (16, 3, 5)), ("BTHN,HND->BTD", (4, 4, 7))])
def test_products_with_an_adapted_weight_are_those_with_the_sum(spec, shape, dtype):
    inputs = 1 if spec.startswith("BTD") else 2
    base = random_like({"weight": jnp.zeros(shape)}, 0)["weight"].astype(dtype)
    pair = random_like({"a": jnp.zeros((*shape[:inputs], 2)), "b": jnp.zeros((2, *shape[inputs:]))}, 1)
    left = random_like({"weight": jnp.zeros((2, 6, *shape[:inputs]))}, 2)["weight"].astype(dtype)

    def apart(left, base, a, b):
        return jnp.sum(jnp.sin(contract(spec, left, LowRank(base, a, b, 0.5).unbox()).astype(jnp.float32)))

    def summed(left, base, a, b):
        weight = jax.lax.stop_gradient(base).astype(jnp.float32) + 0.5 * jnp.tensordot(a, b, axes=1)
        return jnp.sum(jnp.sin(jnp.einsum(spec, left.astype(jnp.float32), weight)))

    found, expected = (
        jax.value_and_grad(f, argnums=(0, 1, 2, 3))(left, base, pair["a"], pair["b"]) for f in (apart, summed)
    )
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 5e-2, "atol": 5e-2}
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, **tolerance), found, expected)
    assert not np.any(found[1][1])
    assert found[1][2].dtype == found[1][3].dtype == jnp.float32


def test_no_gradient_of_a_frozen_weight_is_formed():
    leaf = LowRank(jnp.ones((48, 56)), jnp.ones((48, 2)), jnp.ones((2, 56)), 1.0)

    def loss(left, base, a, b):
        return jnp.sum(contract("BTD,DF->BTF", left, LowRank(base, a, b, 1.0).unbox()) ** 2)

    left = jnp.ones((3, 5, 48))
    compiled = jax.jit(jax.grad(loss, argnums=(0, 2, 3))).lower(left, leaf.base, leaf.a, leaf.b).compile()
    product = 2 * left.size * leaf.base.shape[1]
    assert 2 * product < compiled.cost_analysis()["flops"] < 2.5 * product  # forward, and back to what it reads


@pytest.mark.parametrize("pattern", ["nothing", "norm/scale$", "token_embedding"])
def test_a_pattern_that_finds_no_matrix_is_refused(pattern):
    _, base = model_and_params()
    with pytest.raises(ConfigError, match=r"no weight that LoRA can adapt; they are .*layers/.*attention/key, "):
        init_adapters(jax.random.key(0), base, LoraSettings(pattern=pattern))


def test_adapters_of_another_model_are_refused():
    assert LoraSettings(alpha=16.0).factor == 2.0
    _, base = model_and_params()
    adapters = init_adapters(jax.random.key(0), base, LoraSettings())
    with pytest.raises(ConfigError, match=r"adapters for decoder/layers/attention/key, .*, which the model does not"):
        adapt({"encoder": base["encoder"]}, adapters, LoraSettings())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rank", 10**6, r"rank = 1000000 must lie in \[1, 16384\]"),
        ("alpha", "16", "alpha = '16' is of type str; it must be float"),
        ("dropout", 1.0, r"dropout = 1.0 must lie in \[0, 1\)"),
        ("pattern", "(", "not a regular expression"),
    ],
)
def test_settings_of_another_type_or_size_are_refused_by_name(name, value, message):
    settings = LoraSettings()
    # The types of arguments are checked in tests alone, and earlier.
    object.__setattr__(settings, name, value)
    with pytest.raises(ConfigError, match=message):
        settings.__post_init__()


def test_a_rank_that_no_weight_can_use_is_refused_before_anything_is_made():
    """The largest side of the smaller ones counts: other weights may be smaller."""
    base = {"attention": {"query": np.zeros((12, 4, 5))}, "feed_forward": {"wi": np.zeros((12, 300))}}
    adapters = init_adapters(jax.random.key(0), base, LoraSettings(pattern="", rank=12))
    assert adapters["feed_forward"]["wi"]["a"].shape == (12, 12)
    stacked = {"layers": {"attention": {"out": np.zeros((3, 4, 5, 12))}}}  # of three layers
    for params in (base, stacked):
        with pytest.raises(ConfigError, match=r"rank = 13 is more than 12, the smaller side of the largest weight"):
            init_adapters(jax.random.key(0), params, LoraSettings(pattern="", rank=13))


@pytest.mark.multidevice
def test_adapters_are_split_over_a_mesh_as_the_weights_that_they_are_on():
    fields = {"vocab_size": 14, "d_model": 12, "d_kv": 5, "num_heads": 4, "d_ff": 16, "num_layers": 3}
    model = EncoderDecoder(t5_config(fields | {"feed_forward_proj": "gated-gelu"}))
    base = jax.eval_shape(model.init, jax.random.key(0), IDS, MASK, TARGET)["params"]
    adapters = jax.eval_shape(lambda rng: init_adapters(rng, base, ALL), jax.random.key(0))
    mesh = make_mesh(MeshSettings(data=2, fsdp=2, tensor=2))

    def specs(tree):
        places = named_leaves(shard_params(tree, mesh, axes=logical_axes))
        leaves = named_leaves(tree)
        return {
            name: tuple(place.spec) + (None,) * (leaves[name].ndim - len(place.spec)) for name, place in places.items()
        }

    weights, split, boxes = specs(base), specs(adapters), specs(jax.eval_shape(quantize, base))
    assert weights["encoder/layers/attention/query"] == (None, "fsdp", "tensor", None)
    assert weights["encoder/layers/feed_forward/wo"] == (None, "tensor", "fsdp")
    assert weights["token_embedding"] == ("tensor", "fsdp")
    owners = {name[:-2] for name in split}
    assert len(owners) == 4 + 8 + 2 * 3
    for name in owners:
        inputs = 2 if name.endswith("attention/out") else 1
        whole = weights[name]
        assert split[f"{name}/a"] == (*whole[: 1 + inputs], None), name
        assert split[f"{name}/b"] == (None, None, *whole[1 + inputs :]), name
        assert {"fsdp", "tensor"} == {*split[f"{name}/a"], *split[f"{name}/b"]} - {None}
        assert boxes[f"{name}/values"] == whole
        assert boxes[f"{name}/scale"][1 : 1 + inputs] == (None,) * inputs
        assert boxes[f"{name}/scale"][1 + inputs :] == whole[1 + inputs :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "frozen"),
    [({}, dict), ({"remat": "full", "unroll": 2}, dict), ({}, quantize)],
    ids=["scan", "remat", "int8"],
)
def test_values_and_gradients_are_those_of_the_sum_written_out(changes, frozen):
    """With eight-bit weights, of what they stand for."""
    model, plain = model_and_params(**changes)
    adapters, base = drawn(plain, ALL, seed=1), frozen(plain)
    floats = merge(base, {}, ALL)

    @jax.jit
    def ours(adapters):
        return jax.value_and_grad(lambda a: objective(model, adapt(base, a, ALL)))(adapters)

    @jax.jit
    def explicit(adapters):
        return jax.value_and_grad(lambda a: objective(model, sums(floats, a, 2.0)))(adapters)

    (value, grads), (expected, expected_grads) = ours(adapters), explicit(adapters)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, grad in named_leaves(grads).items():
        wanted = named_leaves(expected_grads)[name]
        np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=2e-6 * np.abs(wanted).max(), err_msg=name)
        assert np.abs(grad).max() > 0
    if frozen is quantize:
        exact = jax.jit(objective, static_argnums=0)(model, sums(plain, adapters, 2.0))
        assert 0 < abs(float(value - exact)) < 0.05 * abs(float(exact))


@pytest.mark.parametrize("name", [pytest.param("t5", marks=pytest.mark.slow), "llama"])
def test_adapters_learn_on_lowered_weights_what_they_learn_on_those_in_float32(name):
    params, logits = made(name, "bfloat16")
    settings = dataclasses.replace(ALL, pattern="attention|feed_forward")
    adapters = jax.tree.map(lambda leaf: 0.1 * leaf, drawn(params, settings, seed=1))

    def learnt(base):
        loss = jax.jit(jax.value_and_grad(lambda a: jnp.mean(logits(adapt(base, a, settings)) ** 2)))
        return loss(adapters)

    (value, grads), (wanted, wanted_grads) = learnt(lower(params, "bfloat16")), learnt(params)
    # Between the two lies one more rounding of each weight.
    np.testing.assert_allclose(value, wanted, rtol=0.02)
    for part, grad in named_leaves(grads).items():
        expected = named_leaves(wanted_grads)[part]
        assert grad.dtype == jnp.float32
        distance = np.linalg.norm(grad - expected) / np.linalg.norm(expected)
        assert distance < 0.1, (part, distance)
