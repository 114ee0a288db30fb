"""The retriever's tower over instances: what it reads, and what is kept across runs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from empax.core.types import EMOTIONS, Instance
from empax.data.bpe import train_bpe
from empax.data.exemplars import encode_keys, encode_queries
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder, Towers
from empax.retrieval import encode
from empax.retrieval.encode import CorpusEncoder, embedders
from empax.systems.reg.encoder import EmotionEncoder
from empax.systems.reg.parts import with_emotions

INSTANCES = [Instance(f"d{i}#2", (f"I lost {i} dogs",), f"oh no {i}", "sad") for i in range(5)]


@pytest.fixture(scope="module")
def encoder():
    tokenizer = train_bpe(["i lost dogs oh no"], vocab_size=300)
    model = DualEncoder(
        BertEncoder(BertConfig(tokenizer.vocab_size, d_model=8, num_heads=2, d_ff=16, num_layers=1, max_positions=16)),
        normalize=True,
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.ones((1, 4), np.int32), np.ones((1, 4), bool))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes["params"])
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
    embed = encode.embed

    def counting(*args, **options):
        made.append(1)
        return embed(*args, **options)

    monkeypatch.setattr(encode, "embed", counting)
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
