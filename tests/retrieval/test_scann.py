import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.data.dialogues import to_instances
from empax.data.empathetic_dialogues import find_archive, read_dialogues
from empax.data.exemplars import encode_keys, encode_queries
from empax.data.tokenizer_folders import load_tokenizer
from empax.interop.huggingface import load_pretrained
from empax.models.bert import BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.retrieval import exact
from empax.retrieval.encode import embed
from empax.retrieval.exact import NO_GROUP, ExactIndex
from empax.retrieval.index import measure_recall
from empax.retrieval.scann import BRUTE_FORCE_BELOW, ScannIndex, ScannSettings

pytest.importorskip("scann.scann_ops.py.scann_ops_pybind", reason="ScaNN comes for Linux only: pip install scann")

DIM, ROWS = 16, 1_500


def clustered(count, seed):
    """Unit vectors around 40 centres, as sentence embeddings crowd around topics."""
    centres = np.random.default_rng(0).standard_normal((40, DIM), dtype=np.float32)
    rng = np.random.default_rng(seed)
    rows = centres[rng.integers(0, 40, count)] + 0.5 * rng.standard_normal((count, DIM), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def rows():
    return clustered(ROWS, 1)


@pytest.fixture(scope="module")
def index(rows):
    return ScannIndex(rows, ScannSettings(), groups=np.arange(ROWS) // 5)


def check_equal(found, expected):
    np.testing.assert_array_equal(np.asarray(found.ids), np.asarray(expected.ids))
    np.testing.assert_allclose(np.asarray(found.scores), np.asarray(expected.scores), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 4, BRUTE_FORCE_BELOW - 1])
def test_brute_force_of_a_small_corpus_equals_exact(count):
    rows, queries = clustered(count, 1), clustered(7, 2)
    check_equal(ScannIndex(rows, ScannSettings(reorder=10)).search(queries, 6), ExactIndex(rows).search(queries, 6))


def test_searching_every_leaf_and_rescoring_every_row_equals_exact(rows):
    # What is left is the arithmetic of scores, exclusion and order, over a real tree.
    settings = ScannSettings(num_leaves=10, leaves_to_search=10, reorder=ROWS)
    groups, query_groups = np.arange(ROWS) // 5, np.array([2, NO_GROUP, 299])
    queries = rows[[11, 12, 1499]]
    found = ScannIndex(rows, settings, groups=groups).search(queries, 20, query_groups=query_groups)
    check_equal(found, ExactIndex(rows, groups=groups).search(queries, 20, query_groups=query_groups))


def test_one_index_is_searched_with_several_settings(rows):
    index = ScannIndex(rows, ScannSettings(num_leaves=30, leaves_to_search=1, reorder=5))
    queries, k = clustered(5, 2), 6
    widest = index.searched(leaves_to_search=30, reorder=ROWS)
    check_equal(widest.search(queries, k), ExactIndex(rows).search(queries, k))
    check_equal(widest.searched(leaves_to_search=1, reorder=5).search(queries, k), index.search(queries, k))
    assert measure_recall(index, index.exact, queries, k) < 1


def test_one_query_finds_what_it_finds_among_others(index):
    queries = clustered(40, 2)  # more than one thread takes at a time
    together = index.search(queries, 5)
    for number in (0, 39):
        alone = index.search(queries[number : number + 1], 5)
        np.testing.assert_array_equal(alone.ids[0], together.ids[number])


def test_recall_of_the_default():
    rows = clustered(9_000, 1)
    leaves, searched = ScannSettings().leaves(len(rows))
    assert searched < leaves, "a search of everything would prove nothing"
    index = ScannIndex(rows, ScannSettings())
    assert measure_recall(index, index.exact, clustered(100, 2)) >= 0.95


@pytest.mark.slow
@pytest.mark.real_data
def test_recall_of_the_default_on_real_embeddings(real_data, minilm):
    """MiniLM vectors of 6,000 training pairs and of 100 test contexts, all cut to 16 tokens for speed."""
    tokenizer = load_tokenizer(minilm)
    _, config, params = load_pretrained(minilm)
    encoder = DualEncoder(encoder=BertEncoder(config), normalize=True)
    archive = find_archive(real_data)
    train, test = (to_instances(read_dialogues(archive, split)) for split in ("train", "test"))
    keys = encode_keys(tokenizer, train[:: len(train) // 6_000][:6_000], 16)
    queries = encode_queries(tokenizer, test[:100], 16)

    def apply(params, ids, mask):
        return encoder.apply({"params": {"encoder": params}}, ids, mask)

    rows, vectors = (
        embed(apply, params, ids, pad_id=tokenizer.pad_id, tokens_per_batch=2_048, buckets=(16,))
        for ids in (keys, queries)
    )
    leaves, searched = ScannSettings().leaves(len(rows))
    assert searched < leaves, "a search of everything would prove nothing"
    index = ScannIndex(rows, ScannSettings())
    assert measure_recall(index, index.exact, vectors) >= 0.95


def test_blocks_of_queries_lose_none(monkeypatch, index):
    queries = clustered(10, 2)
    whole = index.search(queries, 5)
    monkeypatch.setattr(exact, "_QUERY_BLOCKS", (4,))
    check_equal(index.search(queries, 5), whole)
    assert index.search(queries[:0], 5).ids.shape == (0, 5)


def test_rows_of_no_group_are_never_excluded(rows):
    index = ScannIndex(rows, ScannSettings(), groups=np.full(ROWS, NO_GROUP))
    assert np.asarray(index.search(rows[:1], 3, query_groups=np.array([NO_GROUP])).ids)[0, 0] == 0
    assert "exact" not in vars(index), "the exact index would hide it"


def test_looks_at_enough_rows_to_lose_the_own_group(rows):
    settings = ScannSettings(num_leaves=10, leaves_to_search=10, reorder=1)
    index = ScannIndex(rows, settings, groups=np.arange(ROWS) // 5)
    assert (np.asarray(index.search(rows[:5], 4, query_groups=np.zeros(5, int)).ids) >= 5).all()
    assert "exact" not in vars(index), "the exact index is the last resort"


def test_one_huge_group_does_not_starve_its_queries(rows):
    # All near rows are of the query's group: far more must be looked at than k, and the last resort is exact.
    groups = np.where(rows @ rows[0] > 0, 7, 8)
    settings = ScannSettings(num_leaves=30, leaves_to_search=1, reorder=10)
    found = ScannIndex(rows, settings, groups=groups).search(rows[:1], 12, query_groups=np.array([7]))
    assert (groups[np.asarray(found.ids)] == 8).all()


def test_a_leaf_with_too_few_rows_is_topped_up(rows):
    index = ScannIndex(rows, ScannSettings(num_leaves=300, leaves_to_search=1))
    check_equal(index.search(rows[:3], 200), ExactIndex(rows).search(rows[:3], 200))


def test_trains_the_same_index_in_another_process(tmp_path, rows):
    # In one process even ScaNN's unseeded start often repeats itself.
    np.save(tmp_path / "rows.npy", rows)
    program = (
        "import numpy, pathlib; from empax.retrieval.scann import ScannIndex, ScannSettings; "
        "ScannIndex(numpy.load('rows.npy'), ScannSettings()).save(pathlib.Path('there'))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, capture_output=True)
    ScannIndex(rows, ScannSettings()).save(tmp_path / "here")
    here, there = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("here", "there"))
    assert here == there
    assert len(here) > 3


@pytest.mark.parametrize("kind", ["same", "zero", "few"])
def test_a_collapsed_encoder_still_gives_an_index(kind):
    # An untrained encoder can map all texts to one point.
    rng = np.random.default_rng(0)
    points = {"same": np.ones((1, DIM)), "zero": np.zeros((1, DIM)), "few": rng.standard_normal((5, DIM))}[kind]
    rows = points[rng.integers(0, len(points), 1_200)].astype(np.float32)
    found = ScannIndex(rows, ScannSettings()).search(rows[:2], 3)
    exact = ExactIndex(rows).search(rows[:2], 3)
    np.testing.assert_allclose(np.asarray(found.scores), np.asarray(exact.scores), rtol=1e-6)


def test_settings_scale_with_the_corpus():
    assert ScannSettings().leaves(40_000) == (200, 80)
    assert ScannSettings().leaves(8_000) == (89, 45)
    assert ScannSettings().leaves(3_000) == (54, 54), "a small corpus is searched whole"
    assert ScannSettings(num_leaves=50, leaves_to_search=80).leaves(40_000) == (50, 50)
    with pytest.raises(ConfigError, match="num_leaves = 5000, but there are only 1500 rows"):
        ScannSettings(num_leaves=5_000).leaves(ROWS)
    with pytest.raises(ConfigError, match=r"anisotropic_threshold = 1\.0"):
        ScannSettings(anisotropic_threshold=1.0)


def test_a_tree_needs_as_many_training_rows_as_it_has_leaves():
    with pytest.raises(ConfigError, match=r"training_sample = 30 .* tree of 38 leaves .* set it to at least 38"):
        ScannIndex(clustered(ROWS, 1), ScannSettings(training_sample=30))
    assert ScannSettings(training_sample=38).leaves(ROWS)[0] == 38
    with pytest.raises(ConfigError, match="set it to at least 16"):
        ScannSettings(num_leaves=2, training_sample=15).leaves(ROWS)


def test_without_scann_says_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install scann.*store\.method = 'exact'"):
        ScannIndex(clustered(4, 0), ScannSettings())
