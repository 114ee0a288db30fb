"""Graphs of words and concepts: KEMP's reader, against PyTorch and by what changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.tree import named_leaves
from empax.systems.classic.concepts import ConceptsSettings
from empax.systems.classic.graphs import GraphAttention, attention_loss, concept_edges
from empax.systems.classic.readers import EmotionSettings
from tests.systems.classic.small import in_torch, make
from tests.systems.learning import random_like

RNG = np.random.default_rng(5)


def with_concepts(one, **changes):
    return dataclasses.replace(one.batch, concepts=one.batch.concepts.replace(**changes))


def with_settings(one, **changes):
    """The same parameters under other settings of the reader."""
    return make("kemp", copies=changes.pop("copies", True), concepts=ConceptsSettings(**changes))


def test_each_word_reads_the_first_the_one_before_and_its_concepts(made):
    batch = made["kemp"].batch
    mask = jnp.asarray([[True] * 4 + [False] * 3] * 3)
    edges = np.asarray(concept_edges(mask, batch.concepts))[0]
    assert edges.shape == (7, 11)
    assert [np.flatnonzero(row).tolist() for row in edges[:4]] == [
        [0, 1, 2, 3, 7, 8, 9], [0, 7, 8], [0, 1, 9], [0, 2],
    ]  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("published", [False, True])
def test_the_graph_matches_torch(made, published):
    import torch

    config = made["kemp"].model.config
    graph = GraphAttention(config, published=published)
    nodes, read = (RNG.normal(size=(2, n, 12)).astype(np.float32) for n in (3, 5))
    edges = RNG.random((2, 3, 5)) < 0.5
    edges[0, 0], edges[1, 0] = False, True
    arrays = tuple(map(jnp.asarray, (nodes, read, edges)))
    params = random_like(graph.init(jax.random.key(0), *arrays)["params"], RNG, 0.4)

    @jax.jit
    def loss(params, nodes, read):
        found = graph.apply({"params": params}, nodes, read, arrays[2])
        return jnp.sin(found).sum(), found

    (_, found), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, *arrays[:2])
    p = in_torch(params)
    x, y, may = *(torch.tensor(a, requires_grad=True) for a in (nodes, read)), torch.tensor(edges)

    def linear(name, values):
        return values @ p[f"{name}/weight"] + p[f"{name}/bias"]

    logits = linear("query", x) @ linear("key", y).transpose(1, 2) * (1.0 if published else 12**-0.5)
    weights = logits.masked_fill(~may, 0.0 if published else -torch.inf).softmax(dim=-1).nan_to_num(0.0)
    mixed = linear("out", weights @ linear("value", y))
    norm = {name.rpartition("/")[2]: leaf for name, leaf in p.items() if name.startswith("Norm")}
    expected = torch.nn.functional.layer_norm(x + mixed, (12,), norm["scale"], norm["bias"], eps=config.layer_norm_eps)
    expected.sin().sum().backward()
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    for name, grad in named_leaves(grads[0]).items():
        if "key/bias" not in name:  # it changes no softmax
            np.testing.assert_allclose(grad, p[name].grad.numpy(), rtol=1e-3, atol=1e-4, err_msg=name)
    if published:  # where a node has no edge, torch's gradient is NaN
        for grad, one in zip(grads[1:], (x, y), strict=True):
            np.testing.assert_allclose(grad, one.grad.numpy(), rtol=1e-3, atol=1e-4)


def test_a_node_reads_more_than_one_neighbour_at_first(made, monkeypatch):
    """At the recipe's size, words with their speakers read three neighbours; unscaled, the largest share is 0.98."""
    graph = GraphAttention(dataclasses.replace(made["kemp"].model.config, d_model=300))
    nodes = jnp.asarray(2**0.5 * np.random.default_rng(0).normal(size=(1, 40, 300)), jnp.float32)
    edges = jnp.asarray((np.arange(40)[:, None] - np.arange(40)) % 40 < 3)[None]
    params = jax.jit(graph.init)(jax.random.key(0), nodes, nodes, edges)
    softmax, seen = jax.nn.softmax, []
    monkeypatch.setattr(jax.nn, "softmax", lambda logits: seen.append(softmax(logits)) or seen[-1])
    graph.apply(params, nodes, nodes, edges)
    assert np.asarray(seen[0]).max(axis=-1).mean() < 0.9


def test_who_is_no_neighbour_changes_nothing_but_as_published(made):
    one = made["kemp"]
    literal = with_settings(one, published=True)

    def graph(model, batch):
        return model.concepts._joined(batch, batch.concepts, model.core)[:, 3]

    other = with_concepts(one, ids=one.batch.concepts.ids.at[:, 0].set(7))  # a concept of word 1
    for form, same in ((one, True), (literal, False)):
        first, second = (form.apply(batch, params=one.params, method=graph) for batch in (one.batch, other))
        assert np.allclose(first, second, atol=1e-6) == same
    assert not np.allclose(one.logits(other), one.logits(), atol=1e-4)
    assert not np.allclose(literal.logits(params=one.params), one.logits(), atol=1e-4)


def test_padding_of_concepts_changes_nothing(made):
    one = made["kemp"]
    wide = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, 3))), one.batch.concepts)
    padded = dataclasses.replace(one.batch, concepts=wide.replace(ids=wide.ids.at[:, 3:].set(9)))
    np.testing.assert_allclose(one.logits(padded), one.logits(), rtol=1e-4, atol=1e-5)


def test_the_emotion_is_read_where_words_are_intense(made):
    one, concepts = made["kemp"], made["kemp"].batch.concepts
    read = one.read()
    for row, real in enumerate(np.asarray(one.batch.source_mask).sum(axis=1)):
        ids, intensity = (
            np.concatenate([np.asarray(words)[row, :real], np.asarray(more)[row, :3]])
            for words, more in ((one.batch.source, concepts.ids), (one.batch.intensity, concepts.intensity))
        )
        shares = np.exp(intensity) / np.exp(intensity).sum()
        assert read.mask[row].tolist() == [True] * len(ids) + [False] * (11 - len(ids))
        np.testing.assert_array_equal(read.words[row, : len(ids)], ids)
        np.testing.assert_allclose(read.intensity[row, : len(ids)], shares, rtol=1e-5)
        signal = shares @ np.asarray(read.states)[row, : len(ids)]
        np.testing.assert_allclose(read.context[row], signal, rtol=1e-4, atol=1e-5)
        emotion = signal @ np.asarray(one.params["emotion"]["head"]["weight"])
        np.testing.assert_allclose(read.emotion[row], emotion, rtol=1e-4, atol=1e-4)


def test_every_layer_adds_what_a_matrix_makes_of_the_signal(made):
    """W [a; s] is W_1 a + W_2 s."""
    one = made["kemp"]
    read, matrix = one.read(), np.asarray(one.params["core"]["decoder"]["layers"]["signal"]["out"][0])
    states = jnp.asarray(RNG.normal(size=(3, 5, 12)), jnp.float32)

    def added(model, states, read):
        def body(layer, carry, _):
            memory = read.memories["signal"]
            memories = {"signal": (*layer.signal.keys_values(memory.states), memory.mask)}
            return carry, layer._read_memories(states, memories, deterministic=True) - states

        return model.core.decoder._scan(body, None, None)[1][0]

    found = np.asarray(one.apply(states, read, method=added))
    expected = np.broadcast_to((np.asarray(read.context) @ matrix)[:, None], found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_every_switch_changes_replies_and_without_all_it_is_the_plain_model(made):
    one, plain = made["kemp"], made["transformer"]
    logits = one.logits()
    for changes in ({"most": 0}, {"signal": False}, {"copies": False}):
        other = with_settings(one, **changes)
        assert set(other.params) <= set(one.params)
        assert not np.allclose(other.logits(params=one.params), logits, atol=1e-4), changes
    off = make("kemp", concepts=ConceptsSettings(most=0, signal=False), copies=False, emotion=EmotionSettings())
    np.testing.assert_array_equal(off.logits(params=one.params), plain.logits(params=one.params))


@pytest.mark.oracle
def test_the_loss_of_attention_matches_torch():
    import torch

    weights = RNG.dirichlet(np.ones(6), (2, 4)).astype(np.float32)
    shares = RNG.dirichlet(np.ones(6), 2).astype(np.float32)
    target, mask = np.arange(4) < np.array([[3], [0]]), np.arange(6) < np.array([[6], [4]])
    arrays = tuple(map(jnp.asarray, (weights, target, shares, mask)))
    value, known = attention_loss(*arrays)
    assert known.tolist() == [True, False]
    given = torch.tensor(weights, requires_grad=True)
    expected = torch.nn.functional.mse_loss(given[0, :3].mean(dim=0), torch.tensor(shares[0]))
    expected.backward()
    np.testing.assert_allclose(value[0], expected.item(), rtol=1e-5)
    grad = jax.grad(lambda w: attention_loss(w, *arrays[1:])[0][0])(arrays[0])
    np.testing.assert_allclose(grad, given.grad.numpy(), rtol=1e-4, atol=1e-7)
    short = attention_loss(arrays[0][1:, :, :4], jnp.ones((1, 4), bool), arrays[2][1:, :4], arrays[3][1:, :4])[0]
    np.testing.assert_allclose(
        attention_loss(arrays[0], jnp.ones((2, 4), bool), *arrays[2:])[0][1], short[0], rtol=1e-5
    )


@pytest.mark.slow
def test_what_concepts_and_signal_are_worth_is_told_of_validation(made, caplog):
    one = made["kemp"]
    batch = dataclasses.replace(one.batch, valid=jnp.asarray([True, True, False]))
    _, metrics = one.loss(one.params, batch, jax.random.key(0), train=False)

    def given(tree):
        return jax.tree.map(lambda leaf: leaf[np.array([1, 0, 2])], tree)  # filler gives nobody anything

    read = one.read()
    concepts = one.read(dataclasses.replace(batch, concepts=given(batch.concepts)))
    np.testing.assert_allclose(metrics["nll_exchanged_concepts"].value(), one.nll(concepts, rows=2), rtol=1e-4)
    signal = read.replace(memories={"signal": given(read.memories["signal"])})
    np.testing.assert_allclose(metrics["nll_exchanged_signal"].value(), one.nll(signal, rows=2), rtol=1e-4)
    averages = {"nll": 2.0, "nll_exchanged_concepts": 2.5, "nll_exchanged_signal": 2.0}
    assert one.task.summarize(averages) == {**averages, "concepts_gain": 0.5, "signal_gain": 0.0}
    assert "signal unused" in caplog.text
    assert "concepts unused" not in caplog.text
