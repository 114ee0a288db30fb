"""The index stage on made-up embeddings: what is searched, found and left behind."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from empax.core.config import to_settings
from empax.core.files import WorkDir, read_json, write_jsonl
from empax.core.system import RunContext
from empax.core.types import Instance
from empax.data.dialogues import instance_to_row
from empax.data.store import load_candidates, load_instances
from empax.pipeline import index
from empax.retrieval.filters import load_filter
from empax.retrieval.index import load_index
from tests.plans import plan_of

DIALOGUES = 20


class Angles:
    """Embeds a text that ends in a number as the point at that angle; keys and queries alike."""

    hash = "angles"

    def _embed(self, instances, progress):
        angles = np.array([float(i.context[-1].split()[-1]) for i in instances])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    embed_queries = embed_keys = lambda self, instances, *, progress=None, mesh=None: self._embed(instances, progress)


def make_instances(split):
    """Two instances a dialogue, at nearly one angle."""
    offset = 0.0 if split == "train" else 0.01
    return [
        Instance(f"{split}-{d}#{2 * t}", (f"at {0.1 * d + 0.001 * t + offset}",), "yes", "sad")
        for d in range(DIALOGUES)
        for t in (1, 2)
    ]


@pytest.fixture
def run(tmp_path):
    context = RunContext(WorkDir(tmp_path), plan_of({"seed": 3}), "index")
    for split in ("train", "validation"):
        write_jsonl(context.files.instances(split), map(instance_to_row, make_instances(split)))
    return context


def build(run, reads=None, **values):
    named = []

    def load_encoder_of(run, stage):
        named.append(stage)
        return reads or Angles()

    values = {"store": {"method": "exact"}, "candidates": 4, **values}
    settings = to_settings(index.Settings, values, where="config.index")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "load_encoder_of", load_encoder_of)
        index.run(settings, run)
    return named


def test_candidates_are_the_nearest_of_other_dialogues(run):
    assert build(run, encoder="retriever") == ["retriever"]
    train = make_instances("train")
    angles = np.array([float(i.context[0].split()[-1]) for i in train])
    positions, ids = load_candidates(run, "index", "train")
    assert sorted(positions) == list(range(2 * DIALOGUES))
    for position, row in zip(positions, ids, strict=True):
        others = [i for i in range(len(train)) if train[i].dialogue_id != train[position].dialogue_id]
        nearest = sorted(others, key=lambda i: abs(angles[i] - angles[position]))
        best = {train[i].dialogue_id: i for i in reversed(nearest)}  # of each dialogue
        assert set(row) == set(sorted(best.values(), key=nearest.index)[:4])
    positions, ids = load_candidates(run, "index", "validation")
    nearest = np.abs(angles[ids[:, 0]] - (0.1 * (positions // 2) + 0.001 * (positions % 2 + 1) + 0.01))
    assert nearest.max() < 0.02
    about = read_json(run.directory / "index.json")
    assert (about["rows"], about["method"], about["recall_at_10"]) == (2 * DIALOGUES, "exact", 1.0)
    stored = load_index(run.files.index("index"), encoder_hash="angles")
    assert len(stored) == 2 * DIALOGUES


def test_a_limited_search_is_part_of_a_larger_one_and_of_the_seed(run):
    build(run, queries={"train": 10})
    few, few_ids = load_candidates(run, "index", "train")
    assert not (run.directory / "candidates_validation.npz").exists()
    build(run, queries={"train": 25})
    more, more_ids = load_candidates(run, "index", "train")
    np.testing.assert_array_equal(more[:10], few)
    np.testing.assert_array_equal(more_ids[:10], few_ids)
    assert len(set(more)) == 25
    other = RunContext(run.files, plan_of({"seed": 4}), "index")
    build(other, queries={"train": 25})
    assert not np.array_equal(load_candidates(run, "index", "train")[0], more)


def with_emotions(run):
    """Two emotions by turns, two texts of each dialogue; test contexts, too."""
    for split in ("train", "validation", "test"):
        rows = [
            dataclasses.replace(
                one,
                emotion=("sad", "joyful")[n // 2 % 2],
                response=f"reply {n}",
                context=(*["before", "and"] * (n % 2), *one.context),
            )
            for n, one in enumerate(make_instances(split))
        ]
        write_jsonl(run.files.instances(split), map(instance_to_row, rows))


@pytest.mark.parametrize("kind", ["gold_emotion", "predicted_emotion"])
def test_a_filter_leaves_exemplars_of_one_emotion_and_says_its_name(run, kind, caplog):
    with_emotions(run)
    with caplog.at_level("INFO", logger="empax"):
        build(run, filter=kind, searched=8, candidates=5, queries={"train": 0, "test": 0})
    train = load_instances(run, "train")
    for split in ("train", "test"):
        positions, ids = load_candidates(run, "index", split)
        asked = [load_instances(run, split)[p] for p in positions]
        emotions = [{train[row].emotion for row in rows if row >= 0} for rows in ids]
        assert max(map(len, emotions)) == 1
        right = np.mean([found == {one.emotion} for found, one in zip(emotions, asked, strict=True) if found])
        assert right == 1.0 if kind == "gold_emotion" else right < 0.9  # an angle tells no emotion
        assert (ids < 0).any()
        assert (ids[:, 0] >= 0).all()
        with np.load(run.directory / f"candidates_{split}.npz") as arrays:
            assert arrays["filter"].item() == kind
    about = read_json(run.directory / "index.json")
    assert about.get("leak") == ("gold_emotion" if kind == "gold_emotion" else None)
    assert about["filter"]["kind"] == kind
    assert about["filter"]["test"]["with_too_few"] == int((ids < 0).any(axis=1).sum()) > 0
    assert ("emotion_accuracy" in about["filter"]["test"]) == (kind == "predicted_emotion")
    assert f"exemplars (filter: {kind})" in caplog.text
    assert load_filter(run.directory).kind == kind


def test_without_a_filter_nothing_of_one_is_left(run):
    build(run, one_per_dialogue=False)
    with np.load(run.directory / "candidates_train.npz") as arrays:
        assert set(arrays) == {"positions", "ids"}
    assert load_filter(run.directory) is None
    assert not {"leak", "filter", "quality"} & set(read_json(run.directory / "index.json"))


def test_quality_is_measured_on_the_splits_that_are_named(run):
    with_emotions(run)
    build(run, quality={"test": 0, "validation": 7})
    about = read_json(run.directory / "index.json")["quality"]
    assert [about[split]["contexts"] for split in ("test", "validation")] == [2 * DIALOGUES, 7]
    metrics = about["test"]["metrics"]
    assert all(m["low"] <= m["value"] <= m["high"] for m in metrics.values())
    # Keys and queries are one point here: a response's own rows come first, next to those of its neighbours.
    assert metrics["gold_recall_at_1:all"]["value"] == pytest.approx(
        metrics[f"gold_recall_at_1:{2 * DIALOGUES + 1}"]["value"]
    )
    assert metrics["exemplar_words"]["value"] == 2.0
    assert 40 < metrics["exemplar_emotion_match_at_10"]["value"] < 60
    assert metrics["exemplar_overlap"]["value"] > 80  # both turns lie at nearly one angle
    assert "exemplar_overlap:3_turns" in metrics


def test_quality_counts_ten_exemplars_where_fewer_are_asked_for(run):
    with_emotions(run)
    build(run, candidates=1, quality={"validation": 0})
    found = read_json(run.directory / "index.json")["filter"]
    assert (found["validation"]["contexts"], found["validation"]["with_too_few"]) == (2 * DIALOGUES, 0)


class Exchanges(Angles):
    """Reads of an exemplar the number of its context where there is one, else that of its response."""

    def embed_keys(self, instances, *, progress=None, mesh=None):
        read = [i if i.context else dataclasses.replace(i, context=(i.response,)) for i in instances]
        return self._embed(read, progress)


@pytest.mark.parametrize(("key", "recall"), [("exchange", 0.0), ("response", 100.0)])
def test_a_gold_exchange_is_not_found_by_the_context_that_it_holds(run, key, recall):
    """Gold responses lie opposite of their contexts, those of training at one angle with theirs."""
    for split, away in (("train", 0.0), ("validation", np.pi)):
        rows = [
            dataclasses.replace(i, response=f"yes {float(i.context[0].split()[-1]) + away}")
            for i in make_instances(split)
        ]
        write_jsonl(run.files.instances(split), map(instance_to_row, rows))
    plan = dataclasses.replace(run.plan, system_settings=SimpleNamespace(key=key))
    build(dataclasses.replace(run, plan=plan), Exchanges(), quality={"validation": 0})
    metrics = read_json(run.directory / "index.json")["quality"]["validation"]["metrics"]
    # A gold exchange, read whole, lies where its context does.
    assert metrics["gold_recall_at_1:all"]["value"] == recall


def test_recall_is_measured_without_queries_too(run):
    build(run, queries={})
    assert read_json(run.directory / "index.json")["recall_at_10"] == 1.0


def test_a_corpus_beyond_one_machine_is_embedded_by_beam_and_searched_by_milvus(run):
    build(run)
    alone = {split: load_candidates(run, "index", split) for split in ("train", "validation")}
    uri = str(run.files.root / "rows.db")
    store = {"method": "milvus", "milvus": {"uri": uri, "index_type": "FLAT", "build": {}, "search": {}}}
    build(run, beam=("--runner=DirectRunner",), store=store)
    keys = Angles().embed_keys(make_instances("train"))
    for split, (positions, ids) in alone.items():
        again = load_candidates(run, "index", split)
        np.testing.assert_array_equal(again[0], positions)
        queries = Angles().embed_queries(make_instances(split))[positions]
        scores = [np.einsum("QD,QMD->QM", queries, keys[found]) for found in (ids, again[1])]
        np.testing.assert_allclose(*scores, atol=1e-6)  # neighbours on either side may be as near
    about = read_json(run.directory / "index.json")
    assert (about["method"], about["recall_at_10"]) == ("milvus", 1.0)
    assert list((run.directory / "parts").glob("*/part-000000.npy"))
