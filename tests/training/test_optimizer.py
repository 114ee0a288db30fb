from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from empax.core.config import ConfigError, to_settings
from empax.core.sharding import MeshSettings, make_mesh, shard_params
from empax.core.tree import named_leaves
from empax.training.optimizer import (
    OptimizerSettings,
    ParamGroup,
    averaged,
    learning_rate,
    make_optimizer,
    trained_mask,
)

PARAMS = {
    "encoder": {"layers": {"kernel": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "bias": jnp.ones((2, 3))}},
    "head": {"kernel": jnp.full(3, 2.0), "norm": {"scale": jnp.ones(3)}},
}
GRADS = jax.tree.map(lambda leaf: 0.3 * leaf + 0.1, PARAMS)


def run(settings, updates=3, total_steps=10):
    optimizer, params = make_optimizer(settings, PARAMS, total_steps), PARAMS
    state = optimizer.init(params)
    for _ in range(updates):
        changes, state = optimizer.update(GRADS, state, params)
        params = optax.apply_updates(params, changes)
    return params


@pytest.mark.oracle
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_matches_adamw_of_torch(clip_norm):
    settings = OptimizerSettings(learning_rate=0.05, weight_decay=0.1, clip_norm=clip_norm, b2=0.99)
    leaves, structure = jax.tree.flatten(PARAMS)
    decayed = jax.tree.leaves({"encoder": {"layers": {"kernel": True, "bias": False}},
                               "head": {"kernel": True, "norm": {"scale": False}}})  # fmt: skip
    tensors = [torch.tensor(np.asarray(leaf), requires_grad=True) for leaf in leaves]
    groups = [{"params": [t], "weight_decay": 0.1 if d else 0.0} for t, d in zip(tensors, decayed, strict=True)]
    theirs = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.99), eps=1e-8)
    for _ in range(3):
        for tensor, grad in zip(tensors, jax.tree.leaves(GRADS), strict=True):
            tensor.grad = torch.tensor(np.asarray(grad))
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(tensors, clip_norm)
        theirs.step()
    expected = jax.tree.unflatten(structure, [t.detach().numpy() for t in tensors])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), run(settings), expected)


@pytest.mark.parametrize(
    ("name", "decays"),
    [("self_attention/query_kernel", True), ("embedding", True), ("gate", True), ("self_attention/query_bias", False),
     ("feed_forward/wi_bias", False), ("head/hidden_bias", False), ("bias", False), ("head/scale", False),
     ("relative_bias", False), ("attention_norm", False), ("bias/kernel", True)],
)  # fmt: skip
def test_biases_and_scales_do_not_decay_whatever_they_belong_to(name, decays):
    params = {name: jnp.ones(3)}
    optimizer = make_optimizer(OptimizerSettings(learning_rate=0.1, weight_decay=0.5), params, 1)
    changes, _ = optimizer.update({name: jnp.zeros(3)}, optimizer.init(params), params)
    assert bool((changes[name] != 0).all()) == decays


def test_the_running_mean_weighs_every_update_and_leaves_frozen_parameters_alone():
    settings = OptimizerSettings(learning_rate=0.05, ema_decay=0.8, groups=(ParamGroup("^head/", frozen=True),))
    optimizer, params = make_optimizer(settings, PARAMS, 10), PARAMS
    state = optimizer.init(params)
    assert averaged(state, params)["encoder"]["layers"]["bias"].tolist() == PARAMS["encoder"]["layers"]["bias"].tolist()
    seen = []
    for _ in range(4):
        changes, state = optimizer.update(GRADS, state, params)
        params = optax.apply_updates(params, changes)
        seen.append(np.asarray(params["encoder"]["layers"]["kernel"]))
    mean = averaged(state, params)
    expected = np.average(seen, axis=0, weights=[0.8**3, 0.8**2, 0.8, 1.0])
    np.testing.assert_allclose(mean["encoder"]["layers"]["kernel"], expected, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, mean["head"], PARAMS["head"])
    plain = run(OptimizerSettings(learning_rate=0.05))
    jax.tree.map(np.testing.assert_array_equal, run(OptimizerSettings(learning_rate=0.05, ema_decay=0.8)), plain)
    assert averaged(optax.EmptyState(), plain) is plain


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {0: 0.25, 3: 1.0, 4: 1.0, 20: 1.0}),
        ("linear", {0: 0.25, 3: 1.0, 4: 1.0, 12: 0.5, 20: 0.0, 30: 0.0}),
        ("cosine", {0: 0.25, 4: 1.0, 8: 0.5 * (1 + math.cos(math.pi / 4)), 12: 0.5, 20: 0.0}),
        ("rsqrt", {0: 0.25, 3: 1.0, 15: 0.5, 63: 0.25}),
    ],
)
def test_schedules(schedule, expected):
    rate = learning_rate(OptimizerSettings(learning_rate=2.0, warmup_steps=4, schedule=schedule), 20)
    for step, value in expected.items():
        assert float(rate(step)) == pytest.approx(2.0 * value, abs=1e-6), step


def test_groups_scale_and_schedule_by_name():
    """The first matching group decides; the updates of Adam are proportional to the learning rate."""
    plain = run(OptimizerSettings(learning_rate=0.01, clip_norm=None), updates=1)
    groups = (
        ParamGroup("layers/kernel", learning_rate_scale=0.5),
        ParamGroup("encoder", learning_rate_scale=3.0, warmup_steps=2),
    )
    grouped = run(OptimizerSettings(learning_rate=0.01, clip_norm=None, groups=groups), updates=1)

    def moved(params, *path):
        after, before = params, PARAMS
        for name in path:
            after, before = after[name], before[name]
        return np.asarray(after - before)

    factors = {("encoder", "layers", "kernel"): 0.5, ("encoder", "layers", "bias"): 1.5, ("head", "kernel"): 1.0}
    for path, factor in factors.items():
        np.testing.assert_allclose(moved(grouped, *path), factor * moved(plain, *path), rtol=1e-4, atol=1e-7)


def test_a_group_of_a_run_without_adapters_applies_beside_adapters():
    params = {"adapters": {"generator": {"model": 1.0}}, "trained": {"generator": {"emotion": 1.0}, "retriever": 1.0}}

    def trained(pattern):
        return trained_mask(OptimizerSettings(groups=(ParamGroup(pattern, frozen=True),)), params)

    retriever_alone = {"generator": {"emotion": False}, "retriever": True}
    assert trained("^generator/") == {"adapters": {"generator": {"model": False}}, "trained": retriever_alone}
    generator_alone = {"generator": {"emotion": True}, "retriever": False}
    for pattern in ("^retriever", "^trained/retriever"):
        assert trained(pattern) == {"adapters": {"generator": {"model": True}}, "trained": generator_alone}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_what_learns_later_begins_as_if_it_were_the_first_update(weight_decay):
    settings = OptimizerSettings(learning_rate=0.1, clip_norm=None, weight_decay=weight_decay)
    params = {"early": jnp.ones(3), "late": {"a": jnp.ones(3), "frozen": jnp.ones(3)}}
    settings = dataclasses.replace(settings, groups=(ParamGroup(pattern="frozen", frozen=True),))
    optimizer = make_optimizer(settings, params, 10, starts={"late/a": 4, "late/frozen": 4, "early": 0})
    state, now, seen = optimizer.init(params), params, []
    gradients = jax.random.normal(jax.random.key(0), (8, 3))
    for step, gradient in enumerate(gradients):
        grads = {"early": gradient, "late": {"a": gradient * (step >= 4), "frozen": gradient}}
        updates, state = jax.jit(optimizer.update)(grads, state, now)
        now = optax.apply_updates(now, updates)
        seen.append(now)
    np.testing.assert_array_equal(seen[3]["late"]["a"], 1.0)
    plain = make_optimizer(settings, params, 10)
    alone, state = params, plain.init(params)
    for gradient, expected in zip(gradients[4:], seen[4:], strict=True):
        updates, state = plain.update(jax.tree.map(lambda _, g=gradient: g, params), state, alone)
        alone = optax.apply_updates(alone, updates)
        np.testing.assert_allclose(expected["late"]["a"], alone["late"]["a"], rtol=1e-6)
        np.testing.assert_array_equal(expected["late"]["frozen"], 1.0)


@pytest.mark.parametrize("late", [False, True], ids=["frozen", "not trained yet"])
def test_gradients_of_what_is_not_trained_do_not_count_in_the_global_norm(late):
    groups = () if late else (ParamGroup("encoder", frozen=True),)
    settings = OptimizerSettings(learning_rate=1.0, b1=0.0, b2=0.0, eps=1.0, clip_norm=0.01, groups=groups)
    starts = {name: 1 for name in named_leaves(PARAMS) if late and name.startswith("encoder/")}
    optimizer = make_optimizer(settings, PARAMS, 10, starts=starts)
    huge = {**GRADS, "encoder": jax.tree.map(lambda leaf: 1e6 * leaf, GRADS["encoder"])}
    updates = [optimizer.update(grads, optimizer.init(PARAMS), PARAMS)[0] for grads in (GRADS, huge)]
    jax.tree.map(np.testing.assert_array_equal, *updates)
    assert float(jnp.abs(updates[0]["head"]["kernel"]).max()) > 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(updates[0]["encoder"]))
    assert trained_mask(settings, PARAMS)["encoder"] == {"layers": {"kernel": late, "bias": late}}


def test_pattern_that_matches_nothing_is_refused_with_names():
    with pytest.raises(ConfigError, match=r"groups\[0\].pattern = 'decodr' matches none of the 4.*encoder/layers/bias"):
        make_optimizer(OptimizerSettings(groups=(ParamGroup("decodr"),)), PARAMS, 10)
    with pytest.raises(ConfigError, match="nothing is left to train"):
        make_optimizer(OptimizerSettings(groups=(ParamGroup(".", frozen=True),)), PARAMS, 10)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"b2": 1.0}, r"must lie in \[0, 1\)"),
        ({"ema_decay": 1.0}, r"ema_decay = 1.0 must lie in \[0, 1\)"),
        ({"clip_norm": 0.0}, "clip_norm = 0.0 must be above 0"),
        ({"no_decay_pattern": "["}, "no_decay_pattern = '\\[' is not a regular expression"),
        ({"no_decay_pattern": "a{99999999999}"}, "not a regular expression: the repetition number is too large"),
        ({"groups": [{"pattern": "a", "learning_rate_scale": -1.0}]}, r"groups\[0\]: learning_rate_scale = -1.0"),
    ],
)
def test_settings_refuse(values, message):
    with pytest.raises(ConfigError, match=message):
        to_settings(OptimizerSettings, values, where="config.optimizer")


# --- Adafactor

WIDE = {
    "wide": {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(6, 9)), jnp.float32)},
    "norm": {"scale": jnp.ones(9) * 1e-4},
}


def gradients(step):
    rng = np.random.default_rng(10 + step)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 3.0 ** (step - 1), jnp.float32), WIDE)


def adafactor(updates=3, params=WIDE, place=lambda tree: tree, factored_from=2, **changes):
    settings = OptimizerSettings(method="adafactor", **{"clip_norm": None, "learning_rate": 0.05, **changes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("empax.training.optimizer._FACTORED_FROM", factored_from)
        optimizer = make_optimizer(settings, params, 10)
    params, state = place((params, optimizer.init(params)))
    for step in range(updates):
        change, state = jax.jit(optimizer.update)(gradients(step), state, params)
        params = optax.apply_updates(params, change)
    return params, state


@pytest.mark.oracle
@pytest.mark.parametrize("scale_parameter", [True, False])
def test_adafactor_is_that_of_transformers(scale_parameter):
    from transformers.optimization import Adafactor

    leaves, structure = jax.tree.flatten(WIDE)
    tensors = [torch.tensor(np.asarray(leaf), requires_grad=True) for leaf in leaves]
    options = {"scale_parameter": scale_parameter, "relative_step": False, "warmup_init": False}
    theirs = Adafactor(tensors, lr=0.05, **options)
    for step in range(3):
        for tensor, grad in zip(tensors, jax.tree.leaves(gradients(step)), strict=True):
            tensor.grad = torch.tensor(np.asarray(grad))
        theirs.step()
    expected = jax.tree.unflatten(structure, [tensor.detach().numpy() for tensor in tensors])
    found, _ = adafactor(scale_parameter=scale_parameter)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), found, expected)


def test_adafactor_follows_the_paper():
    """Shazeer & Stern 2018, Algorithm 4, in numpy doubles."""
    x = np.asarray(WIDE["wide"]["kernel"], np.float64)
    rows, columns = np.zeros(6), np.zeros(9)
    for step in range(3):
        g = np.asarray(gradients(step)["wide"]["kernel"], np.float64)
        decay = 1.0 - (step + 1.0) ** -0.8
        rows = decay * rows + (1 - decay) * (g**2 + 1e-30).sum(1)
        columns = decay * columns + (1 - decay) * (g**2 + 1e-30).sum(0)
        u = g / np.sqrt(np.outer(rows, columns) / rows.sum())
        u /= max(1.0, np.sqrt((u**2).mean()) / 1.0)
        x -= 0.05 * max(1e-3, np.sqrt((x**2).mean())) * u
    np.testing.assert_allclose(adafactor()[0]["wide"]["kernel"], x, rtol=1e-4, atol=1e-6)


def test_each_option_of_adafactor_changes_what_it_should():
    plain = adafactor()[0]["wide"]["kernel"]
    for changes in ({"scale_parameter": False}, {"weight_decay": 0.1}):
        assert not np.allclose(plain, adafactor(**changes)[0]["wide"]["kernel"]), changes
    factored, whole = (adafactor(factored_from=size)[1] for size in (2, 7))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(state)) for state in (factored, whole)]
    assert sizes[0] < sizes[1] - 6 * 9 // 2
    adamw = OptimizerSettings(learning_rate=0.05, clip_norm=None)
    other = dataclasses.replace(adamw, scale_parameter=False)
    jax.tree.map(np.testing.assert_array_equal, run(adamw), run(other))


@pytest.mark.multidevice
def test_adafactor_is_the_same_where_parameters_and_its_state_are_split():
    mesh = make_mesh(MeshSettings(data=1, fsdp=3, tensor=1), jax.devices()[:3])
    split = adafactor(place=lambda tree: jax.device_put(tree, shard_params(tree, mesh)))
    whole = adafactor()
    assert any(
        len(leaf.sharding.device_set) > 1 and not leaf.sharding.is_fully_replicated
        for leaf in jax.tree.leaves(split[1])
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), split, whole)
