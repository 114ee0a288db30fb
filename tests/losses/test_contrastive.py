import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.losses.contrastive import dense_retrieval_nll, rank_margin, supervised_contrastive

B, P, D = 4, 7, 5


def example(seed=0):
    rng = np.random.default_rng(seed)
    queries, passages = (rng.normal(size=(n, D)).astype(np.float32) for n in (B, P))
    allowed = rng.random((B, P)) < 0.7
    return queries, passages, np.array([2, 0, 5, 3]), allowed, np.array([True, True, False, True])


@pytest.mark.oracle
def test_dense_retrieval_matches_torch():
    queries, passages, positives, allowed, valid = example()
    t_queries, t_passages = (torch.tensor(values, requires_grad=True) for values in (queries, passages))
    scores = t_queries @ t_passages.T / 0.5
    counts = allowed | (np.arange(P) == positives[:, None])
    scores = scores.masked_fill(~torch.tensor(counts), -1e9)
    keep = torch.tensor(valid)
    expected = torch.nn.functional.cross_entropy(scores[keep], torch.tensor(positives)[keep])
    expected.backward()

    rest = [jnp.asarray(values) for values in (positives, allowed, valid)]

    def loss(queries, passages):
        return dense_retrieval_nll(queries, passages, *rest, temperature=0.5)[0].value()

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(jnp.asarray(queries), jnp.asarray(passages))
    np.testing.assert_allclose(value, expected.item(), rtol=1e-6)
    np.testing.assert_allclose(gradients[0], t_queries.grad.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients[1], t_passages.grad.numpy(), rtol=1e-5, atol=1e-6)
    accuracy = dense_retrieval_nll(jnp.asarray(queries), jnp.asarray(passages), *rest, temperature=0.5)[1]["accuracy"]
    best = np.argmax(np.where(counts, queries @ passages.T, -np.inf), axis=1)
    assert float(accuracy.value()) == pytest.approx(np.mean((best == positives)[valid]))


@pytest.mark.parametrize(
    ("similarities", "expected"), [((0.9, 0.8, 0.85, 0.2), 0.0), ((0.5, 0.8, 0.85, 0.2), 0.155 + 0.185)]
)
def test_rank_margin_of_worked_numbers(similarities, expected):
    """Candidates with equal scores never form a pair."""
    scores = jnp.asarray([[1.0, 0.5, 0.5, 0.1]])
    mask = jnp.ones((1, 4), bool)
    found = rank_margin(jnp.asarray([similarities]), scores, mask).value()
    assert float(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.oracle
def test_rank_margin_matches_torch():
    rng = np.random.default_rng(3)
    similarities, scores = rng.normal(size=(3, 5)).astype(np.float32), rng.random((3, 5)).astype(np.float32)
    mask = rng.random((3, 5)) < 0.8
    given = torch.tensor(similarities, requires_grad=True)
    total = torch.zeros(())
    order = [sorted((c for c in range(5) if mask[b, c]), key=lambda c: -scores[b, c]) for b in range(3)]
    for offset in range(1, 5):
        terms = [
            torch.relu(given[b, ranked[r + offset]] - given[b, ranked[r]] + 0.05 * offset)
            for b, ranked in enumerate(order)
            for r in range(len(ranked) - offset)
            if scores[b, ranked[r]] - scores[b, ranked[r + offset]] > 0.1
        ]
        total = total + torch.stack(terms).mean() if terms else total
    total.backward()

    def loss(values):
        return rank_margin(values, jnp.asarray(scores), jnp.asarray(mask), margin=0.05, least_gap=0.1).value()

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(similarities))
    np.testing.assert_allclose(value, total.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, given.grad.numpy(), atol=1e-6)


def test_supervised_contrastive_of_worked_numbers():
    features = jnp.asarray([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    found = supervised_contrastive(features, jnp.asarray([0, 0, 1]), jnp.ones(3, bool))
    assert float(found.value()) == pytest.approx(1.456588, abs=1e-5)
    assert float(found.weight) == 2  # the third has no partner


def test_a_filler_row_of_zeros_has_no_gradient():
    features = jax.random.normal(jax.random.key(0), (4, 5)).at[3].set(0.0)
    labels, valid = jnp.array([0, 0, 1, 0]), jnp.array([True, True, True, False])
    slope = jax.jit(jax.grad(lambda features: supervised_contrastive(features, labels, valid).value()))
    found = slope(features)
    assert np.isfinite(found).all()
    assert not found[3].any()


@pytest.mark.oracle
def test_supervised_contrastive_matches_torch():
    rng = np.random.default_rng(5)
    features = rng.normal(size=(6, D)).astype(np.float32)
    labels, valid = np.array([0, 1, 0, 1, 0, 2]), np.array([True] * 4 + [False, True])
    given = torch.tensor(features, requires_grad=True)
    rows = [i for i in range(6) if valid[i]]
    unit = torch.nn.functional.normalize(given, dim=1)
    losses = []
    for i in rows:
        others = [a for a in rows if a != i]
        log_probs = torch.log_softmax(torch.stack([unit[i] @ unit[a] / 0.2 for a in others]), dim=0)
        positives = [place for place, a in enumerate(others) if labels[a] == labels[i]]
        if positives:
            losses.append(-log_probs[positives].mean())
    expected = torch.stack(losses).mean()
    expected.backward()

    def loss(values):
        return supervised_contrastive(values, jnp.asarray(labels), jnp.asarray(valid), temperature=0.2).value()

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(features))
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, given.grad.numpy(), atol=1e-5)
