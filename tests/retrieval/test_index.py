import json

import numpy as np
import pytest

from empax.core.files import DataError
from empax.core.manifest import describe, write_sealed
from empax.retrieval.exact import ExactIndex
from empax.retrieval.index import Index, IndexSettings, StaleIndexError, build_index, load_index, measure_recall
from empax.retrieval.scann import ScannIndex, ScannSettings

ROWS, DIM = 1_200, 16
METHODS = ["exact", "scann"]


def unit(count, seed, dim=DIM):
    rows = np.random.default_rng(seed).standard_normal((count, dim), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def settings(method="exact", dtype="float32"):
    return IndexSettings(method=method, dtype=dtype, scann=ScannSettings(num_leaves=12, leaves_to_search=9))


def build(method="exact", dtype="float32", rows=ROWS, seed=0) -> Index:
    if method == "scann":
        pytest.importorskip("scann.scann_ops.py.scann_ops_pybind", reason="ScaNN comes for Linux only")
    groups = np.arange(rows) // 3
    return build_index(unit(rows, seed), settings(method, dtype), groups=groups, encoder_hash="minilm")


def check_equal(found, expected):
    np.testing.assert_array_equal(np.asarray(found.ids), np.asarray(expected.ids))
    np.testing.assert_array_equal(np.asarray(found.scores), np.asarray(expected.scores))


@pytest.fixture(scope="module", params=METHODS)
def saved(request, tmp_path_factory):
    """An index and the folder it was saved in; tests must not change the folder."""
    index = build(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "index"
    index.save(folder)
    return index, folder


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rows", [50, ROWS])  # ScaNN trains a tree only for the second
def test_saved_and_loaded_searches_the_same(tmp_path, method, dtype, rows):
    index = build(method, dtype, rows)
    index.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index", encoder_hash="minilm")
    assert isinstance(loaded.embeddings, np.memmap)
    assert loaded.embeddings.dtype == dtype
    assert type(loaded.searcher) is {"exact": ExactIndex, "scann": ScannIndex}[method]
    assert type(loaded.exact) is ExactIndex
    assert loaded.settings == index.settings
    assert len(loaded) == rows
    np.testing.assert_array_equal(loaded.embeddings, index.embeddings)
    queries, query_groups = unit(5, 1), np.array([0, 5, 9, 16, 2])
    check_equal(loaded.search(queries, 4, query_groups), index.search(queries, 4, query_groups))


def test_a_saved_index_is_on_the_disk(tmp_path, monkeypatch):
    reached, folder = set(), tmp_path / "index"
    monkeypatch.setattr("empax.retrieval.index.sync", reached.add)
    build("exact").save(folder)
    assert reached >= {tmp_path, folder, *folder.iterdir()}


def test_recall(saved):
    index, _ = saved
    assert measure_recall(index, index.exact, unit(50, 3)) >= 0.95
    half = build("exact", rows=ROWS // 2)  # other rows: a recall that cannot be 1
    assert 0.1 < measure_recall(build_index(index.embeddings[: ROWS // 2], settings(), encoder_hash="a"),
                                index.exact, unit(50, 3)) < 0.9  # fmt: skip
    assert measure_recall(half, half.exact, unit(5, 3), k=ROWS) == 1.0  # missing rows are not counted


def test_a_stale_index_is_refused(saved):
    folder = saved[1]
    with pytest.raises(StaleIndexError, match="made with encoder 'minilm', but 'other' is asked for"):
        load_index(folder, encoder_hash="other")
    assert issubclass(StaleIndexError, DataError)
    assert len(load_index(folder)) == ROWS, "None compares nothing"


def test_no_index(tmp_path):
    with pytest.raises(DataError, match=r"holds no index \(index\.json is missing\); run the index stage"):
        load_index(tmp_path / "index")


@pytest.mark.parametrize("method", METHODS)
def test_every_damaged_file_is_named(tmp_path, method):
    """By the record of its stage."""
    folder = tmp_path / "index" / "store"
    build(method).save(folder)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert len(paths) >= (8 if method == "scann" else 3)
    write_sealed(folder.parent / "DONE", {"files": describe(tmp_path, paths)})
    for path in paths:
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(DataError, match=rf"{path.name} .*--redo=index") as caught:
                load_index(folder)
            assert not isinstance(caught.value, StaleIndexError)
            path.write_bytes(content)
    load_index(folder)


def test_an_index_of_another_version_is_refused(tmp_path):
    build().save(tmp_path / "index")
    description = tmp_path / "index" / "index.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"settings": {"metod": "exact"}}))
    with pytest.raises(DataError, match="metod is not a setting"):
        load_index(tmp_path / "index")


def test_a_half_written_index_is_replaced(tmp_path):
    folder = tmp_path / "index"
    build(seed=0).save(folder)
    (folder / "index.json").unlink()
    (folder / "left_over").touch()
    build(seed=1).save(folder)
    np.testing.assert_array_equal(load_index(folder).embeddings, build(seed=1).embeddings)
    assert {path.name for path in folder.iterdir()} == {"embeddings.npy", "groups.npy", "index.json"}


def test_refuses_embeddings_that_are_not_numbers():
    rows = unit(10, 0)
    rows[4, 2] = np.nan
    with pytest.raises(DataError, match="1 of 10 embeddings are not finite in float32, the first is row 4"):
        build_index(rows, settings(), encoder_hash="a")
    with pytest.raises(DataError, match="not finite in float16, the first is row 0"):
        build_index(unit(10, 0) * 1e6, settings(dtype="float16"), encoder_hash="a")
    with pytest.raises(DataError, match="nothing to index"):
        build_index(unit(0, 0), settings(), encoder_hash="a")
