"""REG's tasks on tiny random models: what is chosen, what it is worth, and where which gradient goes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError, to_settings
from empax.core.protocols import GenerativeTask, OnlineTask
from empax.core.types import EMOTIONS, Generated
from empax.data.exemplars import ExemplarBatch, LabelledBatch
from empax.decoding.search import DecodeSettings
from empax.evaluation.device_metrics import UtilityWeights, utility
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.heads import ClassificationHead
from empax.models.transformer import EncoderDecoder, scratch
from empax.systems.reg import tasks
from empax.systems.reg.tasks import Decoder, DistillationSettings, Generator, Joint, Retriever, take_candidates

VOCABULARY, START, EOS, PAD = 30, 2, 1, 0
ROWS, RETRIEVED, K, SOURCE, TARGET, WIDTH = 3, 4, 2, 7, 6, 8

MODEL = EncoderDecoder(
    scratch(VOCABULARY, d_model=8, num_heads=2, head_dim=4, d_ff=16, num_encoder_layers=1, num_decoder_layers=1,
            dropout=0.1, start_id=START)
)  # fmt: skip
ENCODER = DualEncoder(
    BertEncoder(BertConfig(VOCABULARY, d_model=WIDTH, num_heads=2, d_ff=16, num_layers=1, max_positions=16)),
    normalize=True,
)
HEAD = ClassificationHead(num_classes=len(EMOTIONS))
DECODER = Decoder(DecodeSettings(method="greedy", max_tokens=5), start_id=START, eos_id=EOS, pad_id=PAD)


def ids(rng, *shape):
    return rng.integers(3, VOCABULARY, shape).astype(np.int32)


def lengths_to_mask(lengths, size):
    return np.arange(size) < np.asarray(lengths)[..., None]


def exemplar_batch(candidates=RETRIEVED + K, *, frozen_keys=False, seed=0, **changes):
    """ROWS rows with `candidates` passages each, column c carrying c as its emotion; targets end with EOS."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, TARGET + 1, ROWS)
    target = ids(rng, ROWS, TARGET)
    target[np.arange(ROWS), lengths - 1] = EOS
    shape = (ROWS, candidates)
    key = None if frozen_keys else ids(rng, *shape, 5)
    values = {
        "source": ids(rng, *shape, SOURCE),
        "source_mask": lengths_to_mask(rng.integers(2, SOURCE + 1, shape), SOURCE),
        "target": target,
        "target_mask": lengths_to_mask(lengths, TARGET),
        "valid": np.ones(ROWS, bool),
        "emotion": np.array([4, -1, 9], np.int32),
        "query": ids(rng, ROWS, 5),
        "query_mask": lengths_to_mask([5, 3, 4], 5),
        "key": key,
        "key_mask": None if frozen_keys else lengths_to_mask(rng.integers(2, 6, shape), 5),
        "key_embedding": rng.normal(size=(*shape, WIDTH)).astype(np.float32) if frozen_keys else None,
        "candidate_mask": np.ones(shape, bool),
        "key_emotion": np.broadcast_to(np.arange(candidates, dtype=np.int32), shape),
    }
    return jax.tree.map(jnp.asarray, ExemplarBatch(**{**values, **changes}))


def explored(**changes):
    rng = np.random.default_rng(3)
    return exemplar_batch(K, utilities=rng.random((ROWS, K)).astype(np.float32), **changes)


def retriever(**settings):
    return Retriever(ENCODER, HEAD, MODEL, DECODER, DistillationSettings(**settings), passages=K)


def joint(*, emotion_weight=0.0, retriever_weight=0.2, **settings):
    return Joint(retriever(**settings), FusionInDecoder(MODEL), HEAD, DECODER, retriever_weight, emotion_weight)


@functools.cache
def params():
    """Parameters of Joint; those of Retriever under "retriever", those of Generator under "generator"."""
    made = jax.jit(joint().init)(jax.random.key(0), explored())
    # The heads and biases begin at zero or near it: that would hide mistakes.
    leaves, structure = jax.tree.flatten(made)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    return structure.unflatten(
        [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


def g1_params():
    return params()["generator"]


@jax.jit
def embedded(retriever_params, batch):
    """Queries [B, D] and keys [B, K, D]."""
    task = retriever()
    query = task.embed(retriever_params, batch.query, batch.query_mask, None)
    return query, task.embed_keys(retriever_params, batch, None)


def choose(task, retriever_params, batch):
    return jax.jit(task.choose)(retriever_params, batch)


def columns_of(batch):
    return np.asarray(batch.key_emotion)


def with_scores(scores):
    """A batch whose candidates' dot products with the query are `scores` [RETRIEVED + K], in every row."""
    batch = exemplar_batch(frozen_keys=True)
    query, _ = embedded(params()["retriever"], batch)
    return batch.replace(key_embedding=jnp.asarray(scores, jnp.float32)[None, :, None] * query[:, None])


def explore(task, batch, seed=0):
    return jax.jit(task.explore)(params()["retriever"], {"generator": g1_params()}, batch, jax.random.key(seed))


# ---------------------------------------------------------------------------------------------------- the candidates


SCORES = [0.1, 0.9, -0.2, 0.5, 3.0, 2.0]  # the last two are the random ones, which no score may bring in


def test_choose_takes_the_best_retrieved_by_the_current_scores_and_no_random_one():
    best = choose(retriever(), params()["retriever"], with_scores(SCORES))
    np.testing.assert_array_equal(best, [[1, 3]] * ROWS)
    masked = with_scores(SCORES)
    masked = masked.replace(candidate_mask=masked.candidate_mask.at[1, 1].set(False))
    best = choose(retriever(), params()["retriever"], masked)
    np.testing.assert_array_equal(best, [[1, 3], [3, 0], [1, 3]])


def test_choose_follows_the_parameters_that_it_is_given():
    batch = exemplar_batch()
    task = retriever()
    other = jax.tree.map(lambda leaf: leaf * 1.7 + 0.2, params()["retriever"])
    for given in (params()["retriever"], other):
        scores = np.einsum("BD,BKD->BK", *embedded(given, batch))[:, :RETRIEVED]
        np.testing.assert_array_equal(choose(task, given, batch), np.argsort(-scores, axis=1)[:, :K])


@pytest.mark.parametrize("probability", [0.0, 1.0, 0.3])
def test_each_chosen_one_is_replaced_with_its_probability(probability):
    task = retriever(replace_probability=probability)
    batch, best = exemplar_batch(), np.array([[1, 3]] * ROWS)
    replace = jax.jit(jax.vmap(lambda rng: task.replace(batch, jnp.asarray(best), rng)))
    columns = np.asarray(replace(jax.random.split(jax.random.key(0), 500)))
    spare = RETRIEVED + np.arange(K)
    swapped = columns == spare
    assert np.all(swapped | (columns == best))
    assert swapped.mean() == pytest.approx(probability, abs=0.03)
    assert (swapped[..., 0] & swapped[..., 1]).mean() == pytest.approx(probability**2, abs=0.03)  # independently


def test_taking_candidates_moves_all_that_belongs_to_them():
    batch = exemplar_batch()
    picked = jnp.asarray([[5, 0], [2, 2], [1, 4]])
    taken = take_candidates(batch, picked)
    for name in ("source", "source_mask", "key", "key_mask", "candidate_mask", "key_emotion"):
        before, after = (np.asarray(getattr(b, name)) for b in (batch, taken))
        np.testing.assert_array_equal(after, before[np.arange(ROWS)[:, None], np.asarray(picked)], err_msg=name)
    assert taken.key_embedding is None
    np.testing.assert_array_equal(taken.query, batch.query)


def test_exploring_scores_the_set_that_it_ends_with():
    """Eq. 5: utilities are those of the replaced candidates."""
    task = retriever(replace_probability=1.0)
    found = explore(task, exemplar_batch())
    np.testing.assert_array_equal(columns_of(found), [[4, 5]] * ROWS)
    again = jax.jit(task.utilities)(g1_params(), found.replace(utilities=None), jax.random.key(9))
    np.testing.assert_array_equal(found.utilities, again)
    kept = explore(retriever(replace_probability=0.0), exemplar_batch())
    assert columns_of(kept).max() < RETRIEVED
    assert not np.array_equal(kept.utilities, found.utilities)


def test_joint_exploring_lets_the_generator_read_the_best_and_the_retriever_rank_the_replaced():
    task = joint(replace_probability=1.0)
    batch = exemplar_batch()
    found = jax.jit(task.explore)(params(), {"generator": g1_params()}, batch, jax.random.key(0))
    best = choose(task.retriever, params()["retriever"], batch)
    np.testing.assert_array_equal(columns_of(found), [[4, 5]] * ROWS)
    np.testing.assert_array_equal(found.source, take_candidates(batch, best).source)
    ranked = take_candidates(batch, jnp.asarray([[4, 5]] * ROWS))
    np.testing.assert_array_equal(
        found.utilities, jax.jit(task.retriever.utilities)(g1_params(), ranked, jax.random.key(1))
    )
    np.testing.assert_array_equal(found.key, ranked.key)


def test_without_retriever_weight_nothing_is_tried_out():
    task = joint(retriever_weight=0.0, replace_probability=1.0)
    found = jax.jit(task.explore)(params(), {"generator": None}, exemplar_batch(), jax.random.key(0))
    assert found.utilities is None
    assert columns_of(found).max() < RETRIEVED


# ------------------------------------------------------------------------------------------------------- the utilities


@dataclasses.dataclass(frozen=True)
class Answers:
    """A decoder that gives these tokens whatever it reads."""

    tokens: tuple
    eos_id: int = EOS
    pad_id: int = PAD

    def __call__(self, model, params, source, mask, rng):
        tokens = jnp.asarray(self.tokens, jnp.int32)[:, None]
        return Generated(tokens=tokens, log_probs=jnp.zeros(tokens.shape[:2]))


def test_utilities_are_f_of_the_answers_without_end_and_padding():
    gold = np.array([[5, 6, 7, 8, EOS, PAD], [9, 10, EOS, 0, 0, 0], [11, 12, 13, EOS, 0, 0]], np.int32)
    mask = np.cumsum(gold == EOS, axis=1) - (gold == EOS) == 0
    batch = exemplar_batch(K, target=gold, target_mask=mask)
    answers = [
        [5, 6, 7, 8, EOS, PAD], [20, 21, 22, 23, EOS, PAD],
        [9, 10, EOS, PAD, PAD, PAD], [10, 21, EOS, PAD, PAD, PAD],
        [11, 12, 13, 14, 15, 16], [EOS, PAD, PAD, PAD, PAD, PAD],
    ]  # fmt: skip
    task = dataclasses.replace(retriever(), decoder=Answers(tuple(map(tuple, answers))))
    found = np.asarray(task.utilities(g1_params(), batch, jax.random.key(0)))
    assert found.shape == (ROWS, K)
    assert found[0, 0] == pytest.approx(1.0)
    assert found[0, 1] == pytest.approx(0.0, abs=1e-6)
    assert found[2, 1] == 0.0
    f1 = dataclasses.replace(task, settings=DistillationSettings(utility=UtilityWeights(bleu=0.0, f1=1.0, rouge_l=0.0)))
    expected = [[1.0, 0.0], [1.0, 0.5], [2 * 0.5 * 1.0 / 1.5, 0.0]]
    np.testing.assert_allclose(f1.utilities(g1_params(), batch, jax.random.key(0)), expected, atol=1e-6)


def test_each_candidate_is_judged_by_its_own_greedy_answer():
    """The answers are those of decoding every passage alone; permuting the candidates permutes their utilities."""
    task, batch = retriever(), exemplar_batch(K)
    found = np.asarray(jax.jit(task.utilities)(g1_params(), batch, jax.random.key(0)))
    swapped = take_candidates(batch, jnp.asarray([[1, 0]] * ROWS))
    np.testing.assert_allclose(
        jax.jit(task.utilities)(g1_params(), swapped, jax.random.key(0)), found[:, ::-1], atol=1e-6
    )
    for k in range(K):
        decode = jax.jit(functools.partial(DECODER, MODEL))
        made = decode(g1_params()["model"], batch.source[:, k], batch.source_mask[:, k], jax.random.key(0))
        tokens = made.tokens[:, 0]
        made = (tokens != PAD) & (tokens != EOS)
        gold = batch.target_mask & (batch.target != EOS)
        np.testing.assert_allclose(utility(tokens, made, batch.target, gold), found[:, k], atol=1e-6)


def gold_log_probs(batch):
    """[B, K] summed and [B] counted, with a softmax of our own."""
    sums = np.zeros(batch.source.shape[:2])
    for k in range(sums.shape[1]):
        inputs = (batch.source[:, k], batch.source_mask[:, k], batch.target)
        logits = jax.jit(MODEL.apply)({"params": g1_params()["model"]}, *inputs)
        logits = np.asarray(logits, np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        picked = np.take_along_axis(log_probs, np.asarray(batch.target)[..., None], axis=-1)[..., 0]
        sums[:, k] = np.where(batch.target_mask, picked, 0.0).sum(axis=1)
    return sums, np.asarray(batch.target_mask).sum(axis=1)


def test_likelihood_signals_are_the_gold_responses_log_probabilities():
    batch = exemplar_batch(K)
    sums, counts = gold_log_probs(batch)
    for signal, expected in (("likelihood", sums / counts[:, None]), ("emdr2", sums)):
        found = jax.jit(retriever(signal=signal).utilities)(g1_params(), batch, jax.random.key(0))
        np.testing.assert_allclose(found, expected, rtol=1e-4)


# ------------------------------------------------------------------------------------------------- the retriever's loss


def scores_of(batch):
    return np.einsum("BD,BKD->BK", *embedded(params()["retriever"], batch)).astype(np.float64)


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("kind", ["softmax", "literal_sigmoid", "emdr2"])
def test_the_loss_is_that_of_the_paper_or_of_emdr2(kind):
    batch = explored()
    tau, temperature = 0.2, 0.5
    options = {"signal": "emdr2"} if kind == "emdr2" else {"loss": kind}
    task = retriever(target_temperature=tau, score_temperature=temperature, **options)
    loss, metrics = jax.jit(task.loss)(params()["retriever"], {}, batch, None)
    scores, utilities = scores_of(batch), np.asarray(batch.utilities, np.float64)
    targets = softmax(utilities / tau)
    if kind == "emdr2":
        expected = -np.log((softmax(scores / temperature) * np.exp(utilities)).sum(axis=1))
    else:
        shown = softmax(scores / temperature) if kind == "softmax" else 1 / (1 + np.exp(-scores / temperature))
        expected = (targets * (np.log(targets) - np.log(shown))).sum(axis=1)  # Eq. 4
    assert float(loss.value()) == pytest.approx(expected.mean(), rel=1e-4)
    assert float(metrics["retriever_loss"].value()) == pytest.approx(expected.mean(), rel=1e-4)
    best = np.take_along_axis(utilities, scores.argmax(axis=1)[:, None], axis=1)[:, 0]
    assert float(metrics["utility"].value()) == pytest.approx(utilities.mean(), rel=1e-5)
    assert float(metrics["utility_gain"].value()) == pytest.approx((best - utilities.mean(axis=1)).mean(), abs=1e-5)


def test_filler_rows_and_missing_candidates_change_nothing():
    whole = explored()
    valid = jnp.asarray([True, False, True])
    garbage = whole.utilities.at[1].set(99.0)
    task = retriever(emotion_weight=0.5)
    loss = jax.jit(task.loss)
    first, _ = loss(params()["retriever"], {}, whole.replace(valid=valid), None)
    second, _ = loss(params()["retriever"], {}, whole.replace(valid=valid, utilities=garbage), None)
    assert float(first.weight) == 2.0
    assert float(first.total) == float(second.total)
    # A masked third candidate, however good, is no candidate.
    more = exemplar_batch(K + 1)
    pad = lambda a, b: a if a is None else jnp.concatenate([a, b[:, K:]], axis=1)  # noqa: E731
    names = ("source", "source_mask", "key", "key_mask", "key_emotion")
    wider = whole.replace(
        **{name: pad(getattr(whole, name), getattr(more, name)) for name in names},
        candidate_mask=jnp.asarray([[True, True, False]] * ROWS),
        utilities=jnp.concatenate([whole.utilities, jnp.full((ROWS, 1), 50.0)], axis=1),
    )
    plain = retriever()
    a, a_metrics = jax.jit(plain.loss)(params()["retriever"], {}, whole, None)
    b, b_metrics = jax.jit(plain.loss)(params()["retriever"], {}, wider, None)
    assert float(a.total) == pytest.approx(float(b.total), rel=1e-5)
    for name in ("utility", "utility_gain"):
        assert float(a_metrics[name].value()) == pytest.approx(float(b_metrics[name].value()), abs=1e-5)


def test_frozen_keys_give_the_gradient_of_the_query_side_alone():
    batch = explored()
    task = retriever(score_temperature=0.1)
    own = params()["retriever"]
    _, keys = embedded(own, batch)
    frozen = batch.replace(key=None, key_mask=None, key_embedding=keys)

    def loss(p, b):
        return task.loss(p, {}, b, None)[0].value()

    trained_side, query_side = jax.jit(jax.grad(loss))(own, batch), jax.jit(jax.grad(loss))(own, frozen)

    def by_hand(p):  # the same scores with the keys held still
        query = task.embed(p, batch.query, batch.query_mask, None)
        scores = jnp.einsum("BD,BKD->BK", query, keys)
        return task.distil(scores, batch, jnp.ones(ROWS)).value()

    expected = jax.jit(jax.grad(by_hand))(own)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), query_side["encoder"], expected["encoder"])
    size = lambda tree: float(sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(tree)))  # noqa: E731
    assert size(query_side["encoder"]) > 0
    difference = jax.tree.map(lambda a, b: a - b, trained_side["encoder"], query_side["encoder"])
    assert size(difference) > 0.1 * size(query_side["encoder"])
    assert size(trained_side["emotion"]) == size(query_side["emotion"]) == 0.0  # its weight is 0


# ------------------------------------------------------------------------------------------------------ the emotions


def test_unknown_emotions_count_nowhere():
    encoding = jax.random.normal(jax.random.key(1), (4, 8))
    head = HEAD.init(jax.random.key(2), encoding)["params"]
    logits = np.asarray(HEAD.apply({"params": head}, encoding), np.float64)
    nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(4), [3, 0, 31, 0]]
    loss, metrics = tasks.emotion_loss(HEAD, head, encoding, jnp.asarray([3, -1, 31, -1]), None)
    assert float(loss.value()) == pytest.approx(nll[[0, 2]].mean(), rel=1e-5)
    assert float(metrics["emotion_accuracy"].weight) == 2.0
    sure = {**head, "out_bias": jnp.zeros(32).at[3].set(50.0)}
    _, metrics = tasks.emotion_loss(HEAD, sure, encoding, jnp.asarray([3, -1, 31, -1]), None)
    assert float(metrics["emotion_accuracy"].value()) == 0.5
    nobody, metrics = tasks.emotion_loss(HEAD, head, encoding, jnp.full(4, -1), None)
    assert float(nobody.total) == float(nobody.weight) == float(metrics["emotion_loss"].value()) == 0.0


def test_the_retrievers_head_learns_from_exemplars_where_they_are_trained():
    batch = explored().replace(emotion=jnp.full(ROWS, -1))
    task = retriever(emotion_weight=1.0)
    _, keys = embedded(params()["retriever"], batch)
    frozen = batch.replace(key=None, key_mask=None, key_embedding=keys)

    def gradient(b):
        made = jax.jit(jax.grad(lambda p, b: task.loss(p, {}, b, None)[0].total))(params()["retriever"], b)
        return made["emotion"]["out_bias"]

    assert float(jnp.abs(gradient(frozen)).sum()) == 0.0  # no context's emotion is known, no exemplar is read
    assert float(jnp.abs(gradient(batch)).sum()) > 0.1
    unknown = batch.replace(key_emotion=jnp.full((ROWS, K), -1))
    assert float(jnp.abs(gradient(unknown)).sum()) == 0.0


# ------------------------------------------------------------------------------------------------- joint training, FiD


def test_joint_loss_is_equation_7():
    batch = explored()
    value = lambda weight, b: jax.jit(joint(retriever_weight=weight).loss)(params(), {}, b, None)  # noqa: E731
    loss, metrics = value(0.2, batch)
    nll = float(metrics["nll"].value())
    # A row weighs as many tokens as its response has in both parts, so that both are means over the same weights.
    tokens = np.asarray(batch.target_mask).sum(axis=1)
    scores, targets = scores_of(batch), softmax(np.asarray(batch.utilities, np.float64) / 0.1)
    rows = (targets * (np.log(targets) - np.log(softmax(scores)))).sum(axis=1)
    ranked = (rows * tokens).sum() / tokens.sum()
    assert float(loss.value()) == pytest.approx(0.2 * ranked + 0.8 * nll, rel=1e-4)
    assert float(loss.weight) == tokens.sum()
    assert float(value(0.0, batch)[0].value()) == pytest.approx(nll, rel=1e-5)
    assert float(value(1.0, batch)[0].value()) == pytest.approx(ranked, rel=1e-4)


def test_each_part_of_joint_training_moves_its_own_parameters():
    batch = explored()

    def gradients(weight):
        task = joint(retriever_weight=weight)
        made = jax.jit(jax.grad(lambda p: task.loss(p, {}, batch, None)[0].value()))(params())
        return {
            name: float(sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(part)))
            for name, part in (("encoder", made["retriever"]["encoder"]), ("model", made["generator"]["model"]))
        }

    ranked_only, read_only = gradients(1.0), gradients(0.0)
    assert ranked_only["model"] == 0.0
    assert ranked_only["encoder"] > 0
    assert read_only["encoder"] == 0.0  # the generator's loss does not reach the retriever
    assert read_only["model"] > 0


def plain_batch(batch):
    """The first passage of each row as a batch of G1."""
    names = ("target", "target_mask", "valid", "emotion")
    return LabelledBatch(
        source=batch.source[:, 0], source_mask=batch.source_mask[:, 0], **{name: getattr(batch, name) for name in names}
    )


def test_fusion_in_decoder_with_one_passage_is_g1():
    batch = take_candidates(explored(), jnp.zeros((ROWS, 1), jnp.int32)).replace(utilities=None)
    g1 = Generator(MODEL, HEAD, DECODER, emotion_weight=0.3)
    g2 = joint(retriever_weight=0.0, emotion_weight=0.3)
    plain = plain_batch(batch)
    one, one_metrics = jax.jit(g1.loss)(g1_params(), {}, plain, None)
    two, two_metrics = jax.jit(g2.loss)(params(), {}, batch, None)
    assert float(one.value()) == pytest.approx(float(two.value()), rel=1e-5)
    for name in ("nll", "emotion_loss"):
        other = f"generator_{name}" if name.startswith("emotion") else name
        assert float(one_metrics[name].value()) == pytest.approx(float(two_metrics[other].value()), rel=1e-5)
    rng = jax.random.key(0)
    np.testing.assert_array_equal(
        jax.jit(g1.generate)(g1_params(), {}, plain, rng).tokens, jax.jit(g2.generate)(params(), {}, batch, rng).tokens
    )
    judged = [jax.jit(g1.judge)(g1_params(), plain), jax.jit(g2.judge)(params(), batch)]
    np.testing.assert_allclose(judged[0]["nll"], judged[1]["nll"], rtol=1e-5)
    np.testing.assert_array_equal(judged[0]["generator"], judged[1]["generator"])


def test_judging_adds_up_to_the_loss():
    batch = plain_batch(explored())
    g1 = Generator(MODEL, HEAD, DECODER, emotion_weight=0.0)
    judged = jax.jit(g1.judge)(g1_params(), batch)
    loss, metrics = jax.jit(g1.loss)(g1_params(), {}, batch, None)
    assert float(judged["nll"].sum()) == pytest.approx(float(loss.total), rel=1e-5)
    assert float(judged["num_tokens"].sum()) == float(loss.weight) == float(metrics["nll"].weight)


def test_label_smoothing_changes_what_is_minimised_and_not_what_is_reported():
    batch = plain_batch(explored())
    plain, smooth = (
        jax.jit(Generator(MODEL, HEAD, DECODER, 0.0, label_smoothing=e).loss)(g1_params(), {}, batch, None)
        for e in (0.0, 0.2)
    )
    assert float(plain[0].value()) != pytest.approx(float(smooth[0].value()), rel=1e-3)
    assert float(plain[1]["nll"].value()) == pytest.approx(float(smooth[1]["nll"].value()), rel=1e-6)


def test_dropout_is_on_with_an_rng_and_only_then():
    batch, task = explored(), joint()
    loss = jax.jit(task.loss)
    values = [float(loss(params(), {}, batch, rng)[0].value()) for rng in (None, None)]
    noisy = [float(loss(params(), {}, batch, jax.random.key(seed))[0].value()) for seed in (0, 0, 1)]
    assert values[0] == values[1] != noisy[0]
    assert noisy[0] == noisy[1] != noisy[2]


def test_tasks_are_what_the_loop_expects():
    assert isinstance(Generator(MODEL, HEAD, DECODER, 0.0), GenerativeTask)
    assert not isinstance(Generator(MODEL, HEAD, DECODER, 0.0), OnlineTask)
    assert isinstance(retriever(), OnlineTask)
    assert isinstance(joint(), OnlineTask)
    assert isinstance(joint(), GenerativeTask)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replace_probability": 1.5}, r"must lie in \[0, 1\]"),
        ({"score_temperature": 0.0}, "must be above 0"),
        ({"signal": "bleu"}, "'metrics', 'likelihood', 'emdr2'"),
        ({"utility": {"bleu": 0.0, "f1": 0.0, "rouge_l": 0.0}}, "at least one weight"),
        ({"los": "softmax"}, "did you mean 'loss'"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        to_settings(DistillationSettings, values, where="config.retriever.distillation")
