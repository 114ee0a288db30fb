"""REG's tasks on tiny random models: what is chosen, what it is worth, and where which gradient goes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.protocols import untrained_by
from empax.core.sharding import LOGICAL, MeshSettings, make_mesh
from empax.core.tree import map_named, named_leaves
from empax.core.types import EMOTIONS, Batch, Generated
from empax.data.exemplars import ExemplarBatch, LabelledBatch
from empax.decoding.passages import PassageReader
from empax.decoding.settings import DecodeSettings
from empax.evaluation.device_metrics import UtilityWeights, utility
from empax.losses.cross_entropy import token_log_probs
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder, Towers
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.heads import ClassificationHead
from empax.models.lora import LoraSettings
from empax.models.transformer import EncoderDecoder, scratch
from empax.parts.exemplars.dense_retrieval import RetrievalBatch
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.task import Generator, emotion_loss
from empax.systems.reg.encoder import EmotionEncoder
from empax.systems.reg.settings import DistillationSettings
from empax.systems.reg.tasks import DenseTask, EmotionTask, GuidedGenerator, Joint, RetrieverTask, take_candidates
from empax.training.loop import LoopSettings
from empax.training.lora import lora_task
from empax.training.optimizer import OptimizerSettings, trained_mask
from empax.training.programs import make_programs

VOCABULARY, START, EOS, PAD = 14, 2, 1, 0
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
KEY = jax.random.key(0)
F1 = UtilityWeights(bleu=0.0, f1=1.0, rouge_l=0.0)


def ids(rng, *shape):
    return rng.integers(3, VOCABULARY, shape).astype(np.int32)


def lengths_to_mask(lengths, size):
    return np.arange(size) < np.asarray(lengths)[..., None]


def exemplar_batch(candidates=RETRIEVED + K, *, seed=0, **changes):
    """ROWS rows with `candidates` passages each, column c carrying c as its emotion; targets end with EOS."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, TARGET + 1, ROWS)
    target = ids(rng, ROWS, TARGET)
    target[np.arange(ROWS), lengths - 1] = EOS
    shape = (ROWS, candidates)
    values = {
        "source": ids(rng, *shape, SOURCE),
        "source_mask": lengths_to_mask(rng.integers(2, SOURCE + 1, shape), SOURCE),
        "target": target,
        "target_mask": lengths_to_mask(lengths, TARGET),
        "valid": np.ones(ROWS, bool),
        "emotion": np.array([4, -1, 9], np.int32),
        "query": ids(rng, ROWS, 5),
        "query_mask": lengths_to_mask([5, 3, 4], 5),
        "key": ids(rng, *shape, 5),
        "key_mask": lengths_to_mask(rng.integers(2, 6, shape), 5),
        "key_embedding": None,
        "candidate_mask": np.ones(shape, bool),
        "key_emotion": np.broadcast_to(np.arange(candidates, dtype=np.int32), shape),
    }
    return jax.tree.map(jnp.asarray, ExemplarBatch(**{**values, **changes}))


def explored(**changes):
    rng = np.random.default_rng(3)
    return exemplar_batch(K, utilities=rng.random((ROWS, K)).astype(np.float32), **changes)


def retriever(**settings):
    model = FusionInDecoder(MODEL)
    return RetrieverTask(EmotionEncoder(ENCODER, HEAD), model, DECODER, DistillationSettings(**settings), passages=K)


def joint(*, emotion_weight=0.0, retriever_weight=0.2, **settings):
    return Joint(
        retriever(**settings), Generator(FusionInDecoder(MODEL), DECODER, HEAD, emotion_weight), retriever_weight
    )


def generator(emotion_weight=0.3, label_smoothing=0.0):
    return Generator(MODEL, DECODER, HEAD, emotion_weight, label_smoothing=label_smoothing)


@functools.cache
def params():
    """Parameters of Joint; those of RetrieverTask under "retriever", those of Generator under "generator".

    All leaves are random: biases and heads that begin at zero would hide mistakes. They are of such sizes that what is
    decoded depends on what was read.
    """
    rng = np.random.default_rng(7)

    def make(name, leaf):
        noise = rng.normal(size=leaf.shape)
        if "bias" in name or "scale" in name:
            noise = 0.1 * noise + ("scale" in name)
        return jnp.asarray(noise * (0.3 if "token_embedding" in name else 1.0), leaf.dtype)

    with jax.ensure_compile_time_eval():  # also where the first call is under a jit
        return map_named(make, jax.eval_shape(joint().init, jax.random.key(0), explored()))


def g1_params():
    return params()["generator"]


@jax.jit
def embedded(retriever_params, batch):
    """Queries [B, D] and keys [B, K, D]."""
    task = retriever()
    query, _ = task.encoder.read(retriever_params, batch.query, batch.query_mask)
    return query, task.embed_keys(retriever_params, batch, None)


@jax.jit
def judged_by_likelihood(batch):
    return retriever(signal="likelihood").utilities(g1_params(), batch, jax.random.key(0))


def with_frozen_keys(batch, keys):
    return batch.replace(key=None, key_mask=None, key_embedding=keys)


def columns_of(batch):
    return np.asarray(batch.key_emotion)


def with_scores(scores):
    """A batch whose candidates' dot products with the query are `scores` [RETRIEVED + K], in every row."""
    batch = exemplar_batch()
    query, _ = embedded(params()["retriever"], batch)
    return with_frozen_keys(batch, jnp.asarray(scores, jnp.float32)[None, :, None] * query[:, None])


# ---------------------------------------------------------------------------------------------------- the candidates


SCORES = [0.1, 0.9, -0.2, 0.5, 3.0, 2.0]  # the last two are the random ones, which no score may bring in


def test_choose_takes_the_best_retrieved_by_the_current_scores_and_no_random_one():
    choose = jax.jit(retriever().choose)
    np.testing.assert_array_equal(choose(params()["retriever"], with_scores(SCORES)), [[1, 3]] * ROWS)
    masked = with_scores(SCORES)
    masked = masked.replace(candidate_mask=masked.candidate_mask.at[1, 1].set(False))
    np.testing.assert_array_equal(choose(params()["retriever"], masked), [[1, 3], [3, 0], [1, 3]])


def test_choose_follows_the_parameters_that_it_is_given():
    batch, choose = exemplar_batch(), jax.jit(retriever().choose)
    other = jax.tree.map(lambda leaf: leaf[..., ::-1], params()["retriever"])
    found = []
    for given in (params()["retriever"], other):
        scores = np.einsum("BD,BKD->BK", *embedded(given, batch))[:, :RETRIEVED]
        found.append(np.asarray(choose(given, batch)))
        np.testing.assert_array_equal(found[-1], np.argsort(-scores, axis=1)[:, :K])
    assert not np.array_equal(*found)


@pytest.mark.parametrize("probability", [0.0, 1.0, 0.3])
def test_each_chosen_one_is_replaced_with_its_probability(probability):
    task, batch, best = retriever(replace_probability=probability), exemplar_batch(), np.array([[1, 3]] * ROWS)
    replace = jax.jit(jax.vmap(lambda rng: task.replace(batch, jnp.asarray(best), rng)))
    columns = np.asarray(replace(jax.random.split(jax.random.key(0), 500)))
    swapped = columns == RETRIEVED + np.arange(K)
    assert np.all(swapped | (columns == best))
    assert swapped.mean() == pytest.approx(probability, abs=0.03)
    assert (swapped[..., 0] & swapped[..., 1]).mean() == pytest.approx(probability**2, abs=0.03)  # independently


def test_taking_candidates_moves_all_that_belongs_to_them():
    batch = exemplar_batch()
    picked = np.array([[5, 0], [2, 2], [1, 4]])
    taken = jax.jit(take_candidates)(batch, picked)
    for name in ("source", "source_mask", "key", "key_mask", "candidate_mask", "key_emotion"):
        before, after = (np.asarray(getattr(b, name)) for b in (batch, taken))
        np.testing.assert_array_equal(after, before[np.arange(ROWS)[:, None], picked], err_msg=name)
    assert taken.key_embedding is None
    np.testing.assert_array_equal(taken.query, batch.query)


def test_exploring_scores_the_set_that_it_ends_with():
    """Eq. 5: utilities are those of the replaced candidates."""
    task, batch = retriever(replace_probability=1.0, signal="likelihood"), exemplar_batch()
    found = jax.jit(task.explore)(params()["retriever"], {"generator": g1_params()}, batch, jax.random.key(0))
    np.testing.assert_array_equal(columns_of(found), [[4, 5]] * ROWS)
    np.testing.assert_allclose(found.utilities, judged_by_likelihood(found.replace(utilities=None)), rtol=1e-5)
    best = take_candidates(batch, jax.jit(task.choose)(params()["retriever"], batch))
    assert not np.allclose(found.utilities, judged_by_likelihood(best), rtol=1e-3)


def test_joint_exploring_lets_the_generator_read_the_best_and_the_retriever_rank_the_replaced():
    task, batch = joint(replace_probability=1.0, signal="likelihood"), exemplar_batch()
    found = jax.jit(task.explore)(params(), {"generator": g1_params()}, batch, jax.random.key(0))
    best = take_candidates(batch, jax.jit(retriever().choose)(params()["retriever"], batch))
    ranked = take_candidates(batch, jnp.asarray([[4, 5]] * ROWS))
    np.testing.assert_array_equal(found.source, best.source)
    np.testing.assert_array_equal(found.source_mask, best.source_mask)
    np.testing.assert_array_equal(found.key, ranked.key)
    np.testing.assert_allclose(found.utilities, judged_by_likelihood(ranked), rtol=1e-5)


def test_without_retriever_weight_nothing_is_tried_out():
    task, batch = joint(retriever_weight=0.0, replace_probability=1.0), exemplar_batch(K)
    assert task.explore(params(), {}, batch, jax.random.key(0)) is batch
    _, metrics = jax.eval_shape(lambda p: task.loss(p, {}, batch, KEY, train=True), params())
    assert set(metrics) == {"nll", "generator_emotion_loss", "generator_emotion_accuracy"}


# ------------------------------------------------------------------------------------------------------- the utilities


@dataclasses.dataclass(frozen=True)
class Answers(Decoder):
    """A decoder that gives these tokens whatever it reads."""

    answers: tuple = ()

    def __call__(self, model, params, source, mask, rng):
        tokens = jnp.asarray(self.answers, jnp.int32)[:, None]
        return Generated(tokens=tokens, log_probs=jnp.zeros(tokens.shape[:2]))


def test_utilities_are_f_of_the_answers_without_end_and_padding():
    gold = np.array([[5, 6, 7, 8, EOS, PAD], [9, 10, EOS, 0, 0, 0], [11, 12, 13, EOS, 0, 0]], np.int32)
    mask = np.cumsum(gold == EOS, axis=1) - (gold == EOS) == 0
    batch = exemplar_batch(K, target=gold, target_mask=mask)
    other = 14  # another end
    answers = [
        [5, 6, 7, 8, EOS, PAD], [3, 4, 3, 4, EOS, PAD],
        [9, 10, EOS, PAD, PAD, PAD], [10, 4, other, PAD, PAD, PAD],
        [11, 12, 13, 3, 4, 3], [EOS, PAD, PAD, PAD, PAD, PAD],
    ]  # fmt: skip
    settings = DecodeSettings(more_eos_ids=(other,))
    decoder = Answers(settings, START, EOS, PAD, answers=tuple(map(tuple, answers)))
    task = dataclasses.replace(retriever(), decoder=decoder)
    found = np.asarray(jax.jit(task.utilities)(g1_params(), batch, jax.random.key(0)))
    assert found.shape == (ROWS, K)
    assert found[0, 0] == pytest.approx(1.0)
    assert found[0, 1] < 0.1
    assert found[2, 1] == 0.0
    task = dataclasses.replace(task, settings=DistillationSettings(utility=F1))
    found = jax.jit(task.utilities)(g1_params(), batch, jax.random.key(0))
    np.testing.assert_allclose(found, [[1.0, 0.0], [1.0, 0.5], [2 * 0.5 * 1.0 / 1.5, 0.0]], atol=1e-6)


def test_each_candidate_is_judged_by_its_own_greedy_answer():
    """The answers are those of decoding every passage alone; permuting the candidates permutes their utilities."""
    batch = exemplar_batch(K)
    utilities = jax.jit(retriever(utility=F1).utilities)
    found = np.asarray(utilities(g1_params(), batch, jax.random.key(0)))
    assert len(np.unique(found)) > 2
    swapped = take_candidates(batch, jnp.asarray([[1, 0]] * ROWS))
    np.testing.assert_allclose(utilities(g1_params(), swapped, jax.random.key(0)), found[:, ::-1], atol=1e-6)

    @jax.jit
    def alone(source, mask):
        tokens = DECODER(MODEL, g1_params()["model"], source, mask, jax.random.key(0)).tokens[:, 0]
        gold = batch.target_mask & (batch.target != EOS)
        return utility(tokens, (tokens != PAD) & (tokens != EOS), batch.target, gold, weights=F1)

    for k in range(K):
        np.testing.assert_allclose(alone(batch.source[:, k], batch.source_mask[:, k]), found[:, k], atol=1e-6)


def test_likelihood_signals_are_the_gold_responses_log_probabilities():
    batch = exemplar_batch(K)
    sums = np.zeros((ROWS, K))
    apply = jax.jit(MODEL.apply)
    for k in range(K):
        inputs = (batch.source[:, k], batch.source_mask[:, k], batch.target)
        logits = np.asarray(apply({"params": g1_params()["model"]}, *inputs), np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        picked = np.take_along_axis(log_probs, np.asarray(batch.target)[..., None], axis=-1)[..., 0]
        sums[:, k] = np.where(batch.target_mask, picked, 0.0).sum(axis=1)
    counts = np.asarray(batch.target_mask).sum(axis=1)
    np.testing.assert_allclose(judged_by_likelihood(batch), sums / counts[:, None], rtol=1e-4)
    whole = jax.jit(retriever(signal="emdr2").utilities)(g1_params(), batch, jax.random.key(0))
    np.testing.assert_allclose(whole, sums, rtol=1e-4)


# ------------------------------------------------------------------------------------------------- the retriever's loss


RANKER = retriever(target_temperature=0.2, score_temperature=0.5, emotion_weight=0.5)


@jax.jit
def ranking_loss(batch):
    return RANKER.loss(params()["retriever"], {}, batch, KEY, train=False)


def scores_of(batch):
    return np.einsum("BD,BKD->BK", *embedded(params()["retriever"], batch)).astype(np.float64)


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def kl(scores, utilities, tau, temperature):
    """Eq. 3 and 4, a number for each row."""
    targets, shown = softmax(utilities / tau), softmax(scores / temperature)
    return (targets * (np.log(targets) - np.log(shown))).sum(axis=1)


def test_the_loss_is_equation_4_and_the_emotion_loss():
    batch = explored()
    loss, metrics = ranking_loss(batch)
    scores, utilities = scores_of(batch), np.asarray(batch.utilities, np.float64)
    ranked = kl(scores, utilities, 0.2, 0.5).mean()
    assert float(metrics["retriever_loss"].value()) == pytest.approx(ranked, rel=1e-4)
    best = np.take_along_axis(utilities, scores.argmax(axis=1)[:, None], axis=1)[:, 0]
    assert float(metrics["utility"].value()) == pytest.approx(utilities.mean(), rel=1e-5)
    assert float(metrics["utility_gain"].value()) == pytest.approx((best - utilities.mean(axis=1)).mean(), abs=1e-5)
    # The head reads contexts; the second one's emotion is unknown.
    query = np.asarray(embedded(params()["retriever"], batch)[0], np.float64)
    head = params()["retriever"]["emotion"]
    logits = query * WIDTH**0.5 @ np.asarray(head["out"], np.float64) + np.asarray(head["out_bias"], np.float64)
    nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(ROWS), [4, 0, 9]]
    emotion = (nll[0] + nll[2]) / ROWS
    assert float(loss.value()) == pytest.approx(ranked + 0.5 * emotion, rel=1e-4)
    assert float(metrics["emotion_loss"].value()) == pytest.approx((nll[0] + nll[2]) / 2, rel=1e-4)


@pytest.mark.parametrize("kind", ["softmax", "literal_sigmoid", "emdr2"])
def test_the_signals_and_forms_of_the_loss(kind):
    rng = np.random.default_rng(1)
    scores, utilities, weights = rng.normal(size=(ROWS, K)), rng.normal(size=(ROWS, K)), np.array([1.0, 2.0, 5.0])
    options = {"signal": "emdr2"} if kind == "emdr2" else {"loss": kind}
    task = retriever(target_temperature=0.2, score_temperature=0.5, **options)
    batch = explored().replace(utilities=jnp.asarray(utilities, jnp.float32))
    found = jax.jit(task.distil)(jnp.asarray(scores, jnp.float32), batch, jnp.asarray(weights, jnp.float32))
    if kind == "softmax":
        expected = kl(scores, utilities, 0.2, 0.5)
    elif kind == "literal_sigmoid":
        targets = softmax(utilities / 0.2)
        expected = (targets * (np.log(targets) + np.log1p(np.exp(-scores / 0.5)))).sum(axis=1)
    else:
        expected = -np.log((softmax(scores / 0.5) * np.exp(utilities)).sum(axis=1))
    assert float(found.value()) == pytest.approx((expected * weights).sum() / weights.sum(), rel=1e-4)


def test_filler_rows_change_nothing():
    valid = jnp.asarray([True, False, True])
    first, metrics = ranking_loss(explored().replace(valid=valid))
    other = explored().replace(valid=valid)
    other = other.replace(
        utilities=other.utilities.at[1].set(99.0), query=other.query.at[1].set(3), emotion=other.emotion.at[1].set(2),
        key=other.key.at[1].set(3), key_emotion=other.key_emotion.at[1].set(30),
    )  # fmt: skip
    second, again = ranking_loss(other)
    assert float(first.weight) == 2.0
    assert float(first.total) == pytest.approx(float(second.total), rel=1e-6)
    for name in ("retriever_loss", "utility", "utility_gain"):
        assert float(metrics[name].value()) == pytest.approx(float(again[name].value()), rel=1e-6), name


def test_a_row_without_candidates_has_no_utility():
    batch = explored()
    bare = batch.replace(candidate_mask=batch.candidate_mask.at[1].set(False))
    (_, found), (_, without) = ranking_loss(bare), ranking_loss(batch.replace(valid=jnp.asarray([True, False, True])))
    for name in ("utility", "utility_gain"):
        assert float(found[name].value()) == pytest.approx(float(without[name].value()), rel=1e-6)


def test_a_masked_candidate_is_none_however_good_it_is():
    batch, more = explored(), exemplar_batch(K + 1, seed=2)
    names = ("source", "source_mask", "key", "key_mask")
    wider = batch.replace(
        **{name: jnp.concatenate([getattr(batch, name), getattr(more, name)[:, K:]], axis=1) for name in names},
        key_emotion=jnp.concatenate([batch.key_emotion, jnp.full((ROWS, 1), -1)], axis=1),
        candidate_mask=jnp.asarray([[True, True, False]] * ROWS),
        utilities=jnp.concatenate([batch.utilities, jnp.full((ROWS, 1), 50.0)], axis=1),
    )
    (_, found), (_, expected) = ranking_loss(wider), ranking_loss(batch)
    for name in ("retriever_loss", "utility", "utility_gain"):
        assert float(found[name].value()) == pytest.approx(float(expected[name].value()), abs=1e-5), name


@jax.jit
def ranking_gradient(retriever_params, batch):
    return jax.grad(lambda p: RANKER.loss(p, {}, batch, KEY, train=False)[0].value())(retriever_params)


def size(tree):
    return float(sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(tree)))


@pytest.mark.slow
def test_frozen_keys_give_the_gradient_of_the_query_side_alone():
    unknown = explored().replace(emotion=jnp.full(ROWS, -1), key_emotion=jnp.full((ROWS, K), -1))
    own = params()["retriever"]
    _, keys = embedded(own, unknown)
    both_sides = ranking_gradient(own, unknown)
    query_side = ranking_gradient(own, with_frozen_keys(unknown, keys))

    @jax.jit
    @jax.grad
    def expected(p):  # the same scores with the keys held still
        scores = jnp.einsum("BD,BKD->BK", RANKER.encoder.read(p, unknown.query, unknown.query_mask)[0], keys)
        return RANKER.distil(scores, unknown, jnp.ones(ROWS)).value()

    by_hand = expected(own)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), query_side["encoder"], by_hand["encoder"])
    assert size(query_side["encoder"]) > 0
    difference = jax.tree.map(np.subtract, both_sides["encoder"], query_side["encoder"])
    assert size(difference) > 0.1 * size(query_side["encoder"])


def test_with_a_share_the_score_adds_the_probability_of_the_exemplars_emotion():
    task = dataclasses.replace(RANKER, encoder=EmotionEncoder(ENCODER, HEAD, 0.3))
    rng = np.random.default_rng(5)
    own = params()["retriever"]
    own = {**own, "emotion_encoder": map_named(lambda _, x: x + 0.3 * rng.normal(size=x.shape), own["encoder"])}
    batch = explored()
    batch = batch.replace(key_emotion=batch.key_emotion.at[0, 1].set(-1))

    @jax.jit
    def parts(own, batch):
        query, logits = task.encoder.read(own, batch.query, batch.query_mask)
        scores = jnp.einsum("BD,BKD->BK", query, task.embed_keys(own, batch, None))
        return scores, jax.nn.softmax(logits)

    scores, emotions = parts(own, batch)
    _, alone = parts({**own, "encoder": own["emotion_encoder"]}, batch)
    np.testing.assert_array_equal(emotions, alone)  # read by the emotions' own encoder
    known = np.take_along_axis(np.asarray(emotions), np.maximum(columns_of(batch), 0), axis=1)
    known[0, 1] = 0.0
    np.testing.assert_allclose(scores, 0.7 * scores_of(batch) + 0.3 * known, rtol=1e-4)
    gradient = jax.jit(jax.grad(lambda own: task.loss(own, {}, batch, KEY, train=False)[0].value()))(own)
    assert all(size(gradient[name]) > 0 for name in ("encoder", "emotion_encoder", "emotion"))


# ------------------------------------------------------------------------------------------------------ the emotions


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_emotion_task_is_the_cross_entropy_of_the_head(share):
    batch, given = exemplar_batch(K), params()["retriever"]
    labels = jnp.asarray([[4], [7], [9]]), jnp.ones((3, 1), bool), jnp.asarray([1, 0, 1], bool)
    contexts = Batch(batch.query, batch.query_mask, *labels)
    task = EmotionTask(EmotionEncoder(ENCODER, HEAD, share))
    own = task.trained({**given, "emotion_encoder": given["encoder"]})
    assert set(own) == ({"emotion_encoder", "emotion"} if share else set(given) | {"emotion_encoder"})
    loss, metrics = jax.jit(task.loss, static_argnames="train")(own, {}, contexts, KEY, train=False)
    query = np.asarray(embedded(given, batch)[0], np.float64)
    query *= query.shape[1] ** 0.5 / np.linalg.norm(query, axis=1, keepdims=True)
    logits = query @ np.asarray(given["emotion"]["out"], np.float64) + np.asarray(given["emotion"]["out_bias"])
    nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(3), [4, 7, 9]]
    assert float(loss.value()) == pytest.approx(nll[[0, 2]].mean(), rel=1e-5)
    assert float(metrics["emotion_accuracy"].weight) == 2.0  # a filler row counts nowhere


def test_unknown_emotions_count_nowhere():
    sure = jnp.zeros((4, 32)).at[:, 3].set(50.0)
    loss, metrics = emotion_loss(sure, jnp.asarray([3, -1, 31, -1]))
    assert float(loss.value()) == pytest.approx(25.0)
    assert (metrics["emotion_accuracy"].value(), metrics["emotion_accuracy"].weight) == (0.5, 2.0)
    nobody, metrics = emotion_loss(sure, jnp.full(4, -1))
    assert float(nobody.total) == float(nobody.weight) == float(metrics["emotion_loss"].value()) == 0.0


# ------------------------------------------------------------------------------------------------- joint training, FiD


@functools.cache
def joint_gradient(retriever_weight):
    task = joint(retriever_weight=retriever_weight)

    def loss(p, batch):
        loss, metrics = task.loss(p, {}, batch, KEY, train=False)
        return loss.value(), (loss.weight, metrics)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_joint_loss_is_equation_7():
    batch = explored()
    (loss, (weight, metrics)), _ = joint_gradient(0.2)(params(), batch)
    # A row weighs as many tokens as its response has in both parts, so that both are means over the same weights.
    tokens = np.asarray(batch.target_mask).sum(axis=1)
    rows = kl(scores_of(batch), np.asarray(batch.utilities, np.float64), 0.1, 1.0)
    ranked = (rows * tokens).sum() / tokens.sum()
    assert float(metrics["retriever_loss"].value()) == pytest.approx(ranked, rel=1e-4)
    assert float(loss) == pytest.approx(0.2 * ranked + 0.8 * float(metrics["nll"].value()), rel=1e-4)
    assert float(weight) == tokens.sum()


def test_a_filler_row_as_collate_makes_it_gives_finite_gradients():
    """Nothing real in it: its query embeds to zero, where the gradient of a norm is NaN."""
    batch = explored()
    masks = ("source_mask", "target_mask", "valid", "query_mask", "key_mask", "candidate_mask")
    batch = batch.replace(**{name: getattr(batch, name).at[1].set(False) for name in masks})
    (loss, _), gradient = joint_gradient(0.2)(params(), batch)
    assert np.isfinite(float(loss))
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(gradient))


def test_each_part_of_joint_training_moves_its_own_parameters():
    """alpha = 1 is the retriever's part alone; the generator's is what alpha = 0.2 leaves of it, over 0.8."""
    batch = explored()
    (_, (_, metrics)), both = joint_gradient(0.2)(params(), batch)
    (loss, _), ranked = joint_gradient(1.0)(params(), batch)
    assert float(loss) == pytest.approx(float(metrics["retriever_loss"].value()), rel=1e-5)
    assert size(ranked["generator"]) == 0.0
    assert size(ranked["retriever"]["encoder"]) > 0
    assert size(both["generator"]["model"]) > 0
    # Nothing of the generator's loss reaches the retriever.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, 0.2 * b, rtol=1e-3, atol=1e-6),
        both["retriever"], ranked["retriever"],
    )  # fmt: skip


def test_dropout_is_on_in_training_and_only_then():
    batch, loss = plain_batch(explored()), jax.jit(generator().loss, static_argnames="train")
    quiet, *noisy = (
        float(loss(g1_params(), {}, batch, jax.random.key(seed), train=train)[0].value())
        for seed, train in ((0, False), (0, True), (0, True), (1, True))
    )
    assert quiet != noisy[0] == noisy[1] != noisy[2]


def plain_batch(batch):
    """The first passage of each row as a batch of G1."""
    names = ("target", "target_mask", "valid", "emotion")
    return LabelledBatch(
        source=batch.source[:, 0], source_mask=batch.source_mask[:, 0], **{name: getattr(batch, name) for name in names}
    )


# ---------------------------------------------------------------------------------------- exemplars in their own rows


def apart(**changes):
    """As a form that has them apart gives it: the context's passage, then K exemplars."""
    rng = np.random.default_rng(9)
    batch = exemplar_batch(K, source=ids(rng, ROWS, 1 + K, SOURCE), **changes)
    return batch.replace(source_mask=jnp.asarray(lengths_to_mask([[4, 7, 3], [6, 2, 5], [3, 3, 7]], SOURCE)))


READER = joint(retriever_weight=0.0, emotion_weight=0.3)
ANSWERING = GuidedGenerator(
    FusionInDecoder(MODEL),
    DECODER,
    HEAD,
    0.3,
    heads=("generator", "retriever", "both"),
    retriever=EmotionEncoder(ENCODER, HEAD),
)


def answering_params():
    return {**params()["generator"], "retriever": params()["retriever"]}


@jax.jit
def read_apart(batch):
    return READER.loss(params(), {}, batch, KEY, train=False)[1], ANSWERING.read(answering_params(), batch)


def test_the_order_of_exemplars_and_what_is_padded_change_nothing():
    batch = apart()
    metrics, judged = read_apart(batch)
    swapped = take_candidates(batch, jnp.asarray([[1, 0]] * ROWS))
    np.testing.assert_array_equal(swapped.source[:, 0], batch.source[:, 0])  # the context stays in front
    noise = jnp.where(batch.source_mask, batch.source, VOCABULARY - 1 - batch.source % 5)
    for other in (swapped, batch.replace(source=noise)):
        assert not np.array_equal(other.source, batch.source)
        found, heads = read_apart(other)
        np.testing.assert_allclose(heads["nll"], judged["nll"], rtol=1e-5)
        np.testing.assert_allclose(found["nll"].value(), metrics["nll"].value(), rtol=1e-5)


def test_other_exemplars_change_the_likelihood_and_not_what_the_head_reads():
    batch = apart()
    metrics, judged = read_apart(batch)
    found, heads = read_apart(batch.replace(source=batch.source.at[:, 1:].set((batch.source[:, 1:] + 4) % VOCABULARY)))
    assert (np.abs(np.asarray(heads["nll"] - judged["nll"])) > 1e-3).all()
    name = "generator_emotion_loss"
    np.testing.assert_allclose(found[name].value(), metrics[name].value(), rtol=1e-5)
    moved, _ = read_apart(batch.replace(source=batch.source.at[:, 0].set((batch.source[:, 0] + 4) % VOCABULARY)))
    assert abs(float(moved[name].value() - metrics[name].value())) > 1e-3


def test_a_row_without_exemplars_is_answered_and_weighed_as_a_context_alone_is():
    shown = apart()
    batch = shown.replace(source_mask=shown.source_mask.at[:, 1:].set(False), candidate_mask=jnp.zeros((ROWS, K), bool))
    _, judged = read_apart(batch)
    alone = jax.jit(generator().read)(g1_params(), plain_batch(batch))
    np.testing.assert_allclose(judged["nll"], alone["nll"], rtol=1e-5)
    np.testing.assert_array_equal(judged["generator"], alone["generator"])
    plain = jax.jit(generator().weigh)(g1_params(), plain_batch(batch))
    for name, value in weighed(batch).items():
        np.testing.assert_allclose(value, plain[name], rtol=1e-4, atol=1e-5)
    assert np.abs(weighed(shown)["nll"] - plain["nll"]).min() > 1e-3


def test_each_exemplar_is_tried_with_the_context_alone_beside_it():
    batch = apart()
    found = judged_by_likelihood(batch)
    for k in range(K):
        one = take_candidates(batch, jnp.full((ROWS, 1), k))
        _, judged = jax.jit(lambda b: (0, ANSWERING.read(answering_params(), b)))(one)
        np.testing.assert_allclose(found[:, k], -judged["nll"] / judged["num_tokens"], rtol=1e-4)


def test_the_gradient_reaches_every_real_token_of_exemplars_and_none_that_is_padded():
    model = ANSWERING.model
    batch = apart()

    @jax.jit
    def pull(table, source):
        def total(table):
            own = {**g1_params()["model"], "token_embedding": table}
            logits = model.apply({"params": own}, source, batch.source_mask, batch.target)
            return token_log_probs(logits, batch.target).sum()

        return jax.grad(total)(table)

    table = g1_params()["model"]["token_embedding"]
    # One token stands in one place of an exemplar alone, or in its padding alone.
    free, place = VOCABULARY - 1, {"real": (0, 1, 2), "padded": (1, 1, 6)}
    source = jnp.where(batch.source == free, 3, batch.source)
    for name, where in place.items():
        moved = np.abs(np.asarray(pull(table, source.at[where].set(free)) - pull(table, source))[free]).max()
        assert (moved > 1e-4) == (name == "real")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["joined", "apart"])
def test_passages_that_were_read_before_give_the_same_answers(layout):
    joined = exemplar_batch(K, source_mask=jnp.asarray(lengths_to_mask([[2, 5], [3, 1], [4, 6]], SOURCE)))
    batch = joined if layout == "joined" else apart()
    task, own, rng = ANSWERING, answering_params(), jax.random.key(5)
    host = jax.tree.map(np.asarray, batch)
    read = PassageReader(task.model, rows=2, multiple=4, states_multiple=4).read(own["model"], host)
    read = jax.tree.map(jnp.asarray, read)
    assert read.source.size == 0
    assert read.states.shape[1] == (12 if layout == "joined" else 16) < batch.source.shape[1] * SOURCE
    answers = [task.generate(own, {}, one, rng).tokens for one in (batch, read)]
    np.testing.assert_array_equal(*answers)
    for name, expected in task.read(own, batch).items():
        np.testing.assert_allclose(task.read(own, read)[name], expected, rtol=1e-5)


@jax.jit
def weighed(batch):
    return jax.jit(ANSWERING.weigh)(answering_params(), batch)


def test_a_likelihood_is_the_sum_of_its_first_token_its_end_and_the_rest():
    batch = apart()
    found = weighed(batch)
    read = jax.jit(ANSWERING.read)(answering_params(), batch)
    for name in ("nll", "num_tokens"):
        np.testing.assert_allclose(found[name], read[name], rtol=1e-5)
    model = {"params": g1_params()["model"]}
    logits = jax.jit(ANSWERING.model.apply)(model, batch.source, batch.source_mask, batch.target)
    nll = -np.asarray(token_log_probs(logits, batch.target))
    for b, length in enumerate(np.asarray(batch.target_mask).sum(axis=1)):
        expected = {"first": nll[b, 0], "rest": nll[b, 1 : length - 1].sum(), "end": nll[b, length - 1]}
        for part, value in expected.items():
            np.testing.assert_allclose(found[f"nll_{part}"][b], value, rtol=1e-4, atol=1e-5)


def test_of_an_empty_response_the_end_alone_counts():
    batch = apart()
    first = jnp.arange(batch.target.shape[1])[None] == 0
    empty = batch.replace(target=jnp.where(first, EOS, batch.target), target_mask=batch.target_mask & first)
    found = weighed(empty)
    np.testing.assert_array_equal(found["nll_first"], 0.0)
    np.testing.assert_array_equal(found["nll_rest"], 0.0)
    np.testing.assert_array_equal(found["nll_end"], found["nll"])


def test_a_truncated_response_has_no_share_of_the_end():
    batch = apart()
    place = jnp.arange(batch.target.shape[1])[None]
    cut = batch.replace(target_mask=batch.target_mask & (place < batch.target_mask.sum(axis=1, keepdims=True) - 1))
    found, whole = weighed(cut), weighed(batch)
    np.testing.assert_array_equal(found["nll_end"], 0.0)
    for part in ("first", "rest"):
        np.testing.assert_allclose(found[f"nll_{part}"], whole[f"nll_{part}"], rtol=1e-5)


CONTRASTIVE = EmotionEncoder(ENCODER, HEAD, share=0.4)


def contrastive():
    return DenseTask(Towers(ENCODER), 0.5, CONTRASTIVE)


def contrastive_batch():
    """Four contexts with their responses: of two, the dialogue or the words are the same; the last is a filler."""
    rng = np.random.default_rng(4)
    batch = RetrievalBatch(
        source=ids(rng, 4, 5), source_mask=lengths_to_mask([5, 3, 4, 2], 5), key=ids(rng, 4, 1, 5),
        key_mask=lengths_to_mask([[4], [5], [2], [3]], 5), key_text=np.array([[0], [1], [2], [1]], np.int32),
        key_group=np.array([[7], [8], [7], [9]], np.int32), valid=np.array([True, True, True, False]),
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, batch)


def test_a_contrastive_stage_teaches_the_encoder_alone_to_tell_the_own_response_from_others():
    task, batch = contrastive(), contrastive_batch()
    trained = jax.jit(task.init)(KEY, batch)
    assert set(trained) == {"encoder", "emotion", "emotion_encoder"}
    loss, gradient = jax.jit(
        jax.value_and_grad(lambda params: task.loss(params, {}, batch, KEY, train=False)[0].value())
    )(trained)
    queries, keys = (
        np.asarray(jax.jit(CONTRASTIVE.embed)(trained, *side))
        for side in ((batch.source, batch.source_mask), (batch.key[:, 0], batch.key_mask[:, 0]))
    )
    scores = queries @ keys.T / 0.5
    others = {0: [1, 3], 1: [0, 2], 2: [1, 3]}  # not of the own dialogue, nor with the own words; fillers may be there
    expected = [np.logaddexp.reduce(scores[i, [i, *rest]]) - scores[i, i] for i, rest in others.items()]
    np.testing.assert_allclose(loss, np.mean(expected), rtol=1e-5)
    sizes = {name: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(part)) for name, part in gradient.items()}
    assert sizes["encoder"] > 0
    assert sizes["emotion"] == sizes["emotion_encoder"] == 0


# ------------------------------------------------------------------------------------------- what no loss trains


DECAYED = OptimizerSettings(learning_rate=0.1, weight_decay=0.5, ema_decay=0.9)


@pytest.mark.parametrize(
    ("task", "batch", "kept"),
    [
        (joint(retriever_weight=0.0), exemplar_batch(K), ("retriever/", "generator/emotion/")),
        (contrastive(), contrastive_batch(), ("emotion/", "emotion_encoder/")),
    ],
    ids=["joint", "dense"],
)
def test_weight_decay_leaves_what_no_loss_trains_as_it_is(task, batch, kept):
    """To the bit, in the parameters and in their running mean."""
    settings = LoopSettings(steps=10, batch_size=len(batch.valid), buckets=(SOURCE,), optimizer=DECAYED)
    mesh = make_mesh(MeshSettings(data=1), jax.devices()[:1])
    programs = make_programs(task, settings, batch, mesh=mesh, logical=LOGICAL)
    state = programs.initialise()
    began = jax.tree.map(lambda leaf: jnp.copy(leaf) + 0.1, state.params)  # a head begins at zero, which cannot decay
    state = dataclasses.replace(state, params=jax.tree.map(jnp.copy, began))
    for _ in range(2):
        state, _ = programs.train(state, {}, batch)
    for params in (state.params, programs.average(state.opt_state, state.params)):
        now = named_leaves(params)
        for name, leaf in named_leaves(began).items():
            assert np.array_equal(leaf, now[name]) == name.startswith(kept), name


@pytest.mark.parametrize(
    ("task", "left"),
    [
        (joint(emotion_weight=0.1), {"retriever/emotion/out"}),
        (joint(emotion_weight=0.1, retriever_weight=0.0), {"retriever/emotion/out", "retriever/encoder/a"}),
        (joint(retriever_weight=1.0), {"retriever/emotion/out", "generator/emotion/out", "generator/model/a"}),
    ],
)
def test_what_a_joint_stage_leaves_untrained_depends_on_its_weights(task, left):
    params = {
        "retriever": {"emotion": {"out": 0}, "encoder": {"a": 0}},
        "generator": {"emotion": {"out": 0}, "model": {"a": 0}},
    }
    mask = trained_mask(DECAYED, params, untrained_by(task))
    assert {name for name, trained in named_leaves(mask).items() if not trained} == left
    adapted = lora_task(task, LoraSettings())
    mask = trained_mask(DECAYED, {"trained": params, "adapters": {"other": 0}}, untrained_by(adapted))
    assert {name for name, trained in named_leaves(mask).items() if not trained} == {f"trained/{name}" for name in left}
