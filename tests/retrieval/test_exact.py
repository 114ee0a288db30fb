import jax
import numpy as np
import pytest

from empax.core.files import DataError
from empax.retrieval import exact
from empax.retrieval.exact import NO_GROUP, ExactIndex, ExactInParts

ROWS, DIM = 203, 8


def integers(count, seed):
    """Small whole numbers: float32 products are exact, so ids must agree to the last tie, of which there are many."""
    return np.random.default_rng(seed).integers(-2, 3, (count, DIM)).astype(np.float32)


def brute_force(rows, queries, k, groups=None, query_groups=None):
    scores = queries.astype(np.float64) @ rows.astype(np.float64).T
    if groups is not None:
        scores[(groups[None, :] == query_groups[:, None]) & (query_groups >= 0)[:, None]] = -np.inf
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(scores, ids, axis=1)
    return np.where(np.isinf(scores), -1, ids), scores


def check(found, expected):
    np.testing.assert_array_equal(np.asarray(found.ids), expected[0])
    np.testing.assert_array_equal(np.asarray(found.scores), expected[1].astype(np.float32))


@pytest.mark.parametrize("num_queries", [0, 1, 5, 64, 257])
@pytest.mark.parametrize("chunk_rows", [65_536, 50, 3])
def test_equals_brute_force_however_chunked(chunk_rows, num_queries):
    rows, queries = integers(ROWS, 0), integers(num_queries, 1)
    check(ExactIndex(rows, chunk_rows=chunk_rows).search(queries, 7), brute_force(rows, queries, 7))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scores_are_float32_products_of_what_is_stored(dtype):
    rng = np.random.default_rng(3)
    rows, queries = (rng.standard_normal((n, 48), dtype=np.float32) for n in (ROWS, 4))
    rows = rows.astype(dtype)
    found = ExactIndex(rows).search(queries, 5)
    expected = brute_force(rows, queries, 5)
    np.testing.assert_array_equal(np.asarray(found.ids), expected[0])
    np.testing.assert_allclose(np.asarray(found.scores), expected[1], rtol=1e-5)


def traced(index, queries, *, gpu):
    asked = np.zeros((queries, index.dim + 1), np.int32)
    settings = {"k": 5, "chunks": 1, "mesh": index._mesh, "gpu": gpu}
    return exact._search.trace(index._rows, index._groups, asked, index._count, **settings)


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e5])
def test_on_a_gpu_half_precision_rows_are_multiplied_as_they_are_and_as_exactly(size, monkeypatch):
    rng = np.random.default_rng(3)
    rows, queries = (rng.standard_normal((n, 384), dtype=np.float32) for n in (ROWS, 9))
    rows, queries = rows.astype(np.float16), size * queries
    queries[0] = 0.0
    expected = brute_force(rows, queries, 5)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    index = ExactIndex(rows)
    found = index.search(queries, 5)
    np.testing.assert_array_equal(np.asarray(found.ids)[1:], expected[0][1:])
    np.testing.assert_allclose(np.asarray(found.scores), expected[1], rtol=2e-6)
    assert f"f32[{ROWS},384]" in str(traced(index, 8, gpu=False).jaxpr)
    assert f"f32[{ROWS},384]" not in str(traced(index, 8, gpu=True).jaxpr)


def test_on_a_gpu_many_queries_are_multiplied_by_tensor_cores_and_a_few_are_not():
    index = ExactIndex(np.zeros((ROWS, DIM), np.float32))

    def program(queries, gpu):
        return traced(index, queries, gpu=gpu).lower(lowering_platforms=("cuda",)).as_text()

    assert "num_primitive_operations = 3" in program(64, gpu=True)
    for queries, gpu in ((64, False), (1, True)):
        text = program(queries, gpu)
        assert "num_primitive_operations" not in text
        assert "precision = [HIGHEST, HIGHEST]" in text


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_rows_are_chunked_as_memory_allows(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(exact, "_CHUNK_ROWS", 3000)
    monkeypatch.setattr(exact, "_device_memory", lambda: 32 * 4 * 256 * 9000)
    rows = np.zeros((9001, 2), np.float16)
    index = ExactIndex(rows)
    assert index._chunks == (4 if backend == "cpu" else 2)
    assert index._rows.shape[0] == (9004 if backend == "cpu" else 9024)  # in groups of 32
    # Converted part by part on a CPU; a few queries have few scores.
    assert [index._chunks_for(count) for count in (1, 256)] == ([4, 4] if backend == "cpu" else [1, 2])
    assert ExactIndex(rows.astype(np.float32))._chunks_for(1) == 1


@pytest.mark.multidevice
@pytest.mark.parametrize("shape", [(8, 1), (4, 2)])
@pytest.mark.parametrize("chunk_rows", [65_536, 10])
def test_a_mesh_changes_nothing(shape, chunk_rows):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))
    rows, queries = integers(ROWS, 0), integers(5, 1)
    groups, query_groups = np.arange(ROWS) // 4, np.array([0, 7, NO_GROUP, 50, 3])
    found = ExactIndex(rows, groups=groups, mesh=mesh, chunk_rows=chunk_rows)
    check(found.search(queries, 30, query_groups=query_groups), brute_force(rows, queries, 30, groups, query_groups))


@pytest.mark.multidevice
def test_fewer_rows_than_devices():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    found = ExactIndex(integers(3, 0), mesh=mesh).search(integers(2, 1), 5)
    assert np.sort(np.asarray(found.ids)[:, :3], axis=1).tolist() == [[0, 1, 2]] * 2
    assert np.asarray(found.ids)[:, 3:].tolist() == [[-1, -1]] * 2


@pytest.mark.parametrize("part_rows", [7, 50, 1000])
def test_rows_in_parts_are_searched_as_one(part_rows):
    rng = np.random.default_rng(3)
    rows = rng.integers(-2, 3, (60, 4)).astype(np.float32)  # many scores are equal
    groups, queries = np.arange(60) // 4, rng.integers(-2, 3, (9, 4)).astype(np.float32)
    whole, parts = ExactIndex(rows, groups=groups), ExactInParts(rows, groups=groups, part_rows=part_rows)
    for k in (3, 70):
        one = whole.search(queries, k, query_groups=groups[:9])
        other = parts.search(queries, k, query_groups=groups[:9])
        np.testing.assert_array_equal(other.ids, one.ids)
        np.testing.assert_array_equal(other.scores, one.scores)


def test_never_returns_the_own_group():
    rows, groups = integers(ROWS, 0), np.arange(ROWS) // 4
    query_groups = np.array([0, 7, NO_GROUP, 50, 3])
    queries = rows[np.maximum(query_groups, 0) * 4]  # each would find itself first
    index = ExactIndex(rows, groups=groups)
    found = index.search(queries, ROWS, query_groups=query_groups)
    check(found, brute_force(rows, queries, ROWS, groups, query_groups))
    assert (groups[np.asarray(index.search(queries, 4).ids)] == query_groups[:, None]).any(), "nothing to exclude"


def test_rows_of_no_group_are_never_excluded():
    found = ExactIndex(integers(6, 0), groups=np.full(6, NO_GROUP)).search(
        integers(1, 1), 6, query_groups=np.array([NO_GROUP])
    )
    assert (np.asarray(found.ids) >= 0).all()


def test_more_asked_than_there_is():
    found = ExactIndex(integers(3, 0), groups=np.array([0, 1, 1])).search(integers(1, 1), 5, query_groups=np.array([1]))
    assert np.asarray(found.ids).tolist() == [[0, -1, -1, -1, -1]]
    assert np.isneginf(np.asarray(found.scores)[:, 1:]).all()


def test_a_second_index_of_the_same_shape_compiles_nothing():
    ExactIndex(integers(ROWS, 0)).search(integers(3, 1), 7)
    before = exact._search._cache_size()
    ExactIndex(integers(ROWS, 5)).search(integers(2, 6), 7)
    assert exact._search._cache_size() == before


def test_refuses_what_it_cannot_do():
    index = ExactIndex(integers(3, 0))
    with pytest.raises(ValueError, match="built without groups"):
        index.search(integers(1, 0), 1, query_groups=np.array([0]))
    for bad in (np.nan, np.inf):
        queries = np.ones((3, 8), np.float32)
        queries[1, 5] = bad
        for searcher in (index, ExactInParts(integers(3, 0))):
            with pytest.raises(DataError, match="1 of 3 queries are not finite, the first is row 1"):
                searcher.search(queries, 1)
