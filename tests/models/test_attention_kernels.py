"""One kernel of attention gives what products and softmax give, and is chosen where it pays."""

import dataclasses
import functools
import types

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.pallas import tpu as pltpu

from empax.core.config import ConfigError
from empax.core.machine import planned_for
from empax.core.sharding import batch_sharding, make_mesh, rows_split_as
from empax.models import attention_kernels
from empax.models.attention_kernels import is_fused
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.layers import Attention
from empax.models.transformer import EncoderDecoder, TransformerConfig

B, T, H, N, D = 3, 6, 4, 8, 32


def attention(kernel, sizes=(D, H, N), **changes):
    settings = {"use_bias": False, "scale": False, "dropout": 0.0, **changes}
    return Attention(*sizes, kernel=kernel, **settings)


def inputs(dtype):
    states, source, bias = (jax.random.normal(jax.random.key(i), shape) for i, shape in
                            enumerate([(B, T, D), (B, 10, D), (1, H, T, 10)]))  # fmt: skip
    lengths = jnp.array([10, 4, 7])[:, None]
    return states.astype(dtype), source.astype(dtype), bias, (jnp.arange(10)[None] < lengths)[:, None]


def both(dtype, *, with_bias, with_mask, **changes):
    """Values and gradients (of parameters, states, source, bias), plain and fused."""
    target, source, bias, mask = inputs(dtype)
    layer = attention("plain", dtype=dtype, **changes)
    options = {"mask": mask if with_mask else None, "deterministic": True}
    given = {"bias": bias if with_bias else None, **options}
    params = jax.jit(lambda key: layer.init(key, target, source, **given))(jax.random.key(9))

    def value(params, target, source, bias, kernel):
        read = attention(kernel, dtype=dtype, **changes).apply(
            params, target, source, bias=bias if with_bias else None, **options
        )
        return jnp.sum(jnp.sin(read.astype(jnp.float32)))

    def at(kernel):
        slopes = jax.value_and_grad(functools.partial(value, kernel=kernel), (0, 1, 2, 3))
        return jax.jit(slopes)(params, target, source, bias)

    return at("plain"), at("fused")


CASES = [
    {"with_bias": True, "with_mask": True},
    {"with_bias": False, "with_mask": True, "scale": True, "use_bias": True},
    {"with_bias": False, "with_mask": False, "num_kv_heads": 2},
]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_products_and_softmax(case):
    plain, fused = both(jnp.float32, **case)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(fused), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_in_half_precision_they_differ_by_its_rounding():
    plain, fused = both(jnp.bfloat16, with_bias=True, with_mask=True)
    exact, _ = both(jnp.float32, with_bias=True, with_mask=True)
    for one, other, true in zip(*map(jax.tree.leaves, (plain, fused, exact)), strict=True):
        error = lambda x: np.linalg.norm(np.asarray(x, np.float32) - true)  # noqa: E731, B023
        assert error(other) <= 1.5 * error(one) + 1e-6


@pytest.mark.parametrize(
    ("words", "fused"),
    [
        ({}, True),
        ({"queries": 128}, False),
        ({"keys": 144}, False),
        ({"dropped": True}, False),
        ({"dtype": jnp.float32}, False),
        ({"head_dim": 50}, False),
        ({"head_dim": 128}, True),
        ({"head_dim": 136}, False),
        ({"queries": 257}, False),
        ({"keys": 257}, False),
        ({"kernel": "plain"}, False),
    ],
)
def test_a_gpu_takes_it_for_long_sequences_in_half_precision(words, fused, monkeypatch):
    given = {"kernel": "auto", "queries": 256, "keys": 512, "head_dim": 64, "dtype": jnp.bfloat16, "dropped": False}
    args = {**given, **words}
    assert not is_fused(**args)  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert is_fused(**args) == fused


@pytest.mark.parametrize(
    ("card", "fused"), [("9.0", True), ("8.0", True), ("10.3", True), ("7.5", False), ("gfx942", False)]
)
def test_a_card_that_cudnn_has_no_attention_for_computes_it_by_products(card, fused, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=card)])
    assert is_fused("auto", 256, 256, 64, jnp.bfloat16, dropped=False) == fused


def test_the_program_for_a_gpu_has_calls_of_cudnn_and_no_softmax(monkeypatch):
    """It is made without a GPU, forward and backward, with the bias' gradient."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda _: False)
    states, bias = jnp.ones((2, 256, D), jnp.bfloat16), jnp.ones((1, H, 256, 256))
    layer = attention("auto", dtype=jnp.bfloat16)
    mask = jnp.ones((2, 1, 256), bool)
    weights = {"params": {name: jnp.ones((D, H, N)) for name in ("query", "key", "value")}}
    weights["params"]["out"] = jnp.ones((H, N, D))

    def loss(weights, bias):
        read = layer.apply(weights, states, states, mask=mask, bias=bias, deterministic=True)
        return jnp.sum(read.astype(jnp.float32))

    calls = [f"__cudnn$fmhaScaleBiasSoftmax{part}" for part in ("", "Backward")]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
    function = jax.jit(jax.grad(loss, (0, 1)))
    text = jax.export.export(function, platforms=["cuda"], disabled_checks=allowed)(weights, bias).mlir_module()
    assert all(f"@{name}(" in text for name in calls)
    asked = [line for line in text.splitlines() if "@__cudnn" in line]
    assert not any("256x256xf32" in line for line in asked)  # cuDNN takes a bias in the type of the queries
    assert "stablehlo.exponential" not in text


LONG = 256


def on_one_of(device, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)


@pytest.mark.parametrize(
    ("queries", "with_bias", "masked", "changes"),
    [
        (128, True, "keys", {}),  # T5's bias, read from a source of another length
        (LONG, False, "causal", {"num_kv_heads": 1}),
        (LONG, True, "all", {"scale": True, "use_bias": True}),
    ],
    ids=["bias", "causal", "mask"],
)
def test_the_kernel_of_a_tpu_gives_values_and_gradients_of_products_and_softmax(
    queries, with_bias, masked, changes, monkeypatch
):
    """As Pallas interprets it."""
    target, source, bias = (jax.random.normal(jax.random.key(i), shape) for i, shape in
                            enumerate([(2, queries, 16), (2, LONG, 16), (1, 2, queries, LONG)]))  # fmt: skip
    mask = (jnp.arange(LONG)[None] < jnp.array([[LONG], [150]]))[:, None]
    if masked != "keys":
        mask = mask & jnp.tril(jnp.ones((1, LONG, LONG), bool))

    made = functools.partial(attention, sizes=(16, 2, N), **changes)
    options = {"mask": mask, "deterministic": True}
    init = functools.partial(made("plain").init, bias=bias if with_bias else None, **options)
    params = jax.jit(init)(jax.random.key(9), target, source)
    on_one_of("tpu", monkeypatch)

    def value(params, target, source, bias, kernel):
        def read(layer):
            parts = layer.queries(target), *layer.keys_values(source)
            return layer.attend(*parts, bias=bias if with_bias else None, causal=masked == "causal", **options)

        return jnp.sum(jnp.sin(nn.apply(read, made(kernel))(params)))

    def at(kernel):
        function = functools.partial(value, kernel=kernel)
        program = str(jax.make_jaxpr(function)(params, target, source, bias))
        assert ("pallas_call" in program) == (kernel == "flash")
        return jax.jit(jax.value_and_grad(function, (0, 1, 2, 3)))(params, target, source, bias)

    with pltpu.force_tpu_interpret_mode():
        flash = at("flash")
    for one, other in zip(jax.tree.leaves(at("plain")), jax.tree.leaves(flash), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("device", "tokens", "kernel"), [("tpu", 128, True), ("tpu", 144, False), ("cpu", 128, False)])
def test_the_kernel_of_a_tpu_is_asked_where_it_fits(device, tokens, kernel, monkeypatch):
    on_one_of(device, monkeypatch)
    for queries, keys in ((tokens, 256), (256, tokens)):
        assert is_fused("flash", queries, keys, 64, jnp.bfloat16, dropped=False) == kernel
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)  # and nobody says which rows each has
    assert not is_fused("flash", tokens, 256, 64, jnp.bfloat16, dropped=False)


@pytest.mark.multidevice
def test_each_device_calls_the_kernel_of_a_tpu_with_its_own_rows(monkeypatch):
    config = DecoderOnlyConfig(vocab_size=40, d_model=16, num_heads=2, head_dim=8, d_ff=16, dropout=0.0, num_kv_heads=1,
                               num_layers=1, max_positions=128, attention="flash")  # fmt: skip
    ids = jnp.zeros((4, 128), jnp.int32)
    params = jax.eval_shape(DecoderOnly(config).init, jax.random.key(0), ids, ids == 0)
    with planned_for("tpu"), rows_split_as(batch_sharding(make_mesh(devices=jax.devices()[:2]))):
        program = str(jax.make_jaxpr(lambda params: DecoderOnly(config).apply(params, ids, ids == 0))(params))
    assert "shard_map" in program
    assert "bf16[2,2,128,8]" in program or "f32[2,2,128,8]" in program  # two rows, two heads


def models():
    tiny = {"d_model": 16, "num_heads": 2, "head_dim": 8, "d_ff": 16, "dropout": 0.0}
    seq2seq = TransformerConfig(vocab_size=40, num_encoder_layers=1, num_decoder_layers=1, **tiny)
    prompted = DecoderOnlyConfig(vocab_size=40, num_kv_heads=1, num_layers=1, max_positions=32, **tiny)
    ids, real = jnp.arange(12).reshape(2, 6) % 40, jnp.arange(6)[None] < jnp.array([[6], [4]])
    return {"encoder_decoder": (EncoderDecoder, seq2seq, (ids, real, ids)),
            "decoder_only": (DecoderOnly, prompted, (ids, real))}  # fmt: skip


@pytest.mark.parametrize("name", models())
def test_the_setting_reaches_every_layer_of_a_model(name, monkeypatch):
    make, config, args = models()[name]
    params = jax.jit(make(config).init)(jax.random.key(0), *args)
    called = []
    real = jax.nn.dot_product_attention
    monkeypatch.setattr(
        attention_kernels.jax.nn, "dot_product_attention", lambda *a, **k: called.append(1) or real(*a, **k)
    )
    plain = jax.jit(make(config).apply)(params, *args)
    assert not called
    fused = jax.jit(make(dataclasses.replace(config, attention="fused")).apply)(params, *args)
    assert len(called) >= (3 if name == "encoder_decoder" else 1)
    np.testing.assert_allclose(fused, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["fused", "flash"])
def test_what_drops_weights_out_is_refused(kernel):
    layer, (states, source, _, mask) = attention(kernel, dropout=0.1), inputs(jnp.float32)
    options = {"mask": mask, "bias": None}
    params = layer.init(jax.random.key(0), states, source, deterministic=True, **options)
    with pytest.raises(ConfigError, match=f"'{kernel}' has no dropout of attention weights; set the rate to 0, or"):
        layer.apply(params, states, source, deterministic=False, rngs={"dropout": jax.random.key(1)}, **options)


@pytest.mark.parametrize("kv_heads", [H, 2])
def test_on_a_gpu_queries_keys_and_values_are_one_product(kv_heads, monkeypatch):
    states, *_ = inputs(jnp.float32)
    layer = attention("plain", use_bias=True, scale=True, head_norm_eps=1e-6, num_kv_heads=kv_heads)
    options = {"mask": None, "bias": None, "deterministic": True}
    params = jax.jit(lambda key: layer.init(key, states, states, **options))(jax.random.key(0))

    def value(params, states):
        return jnp.sum(jnp.sin(layer.apply(params, states, states, **options)))

    def slopes():
        return jax.jit(jax.value_and_grad(lambda *args: value(*args), (0, 1)))(params, states)

    def products():
        return str(jax.make_jaxpr(lambda *args: value(*args))(params, states)).count("dot_general")

    apart, before = slopes(), products()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert products() == before - (2 if kv_heads == H else 0)
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(slopes()), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6)
