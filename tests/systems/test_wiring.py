"""How the systems wire their parts together: each weight, mask and mapping, by stand-ins whose numbers are known."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from empax.core import types as core
from empax.core.config import ConfigError
from empax.core.sharding import MeshSettings
from empax.core.system import AnswerOptions
from empax.core.types import LEVELS, MECHANISMS, Instance, Mean
from empax.data.bpe import train_bpe
from empax.data.epitome import EpitomePair
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.transformer import EncoderDecoder, scratch
from empax.parts.attributes import pairs
from empax.parts.attributes.identifier import Identifier, Identifiers
from empax.parts.attributes.pairs import JudgeTaskSettings, label_batch
from empax.parts.exemplars.parts import ExemplarSearch
from empax.parts.exemplars.settings import RetrievalSettings
from empax.parts.generator.answerer import Answerer
from empax.parts.generator.parts import GeneratorParts
from empax.parts.generator.settings import DialogueSettings, GeneratorSettings
from empax.parts.generator.stages import answerer_of
from empax.parts.generator.task import Generator, target_weights
from empax.systems.emprl import ppo
from empax.systems.emprl.kl import kl_penalty
from empax.systems.emprl.policy import Found
from empax.systems.emprl.settings import GrpoTaskSettings, PpoTaskSettings
from empax.systems.emprl.tasks import Grpo, Ppo
from empax.systems.reg.tasks import GuidedGenerator, Joint

NAMES = core.EMOTIONS
ROWS, SOURCE, TARGET, WIDTH, WORDS = 3, 4, 5, 6, 7
RNG, KEY = np.random.default_rng(0), jax.random.key(0)
STATES = RNG.normal(size=(ROWS, SOURCE, WIDTH))
STATES_MASK = np.arange(SOURCE) < np.array([[4], [2], [1]])
LOGITS = RNG.normal(size=(ROWS, TARGET, WORDS))
TARGETS = RNG.integers(0, WORDS, (ROWS, TARGET))
TARGET_MASK = np.arange(TARGET) < np.array([[5], [2], [3]])
VALID = np.array([True, True, False])
EMOTIONS = np.array([3, 1, 2])
HEAD = RNG.normal(size=(WIDTH, 4))


class Model(nn.Module):
    """Gives known states and logits; states of padding are large, so that who reads them shows it."""

    config = types.SimpleNamespace(d_model=WIDTH)

    def apply(self, variables, *args, method, **_):
        if method == "encode":
            return jnp.asarray(np.where(STATES_MASK[..., None], STATES, 1e3))
        if method == "logits_from":  # of any tokens, of which the states are the logits
            return args[0]
        assert method in ("decode", "decode_hidden")
        target, _, mask = args
        np.testing.assert_array_equal(target, TARGETS)
        np.testing.assert_array_equal(mask, STATES_MASK)
        return jnp.asarray(LOGITS)

    def states_mask(self, mask):
        return mask


class Head(nn.Module):
    """A linear one."""

    def apply(self, variables, pooled, **_):
        return pooled @ variables["params"]


BATCH = types.SimpleNamespace(
    source=jnp.zeros((ROWS, SOURCE), jnp.int32),
    source_mask=jnp.asarray(STATES_MASK),
    target=jnp.asarray(TARGETS),
    target_mask=jnp.asarray(TARGET_MASK),
    valid=jnp.asarray(VALID),
    emotion=jnp.asarray(EMOTIONS),
    query=None,
    query_mask=None,
    states=None,
)
PARAMS = {"model": {}, "emotion": jnp.asarray(HEAD)}


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


POOLED = np.stack([STATES[b, STATES_MASK[b]].mean(axis=0) for b in range(ROWS)])
POOLED /= np.sqrt(np.mean(POOLED**2, axis=1, keepdims=True))  # heads read them at unit variance
EMOTION_NLL = -log_softmax(POOLED @ HEAD)[np.arange(ROWS), EMOTIONS]
TOKEN_NLL = -np.take_along_axis(log_softmax(LOGITS), TARGETS[..., None], axis=2)[..., 0]
COUNTED = TARGET_MASK & VALID[:, None]
WEIGHTS = COUNTED.sum(axis=1)


def expected_losses():
    """Sums over the real rows: of the likelihood by token, and of the emotion, a row counting by its tokens."""
    return (TOKEN_NLL * COUNTED).sum(), (EMOTION_NLL * WEIGHTS).sum()


def generator(**changes):
    return Generator(**{"model": Model(), "decoder": None, "head": Head(), "emotion_weight": 0.3, **changes})


def test_the_losses_of_a_generator_are_the_likelihood_and_its_weight_times_the_emotion():
    nll, emotion = expected_losses()
    task = generator()
    parts, metrics = task.losses(PARAMS, {}, BATCH, task.encode(PARAMS, BATCH, None), (None, None))
    assert [factor for factor, _ in parts] == [1.0, 0.3]
    np.testing.assert_allclose([float(part.total) for _, part in parts], [nll, emotion], rtol=1e-5)
    np.testing.assert_allclose(float(metrics["nll"].value()), nll / COUNTED.sum(), rtol=1e-5)
    for weight in (0.0, 0.3, 2.0):
        loss, _ = generator(emotion_weight=weight).loss(PARAMS, {}, BATCH, KEY, train=False)
        np.testing.assert_allclose(float(loss.total), nll + weight * emotion, rtol=1e-5)
        assert float(loss.weight) == WEIGHTS.sum()
    np.testing.assert_array_equal(target_weights(BATCH), WEIGHTS)


def test_smoothing_is_learnt_from_and_not_reported():
    nll, _ = expected_losses()
    loss, metrics = generator(emotion_weight=0.0, label_smoothing=0.1).loss(PARAMS, {}, BATCH, KEY, train=False)
    uniform = -(log_softmax(LOGITS).mean(axis=2) * COUNTED).sum()
    np.testing.assert_allclose(float(loss.total), 0.9 * nll + 0.1 * uniform, rtol=1e-5)
    np.testing.assert_allclose(float(metrics["nll"].total), nll, rtol=1e-5)


@pytest.mark.parametrize("shown", [False, True])
def test_exemplars_that_a_batch_carries_reach_the_search(shown):
    asked = []
    decoder = types.SimpleNamespace(
        from_states=lambda *_, exemplars, **__: asked.append(exemplars),
        looked_at=lambda source, mask: {},
    )
    more = {"response": "ids", "response_mask": "mask"} if shown else {}
    batch = types.SimpleNamespace(source=None, source_mask=None, **more)
    generator(decoder=decoder).generate(PARAMS, {}, batch, KEY)
    assert asked == [("ids", "mask") if shown else None]


class Ranker:
    """A retriever with two known losses and a known head."""

    encoder = types.SimpleNamespace(emotions=lambda params, query, mask: jnp.asarray(params))

    def losses(self, params, batch, rng, weights):
        np.testing.assert_array_equal(weights, WEIGHTS)
        return [(1.0, Mean(jnp.float32(10.0), weights.sum())), (0.5, Mean(jnp.float32(4.0), weights.sum()))], {}


def joint(retriever_weight=0.2):
    return Joint(Ranker(), generator(), retriever_weight)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_joint_training_weighs_generator_and_retriever_with_all_their_parts(alpha):
    nll, emotion = expected_losses()
    params = {"generator": PARAMS, "retriever": None}
    loss, metrics = joint(retriever_weight=alpha).loss(params, {}, BATCH, KEY, train=False)
    expected = (1 - alpha) * (nll + 0.3 * emotion) + alpha * (10.0 + 0.5 * 4.0)
    np.testing.assert_allclose(float(loss.total), expected, rtol=1e-5)
    np.testing.assert_allclose(float(metrics["generator_emotion_loss"].value()), EMOTION_NLL.mean(), rtol=1e-5)


def test_both_heads_together_are_the_sum_of_their_log_probabilities():
    other = RNG.normal(size=(ROWS, 4)) * 3
    given = {**vars(generator()), "heads": ("generator", "retriever", "both"), "retriever": Ranker.encoder}
    found = GuidedGenerator(**given).read({**PARAMS, "retriever": other}, BATCH)
    own = POOLED @ HEAD
    np.testing.assert_array_equal(found["generator"], own.argmax(axis=1))
    np.testing.assert_array_equal(found["retriever"], other.argmax(axis=1))
    np.testing.assert_array_equal(found["both"], (log_softmax(own) + log_softmax(other)).argmax(axis=1))


CORPUS = [
    Instance(f"d{i}#2", (f"c{i}",), f"r{i}", "sad" if i else "proud", {"response_attributes": {"sentiment": "low"}})
    for i in range(3)
]


def test_a_prediction_holds_the_exemplars_with_their_scores():
    me = types.SimpleNamespace(corpus=types.SimpleNamespace(instances=CORPUS))
    found = ExemplarSearch.told(me, np.array([2, -1, 0]), np.array([0.912345, -np.inf, 0.5]))
    assert [(e["id"], e["score"]) for e in found] == [("d2#2", 0.9123), ("d0#2", 0.5)]
    assert found[1] == {
        "id": "d0#2", "context": ["c0"], "response": "r0", "emotion": "proud",
        "attributes": {"sentiment": "low"}, "score": 0.5,
    }  # fmt: skip


def test_a_prediction_holds_what_was_asked_and_what_was_found():
    me = types.SimpleNamespace(
        heads=("both", "generator"),
        _labels={"intent": ("ask", "agree")},
        tokenizer=types.SimpleNamespace(),
        _cost_of_unknown=0.0,
    )
    asked = dataclasses.replace(CORPUS[0], notes={"context_attributes": {"exploration": "high"}})
    notes = {"both": np.int32(4), "generator": np.int32(7), "intent": np.int32(1), "nll": np.float32(2.5),
             "num_tokens": np.float32(3)}  # fmt: skip
    told = {"exemplars": ({"score": 0.5},), "knowledge": "x"}
    found = Answerer._prediction(me, asked, "5 6", notes, told)
    assert (found.response, found.reference, found.context, found.id) == ("5 6", "r0", ("c0",), "d0#2")
    assert (found.emotion, found.emotion_prediction) == ("proud", NAMES[4])
    assert found.attributes == {"exploration": "high"}
    assert found.exemplars == ({"score": 0.5},)
    heads = {"both": NAMES[4], "generator": NAMES[7]}
    assert found.notes == {
        "nll": 2.5, "num_tokens": 3, "emotion_by_head": heads, "intent": "agree", "knowledge": "x"
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- judges


def test_pairs_carry_the_level_of_each_mechanism_that_a_stage_names(monkeypatch):
    rated = [
        EpitomePair(f"s{i}", f"r{i}", f"post {i}", f"answer {i}", dict(zip(MECHANISMS, levels, strict=True)))
        for i, levels in enumerate([("low", "mid", "high"), ("high", "low", "mid")] * 5)
    ]
    monkeypatch.setattr(pairs, "load_annotated_pairs", lambda: rated)
    run = types.SimpleNamespace(seed=0)
    stage = JudgeTaskSettings(data="sample", mechanisms=(MECHANISMS[2], MECHANISMS[0]))
    train, holdout = pairs.load_pairs(stage, run)
    assert train
    assert holdout
    for found in (*train, *holdout):
        number = int(found.response.rpartition(" ")[2])
        wanted = rated[number].levels
        assert found.context == (f"post {number}",)
        assert [LEVELS[level] for level in found.levels] == [wanted[MECHANISMS[2]], wanted[MECHANISMS[0]]]
    texts = np.zeros((3, 2), np.int32), np.ones((3, 2), bool)
    batch = label_batch(train, [1, -1, 0], texts)
    np.testing.assert_array_equal(batch.valid, [True, False, True])
    np.testing.assert_array_equal(batch.labels[[0, 2]], [train[1].levels, train[0].levels])


@dataclasses.dataclass(frozen=True)
class Judge:
    """Says always the same level of each of its mechanisms."""

    mechanisms: tuple[str, ...]
    levels: tuple[int, ...]

    @property
    def task(self):
        return self

    def __call__(self, contexts, responses, *, progress):
        return np.broadcast_to(np.eye(3)[list(self.levels)], (len(responses), len(self.levels), 3)) * 5.0


FIRST, SECOND = Judge((MECHANISMS[2],), (2,)), Judge((MECHANISMS[1], MECHANISMS[0]), (1, 0))


def test_rewards_read_the_mechanisms_in_their_order_whoever_says_them():
    found = Identifiers((FIRST, SECOND))([("a",)] * 2, ["b", "c"])
    np.testing.assert_array_equal(found.argmax(axis=2), [[0, 1, 2]] * 2)
    assert Identifier.mechanisms.fget(types.SimpleNamespace(model=FIRST)) == FIRST.mechanisms


# ------------------------------------------------------------------------------------------------------------- policy


ANSWER_MASK = np.arange(TARGET) < np.array([[5], [2], [0]])
OLD = TOKEN_NLL * 0 - 1.0


def rollout(**changes):
    values = {
        "batch": None, "tokens": jnp.asarray(TARGETS), "mask": jnp.asarray(ANSWER_MASK),
        "log_probs": jnp.asarray(OLD), "reference_log_probs": jnp.asarray(OLD) - 0.3,
        "advantages": jnp.asarray(LOGITS[..., 0]), "returns": jnp.asarray(LOGITS[..., 1]),
        "values": jnp.asarray(LOGITS[..., 2]), "kl_coefficient": jnp.full(ROWS, 0.7),
    }  # fmt: skip
    return types.SimpleNamespace(**{**values, **changes})


def policy_of(cls, settings, patch):
    """The task with a model of known log-probabilities, values and logits."""
    task = cls(types.SimpleNamespace(model=None, decoder=None), None, settings)
    patch.setattr(cls, "encoded", lambda *_: None)
    patch.setattr(cls, "on_gold", lambda *_, **__: (Mean(jnp.float32(6.0), jnp.float32(2.0)), {}))
    given = Found(jnp.asarray(OLD) + 0.05, jnp.asarray(LOGITS[..., 3]), jnp.asarray(LOGITS))
    patch.setattr(cls, "read", lambda *_: given)
    return task, given


def test_ppo_adds_value_entropy_and_likelihood_with_their_weights(monkeypatch):
    settings = PpoTaskSettings(value_weight=0.4, entropy_weight=0.02, likelihood_weight=0.5, kept_share=1.0)
    task, (_, _, logits) = policy_of(Ppo, settings, monkeypatch)
    batch = rollout()
    loss, metrics = task.loss({}, {}, batch, KEY, train=False)
    far, _ = task.loss({}, {}, rollout(log_probs=jnp.asarray(OLD) - 3.0), KEY, train=False)
    assert float(far.total) == 0.0  # whatever is in the loss
    entropy = ppo.entropy(logits, batch.mask, reduction="tokens").value()
    learnt = metrics["policy_loss"].value() + 0.5 * 3.0 - 0.02 * entropy
    expected = learnt + 0.4 * metrics["value_loss"].value()
    np.testing.assert_allclose(float(loss.value()), float(expected), rtol=1e-5)
    mask = ANSWER_MASK
    ratio = np.exp(0.05)
    surrogate = -np.minimum(ratio * LOGITS[..., 0], np.clip(ratio, 0.8, 1.2) * LOGITS[..., 0])
    np.testing.assert_allclose(float(metrics["policy_loss"].value()), surrogate[mask].mean(), rtol=1e-4)
    moved = np.clip(LOGITS[..., 3], LOGITS[..., 2] - 0.2, LOGITS[..., 2] + 0.2)
    squared = np.maximum((LOGITS[..., 3] - LOGITS[..., 1]) ** 2, (moved - LOGITS[..., 1]) ** 2)
    np.testing.assert_allclose(float(metrics["value_loss"].value()), 0.5 * squared[mask].mean(), rtol=1e-4)


def test_grpo_adds_kl_entropy_and_likelihood_with_their_weights(monkeypatch):
    def loss(settings, **changes):
        task, given = policy_of(Grpo, GrpoTaskSettings(reduction="tokens", **settings), monkeypatch)
        return float(task.loss({}, {}, rollout(**changes), KEY, train=False)[0].value()), given

    asked, inner = [], ppo.policy_loss
    monkeypatch.setattr(ppo, "policy_loss", lambda *args, **given: asked.append(given) or inner(*args, **given))
    plain, (log_probs, _, logits) = loss({})
    for options in ({"epsilon_high": None, "importance_sampling_level": "token"},
                    {"epsilon_high": 1.0, "importance_sampling_level": "sequence"}):  # fmt: skip
        loss(options)
        assert {name: asked[-1][name] for name in options} == options
    entropy = float(ppo.entropy(logits, jnp.asarray(ANSWER_MASK), reduction="tokens").value())
    assert loss({"entropy_weight": 0.02})[0] == pytest.approx(plain - 0.02 * entropy, rel=1e-5)
    assert loss({"likelihood_weight": 0.5})[0] == pytest.approx(plain + 0.5 * 3.0, rel=1e-5)
    assert loss({"entropy_weight": 0.02, "likelihood_weight": 0.5}, log_probs=jnp.asarray(OLD) - 3.0)[0] == 0.0
    kl = kl_penalty(log_probs, rollout().reference_log_probs, jnp.asarray(ANSWER_MASK), estimator="k3")
    expected = plain - 0.7 * float(np.asarray(kl)[ANSWER_MASK].mean())
    assert loss({}, kl_coefficient=jnp.zeros(ROWS))[0] == pytest.approx(expected, rel=1e-4)


def test_references_are_cut_at_the_positions_of_a_decoder_that_learns_them_and_nowhere_else():
    def longest(**config):
        generator = types.SimpleNamespace(model=EncoderDecoder(scratch(WORDS, **config)))
        parts = GeneratorParts(DialogueSettings(), None, generator, None)
        return parts.for_answers().settings.layout.max_target_tokens

    assert longest(position="learned", max_positions=40) == 40
    assert longest(position="relative") == longest(position="learned", max_positions=2000) == 512


def test_behind_a_prompt_references_have_the_positions_that_it_leaves():
    config = DecoderOnlyConfig(
        vocab_size=300, d_model=8, num_heads=1, num_kv_heads=1, head_dim=8, d_ff=8, num_layers=1, max_positions=900,
        position="learned", norm="layer",
    )  # fmt: skip
    tokenizer = train_bpe(["what a day"], vocab_size=290)
    generator = types.SimpleNamespace(model=DecoderOnly(config))
    parts = GeneratorParts(DialogueSettings(), tokenizer, generator, None)
    prefix, split = len(parts.form(exemplars=False).prefix), parts.form().split
    assert split > 0
    assert parts.positions_read(24) == prefix + 24
    assert parts.positions_read(600, passages=2) == len(parts.form().prefix) + 600 + split

    def longest(*given, **options):
        return parts.for_answers(*given, **options).settings.layout.max_target_tokens

    assert longest((16, 24)) == 512
    assert longest((16, 600)) == 900 - prefix - 600
    assert longest((400,), passages=2) == 900 - parts.positions_read(400, 2)
    assert longest((2000,)) == 2  # the check before training refuses it
    assert parts.longest_source() == parts.settings.layout.max_source_tokens
    few = types.SimpleNamespace(model=DecoderOnly(dataclasses.replace(config, max_positions=400)))
    parts = dataclasses.replace(parts, generator=few)
    for passages in (0, 2):
        answer = parts.settings.decoding.max_tokens
        assert parts.positions_read(parts.longest_source(passages), passages) + answer == 400


@pytest.mark.parametrize(("positions", "read"), [(400, 400), (2000, 411), (None, 411)])
def test_a_source_that_may_be_any_context_is_no_longer_than_the_positions_of_an_encoder(positions, read):
    kind = {"position": "learned", "max_positions": positions} if positions else {"position": "relative"}
    generator = types.SimpleNamespace(model=EncoderDecoder(scratch(WORDS, **kind)))
    parts = GeneratorParts(DialogueSettings(), train_bpe(["what a day"], vocab_size=290), generator, MeshSettings())
    assert parts.longest_source() == read
    task = types.SimpleNamespace(heads=(), model=None, read=dict)
    made = answerer_of(parts, task, {}, lambda _: None, AnswerOptions("generator", ""))
    assert made.buckets == (read,)


def test_a_plain_source_has_an_exemplar_only_before_the_context_of_an_encoder_decoder():
    generator = types.SimpleNamespace(model=EncoderDecoder(scratch(WORDS)))
    settings = RetrievalSettings(GeneratorSettings("t5", "folder"), form="plain", exemplars="apart")
    parts = GeneratorParts(settings, train_bpe(["what a day"], vocab_size=290), generator, None)
    with pytest.raises(ConfigError, match=r"such a source allows only 'joined', .*; set form = 'dialogue'"):
        _ = parts.fusion
    for changes in ({"exemplars": "joined"}, {"form": "dialogue"}):
        assert dataclasses.replace(parts, settings=dataclasses.replace(settings, **changes)).fusion is not None
