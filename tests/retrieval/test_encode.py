import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.types import EMOTIONS, Instance
from empax.data.bpe import train_bpe
from empax.data.exemplars import encode_keys, encode_queries
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder, Towers
from empax.retrieval import encode
from empax.retrieval.encode import BUCKETS, CorpusEncoder, _fewer, economy, embed, embedders, plan_batches
from empax.systems.reg.encoder import EmotionEncoder
from empax.systems.reg.parts import with_emotions
from tests.systems.learning import random_like

PAD = 0


def mean_encoder(params, ids, mask):
    """Mean of word vectors with a position weight: padding, order and neighbours would all show."""
    weights = mask * (1.0 + jnp.arange(ids.shape[1], dtype=jnp.float32))[None, :]
    total = jnp.einsum("BS,BSD->BD", weights, params[ids])
    return total / weights.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def params():
    return jnp.asarray(np.random.default_rng(0).standard_normal((50, 6), dtype=np.float32))


def texts(count, longest=30, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 50, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def one_by_one(params, token_ids):
    params = np.asarray(params)
    weights = [1.0 + np.arange(len(ids)) for ids in token_ids]
    return np.stack([w @ params[ids] / w.sum() for ids, w in zip(token_ids, weights, strict=True)])


def test_embeds_every_text_in_the_order_given(params):
    token_ids = texts(45)
    found = embed(mean_encoder, params, token_ids, pad_id=PAD, tokens_per_batch=64, buckets=(8, 16, 32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, one_by_one(params, token_ids), rtol=1e-5, atol=1e-6)


def traced(shapes):
    """`mean_encoder`, which notes the shapes for which it is compiled; the first trace only asks for D."""

    def encoder(params, ids, mask):
        shapes.append(ids.shape)
        return mean_encoder(params, ids, mask)

    return encoder


def shapes_of(token_ids, params, **options):
    """Of the batches in which `embed` reads them."""
    shapes = []
    embed(traced(shapes), params, token_ids, pad_id=PAD, **options)
    return set(shapes[1:])


def test_few_shapes_within_the_token_budget(params, monkeypatch):
    monkeypatch.setattr(encode, "CPU", dataclasses.replace(encode.CPU, padding=0))
    shapes = []
    encoder, options = traced(shapes), {"pad_id": PAD, "tokens_per_batch": 64, "buckets": (8, 16, 32)}
    embed(encoder, params, texts(80), **options)
    assert set(shapes[1:]) == {(8, 8), (4, 16), (2, 32)}
    before = len(shapes)
    embed(encoder, params, texts(70, seed=2), **options)
    assert shapes[before:] in ([], shapes[:1]), "a second corpus must compile nothing"


def test_many_texts_of_a_length_are_padded_less(params, monkeypatch):
    monkeypatch.setattr(encode, "CPU", dataclasses.replace(encode.CPU, padding=0))
    token_ids = [[1] * 20] * 25 + [[1] * 12] * 42 + [[1] * 30]
    # 26 texts of 20 tokens fill 8 batches of 64 tokens, as would 43 of 12.
    options = {"tokens_per_batch": 64, "buckets": (8, 16, 32)}
    assert shapes_of(token_ids, params, **options) == {(4, 16), (2, 32)}
    token_ids.append([1] * 20)
    assert shapes_of(token_ids, params, **options) == {(4, 16), (3, 20), (1, 32)}
    found = embed(mean_encoder, params, token_ids, pad_id=PAD, **options)
    np.testing.assert_allclose(found, one_by_one(params, token_ids), rtol=1e-5, atol=1e-6)


def test_few_texts_of_a_length_share_the_shape_of_longer_ones(params, monkeypatch):
    token_ids = [[1] * 5] * 10 + [[1] * 12] * 3 + [[1] * 20]
    options = {"tokens_per_batch": 64, "buckets": (8, 16, 32)}
    alone = one_by_one(params, token_ids)
    # Those of 16 cost 48 tokens of padding among those of 32; those of 8 then cost 240 more.
    for padding, expected in ((47, {(8, 8), (4, 16), (1, 32)}), (48, {(8, 8), (2, 32)}), (288, {(2, 32)})):
        monkeypatch.setattr(encode, "CPU", dataclasses.replace(encode.CPU, padding=padding))
        assert shapes_of(token_ids, params, **options) == expected
        found = embed(mean_encoder, params, token_ids, pad_id=PAD, **options)
        np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-6)


def test_one_query_is_not_padded_to_a_whole_batch(params):
    shapes = []
    embed(traced(shapes), params, [[3, 4, 5]], pad_id=PAD)
    assert shapes[-1] == (1, 16)


def test_an_accelerator_compiles_few_shapes(params, monkeypatch):
    token_ids = texts(60)
    on_cpu = embed(mean_encoder, params, token_ids, pad_id=PAD)
    lengths = np.minimum(np.random.default_rng(0).lognormal(3.0, 0.6, 40_000).astype(int) + 2, BUCKETS[-1])
    many = {(rows, length) for _, length, rows in plan_batches(lengths, np.array(BUCKETS), economy())}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    few = {(rows, length) for _, length, rows in plan_batches(lengths, np.array(BUCKETS), economy())}
    assert len(few) < len(BUCKETS) < len(many)
    assert all(rows in (1, 16, 256, 32768 // length) for rows, length in few)
    assert shapes_of(token_ids, params) == {(256, 16), (256, 24), (16, 32)}
    np.testing.assert_allclose(embed(mean_encoder, params, token_ids, pad_id=PAD), on_cpu, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("slack", "expected"),
    [
        (0.0, [8, 16, 16, 32, 64, 64]),
        (0.05, [16, 16, 16, 32, 64, 64]),
        (0.25, [16, 16, 16, 64, 64, 64]),
        (9.0, [64] * 6),
    ],
)
def test_lengths_are_given_up_while_padding_grows_by_little(slack, expected):
    """8 into 16 costs 8 tokens of 200, then 32 into 64 another 32 and 16 into 32 48."""
    worth = dataclasses.replace(encode.ACCELERATOR, slack=slack)
    assert _fewer(np.array([8, 16, 16, 32, 64, 64]), worth).tolist() == expected


@pytest.mark.multidevice
def test_a_mesh_changes_nothing(params):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    token_ids = texts(21)
    spread = embed(mean_encoder, params, token_ids, pad_id=PAD, tokens_per_batch=64, buckets=(32,), mesh=mesh)
    np.testing.assert_allclose(spread, one_by_one(params, token_ids), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("terminal", "progress"), [(True, None), (True, "corpus"), (False, "corpus")])
def test_shows_progress_on_a_terminal_when_asked(params, capsys, monkeypatch, terminal, progress):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    embed(mean_encoder, params, texts(3), pad_id=PAD, progress=progress)
    assert ("corpus" in capsys.readouterr().err) == (terminal and progress is not None)


@pytest.mark.parametrize(("least", "progress"), [(3, None), (3, "facts"), (4, "facts")])
def test_announces_many_texts_in_the_log(params, caplog, monkeypatch, least, progress):
    monkeypatch.setattr("empax.retrieval.encode._ANNOUNCED", least)
    caplog.set_level("INFO", logger="empax")
    embed(mean_encoder, params, texts(3), pad_id=PAD, progress=progress)
    assert caplog.messages == (["facts: embedding 3 texts"] if progress and least == 3 else [])


def test_no_texts(params):
    assert embed(mean_encoder, params, [], pad_id=PAD).shape == (0, 6)


@pytest.mark.parametrize("bad", [[], [1] * 17])
def test_refuses_a_text_it_cannot_hold(params, bad):
    with pytest.raises(ValueError, match=rf"Text 1 has {len(bad)} tokens; an encoder takes 1 to 16"):
        embed(mean_encoder, params, [[1], bad], pad_id=PAD, buckets=(8, 16))


# The retriever's tower over instances: what it reads, and what is kept across runs.

INSTANCES = [Instance(f"d{i}#2", (f"I lost {i} dogs",), f"oh no {i}", "sad") for i in range(5)]


@pytest.fixture(scope="module")
def encoder():
    tokenizer = train_bpe(["i lost dogs oh no"], vocab_size=300)
    model = DualEncoder(
        BertEncoder(BertConfig(tokenizer.vocab_size, d_model=8, num_heads=2, d_ff=16, num_layers=1, max_positions=16)),
        normalize=True,
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.ones((1, 4), np.int32), np.ones((1, 4), bool))
    params = random_like(shapes["params"], scale=1.0)
    queries = functools.partial(encode_queries, tokenizer, max_tokens=12)
    keys = functools.partial(encode_keys, tokenizer, max_tokens=12)
    return CorpusEncoder(Towers(model), {"encoder": params}, tokenizer.pad_id, queries, keys, hash="one", buckets=(16,))


def test_two_towers_embed_as_one_does_each_with_its_own_parameters(encoder):
    model, params = encoder.model.query, encoder.params["encoder"]
    other = jax.tree.map(lambda leaf: leaf[::-1] * 1.5, params)
    both = {"query_encoder": params, "key_encoder": other}
    two = dataclasses.replace(encoder, model=Towers(model, model), params=both)
    np.testing.assert_array_equal(two.embed_queries(INSTANCES), encoder.embed_queries(INSTANCES))
    moved = dataclasses.replace(encoder, params={"encoder": other})
    np.testing.assert_array_equal(two.embed_keys(INSTANCES), moved.embed_keys(INSTANCES))
    assert not np.allclose(two.embed_keys(INSTANCES), encoder.embed_keys(INSTANCES), atol=1e-3)


def test_queries_see_no_response_and_keys_do(encoder):
    other = [dataclasses.replace(i, response="something else") for i in INSTANCES]
    queries = encoder.embed_queries(INSTANCES)
    assert queries.shape == (5, 8)
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(queries, encoder.embed_queries(other))
    assert not np.allclose(encoder.embed_keys(INSTANCES), encoder.embed_keys(other), atol=1e-3)
    assert not np.allclose(queries, encoder.embed_keys(INSTANCES), atol=1e-3)
    assert len(np.unique(queries.round(4), axis=0)) == 5


def test_keys_carry_the_emotion_that_is_known(encoder):
    known = dataclasses.replace(
        encoder, complete_keys=functools.partial(with_emotions, EmotionEncoder(encoder.model.query, share=0.5))
    )
    instances = [*INSTANCES, dataclasses.replace(INSTANCES[0], emotion="")]
    keys = known.embed_keys(instances)
    np.testing.assert_allclose(keys[:, :8], encoder.embed_keys(instances) * 0.5**0.5, rtol=1e-6)
    expected = np.zeros((6, len(EMOTIONS)))
    expected[:5, EMOTIONS.index("sad")] = 0.5**0.5
    np.testing.assert_allclose(keys[:, 8:], expected, rtol=1e-6)


def test_one_function_per_model_finds_its_compiled_code_again(encoder):
    again = dataclasses.replace(encoder, hash="two", model=dataclasses.replace(encoder.model))
    for first, second in zip(embedders(encoder.model), embedders(again.model), strict=True):
        assert first is second


def test_large_corpora_are_embedded_once_per_encoder_and_text(encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("EMPAX_CACHE_DIR", str(tmp_path))
    encoder.embed_queries(INSTANCES)
    assert not list(tmp_path.iterdir())  # few: not worth a file
    monkeypatch.setattr(encode, "KEPT_FROM", 5)
    made = []
    monkeypatch.setattr(encode, "embed", lambda *args, **options: made.append(1) or embed(*args, **options))
    first = encoder.embed_queries(INSTANCES)
    np.testing.assert_array_equal(encoder.embed_queries(INSTANCES), first)
    assert len(made) == 1
    encoder.embed_keys(INSTANCES)  # other texts
    assert len(made) == 2
    dataclasses.replace(encoder, hash="two").embed_queries(INSTANCES)  # another encoder
    assert len(made) == 3
    pooled = encoder.model.query.clone(pooling="cls" if encoder.model.query.pooling == "mean" else "mean")
    other = dataclasses.replace(encoder, model=Towers(pooled)).embed_queries(INSTANCES)  # as "auto" may come to mean
    assert len(made) == 4
    assert np.abs(other - first).max() > 1e-3
    assert len(list((tmp_path / "embeddings").glob("*.npy"))) == 4
    same = dataclasses.replace(encoder, query_text=encoder.key_text)  # one text may go to either tower
    same.embed_queries(INSTANCES)
    assert len(made) == 5
