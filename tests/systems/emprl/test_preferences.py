"""DPO, IPO, KTO: losses and gradients as the papers print them, what is preferred in a group, pairs from a file."""

import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from configs import emprl_transformer
from empax.core.files import write_jsonl
from empax.core.text_files import DataError
from empax.core.types import Instance
from empax.systems.emprl import preferences, stages
from empax.systems.emprl.settings import PreferenceTaskSettings

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
CHOSEN, REJECTED = (RNG.normal(size=6).astype(np.float32) * 4 for _ in range(2))
COUNTS = np.array([True, True, False, True, True, False])


def torch_preference(loss, chosen, rejected, *, beta):
    """Of the pairs that count; without a sigmoid's logarithm, in 64 bits: the probability of Bradley and Terry."""
    if loss == "ipo":
        return ((chosen - rejected - 1 / (2 * beta)) ** 2).mean()
    won = torch.exp(beta * chosen) / (torch.exp(beta * chosen) + torch.exp(beta * rejected))
    return -torch.log(won).mean()


@pytest.mark.oracle
@pytest.mark.parametrize("loss", ["dpo", "ipo"])
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_losses_of_pairs_and_their_gradients_match_torch(loss, beta):
    given = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (CHOSEN, REJECTED)]
    expected = torch_preference(loss, *(x[COUNTS] for x in given), beta=beta)
    expected.backward()

    def mine(chosen, rejected):
        # What stands where nothing is preferred reaches neither value nor gradient.
        nothing = jnp.where(COUNTS, 0.0, jnp.nan)
        function = getattr(preferences, f"{loss}_loss")
        return function(chosen + nothing, rejected + nothing, jnp.asarray(COUNTS), beta=beta).value()

    value, grads = jax.value_and_grad(mine, argnums=(0, 1))(jnp.asarray(CHOSEN), jnp.asarray(REJECTED))
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    for grad, one in zip(grads, given, strict=True):
        np.testing.assert_allclose(grad, one.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("point", [0.0, 2.5])
def test_the_loss_of_single_responses_and_its_gradient_match_torch(point):
    side, beta = np.array([1, -1, 0, 1, -1, 0], np.float32), 0.3
    ratios = torch.tensor(CHOSEN, dtype=torch.float64, requires_grad=True)
    logistic = lambda x: 1 / (1 + torch.exp(-x))  # noqa: E731
    wanted, unwanted = ratios[[0, 3]], ratios[[1, 4]]
    values = torch.cat([logistic(beta * (wanted - point)), logistic(beta * (point - unwanted))])
    (1 - values).mean().backward()

    def mine(ratios, point):
        return preferences.kto_loss(ratios, jnp.asarray(side), jnp.full(6, point), beta=beta).value()

    value, (grad, still) = jax.value_and_grad(mine, argnums=(0, 1))(jnp.asarray(CHOSEN), point)
    np.testing.assert_allclose(value, (1 - values).mean().item(), rtol=1e-6)
    np.testing.assert_allclose(grad, ratios.grad.numpy(), rtol=1e-5, atol=1e-7)
    assert float(still) == 0.0


def test_the_best_stands_against_the_worst_and_each_against_the_mean():
    scores = jnp.array([0.2, 0.9, 0.9, 0.1, *([0.3] * 4), *([np.nan] * 4)])
    valid = jnp.array([True] * 8 + [False] * 4)
    best, worst, counts = preferences.best_and_worst(scores, valid, group_size=4)
    np.testing.assert_array_equal(counts, [True, False, False])
    assert (int(best[0]), int(worst[0])) == (1, 3)
    side = preferences.sides(scores, valid, group_size=4)
    np.testing.assert_array_equal(side, [-1, 1, 1, -1, *([0] * 8)])


def credited(toy, **changes):
    """A task, its parameters, and what it makes of a rollout of the toy by a policy that has moved."""
    task, frozen = toy.policy(preference=True, **changes), toy.frozen()
    batch = toy.Contexts(6).collate(np.array([0, 1, 2, -1]), toy.SOURCE, np.random.default_rng(0))
    batch = jax.tree.map(jnp.asarray, batch)
    if task.settings.pairs:
        answers = np.random.default_rng(2).integers(3, toy.VOCABULARY, (4, 2, toy.TOKENS))
        answers[:, :, 5] = toy.EOS
        batch = batch.replace(answers=jnp.asarray(answers, jnp.int32))
    params = {"model": toy.frozen(1)["reference"]["model"]}
    rollout = task.rate(frozen, jax.jit(task.rollout)(params, frozen, batch, jax.random.key(1)))
    return task, params, frozen, rollout, jax.jit(task.credit)(frozen, rollout, task.init_memory())


def ratios_of(rollout):
    return np.where(rollout.mask, rollout.log_probs - rollout.reference_log_probs, 0.0).sum(axis=1)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto"])
def test_a_policy_learns_from_the_preferences_in_its_groups(toy, loss):
    task, params, frozen, rollout, (batch, _, metrics) = credited(toy, loss=loss, beta=0.2)
    found, logged = jax.jit(lambda p: task.loss(p, frozen, batch, KEY, train=True))(params)
    ratios, scores = ratios_of(rollout).reshape(4, 4)[:3], np.asarray(rollout.scores).reshape(4, 4)[:3]
    if loss == "kto":
        point = max(ratios.mean(), 0.0)
        np.testing.assert_allclose(metrics["kl"].value(), ratios.mean(), rtol=1e-4)
        side = np.sign(np.round(scores - scores.mean(axis=1, keepdims=True), 6))
        expected = (1 - 1 / (1 + np.exp(-side * 0.2 * (ratios - point))))[side != 0].mean()
    else:
        rows = np.arange(3)
        pairs = [torch.tensor(ratios[rows, pick(axis=1)]) for pick in (scores.argmax, scores.argmin)]
        counts = torch.tensor(scores.max(axis=1) > scores.min(axis=1))
        expected = torch_preference(loss, *(x[counts].double() for x in pairs), beta=0.2).item()
        assert float(metrics["pairs"].value()) == pytest.approx(counts.double().mean().item())
        assert batch.counts.shape == (4,)  # whoever draws rows draws pairs
    assert float(found.value()) == pytest.approx(expected, rel=1e-4)
    assert float(logged["ratio_error"].value()) < 1e-4
    assert {"entropy", "margin", "accuracy", "policy_loss", "reference_error"} <= set(logged)
    assert task.init_memory() == {}


def test_the_likelihood_changes_the_loss_and_zero_leaves_it(toy):
    task, params, frozen, rollout, (batch, _, _) = credited(toy)

    def found(**changes):
        other = toy.policy(preference=True, **changes)
        return float(jax.jit(lambda p: other.loss(p, frozen, batch, KEY, train=True)[0].value())(params))

    loss = jax.jit(lambda p: task.loss(p, frozen, rollout.batch, KEY, train=False)[0].value())
    plain, nll = found(), float(loss(params))
    assert found(likelihood_weight=0.5) == pytest.approx(plain + 0.5 * nll, rel=1e-3)


def test_gold_responses_count_as_much_beside_ipo_as_beside_dpo():
    shares = []
    for loss in ("dpo", "ipo"):
        ppo = emprl_transformer.get_config(loss).ppo
        function = functools.partial(getattr(preferences, f"{loss}_loss"), beta=ppo.beta)
        near = [function(jnp.full(1, margin), jnp.zeros(1), jnp.ones(1, bool)).value() for margin in (-0.01, 0.01)]
        shares.append(ppo.likelihood_weight / float(near[0] - near[1]))
    assert shares[1] == pytest.approx(shares[0], rel=0.01)


def test_pairs_of_a_file_are_learnt_from_as_they_stand(toy):
    task, _, _, rollout, (batch, _, metrics) = credited(toy, pairs="votes.jsonl")
    answers = np.asarray(rollout.tokens).reshape(4, 2, toy.TOKENS)
    np.testing.assert_array_equal(batch.chosen.tokens[:3], answers[:3, 0])
    np.testing.assert_array_equal(batch.rejected.tokens[:3], answers[:3, 1])
    np.testing.assert_array_equal(batch.counts, [True, True, True, False])
    assert not task.rates_on_host
    assert float(metrics["response_tokens"].value()) == 6.0


@pytest.mark.parametrize("most", [0, 3])
def test_as_many_pairs_are_learnt_from_as_the_stage_says(toy, tmp_path, monkeypatch, most):
    write_jsonl(
        tmp_path / "pairs.jsonl",
        [{"context": [f"context {n}"], "chosen": f"w{n}", "rejected": f"w{n + 10}"} for n in range(8)],
    )
    monkeypatch.setattr(stages, "ContextExamples", lambda instances, form: [i.response for i in instances])
    monkeypatch.setattr(stages, "load_instances", lambda run, split: [])
    parts = SimpleNamespace(tokenizer=toy.Words(), first_token=None, form=lambda exemplars: None)
    stage = PreferenceTaskSettings(pairs=str(tmp_path / "pairs.jsonl"), max_examples=most)
    chosen, answers = stages._training(parts, None, stage)
    assert len(chosen) == len(answers) == (most or 8)
    numbers = [int(word[1:]) for word in chosen]
    np.testing.assert_array_equal(answers[:, :, 0], [[n, n + 10] for n in numbers])
    assert numbers == sorted(numbers)


def test_a_file_of_pairs_is_read_or_its_bad_line_named(toy, tmp_path):
    path = tmp_path / "pairs.jsonl"
    row = {"context": ["I lost my keys.", "Oh no.", "Yes."], "chosen": "w5 w6", "rejected": "w7"}
    path.write_text(json.dumps(row) + "\n")
    (instance,), rejected = preferences.read_pairs(path)
    assert (instance.context, instance.response, rejected) == (tuple(row["context"]), "w5 w6", ["w7"])
    ids = preferences.given_answers([instance], rejected, toy.Words(), 2)
    np.testing.assert_array_equal(ids, [[[5, 6], [7, toy.EOS]]])  # cut where the answer may not be longer
    begun = preferences.given_answers([instance], rejected, toy.Words(), 2, 9)
    np.testing.assert_array_equal(begun, [[[9, 5], [9, 7]]])
    path.write_text(json.dumps({**row, "rejected": ""}) + "\n")  # a system had no reply
    (instance,), rejected = preferences.read_pairs(path)
    ids = preferences.given_answers([instance], rejected, toy.Words(), 2)
    np.testing.assert_array_equal(ids, [[[5, 6], [toy.EOS, toy.PAD]]])
    preferences.check_apart(path, [instance], [Instance("a#2", ("Hello.",), "Hi.", "")])
    with pytest.raises(DataError, match=r"1 of 1 contexts of .* are in the test split"):
        preferences.check_apart(path, [instance], [Instance("a#4", tuple(row["context"]), "Hi.", "")])
    for bad in ({"context": []}, {"context": "I lost my keys."}, {"context": [3]}, {"chosen": " "}, {"rejected": None}):
        path.write_text("\n".join(json.dumps(one) for one in (row, {**row, **bad})))
        with pytest.raises(DataError, match=r"pair 2: must have context \(a list of texts"):
            preferences.read_pairs(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="has no pairs"):
        preferences.read_pairs(path)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto"])
def test_it_learns_the_toy(toy, tmp_path, loss):
    """Mini-batches and epochs included: pairs stay together. A quarter of the vocabulary is wanted."""
    toy.train(tmp_path, preference=True, loss=loss, steps=15)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if row["split"] == "train"]
    assert rewards[-1] > (0.7 if loss == "ipo" else 0.8), rewards  # the margin that IPO wants is bounded
