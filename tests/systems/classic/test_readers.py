"""Each reader against an independent computation, and its published slips."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.tree import named_leaves
from empax.core.types import EMOTIONS, IS_POSITIVE
from empax.systems.classic.mimicry import MimicrySettings
from empax.systems.classic.model import Listeners
from empax.systems.classic.readers import EmotionSettings, ListenersSettings, Read, teacher_probability
from tests.systems.classic.small import in_torch, linear, make
from tests.systems.learning import random_like

RNG = np.random.default_rng(3)


# Multi-TRS


def test_the_emotion_is_read_from_the_first_state(made):
    one = made["multi_trs"]
    read = one.read()
    expected = np.asarray(read.states)[:, 0] @ np.asarray(one.params["emotion"]["head"]["weight"])
    np.testing.assert_allclose(read.emotion, expected, rtol=1e-5, atol=1e-5)
    nll = np.log(np.exp(expected).sum(axis=1)) - expected[np.arange(3), np.asarray(one.batch.emotion)]
    _, metrics = one.loss(one.params, one.batch, jax.random.key(0), train=False)
    np.testing.assert_allclose(metrics["emotion_loss"].value(), nll.mean(), rtol=1e-4)


def test_who_speaks_changes_the_context(made):
    one = made["transformer"]
    other = dataclasses.replace(one.batch, speaker=9 - one.batch.speaker)
    assert not np.allclose(one.logits(other), one.logits(), atol=1e-3)


# MoEL


def listeners(num):
    one = make("moel")
    module = Listeners(one.model.config, num)
    states = jnp.asarray(RNG.normal(size=(3, 5, 12)), jnp.float32)
    read = Read(
        states=jnp.asarray(RNG.normal(size=(3, 7, 12)), jnp.float32), mask=one.batch.source_mask,
        words=one.batch.source, context=jnp.zeros((3, 12)),
        gate=jnp.asarray(RNG.dirichlet(np.ones(num), 3), jnp.float32),
    )  # fmt: skip
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), states, read, deterministic=True))["params"]
    return module, random_like(shapes, RNG), states, read


@pytest.mark.oracle
def test_listeners_match_torch():
    """MoEL's layer, written again in PyTorch: values and gradients."""
    import torch

    module, params, states, read = listeners(num=2)
    p = in_torch(params["experts"])
    x, source = torch.tensor(np.asarray(states)), torch.tensor(np.asarray(read.states))
    real = torch.tensor(np.asarray(read.mask))
    depth, kernel, length = 4, 3, x.shape[1]

    def norm(name, e, values):
        scale, bias = p[f"{name}/scale"][e], p[f"{name}/bias"][e]
        return torch.nn.functional.layer_norm(values, values.shape[-1:], scale, bias, eps=1e-6)

    def attend(name, e, query, memory, may):
        def split(values, kind):
            return torch.einsum("btd,dhn->bhtn", values, p[f"{name}/{kind}"][e])

        logits = split(query, "query") * depth**-0.5 @ split(memory, "key").transpose(2, 3)
        weights = logits.masked_fill(~may, -1e18).softmax(dim=-1)
        return torch.einsum("bhtn,hnd->btd", weights @ split(memory, "value"), p[f"{name}/out"][e])

    def convolve(name, e, values):
        weight, bias = p[f"feed_forward/{name}"][e], p[f"feed_forward/{name}_bias"][e]
        padded = torch.nn.functional.pad(values.transpose(1, 2), (kernel - 1, 0))
        return torch.nn.functional.conv1d(padded, weight.permute(2, 1, 0), bias).transpose(1, 2).relu()

    total = 0
    for e in range(3):
        y = x
        inner = norm("attention_norm", e, y)
        y = y + attend("attention", e, inner, inner, torch.ones(length, length, dtype=torch.bool).tril())
        inner = norm("cross_attention_norm", e, y)
        y = y + attend("cross_attention", e, inner, source, real[:, None, None, :])
        y = y + convolve("conv_out", e, convolve("conv_in", e, norm("feed_forward_norm", e, y)))
        total = total + y * (torch.tensor(np.asarray(read.gate[:, e]))[:, None, None] if e < 2 else 1.0)
    total.square().sum().backward()

    def loss(params):
        found = module.apply({"params": params}, states, read, deterministic=True)
        return jnp.square(found).sum(), found

    grads, found = jax.jit(jax.grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(found, total.detach().numpy(), rtol=1e-4, atol=1e-5)
    for name, grad in named_leaves(grads["experts"]).items():
        np.testing.assert_allclose(grad, p[name].grad.numpy(), rtol=1e-3, atol=2e-3, err_msg=name)


def test_the_teacher_leaves():
    settings = ListenersSettings()
    found = [float(teacher_probability(jnp.asarray(step), settings)) for step in (0, 10_000, 20_000)]
    np.testing.assert_allclose(found, [1.0, 0.36794, 0.13542], atol=1e-4)


def test_gold_emotions_gate_a_batch_of_training(made):
    one = made["moel"]
    batch = dataclasses.replace(one.batch, emotion=jnp.asarray([5, -1, 9], jnp.int32))

    def gate(step, train=True):
        rngs = {"draws": jax.random.key(0)} if train else {}
        given = dataclasses.replace(batch, step=jnp.asarray(step))
        return np.asarray(one.apply(given, train=train, method="read", rngs=rngs).gate)

    softmax = np.asarray(jax.nn.softmax(one.read(batch).emotion))
    np.testing.assert_allclose(gate(0)[[0, 2]], np.eye(32)[[5, 9]])
    np.testing.assert_allclose(gate(0)[1], softmax[1], rtol=1e-5)
    np.testing.assert_allclose(gate(10**9), softmax, rtol=1e-5)
    np.testing.assert_allclose(gate(0, train=False), softmax, rtol=1e-5)


def test_an_answer_of_the_likeliest_listeners(made):
    one = made["moel"]
    top = make("moel", listeners=ListenersSettings(top=5))
    softmax, few = (np.asarray(m.read(one.batch, one.params).gate) for m in (one, top))
    np.testing.assert_array_equal((few > 0).sum(axis=1), 5)
    kept = np.where(few > 0, softmax, 0)
    np.testing.assert_allclose(few, kept / kept.sum(axis=1, keepdims=True), rtol=1e-5)


# MIME


def test_latents_and_divergence_match_numpy(made):
    one, p = made["mime"], made["mime"].params["mimicry"]
    states = made["transformer"].read(one.batch, one.params).states
    x, mask = np.asarray(states)[:, 0], np.asarray(one.batch.source_mask)
    logits = linear(p["to_emotion"], x) @ p["emotions"].T
    positive = IS_POSITIVE[logits.argmax(axis=1)][:, None]
    hidden = np.maximum(linear(p["hidden"], x), 0)

    def gaussians(params, pos, neg):
        return [
            (linear(params[f"mean_{n}"], h), linear(params[f"log_variance_{n}"], h))
            for n, h in (("pos", pos), ("neg", neg))
        ]

    prior = gaussians(p["prior"], hidden, hidden)
    emotions = [
        12**0.5 * np.asarray(jax.nn.softmax(linear(p[f"mixture_{name}"], mean))) @ p["emotions"][rows]
        for name, rows, (mean, _) in (("pos", IS_POSITIVE, prior[0]), ("neg", ~IS_POSITIVE, prior[1]))
    ]
    mimicked, other = np.where(positive, *emotions), np.where(positive, *emotions[::-1])
    contexts = [
        np.asarray(one.apply(
            jnp.asarray(e, jnp.float32), states, one.batch.source_mask,
            method=lambda m, *args, name=name: getattr(m.mimicry, name)(*args, train=False),
        ))
        for name, e in (("mimicking", mimicked), ("other", other))
    ]  # fmt: skip
    means = [(c * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True) for c in contexts]
    beside = np.where(positive, *means), np.where(positive, *means[::-1])
    each = [np.concatenate([x, mean], axis=1) for mean in beside]
    hidden = [np.maximum(linear(p[f"hidden_{n}"], h), 0) for n, h in zip(("pos", "neg"), each, strict=True)]
    q = gaussians(p["posterior"], *hidden)
    kl = sum(
        0.5 * (lp - lq + (np.exp(lq) + (mq - mp) ** 2) / np.exp(lp) - 1).sum(axis=1)
        for (mq, lq), (mp, lp) in zip(q, prior, strict=True)
    )
    both = np.concatenate(contexts, axis=-1)
    joined = linear(p["combine"]["out"], both / (1 + np.exp(-linear(p["combine"]["gate"], both))))
    read = one.read()
    np.testing.assert_allclose(read.emotion, logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(read.losses["kl"][0], kl, rtol=1e-3)
    np.testing.assert_allclose(np.asarray(read.states)[mask], joined[mask], rtol=1e-3, atol=1e-4)


def test_another_polarity_swaps_what_is_mimicked(made):
    """In training the gold emotion decides; swapped parts then give the same context."""
    one = made["mime"]

    def states(batch, params):
        rngs = {"draws": jax.random.key(0)}
        return one.apply(batch, params=params, train=True, method="read", rngs=rngs).states

    sad, proud, guilty = (
        dataclasses.replace(one.batch, emotion=jnp.full(3, EMOTIONS.index(name))) for name in ("sad", "proud", "guilty")
    )
    assert not np.allclose(states(sad, one.params), states(proud, one.params), atol=1e-3)
    np.testing.assert_array_equal(states(sad, one.params), states(guilty, one.params))
    own, order = one.params["mimicry"], np.roll(np.arange(24), 12)
    gate, out = own["combine"]["gate"], own["combine"]["out"]
    gate = {"weight": gate["weight"][order][:, order], "bias": gate["bias"][order]}
    combine = {"gate": gate, "out": {**out, "weight": out["weight"][order]}}
    turned = {**own, "mimicking": own["other"], "other": own["mimicking"], "combine": combine}
    swapped = states(proud, {**one.params, "mimicry": turned})
    np.testing.assert_allclose(swapped, states(sad, one.params), rtol=1e-3, atol=1e-4)


def test_answers_draw_nothing_and_training_does(made):
    one = made["mime"]
    np.testing.assert_array_equal(one.logits(), one.logits())
    draws = [
        one.apply(one.batch, train=True, method="read", rngs={"draws": jax.random.key(i)}).states for i in (0, 0, 1)
    ]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert not np.allclose(draws[0], draws[2], atol=1e-3)


def test_the_published_slips_of_mime(made):
    """One variance for two polarities, a posterior that no response in training depends on, and small emotions."""
    slips, zeros = make("mime", mimicry=MimicrySettings(published=True)), (jnp.zeros((1, 300)),) * 2

    def drawn(model, gaussian):
        return model.mimicry._drawn((gaussian, gaussian), False)

    for one, published in ((made["mime"], False), (slips, True)):
        mimicry = one.params["mimicry"]
        assert ("log_variance_neg" in mimicry["prior"]) != published
        moved = {**mimicry, "posterior": jax.tree.map(lambda leaf: leaf + 0.5, mimicry["posterior"])}
        options = {"train": True, "method": "read", "rngs": {"draws": jax.random.key(0)}}
        first, second = (
            one.apply(one.batch, params={**one.params, "mimicry": own}, **options) for own in (mimicry, moved)
        )
        assert np.array_equal(first.states, second.states) == published
        assert not np.array_equal(first.losses["kl"][0], second.losses["kl"][0])
        emotion, _ = one.apply(zeros, method=drawn)
        shares = np.asarray(jax.nn.softmax(mimicry["mixture_pos"]["bias"]))
        expected = (1.0 if published else 12**0.5) * shares @ np.asarray(mimicry["emotions"])[IS_POSITIVE]
        np.testing.assert_allclose(emotion[0], expected, rtol=1e-4, atol=1e-6)


# EmpDG


def test_the_decoder_starts_from_the_emotion(made):
    one = made["empdg"]
    read = one.read()
    expected = linear(one.params["emotion"]["start"], np.asarray(read.emotion))
    np.testing.assert_allclose(read.start, expected, rtol=1e-4, atol=1e-5)
    # The first input of the decoder is that vector, neither scaled nor added to the start token's.

    def inputs_of(model, target):
        return model.core.decoder_inputs(target, start=read.start, deterministic=True)

    inputs = one.apply(one.batch.target, method=inputs_of)
    first = expected @ np.asarray(one.params["core"]["decoder"]["embedding_projection"])
    positions = np.r_[np.zeros(6), np.ones(6)]
    np.testing.assert_allclose(inputs[:, 0], first + positions, rtol=1e-4, atol=1e-4)
    plain, started = (
        one.apply(one.batch.target, read.replace(start=start), train=False, method="decode")
        for start in (None, read.start)
    )
    assert not np.allclose(plain, started, atol=1e-3)


def test_without_the_switch_nothing_starts_the_decoder():
    assert "start" not in make("empdg", emotion=EmotionSettings()).params["emotion"]


def test_words_of_emotion_are_read_alone(made):
    one = made["empdg"]
    batch, s = one.batch, one.batch.source.shape[1]
    read = one.read(batch)
    assert read.states.shape[1] == 2 * s
    for row in range(3):
        kept = np.flatnonzero(np.asarray(batch.emotional[row]) | (np.arange(s) == 0))
        ids = batch.source[row, kept][None]
        alone = one.apply(ids, method=_encode_words)
        found = np.asarray(read.states[row, s : s + len(kept)])
        np.testing.assert_allclose(found, alone[0], rtol=1e-4, atol=1e-5)
        assert np.asarray(read.mask[row, s:]).sum() == len(kept)
        np.testing.assert_allclose(read.context[row, :12], alone[0, 0], rtol=1e-4, atol=1e-5)
    none = dataclasses.replace(batch, emotional=jnp.zeros_like(batch.emotional))
    assert not np.allclose(one.logits(none), one.logits(), atol=1e-3)


def _encode_words(model, ids):
    encoder = model.emotion_words.encoder
    inputs = model.core.enter(encoder, model.core.embed(ids), jnp.arange(ids.shape[1]), deterministic=True)
    return encoder(inputs, jnp.ones(ids.shape, bool)[:, None, :], deterministic=True)[0]
