"""Milvus Lite behind the same protocol as the other indexes; the code against a cluster is the same."""

import importlib.util

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.retrieval import milvus
from empax.retrieval.exact import ExactIndex
from empax.retrieval.index import IndexSettings, build_index, load_index, measure_recall
from empax.retrieval.milvus import MilvusIndex, MilvusSettings

ROWS, DIM, QUERIES = 600, 16, 40


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def corpus():
    rng = np.random.default_rng(0)
    return unit(rng.normal(size=(ROWS, DIM))), unit(rng.normal(size=(QUERIES, DIM))), np.arange(ROWS) // 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return MilvusSettings(uri=str(tmp_path_factory.mktemp("milvus") / "rows.db"), insert_rows=250)


def test_what_is_built_and_searched_unless_a_recipe_says_otherwise():
    assert MilvusSettings() == MilvusSettings(
        "milvus.db", "empax", "HNSW", {"M": 32, "efConstruction": 200}, {"ef": 256}, insert_rows=1000
    )


def test_finds_what_the_exact_index_finds(corpus, settings):
    rows, queries, groups = corpus
    index = MilvusIndex(rows, settings, encoder_hash="one", groups=groups)
    exact = ExactIndex(rows, groups=groups)
    assert measure_recall(index, exact, queries) > 0.98
    own = groups[:QUERIES]
    found = index.search(rows[:QUERIES], 10, query_groups=own)
    wanted = exact.search(rows[:QUERIES], 10, query_groups=own)
    ids = np.asarray(found.ids)
    assert not (groups[ids] == own[:, None]).any()  # a dialogue never retrieves itself
    assert (ids == np.asarray(wanted.ids)).mean() > 0.98
    np.testing.assert_allclose(found.scores[:, 0], wanted.scores[:, 0], rtol=1e-4)
    assert "exact" not in vars(index), "the exact index would hide what Milvus finds"
    np.testing.assert_array_equal(index.exact.search(queries, 3).ids, exact.search(queries, 3).ids)


def test_more_is_asked_for_than_there_is(settings):
    rows = unit(np.random.default_rng(1).normal(size=(5, DIM)))
    found = MilvusIndex(rows, settings, encoder_hash="one").search(rows[:2], 8)
    assert sorted(np.asarray(found.ids)[0, :5]) == [0, 1, 2, 3, 4]
    assert (np.asarray(found.ids)[:, 5:] == -1).all()
    assert np.isneginf(np.asarray(found.scores)[:, 5:]).all()


def test_what_the_server_finds_too_little_for_is_searched_exactly(corpus, settings, monkeypatch):
    rows, queries, groups = corpus
    index = MilvusIndex(rows, settings, encoder_hash="one", groups=groups)
    found = index._found
    monkeypatch.setattr(index, "_found", lambda asked, limit: [hits[:1] for hits in found(asked, limit)])
    wanted = ExactIndex(rows, groups=groups).search(queries, 5, query_groups=groups[:QUERIES])
    np.testing.assert_array_equal(index.search(queries, 5, query_groups=groups[:QUERIES]).ids, wanted.ids)


def test_rows_are_sent_once_for_each_encoder_and_corpus(corpus, settings, monkeypatch):
    rows, queries, _ = corpus
    first = MilvusIndex(rows, settings, encoder_hash="kept")
    monkeypatch.setattr(type(first._client), "insert", lambda *_: pytest.fail("sent again"))
    again = MilvusIndex(rows, settings, encoder_hash="kept")
    assert again.collection == first.collection
    np.testing.assert_array_equal(again.search(queries, 3).ids, first.search(queries, 3).ids)
    with pytest.raises(BaseException, match="sent again"):
        MilvusIndex(rows, settings, encoder_hash="other")
    for row in range(len(rows)):  # each counts
        changed = rows.copy()
        changed[row] += 1.0
        assert milvus._digest(changed, None, settings, "kept") != milvus._digest(rows, None, settings, "kept")


def test_one_of_two_runs_that_fill_the_same_rows_is_first(corpus, settings, monkeypatch):
    rows, _, _ = corpus
    client = type(MilvusIndex(rows, settings, encoder_hash="any")._client)
    flush, others = client.flush, []

    def meanwhile(self, name):
        flush(self, name)
        if not others:
            others.append(None)
            others[0] = MilvusIndex(rows, settings, encoder_hash="twice")

    monkeypatch.setattr(client, "flush", meanwhile)
    late = MilvusIndex(rows, settings, encoder_hash="twice")
    for index in (late, others[0]):
        np.testing.assert_array_equal(np.asarray(index.search(rows[:5], 1).ids)[:, 0], np.arange(5))
    names = [name for name in late._client.list_collections() if name.startswith(late.collection)]
    assert names == [others[0].collection] == [late.collection]


def test_an_index_is_saved_and_loaded(corpus, settings, tmp_path):
    rows, queries, groups = corpus
    made = build_index(rows, IndexSettings("milvus", milvus=settings), encoder_hash="saved", groups=groups)
    made.save(tmp_path / "store")
    loaded = load_index(tmp_path / "store", encoder_hash="saved")
    assert isinstance(loaded.searcher, MilvusIndex)
    np.testing.assert_array_equal(loaded.search(queries, 5).ids, made.search(queries, 5).ids)
    assert loaded.exact.num_rows == ROWS


def test_what_cannot_work_says_so(corpus, monkeypatch, tmp_path):
    rows, _, _ = corpus
    with pytest.raises(ConfigError, match="collection = 'my-index' must be a word"):
        MilvusSettings(collection="my-index")
    settings = MilvusSettings(uri=str(tmp_path / "rows.db"))
    with pytest.raises(ConfigError, match=r"there is no Milvus at store\.milvus\.uri"):
        MilvusIndex(rows, MilvusSettings(uri="http://127.0.0.1:9"), encoder_hash="one")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    milvus._milvus.cache_clear()
    with pytest.raises(ConfigError, match=r"needs pymilvus.*pip install 'empax\[milvus\]'"):
        MilvusIndex(rows, settings, encoder_hash="one")
    milvus._milvus.cache_clear()
