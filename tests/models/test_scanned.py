"""What every token of decoding multiplies with is converted once, before the loop, to the same numbers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.layers import Dropout
from empax.models.memory_attention import Memory
from empax.models.prompted import PromptedDecoder
from empax.models.scanned import DecodeCache, scan_layers
from empax.models.transformer import EncoderDecoder, TransformerConfig
from empax.planning.sketches import _bodies

V, D = 48, 16
TINY = {"d_model": D, "num_heads": 2, "head_dim": 8, "d_ff": 24, "dropout": 0.0, "dtype": "bfloat16"}
IDS, REAL = jnp.arange(2, 12).reshape(2, 5), jnp.arange(5)[None] < jnp.array([[5], [3]])


def encoder_decoder(unroll):
    config = TransformerConfig(
        V, num_encoder_layers=1, num_decoder_layers=2, unroll=unroll, memories=("facts",), **TINY
    )
    return EncoderDecoder(config)


def decoder_only(unroll):
    config = DecoderOnlyConfig(V, num_kv_heads=1, num_layers=2, max_positions=32, unroll=unroll, **TINY)
    return PromptedDecoder(DecoderOnly(config))


def answers(make, unroll, settings):
    """Parameters, and a function from them to what is generated."""
    model = make(unroll)
    memories = {"facts": Memory(jnp.ones((2, 3, D), jnp.bfloat16), jnp.ones((2, 3), bool))}
    seq2seq = make is encoder_decoder
    more = {"memories": memories} if seq2seq else {}
    params = jax.jit(model.init)(jax.random.key(0), IDS, REAL, IDS, **more)["params"]

    def run(params):
        variables = {"params": params}
        states = model.apply(variables, IDS, REAL, method="encode")
        sizes = {"num_hypotheses": 1, "max_length": settings.max_tokens}
        cache = model.apply(variables, states, REAL, method="start_cache", **sizes, **more)
        step = lambda tokens, cache: model.apply(variables, tokens, cache, method="step")  # noqa: E731
        start = 0 if seq2seq else states.start
        return generate(step, cache, batch_size=2, start_id=start, eos_id=1, pad_id=0, settings=settings)

    return params, run


def converted(jaxpr, inside=False):
    """Shapes of float32 arrays that loops over tokens turn into bfloat16."""
    found = []
    for equation in jaxpr.eqns:
        old = equation.invars[0].aval if equation.invars else None
        if inside and equation.primitive.name == "convert_element_type" and old.dtype == jnp.float32:
            found += [old.shape] if equation.params["new_dtype"] == jnp.bfloat16 else []
        for part in _bodies(equation):
            found += converted(part, inside or equation.primitive.name == "while")
    return found


SLOW = pytest.mark.slow
CASES = [(encoder_decoder, 1), (decoder_only, 2), pytest.param(encoder_decoder, 2, marks=SLOW),
         pytest.param(decoder_only, 1, marks=SLOW)]  # fmt: skip


@pytest.mark.parametrize(("make", "unroll"), CASES)
def test_weights_are_converted_before_the_loop_over_tokens_and_answers_stay(make, unroll, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    params, run = answers(make, unroll, DecodeSettings(method="greedy", max_tokens=6))
    weights = lambda shapes: [shape for shape in shapes if np.prod(shape) >= D * D]  # noqa: E731
    assert not weights(converted(jax.make_jaxpr(run)(params).jaxpr))
    new = jax.jit(run)(params)

    def as_they_are(self, layers, table, *, dtype, apart):
        return self._cut(layers) if apart else self

    monkeypatch.setattr(DecodeCache, "with_weights", as_they_are)
    again = lambda params: run(params)  # noqa: E731  # traced anew
    assert weights(converted(jax.make_jaxpr(again)(params).jaxpr))
    old = jax.jit(again)(params)
    np.testing.assert_array_equal(new.tokens, old.tokens)
    np.testing.assert_array_equal(new.log_probs, old.log_probs)


@pytest.mark.parametrize(("backend", "dtype"), [("tpu", "float32"), ("cpu", "bfloat16")])
def test_in_single_precision_and_on_a_cpu_the_model_keeps_its_own_weights(backend, dtype, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    sizes = {**TINY, "num_encoder_layers": 1, "num_decoder_layers": 2, "dtype": dtype}
    model = EncoderDecoder(TransformerConfig(V, **sizes))

    def start_cache():
        params = model.init(jax.random.key(0), IDS, REAL, IDS)
        states = model.apply(params, IDS, REAL, method="encode")
        return model.apply(params, states, REAL, num_hypotheses=1, max_length=3, method="start_cache")

    cache = jax.eval_shape(start_cache)
    assert (cache.weights, cache.table) == (None, None)


def test_every_layer_draws_its_own_dropout():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, values):
            def body(layer, carry, _):
                return carry, layer(values, deterministic=False)

            return scan_layers(body, Dropout(0.5), None, None, length=2, unroll=1)[1]

    first, second = Layers().apply({}, jnp.ones(100), rngs={"dropout": jax.random.key(0)})
    assert 20 < np.sum((first == 0) != (second == 0)) < 80
