"""Rewards: the formulas by hand, whole dialogues, functions of others, and what is wrong with them."""

import dataclasses
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.types import Batch, Instance
from empax.data import features
from empax.data.bpe import train_bpe
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.parts.attributes.identifier import (
    IdentifierJudge,
    Identifiers,
    IdentifierTaskSettings,
    empathy_reward,
    make_task,
)
from empax.systems.emprl.expectations import balanced_gains
from empax.systems.emprl.rewards import (
    Part,
    Reward,
    empathy_gain,
    empathy_goals,
    make_reward,
    part_names,
    rate_empathy,
    rate_on_host,
    rate_texts,
    trajectory_reward,
)
from empax.systems.emprl.rollouts import DialogueExamples, Goals, PolicyBatch, PolicyExamples, Rollout, repeat_rows
from empax.systems.emprl.settings import RewardSettings
from tests.systems.learning import random_like


def probabilities(rows, seed=0):
    raw = np.random.default_rng(seed).random((rows, 3, 3))
    return raw / raw.sum(-1, keepdims=True)


def test_a_gain_is_the_mean_over_mechanisms_of_what_the_likely_levels_add():
    given, gains = probabilities(2), np.random.default_rng(1).normal(size=(2, 3, 3))
    found = empathy_gain(given, gains)
    for row in range(2):
        added = [sum(given[row, m, level] * gains[row, m, level] for level in range(3)) for m in range(3)]
        assert float(found[row]) == pytest.approx(sum(added) / 3, rel=1e-5)


def test_a_trajectory_pays_for_sudden_shifts_alone():
    """Two dialogues, of three turns and of one; the gold responses of the first shift once, by one level."""
    given, turn = probabilities(4, seed=3), np.array([0, 1, 2, 0])
    levels = np.array([[0, 0, 0], [1, 0, 0], [1, 0, 0], [2, 1, 0]])
    scores = np.array([0.2, 0.4, 0.9, 0.5])
    found = trajectory_reward(scores, given, levels, ["x", "x", "x", "a"], shift_penalty=0.5)
    expected = given @ np.arange(3.0)
    for row in range(4):
        shift = 0.0
        if turn[row]:
            change, gold = np.abs(expected[row] - expected[row - 1]), np.abs(levels[row] - levels[row - 1])
            shift = np.mean([max(0.0, c - g) for c, g in zip(change, gold, strict=True)])
        assert float(found[row]) == pytest.approx(0.5 * (scores[row] + 0.5) - 0.5 * shift, rel=1e-5)  # both means: 0.5
    assert float(found[1]) < 0.45  # it did shift


class Turns:
    """Stands in for ContextExamples: six turns of three dialogues."""

    pad_id = 0
    instances = tuple(
        Instance(id=f"{name}#{2 * i + 1}", context=("a",) * (2 * i + 1), response="r", emotion="")
        for name, count in (("x", 3), ("y", 1), ("z", 2))
        for i in range(count)
    )
    lengths = np.stack([np.arange(1, 7), np.ones(6, int)], axis=1)

    def __len__(self):
        return len(self.instances)

    def collate(self, indices, length, rng):
        return types.SimpleNamespace(valid=np.asarray(indices) >= 0, rows=np.asarray(indices))


def test_a_batch_of_dialogues_has_their_listener_turns_side_by_side():
    wanted = np.arange(54, dtype=np.float32).reshape(6, 3, 3)
    examples = DialogueExamples(PolicyExamples(Turns(), Goals(wanted, np.arange(6.0))), max_turns=2)
    assert len(examples) == 3
    np.testing.assert_array_equal(examples.lengths, [2, 4, 6])
    batch = examples.collate(np.array([2, 1, -1]), 6, np.random.default_rng(0))
    np.testing.assert_array_equal(batch.row, [4, 5, 3, -1, -1, -1])
    np.testing.assert_array_equal(batch.wanted[1], wanted[5])


def test_rows_are_repeated_as_samples_lie(toy):
    batch = toy.Contexts(4).collate(np.array([2, 0]), toy.SOURCE, np.random.default_rng(0))
    np.testing.assert_array_equal(repeat_rows(batch, 3).row, [2, 2, 2, 0, 0, 0])
    assert repeat_rows(batch, 1) is batch


def constant(rollout):
    assert isinstance(rollout.tokens, jax.core.Tracer)  # it is compiled, beside parts on the host too
    return jnp.full(rollout.tokens.shape[0], 2.0)


class Scorer:
    """As a Flax module with its parameters."""

    def __init__(self):
        self.params = {"weight": jnp.full((3,), 2.0)}

    def __call__(self, params, rollout):
        return rollout.tokens @ params["weight"]


scorer = Scorer()


def reward_of(toy, *parts, instances=()):
    return make_reward(parts, None, toy.Words(), instances)


def lengths_of_texts(contexts, responses, references):
    return [float(len(response.split())) for response in responses]


def too_few(contexts, responses, references):
    return [1.0]


def test_parts_are_summed_with_their_weights(toy):
    reward = reward_of(
        toy,
        RewardSettings("compiled", 0.5, function=f"{__name__}:constant"),
        RewardSettings("text", 2.0, function=f"{__name__}:lengths_of_texts"),
        RewardSettings("compiled", -1.0, function=f"{__name__}:scorer"),
        instances=toy.Contexts(8).instances,
    )
    assert reward.on_host
    assert reward.frozen() == {"0": {}, "1": {}, "2": scorer.params}
    batch = toy.Contexts(8).collate(np.array([3, -1]), toy.SOURCE, np.random.default_rng(0))
    rollout = toy.saying([[5, 6, 1], [7, 1, 0]], batch)
    assert [part.name for part in reward.parts] == ["constant", "lengths_of_texts", "scorer"]
    rated = reward.rate(reward.frozen(), rollout)
    np.testing.assert_allclose(rated, [[2, 2, 24], [2, 0, 16]])
    np.testing.assert_allclose(reward.total(rated), [0.5 * 2 + 2.0 * 2 - 24, 0.5 * 2 - 16])


def test_the_guides_function_of_arrays_gives_a_number_for_each_row():
    page = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n([^`]*\(rollout\)[^`]*)```", page)[1], names)
    rollout = types.SimpleNamespace(mask=np.array([[True, True, True], [True, True, False], [False] * 3]))
    np.testing.assert_allclose(names["brief"](rollout), [1 / 3, 1 / 2, 1.0])


def test_parts_have_the_names_of_their_functions_or_kinds():
    parts = [RewardSettings("empathy"), *(RewardSettings("text", function="m:f") for _ in range(2))]
    assert part_names(parts) == ("empathy", "f", "f_2")


def test_a_scorer_gets_its_parameters_from_what_is_frozen(toy):
    reward = reward_of(toy, RewardSettings("compiled", function=f"{__name__}:scorer"))
    assert not reward.on_host
    rollout = toy.saying([[5, 6, 1], [7, 1, 0]])
    rated = jax.jit(lambda params: reward.rate(params, rollout)[:, 0])
    np.testing.assert_allclose(rated(reward.frozen()), [24.0, 16.0])
    np.testing.assert_allclose(rated({"0": {"weight": jnp.ones(3)}}), [12.0, 8.0])


LETTERS = ["a b c d e f g h i j k l m n o p"]
EXCHANGES = [Instance("x#1", ("a b", "c", "d e"), "f g h", ""), Instance("y#1", ("k",), "l m n o", "")]
CONTEXTS, GOLD, SAID = [i.context for i in EXCHANGES], [i.response for i in EXCHANGES], ["a b c", "f g h"]


@pytest.fixture(scope="module")
def identifiers():
    encoder = EncoderSettings(d_model=8, num_heads=2, d_ff=16, num_layers=1, max_positions=32, dropout=0.0)
    stage = IdentifierTaskSettings(encoder=encoder, max_context_tokens=12, response_buckets=(8, 16))
    tokenizer = train_bpe(LETTERS, vocab_size=300)
    task = make_task(stage, load_encoder(encoder, tokenizer))
    ids, mask = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)
    shapes = jax.eval_shape(task.init, jax.random.key(0), Batch(ids, mask, ids, mask, mask[:, 0]))
    return Identifiers((IdentifierJudge(task, random_like(shapes, scale=1.0), tokenizer, stage, "hash"),))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EMPAX_CACHE_DIR", str(tmp_path))


def answered(tokenizer):
    """A rollout that says SAID in the ids of `tokenizer`, with a filler row behind."""
    rows = [*([*tokenizer.encode(text), tokenizer.eos_id] for text in SAID), []]
    tokens, mask = (jnp.asarray(part) for part in features.pad(rows, 10, tokenizer.pad_id))
    inputs = Batch(tokens, mask, tokens, mask, jnp.asarray([True, True, False]))
    batch = PolicyBatch(inputs, jnp.asarray([0, 1, -1]), jnp.zeros((3, 3, 3)), jnp.zeros(3))
    return Rollout(batch, tokens, mask, jnp.zeros((3, 10)), jnp.zeros((3, 10)))


def test_identifiers_read_the_texts_of_answers_whatever_tokens_they_are_made_of(identifiers):
    part, tokenizer = RewardSettings(), train_bpe(LETTERS, vocab_size=290, lowercase=False)
    goals = empathy_goals(part, identifiers, None, EXCHANGES)
    rate = rate_on_host(rate_empathy(part, identifiers, goals, EXCHANGES), tokenizer)
    gold = identifiers(CONTEXTS, GOLD).argmax(axis=2)
    log_probs = np.take_along_axis(identifiers(CONTEXTS, SAID), gold[..., None], axis=2).sum(axis=(1, 2))
    np.testing.assert_allclose(rate({}, answered(tokenizer)), [*np.exp(log_probs), 0.0], rtol=1e-5)
    assert np.ptp(log_probs) > 0.05


def test_turns_of_a_dialogue_are_rated_together(identifiers):
    part, turns = RewardSettings(shift_penalty=2.0), [dataclasses.replace(i, id="x#1") for i in EXCHANGES]
    goals = empathy_goals(part, identifiers, None, turns)
    found = rate_empathy(part, identifiers, goals, turns)(np.array([0, 1]), SAID)
    log_probs, levels = identifiers(CONTEXTS, SAID), identifiers(CONTEXTS, GOLD).argmax(axis=2)
    given = empathy_reward(log_probs, levels), np.exp(log_probs), levels
    np.testing.assert_allclose(found, trajectory_reward(*given, ["x", "x"], shift_penalty=2.0), rtol=1e-5)


def test_the_levels_of_gold_responses_are_asked_for_once(identifiers, monkeypatch):
    part, balanced = RewardSettings(), RewardSettings(goal="balanced")
    first = empathy_goals(part, identifiers, None, EXCHANGES)
    assert first.wanted.shape == (2, 3, 3)
    np.testing.assert_array_equal(first.merit, 0.0)  # all gold responses earn as much, where theirs are the levels
    goals = empathy_goals(balanced, identifiers, None, EXCHANGES)
    np.testing.assert_array_equal(goals.wanted, balanced_gains(first.wanted.argmax(axis=2)))
    earned = rate_empathy(balanced, identifiers, goals, EXCHANGES)(np.array([0, 1]), SAID)
    np.testing.assert_allclose(earned, empathy_gain(np.exp(identifiers(CONTEXTS, SAID)), goals.wanted), rtol=1e-5)
    monkeypatch.setattr(IdentifierJudge, "__call__", None)
    np.testing.assert_array_equal(empathy_goals(part, identifiers, None, EXCHANGES).wanted, first.wanted)
    other = Identifiers((dataclasses.replace(identifiers.judges[0], hash="another"),))
    for asked, instances in ((other, EXCHANGES), (identifiers, EXCHANGES[:1])):
        with pytest.raises(TypeError, match="not callable"):
            empathy_goals(part, asked, None, instances)


def test_the_merit_of_a_gold_response_is_what_it_earns_in_standard_deviations():
    levels = np.array([[0, 0, 0], [0, 1, 2], [0, 0, 0]])
    found = Goals.of(balanced_gains(levels), levels)
    # They earn 4/9, 7/9 and 4/9: the third of 1 / share, on average.
    np.testing.assert_allclose(found.merit, [-(0.5**0.5), 2**0.5, -(0.5**0.5)], rtol=1e-5)


def test_without_parts_the_kl_is_left(toy):
    reward = reward_of(toy)
    assert not reward.on_host
    rated = reward.rate(reward.frozen(), toy.saying(np.zeros((3, 2), int)))
    np.testing.assert_array_equal(reward.total(rated), [0.0, 0.0, 0.0])


def test_a_function_that_does_not_do_its_part_is_named(toy):
    batch = toy.Contexts(8).collate(np.array([3, 4]), toy.SOURCE, np.random.default_rng(0))
    rollout = toy.saying([[5, 6, 1], [7, 1, 0]], batch)
    rate = rate_on_host(rate_texts(too_few, "mine:too_few", toy.Contexts(8).instances), toy.Words())
    reward = Reward((Part("too_few", 1.0, rate, on_host=True),))
    with pytest.raises(ConfigError, match=r"the reward mine:too_few returned numbers of shape \(1,\) for 2 responses"):
        reward.rate(reward.frozen(), rollout)
