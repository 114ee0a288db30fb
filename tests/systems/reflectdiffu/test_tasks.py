"""The generator: each part does what its switch says, labels reach losses alone, and the policy learns."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.types import EMOTIONS, IS_POSITIVE, Mean
from empax.decoding.settings import DecodeSettings
from empax.losses.contrastive import supervised_contrastive
from empax.losses.cross_entropy import token_log_probs
from empax.models.bert import BertConfig, BertEncoder
from empax.models.transformer import EncoderDecoder
from empax.parts.attributes.reasons import ReasonAnnotator
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.word_level import WordLevelSettings
from empax.systems.reflectdiffu.diffusion import Schedule
from empax.systems.reflectdiffu.examples import ReflectBatch
from empax.systems.reflectdiffu.labels import INTENTS
from empax.systems.reflectdiffu.pointer_generator import PointerGenerator
from empax.systems.reflectdiffu.reinforced import ReinforcedReflectDiffu, policy_loss
from empax.systems.reflectdiffu.settings import GeneratorTaskSettings
from empax.systems.reflectdiffu.tasks import ReflectDiffu, Thought, shown_tags, standardized
from empax.training.accumulation import TrainingError
from tests.systems.learning import loss_and_gradient, random_like, use_all_cells

B, S, T, P, V, N = 4, 7, 5, 9, 23, 3
SMALL = WordLevelSettings(d_model=16, num_heads=2, head_dim=6, d_ff=12)
KEY = jax.random.key(0)
REFERENCES = tuple(tuple((3 * e + n) % len(INTENTS) for n in range(N)) for e in range(len(EMOTIONS)))
OFF = {"reasons": "", "experts": "none", "second_intent": False, "mimicry": False, "copying": False,
       "intent_start": False}  # fmt: skip


def make(**changes):
    """The task of a small model, and made-up parameters of it and of its annotator."""
    stage = GeneratorTaskSettings(**{"latent": 3, "hidden": 12, **changes})
    plain = EncoderDecoder(SMALL.config(V, 2, tie_embeddings=False))
    annotator = ReasonAnnotator(BertEncoder(BertConfig(30, 12, 2, 16, 1, max_positions=P))) if stage.reasons else None
    kind = ReinforcedReflectDiffu if stage.reinforced else ReflectDiffu
    decoder = Decoder(DecodeSettings("greedy", T), 2, 1, 0)
    task = kind(PointerGenerator(plain) if stage.copying else plain, decoder, stage, annotator, REFERENCES)
    batch = example(reasons=bool(stage.reasons))
    shapes = {"own": jax.eval_shape(task.init, KEY, batch), "frozen": {}}
    if annotator is not None:
        made = jax.eval_shape(lambda: annotator.init(KEY, batch.piece, batch.piece_mask))
        shapes["frozen"] = {"reasons": made["params"]}
    params = random_like(shapes, seed=5)
    return task, params["own"], params["frozen"]


def example(*, reasons=True):
    rng = np.random.default_rng(0)
    lengths, sizes = np.array([[7], [4], [6], [5]]), np.array([[9], [5], [7], [6]])
    source_mask, piece_mask = np.arange(S) < lengths, np.arange(P) < sizes
    targets = np.arange(T) < np.array([[5], [3], [4], [2]])
    batch = ReflectBatch(
        source=np.where(source_mask, rng.integers(3, V, (B, S)), 0),
        source_mask=source_mask,
        target=np.where(targets, rng.integers(3, V, (B, T)), 0),
        target_mask=targets,
        valid=np.array([True] * 3 + [False]),
        emotion=np.array([EMOTIONS.index(e) for e in ("sad", "proud", "angry", "joyful")], np.int32),
        polarity=np.array([-1, 1, 0, 1], np.int32),
        turns=np.array([1, 3, 1, 5], np.int32),
        intent=np.array([3, -1, 6, 0], np.int32),
        prior=rng.dirichlet(np.ones(len(INTENTS)), B).astype(np.float32),
        number=np.array([11, 12, 13, 14], np.int32),
        piece=rng.integers(0, 30, (B, P)) if reasons else None,
        piece_mask=piece_mask if reasons else None,
        told=piece_mask & (rng.random((B, P)) < 0.7) if reasons else None,
        place=np.where(source_mask, rng.integers(-1, 5, (B, S)), -1) if reasons else None,
    )
    return jax.tree.map(jnp.asarray, batch)


@pytest.fixture(scope="module")
def whole():
    """The whole task with functions that are compiled once."""
    task, params, frozen = make(reward="alignment")
    read = jax.jit(lambda batch: task.read({**params, **frozen}, batch))
    think = jax.jit(lambda batch: task.encode({**params, **frozen}, batch, None))
    roll = jax.jit(lambda batch, memory: task.credit(frozen, task.rollout(params, frozen, batch, KEY), memory))
    loss = jax.jit(lambda params, batch: task.loss(params, frozen, batch, jax.random.key(1), train=True)[0].value())
    slope = jax.jit(jax.grad(lambda params, batch: task.loss(params, frozen, batch, KEY, train=True)[0].total))
    return task, params, frozen, {"read": read, "think": think, "roll": roll, "loss": loss, "slope": slope}


def test_labels_of_a_row_change_nothing_that_is_read(whole):
    """Nor do responses, other rows, or what stands in padding."""
    *_, run = whole
    batch = example()
    expected = run["read"](batch)
    found = run["read"](batch.replace(emotion=batch.emotion[::-1], intent=jnp.asarray([0, 1, 2, 3])))
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    told = run["read"](batch.replace(target=jnp.where(batch.target_mask, (batch.target + 1) % V, 0)))
    padded = run["read"](batch.replace(
        source=jnp.where(batch.source_mask, batch.source, 9), piece=jnp.where(batch.piece_mask, batch.piece, 9),
        place=jnp.where(batch.source_mask, batch.place, 2),
    ))  # fmt: skip
    for name in ("generator", "intent_first", "intent_second", "intent_prediction"):
        np.testing.assert_array_equal(told[name], expected[name])
        np.testing.assert_array_equal(padded[name], expected[name])
    assert not np.allclose(told["nll"], expected["nll"])
    np.testing.assert_allclose(padded["nll"], expected["nll"], rtol=1e-5)


def test_a_row_is_read_alike_in_any_order(whole):
    *_, run = whole
    batch = example()
    order = jnp.asarray([2, 0, 3, 1])
    expected, found = run["read"](batch), run["read"](jax.tree.map(lambda leaf: leaf[order], batch))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values[order], rtol=1e-5, err_msg=name)


def test_the_fused_states_are_as_long_as_the_context_and_intents_are_of_the_references(whole):
    _task, _, _, run = whole
    batch = example()
    thought = run["think"](batch)
    assert thought.states.shape == (B, S, SMALL.d_model)
    emotion = np.asarray(thought.emotion.argmax(axis=1))
    for row in range(B):
        assert tuple(np.asarray(thought.actions[row])) == REFERENCES[emotion[row]]
        assert int(thought.second[row]) in REFERENCES[emotion[row]]
    np.testing.assert_allclose(np.exp(thought.final).sum(axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(thought.first).sum(axis=1), 1.0, rtol=1e-5)


def test_a_rollout_draws_rewards_and_the_update_reads_the_same(whole):
    """The ratio is 1 before the update; the reward is Eq. 9 of the chosen intent, and the baseline follows it."""
    task, params, _frozen, run = whole
    batch, start = example(), task.init_memory()
    rolled, memory, metrics = run["roll"](batch, start)
    thought = run["think"](rolled)
    chosen = np.asarray(thought.actions)[np.arange(B), rolled.action]
    emotion = np.asarray(thought.emotion.argmax(axis=1))
    side = np.where(IS_POSITIVE[emotion], 0, 1)
    felt = np.asarray(thought.emotion_embedding)[side, emotion]
    intents = np.asarray(params["intents"]["intent_embedding"])
    expected = 1 / (1 + np.exp(-(felt * intents[chosen]).sum(axis=1)))
    np.testing.assert_allclose(rolled.reward, expected, rtol=1e-4)
    valid = np.asarray(batch.valid)
    mean = np.asarray(rolled.reward)[valid].mean()
    np.testing.assert_allclose(rolled.advantage, rolled.reward - mean, atol=1e-6)  # the first has no mean before it
    np.testing.assert_allclose(memory.total / memory.weight, mean, rtol=1e-5)
    assert float(metrics["reward_spread"].value()) > 1e-4
    later, _, _ = run["roll"](batch, Mean(jnp.float32(0.2), jnp.float32(0.4)))
    np.testing.assert_allclose(later.advantage, rolled.reward - 0.5, atol=1e-6)


def test_an_action_stays_the_intent_that_was_drawn_whatever_emotion_is_found_later(whole):
    task, params, frozen, run = whole
    rolled, _, _ = run["roll"](example(), task.init_memory())
    other = dataclasses.replace(task, references=((5, 6, 7),) * len(EMOTIONS))  # as of other emotions
    thought = jax.jit(lambda batch: other.encode({**params, **frozen}, batch, None))(rolled)
    np.testing.assert_array_equal(thought.second, np.asarray(rolled.actions)[np.arange(B), rolled.action])


def test_the_final_intent_is_of_both_intents_and_the_classifiers_alone(whole):
    """The state reaches it through the choice of the second intent, which is given here."""
    task, params, *_ = whole
    rng = np.random.default_rng(8)
    thought = task_thought(jax.nn.log_softmax(jnp.asarray(rng.normal(size=(B, len(INTENTS))), jnp.float32)))
    one, other = (jnp.asarray(rng.normal(size=(B, S, SMALL.d_model)), jnp.float32) for _ in range(2))
    batch = example(reasons=False).replace(actions=jnp.asarray([[6, 4, 3]] * B))

    @jax.jit
    def final(states, action):
        found = task.reconsidered(params, batch.replace(action=action), thought.replace(states=states))
        return found.final, found.policy

    action = jnp.asarray([2, 1, 0, 1])
    (expected, policy), (found, changed) = (final(states, action) for states in (one, other))
    np.testing.assert_array_equal(found, expected)
    assert not np.allclose(changed, policy)
    found, _ = final(one, action.at[0].set(1))
    np.testing.assert_array_equal(found[1:], expected[1:])
    assert not np.allclose(found[0], expected[0])


@pytest.mark.slow
def test_the_update_finds_the_rollouts_ratio_and_the_policy_part_follows_the_advantage(whole):
    task, params, frozen, run = whole
    rolled, _, _ = run["roll"](example(), task.init_memory())
    metrics = jax.jit(lambda: task.loss(params, frozen, rolled, KEY, train=False)[1])()
    assert float(metrics["ratio_error"].value()) < 1e-5
    bonus, gradient, doubled = (
        run["slope"](params, rolled.replace(advantage=factor * rolled.advantage))["intents"]["policy_out"]["kernel"]
        for factor in (0.0, 1.0, 2.0)
    )
    np.testing.assert_allclose(doubled - bonus, 2 * (gradient - bonus), rtol=1e-4, atol=1e-7)  # from rewards alone
    assert float(jnp.abs(gradient - bonus).max()) > 1e-6
    assert float(jnp.abs(bonus).max()) > 1e-6  # for its entropy


@pytest.mark.slow
def test_every_part_of_the_whole_learns(whole):
    task, params, _frozen, run = whole
    rolled, _, _ = run["roll"](example(), task.init_memory())
    gradients = run["slope"](params, rolled)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path


def test_an_update_that_reads_otherwise_and_rewards_that_are_all_the_same_are_noticed(whole, caplog):
    task, *_ = whole
    task.check_start({"ratio_error": 1e-4}, step=0)
    for error in (0.5, float("nan")):
        with pytest.raises(TrainingError, match=f"ratio_error = {error}"):
            task.check_start({"ratio_error": error}, step=0)
    with caplog.at_level("WARNING", "empax"):
        task.check_progress({"reward_spread": 1e-3, "reward": 0.5}, step=7)
        assert not caplog.messages
        task.check_progress({"reward_spread": 0.0, "reward": 0.5}, step=7)
    assert "step 7: every choice has the same reward (0.5" in caplog.text


def test_the_loss_has_each_part_with_its_weight(whole, monkeypatch):
    weights = {"response_weight": 0.5, "emotion_weight": 0.3, "contrastive_weight": 0.7, "twice_weight": 0.2}
    task = dataclasses.replace(whole[0], stage=GeneratorTaskSettings(**weights))
    part = Mean(jnp.float32(3.0), jnp.float32(2.0))
    logits = jax.random.normal(KEY, (B, T, V))
    batch = example(reasons=False)
    for name, found in (
        ("of_response", task.likelihood(logits, batch)), ("intent_parts", ([(2.0, part)], {})),
        ("diffusion_parts", ([(4.0, part)], {})),
    ):  # fmt: skip
        monkeypatch.setattr(ReinforcedReflectDiffu, name, lambda *_, found=found: found)
    batch = batch.replace(emotion=batch.emotion.at[2].set(batch.emotion[0]))  # a pair that attracts
    rng = np.random.default_rng(4)
    summary, emotion = (jnp.asarray(rng.normal(size=(B, size)), jnp.float32) for size in (6, len(EMOTIONS)))
    thought = task_thought(jnp.zeros((B, len(INTENTS)))).replace(summary=summary, emotion=jax.nn.log_softmax(emotion))
    parts, metrics = task.losses({}, {}, batch, thought, (KEY, KEY))
    assert [factor for factor, _ in parts] == pytest.approx([0.5, 0.3, 0.3 * 0.7, 0.2 * 2.0, 0.2 * 4.0])
    rows = np.array([5, 3, 4, 0])  # tokens; the last row is filler
    nll = -(token_log_probs(logits, batch.target) * batch.target_mask).sum(axis=1)[:3].sum()
    felt = -np.asarray(thought.emotion)[np.arange(B), np.asarray(batch.emotion)] @ rows
    alike = supervised_contrastive(summary, batch.emotion, batch.valid, temperature=0.07).value() * rows.sum()
    np.testing.assert_allclose([float(mean.total) for _, mean in parts], [nll, felt, alike, 3.0, 3.0], rtol=1e-5)
    assert "nll_without_mimicry" not in metrics  # which evaluations tell


@pytest.mark.parametrize("copying", [True, False])
def test_losses_without_padding_are_those_of_all_tokens(copying, monkeypatch):
    task, params, frozen = make(**OFF | {"copying": copying, "intent_start": True})
    batch = example(reasons=False)

    monkeypatch.setattr("empax.losses.real_tokens.LEAST", 1)
    found = loss_and_gradient(task, params, frozen, batch, train=True)
    use_all_cells(monkeypatch)
    expected = loss_and_gradient(task, params, frozen, batch, train=True)
    jax.tree.map(lambda e, f: np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-5), expected, found)


def test_each_denoiser_learns_the_noise_of_its_polarity(whole, monkeypatch):
    """By denoisers that are wrong by 1 on their side's rows, and by 2."""
    schedule, times = Schedule(2, 0.1, 0.3), []

    def ask(_task, _params, part, _method, *given):
        if part == "intents":
            return given[0]
        side, noisy, time, _, _, clean = given
        times.extend(time.tolist())
        left = jnp.asarray(schedule.alpha_bars, jnp.float32)[time][:, None]
        noise = (noisy - left**0.5 * clean) / (1.0 - left) ** 0.5
        nothing = jnp.zeros((B, 2))
        return noise + side + 1.0, (nothing + side + 1.0, nothing), (nothing, nothing)

    monkeypatch.setattr(ReflectDiffu, "ask", ask)
    stage = GeneratorTaskSettings(diffusion=schedule, state_time=1, kl_weight=0.5)
    task, batch = dataclasses.replace(whole[0], stage=stage), example(reasons=False)
    batch = batch.replace(emotion=batch.emotion.at[0].set(-1))  # proud and angry are left
    summary = jnp.asarray(np.random.default_rng(5).normal(size=(B, 6)), jnp.float32)
    thought = task_thought(jnp.zeros((B, len(INTENTS)))).replace(summary=summary)
    given = {}, batch, thought, jnp.arange(1.0, 5.0)
    for seed in range(20):
        parts, metrics = task.diffusion_parts(*given, jax.random.key(seed))
        found = [*(part for _, part in parts), *metrics.values()]
        np.testing.assert_allclose([float(mean.value()) for mean in found], (2 * 1 + 3 * 2**2) / 5, rtol=1e-3)
    assert set(times) == {1, 2}
    assert [factor for factor, _ in parts] == [0.5, 1.0]
    assert set(metrics) == {"noise_error", "latent_kl"}
    printed = dataclasses.replace(task, stage=dataclasses.replace(stage, noise_error=False))
    assert [factor for factor, _ in printed.diffusion_parts(*given, KEY)[0]] == [0.5]


def test_the_denoisers_errors_teach_the_denoisers_alone(whole):
    task, params, *_ = whole
    rng = np.random.default_rng(9)
    batch, own = example(reasons=False), {name: params[name] for name in ("intents", "mimicry")}
    first = jax.nn.softmax(jnp.asarray(rng.normal(size=(B, len(INTENTS))), jnp.float32))
    summary = jnp.asarray(rng.normal(size=(B, SMALL.d_model)), jnp.float32)

    def error(params, first, summary):
        thought = task_thought(jnp.zeros((B, len(INTENTS)))).replace(first=first, summary=summary)
        return sum(part.total for _, part in task.diffusion_parts(params, batch, thought, jnp.ones(B), KEY)[0])

    slopes = jax.jit(jax.grad(error, (0, 1, 2)))(own, first, summary)
    largest = [max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(part)) for part in slopes]
    assert max(largest[1:]) == 0
    assert largest[0] > 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(slopes[0]["intents"]))
    known = task.condition(own, jnp.eye(len(INTENTS)))
    np.testing.assert_allclose(known, 4 * own["intents"]["intent_embedding"], rtol=1e-6)  # of width 16


def test_the_intents_loss_knows_the_listeners_intent_alone(whole):
    """What the policy has drawn is no label: a public reproduction takes it for one, and always succeeds."""
    task, *_ = whole
    rng = np.random.default_rng(2)
    batch = example(reasons=False)
    final = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(B, len(INTENTS))), jnp.float32))
    thought = task_thought(final)
    weights = jnp.ones(B)
    task = dataclasses.replace(task, stage=dataclasses.replace(task.stage, first_weight=0.4))
    parts, metrics = task.intent_parts(batch, thought, weights)
    assert [factor for factor, _ in parts] == [1.0, 0.4]
    np.testing.assert_allclose(parts[1][1].total, parts[0][1].total, rtol=1e-5)  # the first thought is the final one
    nll = -np.asarray(final)[np.arange(B), np.asarray(batch.intent)]
    np.testing.assert_allclose(parts[0][1].total, nll[[0, 2]].sum(), rtol=1e-5)  # row 1 has no intent, row 3 is filler
    drawn = batch.replace(action=jnp.asarray([1, 1, 1, 1]), log_prob=jnp.zeros(B), advantage=jnp.ones(B))
    other, logged = task.intent_parts(drawn, thought, weights)
    np.testing.assert_array_equal(other[0][1].total, parts[0][1].total)
    factor, policy = other[2]
    assert factor == task.stage.policy_weight
    np.testing.assert_allclose([policy.value(), logged["ratio_error"].value()], [-1 / N, 1 - 1 / N], rtol=1e-5)
    hits = np.asarray(final.argmax(axis=1)) == np.asarray(batch.intent)
    np.testing.assert_allclose(metrics["intent_accuracy"].total, hits[[0, 2]].sum())
    permuted, _ = task.intent_parts(batch.replace(intent=jnp.asarray([4, -1, 2, 0])), thought, weights)
    assert float(permuted[0][1].total) != float(parts[0][1].total)


def test_the_policy_has_a_bonus_for_its_entropy_where_its_choice_is_rewarded(whole):
    rng = np.random.default_rng(6)
    policy = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(B, N)), jnp.float32))
    thought = task_thought(jnp.zeros((B, len(INTENTS)))).replace(policy=policy)
    chosen = {"action": jnp.zeros(B, int), "log_prob": policy[:, 0], "advantage": jnp.zeros(B)}
    stage = dataclasses.replace(whole[0].stage, reward="label", policy_weight=0.3, entropy_weight=0.2)
    task, weights = dataclasses.replace(whole[0], stage=stage), jnp.asarray([5.0, 3.0, 4.0, 2.0])
    factor, bonus = task.intent_parts(example(reasons=False).replace(**chosen), thought, weights)[0][-1]
    assert factor == pytest.approx(-0.3 * 0.2)
    entropies = -(np.exp(policy) * np.asarray(policy)).sum(axis=1)
    expected = (5 * entropies[0] + 4 * entropies[2]) / 9  # row 1 has no intent, row 3 is filler
    np.testing.assert_allclose(bonus.value(), expected, rtol=1e-5)


def task_thought(final):
    zeros = jnp.zeros((B, S, 2))
    policy = jax.nn.log_softmax(jnp.zeros((B, N)))
    emotion = jax.nn.log_softmax(jnp.zeros((B, len(EMOTIONS))))
    return Thought(
        states=zeros, mask=jnp.ones((B, S), bool), summary=zeros[:, 0], emotion=emotion,
        emotion_embedding=jnp.zeros((2, len(EMOTIONS), 2)), first=jnp.exp(final), final=final, policy=policy,
        actions=jnp.zeros((B, N), int), second=jnp.zeros(B, int),
    )  # fmt: skip


@pytest.mark.slow
def test_with_every_switch_off_it_is_the_plain_transformer_bit_for_bit():
    task, params, frozen = make(**OFF)
    batch = example(reasons=False)
    assert not isinstance(task, ReinforcedReflectDiffu)
    run = jax.jit(lambda params, batch: task.logits(params, batch, task.encode(params, batch, None), None))
    plain = jax.jit(lambda params, batch: EncoderDecoder(SMALL.config(V, 2, tie_embeddings=False)).apply(
        {"params": params}, batch.source, batch.source_mask, batch.target))  # fmt: skip
    np.testing.assert_array_equal(run(params, batch), plain(params["model"], batch))
    expected = -np.asarray(token_log_probs(plain(params["model"], batch), batch.target) * batch.target_mask).sum(axis=1)
    np.testing.assert_allclose(task.read({**params, **frozen}, batch)["nll"], expected, rtol=1e-5)


SWITCHES = {
    "reasons": {"reasons": ""},
    "experts": {"experts": "batch_majority"},
    "first intent": {"first_intent": "printed"},
    "classifier share": {"classifier_share": 0.1},
    "second intent": {"second_intent": False},
    "mimicry": {"mimicry": False},
    "restore": {"restore": "printed", "state_time": 5},
    "state time": {"state_time": 50},
    "constant second": {"constant_second": True},
    "final prior": {"final_prior": False},
    "copying": {"copying": False},
    "intent start": {"intent_start": False},
    "diffusion": {"diffusion": dataclasses.replace(GeneratorTaskSettings().diffusion, last=0.1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_of_what_is_read_changes_the_likelihood(switch, whole):
    """With the same numbers for the parameters that both have."""
    _, params, frozen, run = whole
    task, own, _ = make(**SWITCHES[switch])

    def shared(ours, theirs):
        if not isinstance(ours, dict):
            return theirs
        return {name: shared(value, theirs[name]) if name in theirs else value for name, value in ours.items()}

    given = dict(params)
    if not task.stage.copying:
        given["model"] = params["model"]["model"]
    batch = example(reasons=bool(task.stage.reasons))
    found = task.read({**shared(own, given), **(frozen if task.stage.reasons else {})}, batch)["nll"]
    assert np.isfinite(found).all()
    assert not np.allclose(found, run["read"](example())["nll"], rtol=1e-6), switch


def test_a_batch_without_a_reward_leaves_the_baseline(whole):
    task = dataclasses.replace(whole[0], stage=dataclasses.replace(whole[0].stage, reward="label"))
    batch = example().replace(intent=jnp.full(B, -1), reward=jnp.zeros(B))
    _, memory, _ = task.credit({}, batch, Mean(jnp.asarray(1.0), jnp.asarray(2.0)))
    assert float(memory.value()) == pytest.approx(0.5)


def test_rewards_by_label_are_1_for_the_listeners_intent_and_count_where_it_is_known(whole):
    task, batch = dataclasses.replace(whole[0], stage=dataclasses.replace(whole[0].stage, reward="label")), example()
    thought = task_thought(jnp.zeros((B, len(INTENTS)))).replace(actions=jnp.asarray([[6, 4, 3]] * B))
    reward = task.reward({}, batch, thought, jnp.asarray([2, 1, 0, 1]))  # row 1 has no intent, row 3 is filler
    np.testing.assert_array_equal(reward, [1, 0, 1, 0])
    np.testing.assert_array_equal(task.rewarded(batch), [True, False, True, False])
    _, memory, metrics = task.credit({}, batch.replace(reward=reward), Mean(jnp.float32(1.0), jnp.float32(2.0)))
    assert (float(metrics["reward"].total), float(metrics["reward"].weight)) == (2, 2)
    assert float(memory.value()) == pytest.approx((0.99 * 1.0 + 0.01 * 1.0) / (0.99 * 2.0 + 0.01))


def test_noise_at_test_is_of_the_instance_wherever_it_stands(whole):
    task, *_ = whole
    batch, order = example(), jnp.asarray([3, 1, 0, 2])
    noise = task.noise_of(batch, None)
    np.testing.assert_array_equal(task.noise_of(jax.tree.map(lambda leaf: leaf[order], batch), None), noise[order])
    alone = task.noise_of(jax.tree.map(lambda leaf: leaf[1:2], batch), None)
    np.testing.assert_array_equal(alone[0], noise[1])
    assert np.abs(np.asarray(noise)).max() > 1


def test_the_speakers_words_alone_may_be_reasons(whole):
    task, _, frozen, _ = whole
    batch = example()
    eager = {**frozen["reasons"], "emission_bias": jnp.asarray([-50.0, 50.0])}  # all that may be one is one
    _, reasons = jax.jit(task.annotated)({"reasons": eager}, batch)
    told, place = np.asarray(batch.told & batch.piece_mask), np.asarray(batch.place)
    expected = np.where(place >= 0, np.take_along_axis(told, np.maximum(place, 0), axis=1), 0)
    np.testing.assert_array_equal(reasons, expected)
    assert expected.any()


@pytest.mark.slow
def test_a_flipped_reason_changes_the_states(whole):
    task, _params, frozen, run = whole
    batch = example()
    reasoning, reasons = task.annotated(frozen, batch)
    given = batch.replace(reasoning=reasoning, reasons=reasons)
    np.testing.assert_allclose(run["think"](given).states, run["think"](batch).states, rtol=1e-5, atol=1e-6)
    flipped = run["think"](given.replace(reasons=reasons.at[0, 1].set(1 - reasons[0, 1])))
    assert np.abs(np.asarray(flipped.states - run["think"](given).states)[0]).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("which", ["none", "shuffled"])
def test_which_tags_are_shown_reaches_the_likelihood(which, whole):
    task, params, frozen, run = whole
    batch = example()
    reasoning, _ = task.annotated(frozen, batch)
    marked = jnp.where(batch.source_mask, jnp.arange(S)[None] % 2, 0)
    given = batch.replace(reasoning=reasoning, reasons=marked)
    changed = dataclasses.replace(task, stage=dataclasses.replace(task.stage, reason_tags=which))
    found = jax.jit(lambda batch: changed.read({**params, **frozen}, batch)["nll"])(given)
    assert not np.allclose(found, run["read"](given)["nll"], rtol=1e-6)


@pytest.mark.slow
def test_what_the_denoisers_restore_reaches_the_reply():
    """Each on its side; zeros in their place would be another reply."""
    task, params, frozen = make()
    batch = example()
    run = jax.jit(lambda params: task.read({**params, **frozen}, batch)["nll"])
    expected = run(params)
    for side in range(2):
        inner = params["mimicry"][f"denoisers_{side}"]
        changed = {**inner, "out": jax.tree.map(lambda leaf: leaf + 0.5, inner["out"])}
        found = run({**params, "mimicry": {**params["mimicry"], f"denoisers_{side}": changed}})
        assert not np.allclose(found, expected, rtol=1e-6)


def test_diffusion_that_nobody_listens_to_is_a_warning(caplog, whole):
    task, *_ = whole
    with caplog.at_level("WARNING", "empax"):
        used = task.summarize({"nll": 3.0, "nll_without_mimicry": 3.2})
        assert used["mimicry_gain"] == pytest.approx(0.2)
        assert not caplog.messages
        task.summarize({"nll": 3.0, "nll_without_mimicry": 3.0})
    assert "mimicry unused: with zeros" in caplog.text
    assert task.summarize({"nll": 3.0}) == {"nll": 3.0}  # of a model without denoisers


@pytest.mark.slow
def test_an_evaluation_says_what_the_restored_emotions_are_worth(whole):
    task, params, frozen, run = whole
    batch = example()
    metrics = jax.jit(lambda: task.loss(params, frozen, batch, KEY, train=False)[1])()
    erased = jax.jit(lambda: task.encode({**params, **frozen}, batch, None, erased=True).states)()
    states = run["think"](batch).states
    assert np.abs(np.asarray(erased - states)).max() > 1e-3
    assert float(metrics["nll_without_mimicry"].value()) != float(metrics["nll"].value())


@pytest.mark.slow
def test_replies_are_decoded_with_words_of_the_context():
    task, params, frozen = make()
    batch = example()
    found = task.generate({**params, **frozen}, {}, batch, KEY)
    assert found.tokens.shape == (B, 1, T)
    bias = {**params["model"], "gate": jnp.zeros_like(params["model"]["gate"]), "gate_bias": jnp.float32(-50.0)}
    copied = task.generate({**params, **frozen, "model": bias}, {}, batch, KEY).tokens[:, 0]
    for row in range(B):
        said = set(np.asarray(copied[row]).tolist()) - {0, 1}
        assert said <= set(np.asarray(batch.source[row][batch.source_mask[row]]).tolist())


def test_the_policys_loss_is_the_ratio_times_the_advantage():
    """And what was drawn and earned before is not taught."""
    rng = np.random.default_rng(3)
    log_prob, drawn, advantage = rng.normal(size=(3, 5)).astype(np.float32)
    weights = np.arange(1.0, 6.0, dtype=np.float32)
    counted = np.array([True, True, False, True, True])

    def loss(log_prob, drawn, advantage):
        given = SimpleNamespace(log_prob=drawn, advantage=advantage)
        return policy_loss(log_prob, given, jnp.asarray(counted), jnp.asarray(weights)).value()

    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(*map(jnp.asarray, (log_prob, drawn, advantage)))
    parts = -np.exp(log_prob - drawn) * advantage * weights * counted / weights[counted].sum()
    np.testing.assert_allclose(value, parts.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradients, [parts, np.zeros(5), np.zeros(5)], rtol=1e-5, atol=1e-7)


def test_standardized_vectors_have_the_scale_of_the_noise():
    found = np.asarray(standardized(jnp.asarray(7 + 3 * np.random.default_rng(0).normal(size=(2, 300)), jnp.float32)))
    np.testing.assert_allclose(found.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(found.std(axis=1), 1, rtol=1e-4)


def test_shown_tags_are_as_many_on_other_words_or_none():
    mask = jnp.arange(12)[None] < jnp.asarray([[12], [7]])
    tags = jnp.where(mask & (jnp.arange(12) % 3 == 0)[None], 1, 0)
    numbers = jnp.asarray([4, 5])
    shuffled = shown_tags(tags, mask, numbers, "shuffled")
    np.testing.assert_array_equal(shuffled.sum(axis=1), tags.sum(axis=1))
    assert not np.array_equal(shuffled, tags)
    assert not np.asarray(shuffled * ~mask).any()
    words = mask & (jnp.arange(12) % 4 != 1)[None]  # the others are speakers' tokens
    many = jnp.where(words & (jnp.arange(12) > 0)[None], 1, 0)
    among = shown_tags(many, words, numbers, "shuffled")
    np.testing.assert_array_equal(among.sum(axis=1), many.sum(axis=1))
    assert not np.asarray(among * ~words).any()
    np.testing.assert_array_equal(shown_tags(tags[::-1], mask[::-1], numbers[::-1], "shuffled"), shuffled[::-1])
    assert not np.asarray(shown_tags(tags, mask, numbers, "none")).any()
    np.testing.assert_array_equal(shown_tags(tags, mask, numbers, "marked"), tags)


def bandit(steps, *, baseline):
    """P(action) after REINFORCE on rewards .2 .5 .9, and the variance of the gradient at the uniform policy."""
    rewards, rows = jnp.asarray([0.2, 0.5, 0.9]), 32

    def gradient(logits, rng, mean):
        log_policy = jax.nn.log_softmax(logits)
        action = jax.random.categorical(rng, log_policy, shape=(rows,))
        made = rewards[action]

        def loss(logits):
            log_prob = jax.nn.log_softmax(logits)[action]
            advantage = made - (mean if baseline else 0.0)
            given = SimpleNamespace(log_prob=jax.lax.stop_gradient(log_prob), advantage=advantage)
            return policy_loss(log_prob, given, jnp.ones(rows, bool), jnp.ones(rows)).value()

        return jax.grad(loss)(logits), made.mean()

    def step(carry, rng):
        logits, mean = carry
        grad, new = gradient(logits, rng, mean)
        return (logits - 1.0 * grad, 0.9 * mean + 0.1 * new), None

    (logits, _), _ = jax.lax.scan(step, (jnp.zeros(3), jnp.float32(0.5)), jax.random.split(KEY, steps))
    grads = jax.vmap(lambda rng: gradient(jnp.zeros(3), rng, rewards.mean())[0])(jax.random.split(KEY, 4000))
    return jax.nn.softmax(logits), grads


def test_the_policy_learns_the_best_of_three_and_a_baseline_changes_the_variance_alone():
    found, with_baseline = jax.jit(lambda: bandit(300, baseline=True))()
    assert float(found[2]) > 0.95
    _, without = jax.jit(lambda: bandit(1, baseline=False))()
    rewards = np.array([0.2, 0.5, 0.9])
    expected = -(rewards - rewards.mean()) / 3  # enumerated: sum_a pi(a) R(a) d(-log pi(a)), at the uniform policy
    for grads in (with_baseline, without):
        error = np.asarray(grads).std(axis=0) / 4000**0.5
        assert (np.abs(np.asarray(grads).mean(axis=0) - expected) < 4 * error).all()
    assert np.asarray(with_baseline).var(axis=0).sum() < 0.5 * np.asarray(without).var(axis=0).sum()


TRAINED = {
    "contrastive": {"contrastive_weight": 0.0},
    "temperature": {"temperature": 0.5},
    "policy": {"policy_weight": 0.0, "reward": "label"},
    "entropy": {"entropy_weight": 0.5},
    "noise error": {"noise_error": False},
    "latent": {"kl_weight": 0.0},
    "first": {"first_weight": 0.0},
    "emotion": {"emotion_weight": 0.5},
    "twice": {"twice_weight": 0.5},
    "response": {"response_weight": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("switch", TRAINED)
def test_every_switch_of_the_loss_changes_it(switch, whole):
    task, params, frozen, run = whole
    rolled, _, _ = run["roll"](example(), task.init_memory())
    rolled = rolled.replace(emotion=rolled.emotion.at[2].set(rolled.emotion[0]))  # a pair that attracts
    stage = dataclasses.replace(task.stage, **TRAINED[switch])
    changed = dataclasses.replace(task, stage=stage)
    found = changed.loss(params, frozen, rolled, jax.random.key(1), train=True)[0].value()
    assert np.isfinite(found)
    assert abs(float(found) - float(run["loss"](params, rolled))) > 1e-6
