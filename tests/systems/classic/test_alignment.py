"""CASE's reader: its graph of facts, what is chosen of graphs, and what is near to what."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.tree import named_leaves
from empax.core.types import Instance
from empax.data.knowledge import Fact, clauses
from empax.data.words import train_words
from empax.systems.classic.alignment import (
    KINDS,
    AlignmentSettings,
    GraphLayer,
    chosen,
    fact_edges,
    mean_divergence,
    nearness,
)
from empax.systems.classic.readers import COGNITION, next_rows
from tests.systems.classic.small import in_torch, linear, make, rows_of
from tests.systems.learning import random_like

RNG = np.random.default_rng(6)


def with_facts(one, **changes):
    return dataclasses.replace(one.batch, cognition=one.batch.cognition.replace(**changes))


def test_facts_are_exchanged_whole_and_graphs_for_the_decoder_alone(made):
    one, batch = made["case"], made["case"].batch
    metrics = jax.jit(one.task._exchanged)(one.params, batch, one.read())
    assert {name.removeprefix("nll_exchanged_") for name in metrics} == {
        "concepts", "cognition", "cognition_memory", "affection_memory",
    }  # fmt: skip

    def given(tree):
        return jax.tree.map(lambda leaf: leaf[np.array([1, 2, 0])], tree)

    read = one.read()
    whole = one.read(dataclasses.replace(batch, cognition=given(batch.cognition)))
    memory = read.replace(memories={**read.memories, "cognition": given(read.memories["cognition"])})
    np.testing.assert_allclose(metrics["nll_exchanged_cognition"].value(), one.nll(whole), rtol=1e-4)
    np.testing.assert_allclose(metrics["nll_exchanged_cognition_memory"].value(), one.nll(memory), rtol=1e-4)


def test_turns_clauses_and_facts_are_joined_both_ways(made):
    edges = np.asarray(fact_edges(made["case"].batch.cognition))[0]
    # Turn, clause, no clause; facts of the turn (xNeed), of the clause (xWant, xIntent), none.
    assert edges.tolist() == [
        [1, 2, 0, 4, 0, 0, 0],
        [2, 1, 0, 0, 7, 5, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [4, 0, 0, 1, 0, 0, 0],
        [0, 7, 0, 0, 1, 0, 0],
        [0, 5, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    assert KINDS == 7
    three = with_facts(made["case"], turns_mask=jnp.ones((3, 3, 3), bool)).cognition
    assert np.asarray(fact_edges(three))[0, 1, 2] == 3  # clauses beside each other


@pytest.mark.oracle
def test_a_layer_with_kinds_of_edges_matches_torch(made):
    """As CASE's code computes it, with a vector for each edge."""
    import torch

    config = made["case"].model.config
    layer = GraphLayer(config, kinds=3)
    nodes, edges = RNG.normal(size=(2, 4, 12)).astype(np.float32), RNG.integers(0, 4, (2, 4, 4))
    edges[:, np.arange(4), np.arange(4)] = 1
    params = layer.init(jax.random.key(0), jnp.asarray(nodes), jnp.asarray(edges))["params"]
    params = random_like(params, RNG, 0.4)

    @jax.jit
    def loss(params, nodes):
        found = layer.apply({"params": params}, nodes, jnp.asarray(edges))
        return jnp.sin(found).sum(), found

    (_, found), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, jnp.asarray(nodes))
    p = in_torch(params)
    x, kinds = torch.tensor(nodes, requires_grad=True), torch.tensor(edges)

    def apply(name, values):
        return values @ p[f"{name}/weight"] + p[f"{name}/bias"]

    def norm(name, values):
        scale, bias = p[f"{name}/scale"], p[f"{name}/bias"]
        return torch.nn.functional.layer_norm(values, (12,), scale, bias, eps=config.layer_norm_eps)

    query, key, value = (apply(f"attention/{name}", x).unflatten(-1, (2, 6)) for name in ("query", "key", "value"))
    asked, told = (p[f"attention/{name}"][(kinds - 1).clamp(min=0)] for name in ("asked", "told"))
    logits = ((query[:, :, None] * 6**-0.5 + asked) * (key[:, None] + told)).sum(dim=-1)
    weights = logits.masked_fill((kinds == 0)[..., None], -torch.inf).softmax(dim=2)
    mixed = torch.einsum("bijh,bjhn->bihn", weights, value).flatten(2)
    states = norm("attention/Norm_0", x + apply("attention/out", mixed))
    expected = norm("Norm_0", states + apply("feed_out", torch.nn.functional.gelu(apply("feed_in", states))))
    expected.sin().sum().backward()
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(grads[1], x.grad.numpy(), rtol=1e-3, atol=1e-3)
    for name, grad in named_leaves(grads[0]).items():
        np.testing.assert_allclose(grad, p[name].grad.numpy(), rtol=1e-2, atol=1e-3, err_msg=name)


@pytest.mark.oracle
@pytest.mark.parametrize("published", [False, True])
def test_choices_and_their_divergence_match_torch(published):
    import torch

    query, other = (RNG.normal(size=(2, 6)).astype(np.float32) for _ in range(2))
    memory, mask = RNG.normal(size=(2, 4, 6)).astype(np.float32), np.arange(4) < np.array([[4], [2]])
    scale = 1.0 if published else 6**-0.5

    def loss(query, other, memory):
        prior, posterior = (chosen(q, memory, jnp.asarray(mask), published=published) for q in (query, other))
        return mean_divergence(posterior[1], prior[1], jnp.asarray(mask)).sum(), prior

    (value, prior), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*map(jnp.asarray, (query, other, memory)))
    q, o, m = (torch.tensor(array, requires_grad=True) for array in (query, other, memory))
    total = 0.0
    for row, real in enumerate(mask.sum(axis=1)):
        nodes = m[row, :real].tanh()
        theirs = (scale * nodes @ o[row]).softmax(dim=0).detach()
        shares = (scale * nodes @ q[row]).log_softmax(dim=0)
        total = total + torch.nn.functional.kl_div(shares, theirs, reduction="sum") / real
        np.testing.assert_allclose(prior[0][row], (shares.exp() @ nodes).detach().numpy(), rtol=1e-4, atol=1e-5)
        assert not np.asarray(prior[1])[row, real:].any()
    total.backward()
    assert float(value) == pytest.approx(total.item(), rel=1e-4)
    np.testing.assert_allclose(grads[0], q.grad.numpy(), rtol=1e-3, atol=1e-5)
    assert not np.asarray(grads[1]).any()  # the prior learns from the posterior, never the other way round
    np.testing.assert_allclose(grads[2], m.grad.numpy(), rtol=1e-3, atol=1e-5)
    same = chosen(*map(jnp.asarray, (query, memory, mask)), published=published)[1]
    np.testing.assert_allclose(mean_divergence(same, same, jnp.asarray(mask)), 0.0, atol=1e-7)
    nothing = chosen(jnp.asarray(query), jnp.asarray(memory), jnp.zeros((2, 4), bool), published=published)
    assert not any(np.asarray(part).any() for part in nothing)


@pytest.mark.oracle
@pytest.mark.parametrize("published", [False, True])
def test_nearness_matches_torch(published):
    import torch

    first, second = (RNG.normal(size=(3, 2, 5)).astype(np.float32) for _ in range(2))
    giver = np.array([1, 2, 0])

    def loss(first, second):
        found = nearness(first, second, jnp.asarray(giver), published=published)
        return found.sum(), found

    (_, found), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(jnp.asarray(first), jnp.asarray(second))
    a, b = (torch.tensor(array, requires_grad=True) for array in (first, second))
    near = lambda a, b: ((a * b).sum(dim=-1) * (1.0 if published else 5**-0.5)).sigmoid()  # noqa: E731
    own = near(a, b)
    expected = 0.0
    for other in (near(a, b[giver]), near(a[giver], b)):
        distance = (own - other).sigmoid()
        expected = expected - (distance.sigmoid() if published else distance).log()
    expected.sum().backward()
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-4)
    np.testing.assert_allclose(grads[0], a.grad.numpy(), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(grads[1], b.grad.numpy(), rtol=1e-3, atol=1e-6)


def test_new_vectors_of_the_recipes_width_have_a_gradient_of_nearness():
    """Unscaled, the sigmoid of a product of 300 features is 0 or 1."""
    first, second = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 300)), jnp.float32)
    giver = jnp.roll(jnp.arange(64), -1)
    gradient = jax.jit(jax.grad(lambda a: nearness(a, second, giver, published=False).sum()))(first)
    assert np.abs(gradient).max(axis=1).min() > 1e-3


def test_negatives_are_of_the_next_real_row():
    assert next_rows(jnp.asarray([True, True, True, False])).tolist() == [1, 2, 0, 3]
    assert next_rows(jnp.asarray([True, False])).tolist() == [0, 1]


def test_a_row_without_another_has_no_negatives(made):
    one = made["case"]
    alone = dataclasses.replace(one.batch, valid=jnp.asarray([True, False, False]))
    losses = one.read(alone).losses
    for name in ("coarse", "fine"):
        assert not np.asarray(losses[name][1]).any()
        assert np.isfinite(np.asarray(losses[name][0])).all()
    together = one.read().losses
    assert np.asarray(together["coarse"][1]).all()
    assert np.asarray(together["fine"][1]).all()
    assert not one.task.splits_batches
    assert made["mime"].task.splits_batches


def test_the_decoder_reads_the_context_beside_what_was_chosen_and_the_emotion(made):
    one = made["case"]
    p, read = one.params["alignment"], one.read()
    states = np.asarray(made["transformer"].read(one.batch, one.params).states)
    query = np.tanh(linear(p["query"], states[:, 0]))
    affection, cognition = (read.memories[name] for name in ("affection", "cognition"))
    felt, known = (
        np.asarray(chosen(query, one.states, one.mask, published=False)[0]) for one in (affection, cognition)
    )

    def feelings(model, batch, read):
        return model.alignment._feelings(batch.cognition, model.core, read, False)

    feeling = np.asarray(one.apply(one.batch, read.replace(states=jnp.asarray(states)), method=feelings))[:, 0]
    gate = 1 / (1 + np.exp(-linear(p["gate"], linear(p["join"], np.concatenate([felt, feeling], axis=1)))))
    emotion = gate * felt + (1 - gate) * feeling
    np.testing.assert_allclose(read.emotion, linear(p["head"], emotion), rtol=1e-3, atol=1e-4)
    beside = np.broadcast_to(np.concatenate([known, emotion], axis=1)[:, None], (*states.shape[:2], 24))
    expected = linear(p["out"], np.maximum(linear(p["hidden"], np.concatenate([states, beside], axis=2)), 0))
    mask = np.asarray(one.batch.source_mask)
    np.testing.assert_allclose(np.asarray(read.states)[mask], expected[mask], rtol=1e-3, atol=1e-3)
    assert affection.states.shape == (3, 11, 12)
    assert cognition.mask.tolist() == [[True, True, True, False]] * 3


def test_responses_and_padding_of_facts_reach_no_answer(made):
    one, facts = made["case"], made["case"].batch.cognition
    read = one.read()

    def unlike(name):
        return jnp.where(getattr(facts, f"{name}_mask"), getattr(facts, name), 7)

    other = dataclasses.replace(
        with_facts(one, **{name: unlike(name) for name in ("turns", "feelings", "tails")}),
        target=one.batch.target[::-1],
    )
    again = one.read(other)
    for first, second in ((read.states, again.states), (read.emotion, again.emotion)):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
    assert not np.allclose(read.losses["bag"][0], again.losses["bag"][0], atol=1e-3)
    for name in ("turns", "feelings", "tails"):
        changed = one.read(with_facts(one, **{name: 33 - getattr(facts, name)}))
        assert not np.allclose(changed.states, read.states, atol=1e-4), name


def test_rows_have_the_turn_its_clauses_and_their_facts():
    turn = "I lost my dog. I cried!"
    facts = [
        Fact(turn, "xReact", "sad"), Fact(turn, "xWant", "to cry", rank=1), Fact("I cried!", "xNeed", "to lose"),
        Fact("i lost my dog.", "xReact", "alone"), Fact("PersonX cries", "xEffect", "sad"), Fact("dog", "IsA", "pet"),
    ]  # fmt: skip
    told = Instance("a#2", (turn,), "Oh no!", "sad", {"facts": [fact.row() for fact in facts]})
    assert clauses(turn) == ["I lost my dog.", "I cried!"]
    assert clauses("I lost my dog.") == []
    tokenizer = train_words(["i lost my dog . i cried ! oh no ! sad alone to cry lose pet"], min_count=1)
    sizes = AlignmentSettings(clauses=2, facts=2, tokens=6, tail_tokens=2)
    asked = [told, Instance("b#2", ("Hi.",), "Oh!", "")]
    examples = rows_of(asked, tokenizer, readers=("alignment",), alignment=sizes)
    found = examples.collate(np.array([0, 1, -1]), 9, np.random.default_rng(0)).cognition

    def words(name, row):
        pairs = zip(getattr(found, name)[row], getattr(found, f"{name}_mask")[row], strict=True)
        return [" ".join(tokenizer.backend.id_to_token(int(i)) for i in ids[mask]) for ids, mask in pairs]

    assert words("turns", 0) == ["[CLS] dog . i cried !", "[CLS] i lost my dog .", "[CLS] i cried !"]
    assert words("feelings", 0) == ["sad", "alone", ""]
    assert words("tails", 0) == ["[CLS] to", "[CLS] sad"]  # of the best rank
    assert found.of[0].tolist() == [2, 0]
    brief = rows_of(asked, tokenizer, readers=("alignment",), alignment=dataclasses.replace(sizes, clauses=1, facts=9))
    found_brief = brief.collate(np.array([0]), 9, np.random.default_rng(0)).cognition
    assert found_brief.tails_mask.any(axis=2).sum() == 2  # of the turn, and none of "I cried!", which is cut
    assert [COGNITION[i] for i in found.relation[0]] == ["xNeed", "xEffect"]
    assert not found.tails_mask[1:].any()
    assert found.turns_mask.any(axis=2).tolist() == [[True] * 3, [True, False, False], [False] * 3]


def test_as_published_the_loss_is_another(made):
    one = made["case"]
    literal = make("case", alignment=AlignmentSettings(published=True))
    first, second = one.read().losses, literal.read(params=one.params).losses
    for name in ("coarse", "fine"):
        assert not np.allclose(first[name][0], second[name][0], atol=1e-3)
    intense = dataclasses.replace(one.batch, intensity=one.batch.intensity.at[:, 1].add(1.0))
    for form, same in ((one, False), (literal, True)):  # a norm removes the intensities that come before it
        before, after = (form.read(batch, one.params).memories["affection"] for batch in (one.batch, intense))
        real = np.asarray(before.mask)
        assert np.allclose(np.asarray(before.states)[real], np.asarray(after.states)[real], atol=0.02) == same
