"""Distillation losses against PyTorch, on masks, and on a toy corpus that they must learn to search."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from configs import reg_transformer
from empax.core.config import ConfigError
from empax.evaluation.device_metrics import UtilityWeights
from empax.systems.reg.distillation import emdr2, retriever_kl, target_distribution
from empax.systems.reg.settings import DistillationSettings

B, K = 5, 6


def example(seed=0):
    """Scores, utilities, log-likelihoods [B, K]; all candidates real, all rows valid."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(B, K)).astype(np.float32) * 2
    utilities = rng.uniform(size=(B, K)).astype(np.float32)
    log_likelihoods = -rng.uniform(5, 60, size=(B, K)).astype(np.float32)
    return scores, utilities, log_likelihoods


ALL = jnp.ones((B, K), bool)
ROWS = jnp.ones(B, bool)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signal": "emdr2", "loss": "literal_sigmoid"}, "'literal_sigmoid' needs targets, which signal = 'emdr2'"),
        (
            {"signal": "likelihood", "utility": UtilityWeights(bleu=0.0)},
            "goes with signal = 'metrics', not with 'likeli",
        ),
        ({"signal": "emdr2", "utility": UtilityWeights(f1=0.0)}, "goes with signal = 'metrics', not with 'emdr2'"),
        ({"replace_probability": 1.5}, r"must lie in \[0, 1\]"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        DistillationSettings(**changes)


@pytest.mark.oracle
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_targets_match_torch(temperature):
    _, utilities, _ = example()
    expected = torch.softmax(torch.tensor(utilities) / temperature, -1)
    found = target_distribution(jnp.asarray(utilities), ALL, temperature=temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.oracle
@pytest.mark.parametrize("temperature", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("kind", ["softmax", "literal_sigmoid", "emdr2"])
def test_value_and_gradient_match_torch(kind, temperature):
    scores, utilities, log_likelihoods = example()
    t_scores = torch.tensor(scores, requires_grad=True)
    targets = torch.softmax(torch.tensor(utilities) / 0.1, -1)
    if kind == "softmax":
        expected = torch.nn.functional.kl_div(
            torch.log_softmax(t_scores / temperature, -1), targets, reduction="batchmean"
        )
    elif kind == "literal_sigmoid":
        log_q = torch.nn.functional.logsigmoid(t_scores / temperature)
        expected = (targets * (targets.log() - log_q)).sum(-1).mean()
    else:
        probs = torch.softmax(t_scores.double() / temperature, -1)
        expected = -(probs * torch.tensor(log_likelihoods).double().exp()).sum(-1).log().mean()
    expected.backward()

    def loss(scores):
        if kind == "emdr2":
            return emdr2(scores, jnp.asarray(log_likelihoods), ALL, ROWS, temperature=temperature).value()
        return retriever_kl(scores, jnp.asarray(targets.numpy()), ALL, ROWS, temperature=temperature, form=kind).value()

    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.asarray(scores))
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(grad, t_scores.grad.numpy(), rtol=1e-4, atol=1e-7)


LOSSES = {
    "softmax": lambda scores, utilities, mask, valid: retriever_kl(
        scores, target_distribution(utilities, mask, temperature=0.1), mask, valid
    ),
    "literal_sigmoid": lambda scores, utilities, mask, valid: retriever_kl(
        scores, target_distribution(utilities, mask, temperature=0.1), mask, valid, form="literal_sigmoid"
    ),
    "emdr2": lambda scores, utilities, mask, valid: emdr2(scores, 10 * (utilities - 1), mask, valid),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_masked_candidates_and_filler_rows_do_not_exist(kind):
    scores, utilities, _ = example()
    mask = np.ones((B, K), bool)
    mask[:, 4:] = False
    mask[3] = False  # a query without candidates
    valid = np.array([True, True, False, True, True])
    poison = np.where(mask, scores, np.array([np.nan, -np.inf, np.inf, 1e30, 0.0, np.nan], np.float32))
    bad = np.where(mask, utilities, np.nan).astype(np.float32)

    def loss(scores, utilities):
        return LOSSES[kind](scores, utilities, jnp.asarray(mask), jnp.asarray(valid)).value()

    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(jnp.asarray(poison), jnp.asarray(bad))
    rows = [0, 1, 4]
    cut = (jnp.asarray(scores[rows, :4]), jnp.asarray(utilities[rows, :4]), jnp.ones((3, 4), bool), jnp.ones(3, bool))
    expected, grad = jax.jit(jax.value_and_grad(lambda *arrays: LOSSES[kind](*arrays).value()))(*cut)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grads[0][np.array(rows), :4], grad, rtol=1e-5, atol=1e-8)
    assert (np.asarray(grads[0])[~(mask & valid[:, None])] == 0.0).all()
    assert np.abs(grads[0]).max() > 0
    np.testing.assert_array_equal(grads[1], 0.0)  # what teaches is not taught


def test_the_printed_form_is_least_when_all_scores_are_infinite():
    scores, utilities, _ = example()
    targets = target_distribution(jnp.asarray(utilities), ALL, temperature=0.1)

    @jax.jit
    def loss(scores):
        return retriever_kl(scores, targets, ALL, ROWS, form="literal_sigmoid").value()

    grad = jax.jit(jax.grad(loss))(jnp.asarray(scores))
    assert (grad < 0).all()  # no candidate is ever pushed down, not even the worst
    right, all_high = jnp.asarray(utilities) / 0.1, jnp.full((B, K), 60.0)
    assert loss(all_high) < loss(right)
    assert loss(all_high) < 0  # no distance: below the 0 of a perfect match
    np.testing.assert_allclose(loss(all_high), jnp.sum(targets * jnp.log(targets), 1).mean(), rtol=1e-5)


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"temperature = 0.0 .* above 0"):
        target_distribution(jnp.zeros((B, K)), ALL, temperature=0.0)


def test_utilities_that_tell_nothing_hardly_teach_the_recipes_retriever_to_rank_random_candidates_as_high():
    rng = np.random.default_rng(0)
    rows = 200
    settings = DistillationSettings(**{**reg_transformer.distillation(), "utility": UtilityWeights()})
    # Two retrieved candidates and a random one: cosines of MiniLM, halved by `emotion_share`.
    scores = np.tile(0.5 * np.array([0.65, 0.65, 0.1], np.float32), (rows, 1))
    utilities = rng.normal(0.13, 0.06, size=(rows, 3)).astype(np.float32)
    mask, valid = jnp.ones((rows, 3), bool), jnp.ones(rows, bool)
    targets = target_distribution(jnp.asarray(utilities), mask, temperature=settings.target_temperature)

    @jax.jit
    def loss(scores):
        return retriever_kl(scores, targets, mask, valid, temperature=settings.score_temperature).value()

    assert loss(jnp.asarray(scores)) - loss(jnp.zeros_like(scores)) < 0.1


@pytest.mark.parametrize("kind", ["metric", "pdist", "emdr2"])
def test_a_retriever_learns_a_toy_corpus(kind):
    """Queries are rotated, noisy passages; the retriever learns the rotation from 6 random candidates a query."""
    rng = np.random.default_rng(3)
    num_passages, width, num_train, num_held_out = 32, 16, 128, 200
    passages = rng.normal(size=(num_passages, width)).astype(np.float32)
    passages /= np.linalg.norm(passages, axis=1, keepdims=True)
    rotation = np.linalg.qr(rng.normal(size=(width, width)))[0]
    gold = rng.integers(0, num_passages, num_train + num_held_out)
    queries = (passages[gold] @ rotation + 0.05 * rng.normal(size=(len(gold), width))).astype(np.float32)
    # The best candidate is not always the gold one: like a metric, utility falls with distance from it.
    utilities = 0.3 + 0.3 * (passages @ passages[gold[:num_train]].T).T  # [num_train, num_passages], 0 to 0.6

    orders = rng.permuted(np.tile(np.arange(num_passages), (200, num_train, 1)), axis=2)[..., :6]  # 200 steps

    def loss(matrix, order):
        scores = jnp.einsum("BD,DE,BKE->BK", queries[:num_train], matrix, jnp.asarray(passages)[order])
        teacher = jnp.take_along_axis(jnp.asarray(utilities, jnp.float32), order, axis=1)
        mask, valid = jnp.ones(order.shape, bool), jnp.ones(num_train, bool)
        if kind == "metric":
            targets = target_distribution(teacher, mask, temperature=0.1)
            return retriever_kl(scores, targets, mask, valid, temperature=0.3).value()
        log_likelihoods = 10 * (teacher - 0.6) - 5.0
        if kind == "pdist":
            targets = target_distribution(log_likelihoods, mask, temperature=1.0)
            return retriever_kl(scores, targets, mask, valid, temperature=0.3).value()
        return emdr2(scores, log_likelihoods, mask, valid, temperature=0.3).value()

    def recall(matrix):
        return ((queries[num_train:] @ np.asarray(matrix) @ passages.T).argmax(1) == gold[num_train:]).mean()

    optimizer = optax.adam(0.03)

    @jax.jit
    def train(matrix):
        def step(carry, order):
            matrix, state = carry
            updates, state = optimizer.update(jax.grad(loss)(matrix, order), state)
            return (optax.apply_updates(matrix, updates), state), None

        return jax.lax.scan(step, (matrix, optimizer.init(matrix)), jnp.asarray(orders))[0][0]

    start = jnp.asarray(0.1 * rng.normal(size=(width, width)), jnp.float32)
    assert recall(start) < 0.15  # chance is 1 / 32
    assert recall(train(start)) >= 0.9
