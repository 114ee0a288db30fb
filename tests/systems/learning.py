"""What tests of systems learn with: made-up parameters, and a loop of updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def random_like(shapes, seed=0, scale=0.3):
    """Parameters by their shapes alone: none is 0, as biases begin, so that each changes something.

    `seed` may be a generator of NumPy.
    """
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * scale, leaf.dtype), shapes)


def learn(loss, params, given, rate):
    """`params` after an update of Adam on each of `given`, and the last metrics; `loss` gives a Mean and metrics."""
    optimizer = optax.adam(rate)

    @jax.jit
    def update(params, state, one):
        def value(params):
            found, metrics = loss(params, one)
            return found.value(), metrics

        gradient, metrics = jax.grad(value, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, metrics

    state, metrics = optimizer.init(params), {}
    for one in given:
        params, state, metrics = update(params, state, one)
    return params, metrics


def loss_and_gradient(task, params, frozen, batch, *, train):
    """The summed loss of a batch with (the loss, what is logged), and its gradient."""

    def loss(params):
        found, metrics = task.loss(params, frozen, batch, jax.random.key(0), train=train)
        return found.total, (found, metrics)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def use_all_cells(monkeypatch):
    """Losses over real tokens are computed over padding, too."""
    monkeypatch.setattr("empax.parts.generator.task.over_real_tokens", lambda function, *given: function(*given))


def keys(count):
    """Of as many updates on the same rows."""
    return map(jax.random.key, range(count))
