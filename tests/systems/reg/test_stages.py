"""REG's stages put together from a finished run: what begins where, and what a switch changes."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError, to_settings
from empax.core.files import DataError, WorkDir, read_json
from empax.core.system import RunContext, load_encoder_of
from empax.core.tree import hash_tree
from empax.data import features
from empax.data.batches import draw
from empax.data.store import PrepareSettings, load_candidates, load_instances
from empax.interop.pretrained_encoders import load_encoder
from empax.parts.generator.settings import GeneratorTaskSettings
from empax.parts.generator.stages import build_generator
from empax.pipeline import evaluate
from empax.pipeline.plan import make_plan
from empax.retrieval.filters import ExemplarFilter
from empax.retrieval.index import IndexSettings, StaleIndexError, build_index
from empax.systems.reg import stages
from empax.systems.reg.parts import RegParts
from empax.systems.reg.settings import EmotionTaskSettings, JointTaskSettings, RetrieverTaskSettings
from empax.systems.reg.stages import (
    Refresh,
    build_emotions,
    build_joint,
    build_retriever,
)
from empax.training.checkpoint import load_params

FRESH = {"retriever": {"fresh": 1}, "generator": {"fresh": 2}, "encoder": {"fresh": 3}, "emotion": {"fresh": 4}}


def context(workdir, stage, **changes):
    config = read_json(workdir / "config.json")
    for path, value in changes.items():
        section, name = path.split("__")
        config[section] = {**config.get(section, {}), name: value}
    return RunContext(WorkDir(workdir), make_plan(config), stage)


def answering(run, stage, index="reindex", buckets=(80,)):
    return evaluate.load_answerer(evaluate.Settings(stage, index=index), run, buckets)


def same(one, two):
    return hash_tree(one) == hash_tree(two)


def test_g1_begins_anew_or_from_an_earlier_stage(finished):
    assert build_generator(GeneratorTaskSettings(), context(finished, "generator")).initial is None
    warm = build_generator(GeneratorTaskSettings(start_from="generator"), context(finished, "generator"))
    assert warm.initial is not None
    assert same(warm.initial(FRESH), load_params(finished / "generator"))


def test_g1_sees_contexts_alone_and_as_much_of_validation_as_asked(finished):
    run = context(finished, "generator")
    limited = build_generator(GeneratorTaskSettings(max_validation_examples=5), run)
    assert len(limited.validation) == 5
    separator = RegParts.of(run).generator.tokenizer.token_id(features.SEPARATOR)
    assert not (limited.train.collate(np.arange(40), 80, np.random.default_rng(0)).source == separator).any()


READS = JointTaskSettings(retriever="", index="index", retriever_weight=0.0)


def test_a_generator_that_learns_to_read_exemplars_sees_them_on_every_row_of_training_and_validation(finished):
    """Of the index, in its order, and no random ones; with a probability, on as many rows of training alone."""
    run = context(finished, "exemplars")
    made = build_joint(READS, run)
    positions, ids = load_candidates(run, "index", "train")
    np.testing.assert_array_equal(made.train.candidates, ids[:, :2])
    assert len(positions) == len(load_instances(run, "train"))
    for examples in (made.train, made.validation):
        batch = examples.collate(np.arange(40), 80, np.random.default_rng(0))
        assert batch.source.shape == (40, 1 + 2, 80)
        assert batch.candidate_mask.all()
        assert batch.source_mask.any(axis=2).all()
    assert made.frozen == {}  # nobody judges
    rare = build_joint(dataclasses.replace(READS, exemplar_probability=0.25), run)
    shown = [rare.train.collate(np.arange(40), 80, np.random.default_rng(seed)).candidate_mask for seed in range(20)]
    assert np.mean(shown) == pytest.approx(0.25, abs=0.05)
    assert rare.validation.collate(np.arange(40), 80, np.random.default_rng(0)).candidate_mask.all()


def test_who_judges_candidates_may_be_the_generator_of_a_joint_stage(finished):
    run = context(finished, "joint")
    judge = load_params(finished / "exemplars")["generator"]
    assembly = build_joint(JointTaskSettings(generator="exemplars"), run)
    assert same(assembly.frozen["generator"], judge)
    assert same(assembly.initial(FRESH)["generator"], judge)
    assert same(build_retriever(RetrieverTaskSettings(generator="exemplars"), run).frozen["generator"], judge)


def test_limited_emotions_are_of_drawn_contexts(finished):
    run = context(finished, "emotions")
    every, some = (
        build_emotions(EmotionTaskSettings(max_examples=most, max_validation_examples=most), run) for most in (0, 8)
    )
    for whole, drawn in ((every.train, some.train), (every.validation, some.validation)):
        rows = [list(source) for source in whole.sources]
        assert len(drawn) == 8
        assert list(map(list, drawn.sources)) == draw(rows, 8)
        assert list(map(list, drawn.sources)) != rows[:8]


def test_attributes_false_removes_every_attribute_token(finished):
    stage = JointTaskSettings(index="index")  # of the retriever as pretrained: without emotions
    for shown in (True, False):
        run = context(finished, "joint", reg__attributes=shown, reg__emotion_share=0.0)
        assembly = build_joint(stage, run)
        tokenizer = RegParts.of(run).generator.tokenizer
        every = [tokenizer.token_id(token) for token in features.ATTRIBUTE_TOKENS]
        batch = assembly.train.collate(np.arange(6), 80, np.random.default_rng(0))
        counts = np.isin(batch.source, every).sum(axis=2)
        assert (counts == (4 if shown else 0)).all()


def test_pretrained_weights_of_a_generator_are_not_read_where_an_earlier_stage_has_trained_it(finished, monkeypatch):
    """What a stage holds stays in memory beside the training state."""
    known = {**read_json(finished / "config.json")["reg"]["generator"], "embeddings": "minilm"}
    monkeypatch.setattr("empax.interop.pretrained.word_embeddings", lambda *_: pytest.fail("weights are read"))
    build_retriever(RetrieverTaskSettings(), context(finished, "retriever", reg__generator=known))
    build_joint(JointTaskSettings(), context(finished, "joint", reg__generator=known))


def test_the_retriever_begins_as_pretrained_and_is_judged_by_g1(finished, monkeypatch):
    run = context(finished, "retriever")
    assembly = build_retriever(RetrieverTaskSettings(candidates=3), run)
    began = assembly.initial(FRESH)
    assert same(began, RegParts.of(run).retriever_params(run, ""))
    assert same(assembly.frozen["generator"], load_params(finished / "generator"))
    batch = assembly.train.collate(np.arange(4), 80, np.random.default_rng(0))
    assert batch.source.shape == (4, 1 + 3 + 2, 80)  # the context, M retrieved, K random
    held_out = assembly.validation.collate(np.arange(4), 80, np.random.default_rng(0))
    assert held_out.source.shape == (4, 1 + 2, 80)
    assert batch.key_embedding is None
    other = jax.tree.map(lambda leaf: np.roll(leaf, 1), began)
    kept = []
    monkeypatch.setattr(stages, "write_json", lambda *given: kept.append(given))
    assembly.on_end(4, other)
    ((path, found),) = kept
    assert path == finished / "retriever" / "utility.json"
    assert found["contexts"] == len(assembly.validation)
    assert 0 <= found["utility"]["low"] <= found["utility"]["value"] <= found["utility"]["high"]
    gain, before = found["utility_gain"]["value"], found["utility_gain_before"]["value"]
    assert found["utility_gain_minus_before"]["value"] == pytest.approx(gain - before)
    alone = context(finished, "retriever", reg__emotion_share=0.0)
    frozen = build_retriever(RetrieverTaskSettings(passage_encoder="frozen"), alone)
    batch = frozen.train.collate(np.arange(4), 80, np.random.default_rng(0))
    assert batch.key is None
    assert batch.source.shape[1] - 1 == batch.key_embedding.shape[1] == 4 + 2


def test_joint_training_begins_where_its_settings_say(finished):
    run = context(finished, "joint")
    warm = build_joint(JointTaskSettings(), run).initial(FRESH)
    assert same(warm["generator"], load_params(finished / "generator"))
    assert same(warm["retriever"], load_params(finished / "retriever"))
    scratch = build_joint(JointTaskSettings(warm_up=False), run)
    assert scratch.initial(FRESH)["generator"] == FRESH["generator"]
    assert same(scratch.frozen["generator"], load_params(finished / "generator"))  # the judge stays G1
    untrained = build_joint(JointTaskSettings(retriever=""), run).initial(FRESH)
    assert same(untrained["retriever"], RegParts.of(run).retriever_params(run, ""))


def test_without_warm_up_a_pretrained_generator_begins_as_pretrained(finished, monkeypatch):
    """As the stage "generator" does: a T5 with random weights is no "scratch" row of the paper."""
    known = {**read_json(finished / "config.json")["reg"]["generator"], "embeddings": "minilm"}
    assembly = build_joint(JointTaskSettings(warm_up=False), context(finished, "joint", reg__generator=known))
    monkeypatch.setattr("empax.systems.reg.stages.pretrained", lambda run: {"token_embedding": 7})
    fresh = {**FRESH, "generator": {"model": {"token_embedding": 1, "encoder": 2}, "emotion": 3}}
    begun = assembly.initial(fresh)["generator"]
    assert begun == {"model": {"token_embedding": 7, "encoder": 2}, "emotion": 3}


def test_the_distillation_settings_of_a_stage_reach_its_task(finished):
    run = context(finished, "joint")
    values = {
        "distillation": {"loss": "literal_sigmoid", "replace_probability": 0.0, "explore_tokens": 7,
                         "utility": {"bleu": 0.0, "f1": 1.0, "rouge_l": 1.0}},
        "retriever_weight": 0.35,
    }  # fmt: skip
    task = build_joint(to_settings(JointTaskSettings, values, where="config.joint"), run).task
    assert task.retriever_weight == 0.35
    assert task.retriever.settings.loss == "literal_sigmoid"
    assert task.retriever.settings.utility.bleu == 0.0
    assert task.retriever.decoder.settings.max_tokens == 7
    assert task.generator.decoder.settings.max_tokens == 12  # config.reg.decoding, for the answers that count


def test_a_refresh_searches_once_and_a_resumed_run_reads_what_it_found(finished, tmp_path):
    """With the passages trained too, the index is built anew; with the parameters changed, so are the candidates."""
    (tmp_path / "joint").mkdir()
    for name in ("prepare", "annotate", "index", "reindex", "config.json"):
        (tmp_path / name).symlink_to(finished / name)
    run = context(tmp_path, "joint")
    parts = RegParts.of(run)
    stage = JointTaskSettings(passage_encoder="trained")
    instances = load_instances(run, "train")[:64]
    form = parts.generator.form()
    corpus = parts.retrieval.corpus(load_instances(run, "train"), form)
    examples = parts.retrieval.examples(instances, corpus, np.full((64, 3), -1), form)
    refresh = Refresh(parts, run, stage, examples)
    params = load_params(finished / "joint", "last")
    refresh(2, params)
    found = examples.candidates
    assert found.shape == (64, 3)
    assert found.min() >= 0
    assert not (corpus.groups[found] == examples.groups[:, None]).any()
    examples.set_candidates(np.full((64, 3), -1))
    refresh(2, None)
    np.testing.assert_array_equal(examples.candidates, found)
    rng = np.random.default_rng(0)
    other = jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape).astype(leaf.dtype), params)
    refresh(4, other)
    assert not np.array_equal(examples.candidates, found)
    with pytest.raises(DataError, match=r"00000006\.npy, written at step 6, is gone or damaged\. .*--redo=joint"):
        refresh(6, None)
    refresh(4, None)
    path = refresh.run.directory / "refresh" / "00000004.npy"
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(DataError, match=r"00000004\.npy, .* gone or damaged"):
        refresh(4, None)
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.write_bytes(b"")  # nothing can be written: a run that went on would wait for the file
    with pytest.raises(DataError, match="refresh"):
        refresh(6, other)


def test_a_refresh_of_trained_passages_predicts_emotions_from_their_vectors(finished, tmp_path):
    """The weights in the index stage are for its own vectors, here of another size."""
    run = context(finished, "joint")
    instances = load_instances(run, "train")
    emotions = np.unique([i.emotion for i in instances], return_inverse=True)[1]
    known = dict(zip((i.id for i in instances), emotions, strict=True))
    embed = lambda some, **_: np.eye(32, dtype=np.float32)[[known[i.id] for i in some]]  # noqa: E731
    encoder = SimpleNamespace(hash="now", embed_queries=embed, embed_keys=embed)
    run = dataclasses.replace(run, files=WorkDir(tmp_path))
    rows, groups = len(instances), np.arange(len(instances))
    before = build_index(np.ones((rows, 2), np.float32), IndexSettings("exact"), groups=groups, encoder_hash="before")
    before.save(run.files.index("reindex"))
    ExemplarFilter("predicted_emotion", rows, emotions, np.zeros((3, 32))).save(run.files.stage("reindex"))
    corpus = SimpleNamespace(instances=instances, groups=groups, emotions=emotions)
    train = SimpleNamespace(instances=instances[:8], corpus=corpus, candidates=np.full((8, 2), -1))
    parts = SimpleNamespace(corpus_encoder=lambda params: encoder)
    found = Refresh(parts, run, JointTaskSettings(passage_encoder="trained"), train)._make({"retriever": {}})
    assert (found >= 0).all()
    np.testing.assert_array_equal(emotions[found], np.tile(emotions[:8, None], 2))


def test_the_pretrained_encoder_is_the_same_in_every_process(finished):
    run = context(finished, "index")
    assert load_encoder_of(run, "").hash == load_encoder_of(run, "").hash
    assert load_encoder_of(run, "retriever").hash != load_encoder_of(run, "").hash
    joint = load_encoder_of(run, "joint")  # of a joint stage, its retriever
    assert same(joint.params, load_params(finished / "joint")["retriever"])
    other = load_encoder_of(context(finished, "index", reg__emotion_share=0.25), "joint")
    assert other.hash != joint.hash  # the same parameters, other vectors
    alone = load_encoder_of(context(finished, "index", reg__emotion_share=0.0), "joint")
    assert alone.hash not in (joint.hash, other.hash)


def test_only_what_answers_can_be_evaluated(finished):
    run = context(finished, "evaluate")
    with pytest.raises(ConfigError, match=r"stage = 'retriever' trains 'reg\.retriever', which answers nothing"):
        answering(run, "retriever")
    with pytest.raises(ConfigError, match=r"refers to config\.jiont"):
        answering(run, "jiont")


def test_the_index_must_be_of_the_encoder_that_joint_training_began_with(finished):
    """Joint training moves the queries; with frozen passages theirs stay those of the stage before it."""
    for began, fits, stale in (("retriever", "reindex", "index"), ("", "index", "reindex")):
        run = context(finished, "evaluate", joint__retriever=began, joint__retriever_weight=0.2)
        assert answering(run, "joint", fits).heads == ("generator", "retriever", "both")
        with pytest.raises(StaleIndexError, match=rf"/{stale}/store was made with encoder .*--redo={stale}\b"):
            answering(run, "joint", stale)
    trained = context(finished, "evaluate", joint__passage_encoder="trained")
    with pytest.raises(StaleIndexError):  # its own encoder, which no index here is of
        answering(trained, "joint")


def test_the_index_of_an_encoder_that_no_stage_trained_is_recognised_by_its_pretrained_weights(finished, monkeypatch):
    """Beside a share of emotions, the stage "emotions" trains another encoder than the one that embeds exemplars."""
    drawn = load_encoder_of(context(finished, "index"), "").params["encoder"]
    weights = jax.tree.map(lambda leaf: leaf + 1.0, drawn)

    def pretrained(*given, with_params=True, **options):
        found = load_encoder(*given, with_params=with_params, **options)
        return dataclasses.replace(found, params=weights if with_params else None)

    asked = []
    monkeypatch.setattr("empax.parts.exemplars.parts.load_encoder", pretrained)
    monkeypatch.setattr("empax.systems.reg.stages.ExemplarSearch.of", lambda *_, made_by, **__: asked.append(made_by))
    monkeypatch.setattr("empax.systems.reg.stages.answerer_of", lambda *_: None)
    run = context(finished, "evaluate", joint__retriever="emotions")
    answering(run, "joint")
    assert asked == [load_encoder_of(run, "emotions").hash]


@pytest.mark.slow
@pytest.mark.multidevice
def test_answers_are_the_same_however_many_devices_make_them(finished, monkeypatch):
    instances = load_instances(context(finished, "evaluate"), "test")[:8]

    def answered(fsdp):
        run = context(finished, "evaluate", mesh__fsdp=fsdp)
        answerer = answering(run, "joint")
        found = answerer.respond(instances, batch_size=8, seed=0)
        return [p.response for p in found], [p.notes["nll"] for p in found], answerer._params

    rows, row_nll, whole = answered(1)
    split, split_nll, parts = answered(2)
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    alone, alone_nll, _ = answered(1)
    assert rows == split == alone
    assert row_nll == pytest.approx(alone_nll, rel=1e-4)
    assert split_nll == pytest.approx(alone_nll, rel=1e-4)
    held = [max(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree)) for tree in (whole, parts)]
    assert held[1] == held[0] // 8


def test_heads_of_a_joint_model_are_asked_where_any_stage_has_learnt_emotions(finished):
    nothing = {"joint__emotion_weight": 0.0, "joint__retriever_weight": 0.0, "joint__retriever": ""}
    never = {"generator__emotion_weight": 0.0, "exemplars__emotion_weight": 0.0}
    assert answering(context(finished, "evaluate", **nothing, **never), "joint", "index").heads == ()
    assert answering(context(finished, "evaluate", **nothing), "joint", "index").heads == ("generator",)
    assert len(answering(context(finished, "evaluate"), "joint").heads) == 3
    # A retriever that only distillation has taught knows no emotions, unless distillation teaches those too.
    untaught = {"joint__retriever_weight": 0.2, "joint__retriever": ""}
    for weight, heads in ((0.0, ("generator",)), (0.1, ("generator", "retriever", "both"))):
        run = context(finished, "evaluate", **untaught, joint__distillation={"emotion_weight": weight})
        assert answering(run, "joint", "index").heads == heads
    # And what the generator began with may have taught its head.
    later = context(finished, "evaluate", joint__emotion_weight=0.0, exemplars__emotion_weight=0.0)
    assert "generator" in answering(later, "joint").heads


def test_a_head_that_has_learnt_nothing_is_not_asked(finished):
    run = context(finished, "evaluate", reg__attributes=False, reg__emotion_share=0.0, generator__emotion_weight=0.0)
    alone = answering(run, "generator")
    assert alone.heads == ()
    instances = load_instances(run, "test")[:2]
    assert alone.emotions(instances, batch_size=2) == [{}, {}]
    for found in alone.respond(instances, batch_size=2, seed=0):
        assert (found.emotion_prediction, found.notes["emotion_by_head"]) == ("", {})
    rows = build_generator(GeneratorTaskSettings(), run).train.collate(np.arange(2), 80, np.random.default_rng(0))
    batch = jax.tree.map(jnp.asarray, rows)
    params, logged = load_params(finished / "generator"), {}
    for weight in (0.0, 0.1):
        task = RegParts.of(run).generator.generator_task(GeneratorTaskSettings(emotion_weight=weight))
        logged[weight] = set(
            jax.eval_shape(lambda p, task=task: task.loss(p, {}, batch, jax.random.key(0), train=False)[1], params)
        )
    assert logged == {0.0: {"nll"}, 0.1: {"nll", "emotion_loss", "emotion_accuracy"}}


@pytest.mark.slow
def test_sketches_have_the_shapes_of_what_is_trained(finished):
    """A plan counts the same parameters as a run, without reading any data."""
    for name, settings in (
        ("generator", GeneratorTaskSettings),
        ("exemplars", JointTaskSettings),
        ("retriever", RetrieverTaskSettings),
        ("joint", JointTaskSettings),
    ):
        run = context(finished, name)
        spec = run.plan.stages[name].spec
        stage = run.settings(name, settings)
        assembly = spec.build(stage, run)
        sketch = spec.sketch(stage, run, 8, 80)
        real = assembly.train.collate(np.arange(8), 80, np.random.default_rng(0))
        rng = jax.random.key(0)
        made = jax.eval_shape(assembly.task.init, rng, jax.tree.map(jnp.asarray, real))
        planned = jax.eval_shape(sketch.task.init, rng, sketch.batch)
        shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)  # noqa: E731
        # The tokenizer of a small corpus may come out smaller than asked for.
        vocabulary = RegParts.of(run).generator.tokenizer.vocab_size
        assert vocabulary == run.settings("prepare", PrepareSettings).tokenizer.vocab_size
        assert shapes(made) == shapes(planned)
        if name != "generator":
            assert sketch.batch.source.shape == (8, 1 + 2, 80)
