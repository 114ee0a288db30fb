"""Critics of responses: their penalty, and who learns from whom."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.tree import named_leaves
from empax.systems.classic.adversary import LOSSES, AdversarySettings, Critic, adversarial_losses, gradient_penalty
from tests.systems.classic.small import VOCAB, in_torch, make, make_batch
from tests.systems.learning import random_like

RNG = np.random.default_rng(4)
LEXICON = jnp.arange(VOCAB) % 3 == 0


@pytest.fixture(scope="module")
def critics():
    made = make("empdg", adversary=AdversarySettings(width=6))
    followed = jnp.asarray([[True, True, False], [False] * 3, [True, False, False]])
    feedback = jnp.asarray(RNG.integers(4, VOCAB, (3, 3)), jnp.int32)
    return dataclasses.replace(made, batch=dataclasses.replace(made.batch, feedback=feedback, feedback_mask=followed))


@pytest.mark.oracle
def test_the_penalty_matches_torch():
    """Its value, and by a second backward pass its gradient."""
    import torch

    critic = Critic(5)
    real, fake = (RNG.normal(size=(3, 4, 6)).astype(np.float32) for _ in range(2))
    context, following = (RNG.normal(size=(3, 6)).astype(np.float32) for _ in range(2))
    mask, shares = np.arange(4) < np.array([[4], [2], [3]]), RNG.random(3).astype(np.float32)
    arrays = tuple(map(jnp.asarray, (real, mask, context, following)))
    params = random_like(jax.eval_shape(critic.init, jax.random.key(0), *arrays)["params"], RNG, 1.0)

    def penalty(params):
        def score(words):
            return critic.apply({"params": params}, words, *arrays[1:])

        return gradient_penalty(score, *map(jnp.asarray, (real, fake, shares)))

    value = jax.jit(penalty)(params)
    grads = jax.jit(jax.grad(lambda p: penalty(p).sum()))(params)
    p = in_torch(params)
    u = torch.tensor(shares)[:, None, None]
    between = (u * torch.tensor(real) + (1 - u) * torch.tensor(fake)).requires_grad_()
    hidden = torch.relu(between @ p["words/weight"] + p["words/bias"])
    counted = torch.tensor(mask, dtype=torch.float32)[..., None]
    pooled = (hidden * counted).sum(dim=1) / counted.sum(dim=1)
    beside = torch.cat([pooled, torch.tensor(context), torch.tensor(following)], dim=1)
    inner = torch.relu(beside @ p["hidden/weight"] + p["hidden/bias"])
    score = (inner @ p["score/weight"] + p["score/bias"])[:, 0]
    (gradient,) = torch.autograd.grad(score.sum(), between, create_graph=True)
    expected = (gradient.flatten(1).norm(dim=1) - 1) ** 2
    expected.sum().backward()
    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-4)
    for name, grad in named_leaves(grads).items():
        theirs = p[name].grad
        theirs = np.zeros(grad.shape) if theirs is None else theirs.numpy()
        np.testing.assert_allclose(grad, theirs, rtol=1e-3, atol=1e-4, err_msg=name)


def test_critics_reach_what_is_said_but_as_published(critics):
    """In the released code what the critics say enters the generator's loss as a plain number."""
    one, read, logits = critics, critics.read(), critics.logits()

    def told(published):
        model = one.model.clone(adversary=dataclasses.replace(one.model.adversary, published=published))

        @jax.jit
        def adversary(logits):
            found = adversarial_losses(model, one.params, LEXICON, one.batch, read, logits, jax.random.key(0))
            return found["adversary"][0].sum()

        return jax.value_and_grad(adversary)(logits)

    (value, grad), (same, nothing) = told(published=False), told(published=True)
    assert value == same
    assert np.abs(grad).max() > 1e-4
    assert not np.asarray(nothing).any()


def test_critics_compare_words_with_words(critics):
    """Never with a mixture of words: a model that is certain of the references is as good as they are."""
    one, read = critics, critics.read()
    model = one.model.clone(adversary=dataclasses.replace(one.model.adversary, penalty=0.0))

    @jax.jit
    def found(logits, seed):
        return adversarial_losses(model, one.params, LEXICON, one.batch, read, logits, jax.random.key(seed))

    certain = 1e4 * jax.nn.one_hot(one.batch.target, VOCAB)
    np.testing.assert_allclose(found(certain, 0)["critics"][0], 0.0, atol=1e-4)
    undecided = [np.asarray(found(0.0 * certain, seed)["adversary"][0]) for seed in range(2)]
    assert np.abs(undecided[0] - undecided[1]).max() > 1e-3  # a mixture of all words would be one


@pytest.mark.slow
def test_the_generator_learns_from_the_critics_and_they_from_their_own_loss(critics):
    one = critics

    def total(params, name):
        variables, batch = {"params": params}, one.batch
        read = one.model.apply(variables, batch, train=False, method="read")
        logits = one.model.apply(variables, batch.target, read, train=False, method="decode")
        found = adversarial_losses(one.model, params, LEXICON, batch, read, logits, jax.random.key(0))
        return found[name][0].sum()

    every = jax.jit(lambda params: {name: jax.grad(total)(params, name) for name in LOSSES})(one.params)
    by_adversary, by_critics = (
        {name: float(np.abs(grad).max()) for name, grad in named_leaves(every[loss]).items()} for loss in LOSSES
    )

    def is_critic(name):
        return "critic/" in name

    assert not any(size for name, size in by_adversary.items() if is_critic(name))
    assert by_adversary["output_embedding"] > 1e-4
    assert by_adversary["emotion_words/encoder/embedding_projection"] > 1e-5
    assert not any(size for name, size in by_critics.items() if not is_critic(name))
    assert min(size for name, size in by_critics.items() if is_critic(name) and "bias" not in name) > 1e-5


def test_rows_without_a_following_turn_count_nothing(critics):
    one, read, logits = critics, critics.read(), critics.logits()

    @jax.jit
    def found(batch):
        return adversarial_losses(one.model, one.params, LEXICON, batch, read, logits, jax.random.key(0))

    first = found(one.batch)
    assert first["adversary"][1].tolist() == [True, False, True]
    other = found(dataclasses.replace(one.batch, feedback=one.batch.feedback + one.batch.feedback_mask))
    assert not np.allclose(first["adversary"][0], other["adversary"][0])
    np.testing.assert_allclose(first["adversary"][0][1], other["adversary"][0][1], rtol=1e-5)


def test_critics_are_asked_in_training_alone(critics):
    one, plain = critics, make("empdg")
    _, metrics = jax.eval_shape(
        lambda batch: one.task.loss(one.params, {}, batch, jax.random.key(0), train=False), one.batch
    )
    assert set(metrics) == {"emotion_loss", "emotion_accuracy", "nll"}
    np.testing.assert_array_equal(plain.logits(params=one.params), one.logits())
    assert make_batch().feedback is None
