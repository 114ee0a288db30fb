import functools

import jax
import jax.numpy as jnp

from empax.models.layers import Attention
from empax.planning.sketches import count_flops


def test_products_are_counted_and_loops_multiplied_out():
    weights = jax.ShapeDtypeStruct((5, 8, 8), jnp.float32)
    states = jax.ShapeDtypeStruct((4, 8), jnp.float32)

    def looped(states, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), states, weights)[0]

    def unrolled(states, weights):
        for layer in range(5):
            states = jnp.tanh(states @ weights[layer])
        return states

    once = 2 * 4 * 8 * 8
    assert count_flops(lambda x, w: x @ w[0], states, weights) == once
    assert count_flops(looped, states, weights) == count_flops(unrolled, states, weights) == 5 * once
    # Backward: one product for the states and one for the weights of every layer.
    gradient = jax.grad(lambda w, x: jax.jit(looped)(x, w).sum())
    assert count_flops(gradient, weights, states) == 15 * once


def test_a_loop_that_does_not_say_its_length_runs_as_often_as_one_is_told():
    weights, states = (jax.ShapeDtypeStruct((8, 8), jnp.float32) for _ in range(2))

    def until_small(states, weights):
        return jax.lax.while_loop(lambda x: x.sum() > 1.0, lambda x: x @ weights, states) @ weights

    once = 2 * 8**3
    assert count_flops(until_small, states, weights) == 2 * once
    assert count_flops(until_small, states, weights, while_turns=5) == 6 * once


def test_a_gpu_counts_the_products_of_attention_too(monkeypatch):
    layer = Attention(16, 2, 8, use_bias=False, scale=True, dropout=0.0, dtype=jnp.bfloat16)
    read = functools.partial(layer.apply, mask=None, bias=None, deterministic=True)
    states = jax.ShapeDtypeStruct((1, 256, 16), jnp.bfloat16)
    weights = {name: jax.ShapeDtypeStruct((16, 2, 8), jnp.float32) for name in ("query", "key", "value")}
    params = {"params": {**weights, "out": jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)}}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert count_flops(read, params, states, states) == 2 * 256 * 16 * (4 * 16 + 2 * 256)


def test_of_branches_the_costliest_counts():
    weights, states = (jax.ShapeDtypeStruct((8, 8), jnp.float32) for _ in range(2))

    def either(states, weights):
        return jax.lax.cond(states.sum() > 1.0, lambda: states @ weights @ weights, lambda: states @ weights)

    assert count_flops(either, states, weights) == 2 * 2 * 8**3


def test_a_gradient_that_is_dropped_is_not_counted():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(product(x, jax.lax.stop_gradient(w))), None), x, w)[0].sum()

    states, weights = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((5, 8, 8), jnp.float32)
    assert count_flops(jax.grad(layers), states, weights) == 5 * 2 * 2 * 4 * 8 * 8
