"""The whole model: sizes, cached decoding, padding, what does not reach an answer, losses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import classic
from empax.core.config import ConfigError, to_settings
from empax.core.tree import count_params, named_leaves
from empax.systems.classic.settings import ClassicSettings, ClassicTaskSettings
from empax.training.optimizer import OptimizerSettings, learning_rate
from tests.systems.classic.small import FORMS, START, VOCAB, make, token_nll
from tests.systems.learning import loss_and_gradient, use_all_cells


def rarely(*forms):
    """Forms that only the slow tests look at."""
    return [pytest.param(form, marks=pytest.mark.slow) for form in forms]


def test_the_lineages_sizes():
    settings = ClassicSettings()
    one = make("transformer", d_model=settings.d_model, head_dim=settings.head_dim, d_ff=settings.d_ff)
    words = {"core/token_embedding", "output_embedding", "output_bias"}
    rest = {name: leaf for name, leaf in named_leaves(one.params).items() if name not in words}
    assert count_params(rest) == 508_900  # encoder and decoder of one layer: MoEL's code


def test_the_output_layer_begins_as_the_lineages():
    model = make("transformer", d_model=300).model
    made = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32), method=lambda one, ids: one.core.embed(ids))
    np.testing.assert_allclose(np.std(made["params"]["output_embedding"]), (2 / (VOCAB + 300)) ** 0.5, rtol=0.05)


def test_listeners_without_convolution_decode_too():
    one = make("moel", kernel=1)
    read = one.read(one.batch)
    expected = one.apply(one.batch.target, read, train=False, method="decode")
    cache = one.apply(read, read.mask, num_hypotheses=1, max_length=2, method="start_cache")
    logits, _ = one.apply(jnp.full((3, 1), START), cache, method="step")
    np.testing.assert_allclose(logits[:, 0], expected[:, 0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("form", ["moel", "empdg", "kemp", *rarely("transformer", "case")])
def test_cached_decoding_is_teacher_forcing(made, form):
    one, batch = made[form], made[form].batch
    read = one.read(batch)
    expected = one.apply(batch.target, read, train=False, method="decode")
    sizes = {"num_hypotheses": 2, "max_length": batch.target.shape[1]}
    cache = one.apply(read, read.mask, **sizes, method="start_cache")
    step = jax.jit(lambda tokens, cache: one.apply(tokens, cache, method="step"))
    tokens = jnp.full((3, 2), START)
    for t in range(batch.target.shape[1]):
        # Hypothesis 1 reads other words, and then goes on from hypothesis 0.
        logits, cache = step(tokens, cache)
        np.testing.assert_allclose(logits[:, 0], expected[:, t], rtol=1e-4, atol=2e-5)
        tokens = jnp.stack([batch.target[:, t], batch.target[:, t - 1]], axis=1)
        if t == 1:
            assert not np.allclose(logits[:, 1], expected[:, t], atol=1e-3)
            cache = cache.reorder(jnp.zeros((3, 2), jnp.int32))
            tokens = tokens.at[:, 1].set(batch.target[:, t])
        if t == 2:
            np.testing.assert_allclose(logits[:, 1], expected[:, t], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("form", ["moel", "kemp"])
def test_an_accelerator_converts_the_output_layer_once_for_all_steps(form, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    one = make(form, dtype="bfloat16")
    read = one.read(one.batch)
    cache = one.apply(read, read.mask, num_hypotheses=1, max_length=2, method="start_cache")
    np.testing.assert_array_equal(cache.decoder.table, one.params["output_embedding"].astype(jnp.bfloat16))
    expected = one.apply(one.batch.target, read, train=False, method="decode")
    logits, _ = one.apply(jnp.full((3, 1), START), cache, method="step")
    np.testing.assert_allclose(logits[:, 0], expected[:, 0], rtol=0.05, atol=0.05)
    none = {**one.params, "output_embedding": jnp.zeros_like(one.params["output_embedding"])}
    again, _ = one.apply(jnp.full((3, 1), START), cache, params=none, method="step")
    np.testing.assert_array_equal(again, logits)  # steps read the cache's alone


@pytest.mark.parametrize("form", ["moel", "mime", "empdg", "kemp", "case", *rarely("transformer", "cem")])
def test_padding_changes_nothing(made, form):
    one, batch = made[form], made[form].batch

    def wider(values, fill):
        return jnp.pad(values, ((0, 0), (0, 4)), constant_values=fill)

    names = {"source": 9, "source_mask": False, "speaker": 5, "emotional": False, "intensity": 0.0}
    padded = dataclasses.replace(batch, **{name: wider(getattr(batch, name), fill) for name, fill in names.items()})
    np.testing.assert_allclose(one.logits(padded), one.logits(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["moel", "mime", "empdg"])
def test_gold_emotions_reach_no_answer(made, form):
    one, batch = made[form], made[form].batch
    other = dataclasses.replace(batch, emotion=jnp.asarray([-1, 3, 16], jnp.int32))
    first, second = (one.loss(one.params, b, jax.random.key(0), train=False)[1] for b in (batch, other))
    assert first["nll"].value() == second["nll"].value()
    assert first["emotion_loss"].value() != second["emotion_loss"].value()


def test_without_readers_a_model_is_the_plain_one(made):
    plain = made["transformer"]
    for form in FORMS.keys() - {"transformer"}:
        alone, same = plain.logits(params=made[form].params), form == "multi_trs"  # its reader only adds a loss
        assert np.array_equal(alone, made[form].logits()) == same, form


def test_the_loss_is_the_weighted_sum_of_its_parts(made):
    one = made["mime"]
    mask = np.asarray(one.batch.target_mask)
    rows = mask.sum(axis=1)
    read = one.read()
    emotion = -np.take_along_axis(np.asarray(jax.nn.log_softmax(read.emotion)), one.batch.emotion[:, None], axis=1)
    values = {"emotion": emotion[:, 0], "kl": np.asarray(read.losses["kl"][0])}
    means = {name: (of_rows * rows).sum() / rows.sum() for name, of_rows in values.items()}
    log_probs, nll = np.asarray(jax.nn.log_softmax(one.logits())), token_nll(one.logits(), one.batch)
    smoothed = (0.9 * nll - 0.1 * log_probs.mean(axis=-1) * mask).sum() / mask.sum()
    loss, metrics = one.loss(one.params, one.batch, jax.random.key(0), train=False)
    assert float(loss.value()) == pytest.approx(smoothed + 0.5 * means["emotion"] + 0.5 * means["kl"], rel=1e-4)
    assert float(metrics["nll"].value()) == pytest.approx(nll.sum() / mask.sum(), rel=1e-4)
    for weights in ({"emotion": 0.0, "kl": 3.0}, {"emotion": 2.0, "kl": 0.0}):
        task = dataclasses.replace(one.task, weights=weights)
        parts, _ = task._row_losses(one.batch, read, read.losses)
        assert {weight: float(part.value()) for weight, part in parts} == {
            weights[name]: pytest.approx(means[name], rel=1e-5) for name in weights
        }


def test_a_classifier_alone_reads_no_response(made):
    one = made["multi_trs"]
    task = dataclasses.replace(one.task, weights={"nll": 0.0, "emotion": 1.0})
    loss = functools.partial(task.loss, train=False)
    _, metrics = jax.eval_shape(loss, one.params, {}, one.batch, jax.random.key(0))
    assert set(metrics) == {"emotion_loss", "emotion_accuracy"}
    cut = one.batch.replace(target_mask=one.batch.target_mask & (jnp.arange(len(one.batch.valid)) == 0)[:, None])
    expected, found = (jax.jit(loss)(one.params, {}, batch, jax.random.key(0))[0] for batch in (one.batch, cut))
    assert float(found.value()) == pytest.approx(float(expected.value()))


def test_losses_of_parts_of_a_batch_add_up_and_filler_counts_nothing(made):
    one = made["mime"]
    # Filler rows stand where the others were, so that no shape changes.
    whole, *parts = (
        one.loss(one.params, dataclasses.replace(one.batch, valid=jnp.array(valid)), jax.random.key(0), train=False)[0]
        for valid in ([True] * 3, [True, False, False], [False, True, True])
    )
    np.testing.assert_allclose(parts[0].total + parts[1].total, whole.total, rtol=1e-5)
    assert parts[0].weight + parts[1].weight == whole.weight


@pytest.mark.parametrize("form", ["moel", *rarely("mime", "empdg", "cem", "kemp", "case")])
def test_every_parameter_learns(made, form):
    one = made[form]
    batch = dataclasses.replace(one.batch, step=jnp.asarray(10_000_000))  # no teacher: the gate learns
    grads = jax.jit(jax.grad(lambda p: one.task.loss(p, {}, batch, jax.random.key(0), train=True)[0].total))(one.params)
    still = [name for name, grad in named_leaves(grads).items() if not np.abs(grad).max() > 0]
    assert not still


def test_what_is_read_of_a_reference(made):
    one = made["empdg"]
    found = jax.jit(one.task.read)(one.params, one.batch)
    np.testing.assert_allclose(found["nll"], token_nll(one.logits(), one.batch).sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(found["num_tokens"], one.batch.target_mask.sum(axis=1))
    made_ids = jax.jit(one.task.generate)(one.params, {}, one.batch, jax.random.key(0)).tokens
    assert made_ids.shape == (3, 1, 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"readers": ("listeners",)}, 'gated by the logits of "emotion"; put that before them'),
        ({"readers": ("emotion", "concepts")}, "must be some of concepts, refinement, .*alignment, in this order"),
        ({"readers": ("emotion", "emotion")}, "each at most once"),
        ({"readers": ("comet",)}, r"readers = \('comet',\) must be some of concepts, refinement"),
        ({"readers": ("emotion", "mimicry")}, "emotion and mimicry each read the emotion on their own; leave"),
        ({"readers": ("concepts", "alignment")}, "read the same graph; leave one of them out"),
        ({"readers": ("alignment",), "concepts": {"most": 0}}, r"concepts\.most = 0 leaves .*; set it to at least 1"),
        ({"readers": ("concepts", "emotion_words", "emotion")}, "concepts and emotion_words each choose what the emo"),
        ({"concepts": {"least": 2.0}}, r"least = 2.0 must lie in \[0, 1\]"),
        ({"decoding": {"method": "beam", "rerank": "similarity"}}, "compares encodings, which nothing here learns"),
        ({"listeners": {"top": 33}}, r"top = 33 must lie in \[0, 32\]"),
        ({"weights": {"emotion": -1.0}}, r"weights\.emotion = -1\.0 must lie in \[0, 1e6\]"),
    ],
)
def test_bad_settings_are_named(values, message):
    kind = ClassicTaskSettings if "weights" in values else ClassicSettings
    with pytest.raises(ConfigError, match=message):
        to_settings(kind, values, where="config.classic")


@pytest.mark.parametrize(
    ("readers", "width"), [(("refinement", "emotion_words", "emotion"), 24), (("concepts", "mimicry"), 12)]
)
def test_readers_of_several_systems_in_one_model_lose_nothing(readers, width):
    one = make("transformer", readers=readers)
    read = jax.eval_shape(lambda: one.model.apply({"params": one.params}, one.batch, train=False, method="read"))
    assert read.context.shape == (3, width)
    jax.eval_shape(functools.partial(one.task.loss, train=True), one.params, {}, one.batch, jax.random.key(0))


@pytest.mark.parametrize("machine", classic.MACHINES)
@pytest.mark.parametrize("form", classic.FORMS)
def test_every_model_has_the_same_number_of_updates(form, machine):
    config = classic.get_config(f"{form},machine={machine}")
    first = config.generator.get("start_from")
    assert config.generator.steps + (config[first].steps if first else 0) == classic.STEPS[machine]


def test_case_divides_its_updates():
    config = classic.get_config("case,machine=gpu")
    found = [(s.steps, s.eval_every_steps, s.optimizer.warmup_steps) for s in (config.choice, config.generator)]
    assert found == [(2166, 1083, 270), (4334, 722, 541)]


@pytest.mark.parametrize("form", classic.FORMS)
def test_the_lineages_training_is_that_of_its_code(form):
    loop, warm_up = classic.get_config(f"{form},lineage").generator, 12_000 if form == "case" else 8000
    assert (loop.steps, loop.batch_size, loop.eval_every_steps) == (20_000, 16, 2000)
    settings = to_settings(OptimizerSettings, loop.optimizer.to_dict(), where="optimizer")
    for n in (1, 4000, 12_000, 20_000):  # Noam's rate at update n of a model of width 300
        rate = float(learning_rate(settings, 20_000)(n - 1))
        assert rate == pytest.approx(300**-0.5 * min(n**-0.5, n * warm_up**-1.5), rel=1e-3)
    assert settings.clip_norm is None
    assert loop.get("patience") is None  # most of its code cannot stop before 20,000 updates


def test_the_lineages_models_are_those_of_its_commands():
    copies = [classic.get_config(f"empdg{flag}").classic.get("copies", False) for flag in ("", ",lineage")]
    assert copies == [False, True]
    for form in ("multi_trs", "moel", "mime"):  # beside a sum over tokens, their code has a mean over rows
        weights = [classic.get_config(f"{form}{flag}").generator.weights.emotion for flag in ("", ",lineage")]
        assert weights == [1 / 15, 1 / 240]
    assert classic.get_config("mime,lineage").generator.weights.kl == 1 / 15
    moel = classic.get_config("moel,lineage")
    assert (moel.classic.listeners.top, moel.classic.listeners.teacher_decay_steps) == (5, 10_000)
    case = classic.get_config("case,lineage").classic
    assert (case.num_heads * case.head_dim, case.d_ff) == (100, 300)  # its "depth" and "filter"
    assert classic.get_config("transformer,lineage").classic.num_decoder_layers == 2
    assert classic.get_config("emo_prepend,lineage").emotions.steps == 10_000


@pytest.mark.parametrize("form", ["kemp", "cem", *rarely("moel", "empdg")])
def test_losses_without_padding_are_those_of_all_tokens(made, form, monkeypatch):
    """KEMP copies words, CEM weighs frequent ones less."""
    one = made[form]
    task = dataclasses.replace(one.task, weights={**one.task.weights, "nll": 0.7, "frequency": 0.3})
    frozen = {"frequency": jnp.linspace(0.1, 1.0, VOCAB)}
    batch = dataclasses.replace(one.batch, valid=jnp.array([True, False, True]))

    monkeypatch.setattr("empax.losses.real_tokens.LEAST", 1)
    found = [loss_and_gradient(task, one.params, frozen, batch, train=train) for train in (True, False)]
    use_all_cells(monkeypatch)
    expected = [loss_and_gradient(task, one.params, frozen, batch, train=train) for train in (True, False)]
    jax.tree.map(lambda e, f: np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-5), expected, found)
    (_, (_, metrics)), _ = found[0]
    assert "frequency_loss" in metrics
