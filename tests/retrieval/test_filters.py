"""Exemplars of one emotion, of one turn, of different dialogues: what is dropped, and what comes first."""

import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from empax.retrieval.filters import ExemplarFilter, find_exemplars, fit_emotions, load_filter
from empax.retrieval.index import IndexSettings, build_index

ROWS, DIM, K = 60, 6, 4
TURNS = np.array([1, 3, 5] * 3, np.int32)  # of the queries


@pytest.fixture(scope="module")
def space():
    """Vectors of rows and queries, groups and emotions."""
    rng = np.random.default_rng(0)
    keys, queries = (rng.normal(size=(n, DIM)).astype(np.float32) for n in (ROWS, 9))
    emotions, gold = rng.integers(3, size=ROWS), rng.integers(3, size=9)
    emotions[:5], gold[4] = -1, -1
    groups, of_queries = np.arange(ROWS) // 3, np.arange(9) * 2
    index = build_index(keys, IndexSettings(method="exact"), encoder_hash="x", groups=groups)
    return index, keys, queries, groups, of_queries, emotions.astype(np.int32), gold.astype(np.int32)


def search(space, filter):
    index, _, queries, _, of_queries, _, gold = space
    return find_exemplars(index, queries, K, groups=of_queries, emotions=gold, turns=TURNS, filter=filter)


def expected(space, wanted, searched):
    """By hand: the best rows of other dialogues, of those searched the ones with the emotion."""
    _, keys, queries, groups, of_queries, emotions, _ = space
    rows = []
    for q, emotion in enumerate(wanted):
        order = [r for r in np.argsort(-(keys @ queries[q])) if groups[r] != of_queries[q]][:searched]
        kept = [r for r in order if emotion < 0 or emotions[r] == emotion][:K]
        rows.append([*kept, *[-1] * (K - len(kept))])
    return np.array(rows)


@pytest.mark.parametrize("searched", [K, 12, 100])
def test_only_rows_of_the_gold_emotion_stay(space, searched):
    emotions, gold = space[5:]
    found = search(space, ExemplarFilter("gold_emotion", searched, emotions))
    np.testing.assert_array_equal(found.ids, expected(space, gold, searched))
    assert (np.diff(np.where(found.ids < 0, -1e9, found.scores), axis=1) <= 0).all()
    assert (found.scores[found.ids < 0] == -np.inf).all()
    assert ((found.ids < 0).any(axis=1).sum() == 0) == (searched == 100)


def test_the_predicted_emotion_reads_the_query_alone(space):
    index, keys, queries, _, of_queries, emotions, gold = space
    filter = ExemplarFilter("predicted_emotion", 100, emotions, fit_emotions(keys, emotions))
    predicted = filter.predict(queries)
    assert len(set(predicted.tolist())) > 1
    found = search(space, filter)
    np.testing.assert_array_equal(found.ids, expected(space, predicted, 100))
    other = find_exemplars(index, queries, K, groups=of_queries, emotions=(gold + 1) % 3, turns=TURNS, filter=filter)
    np.testing.assert_array_equal(other.ids, found.ids)


def test_without_a_filter_it_is_the_index(space):
    index, _, queries, _, of_queries, _, _ = space
    found = search(space, None)
    plain = index.search(queries, K, query_groups=of_queries)
    np.testing.assert_array_equal(found.ids, plain.ids)
    assert (found.ids != search(space, ExemplarFilter("gold_emotion", 100, space[5])).ids).any()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["none", "gold_emotion"])
def test_one_row_of_a_dialogue_stays_and_those_of_the_turn_come_first(space, kind, turned):
    _, keys, queries, groups, of_queries, emotions, gold = space
    turns = np.tile(np.array([1, 3, 1], np.int32), ROWS // 3)
    searched = 40 if turned or kind != "none" else 0
    filter = ExemplarFilter(kind, searched, emotions, turns=turns if turned else None, one_per_dialogue=True)
    found = search(space, filter)
    for q in range(len(queries)):
        order = [r for r in np.argsort(-(keys @ queries[q])) if groups[r] != of_queries[q]][:40]
        order = [r for r in order if kind == "none" or gold[q] < 0 or emotions[r] == gold[q]]
        if turned:
            order.sort(key=lambda r: turns[r] != TURNS[q])
        best = [r for i, r in enumerate(order) if groups[r] not in groups[order[:i]]][:K]
        assert found.ids[q].tolist() == [*best, *[-1] * (K - len(best))]
        np.testing.assert_allclose(found.scores[q, : len(best)], keys[best] @ queries[q], rtol=1e-5)
    if turned and kind == "none":  # nobody is of the fifth turn: others stand in
        assert (found.ids >= 0).all()


@pytest.mark.oracle
def test_emotions_are_told_by_discriminant_analysis(space):
    _, keys, queries, _, _, emotions, _ = space
    known = emotions >= 0
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.01).fit(keys[known].astype(float), emotions[known])
    scores = np.concatenate([queries, np.ones((len(queries), 1))], axis=1) @ fit_emotions(keys, emotions)
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares[:, :3], theirs.predict_proba(queries), rtol=1e-3)
    assert shares[:, 3:].max() == 0.0  # no row has them


def test_an_emotion_between_two_others_is_told():
    emotions = np.repeat(np.arange(3), 10)
    vectors = (emotions[:, None] - 1 + 0.1 * np.random.default_rng(0).normal(size=(30, 1))).astype(np.float32)
    filter = ExemplarFilter("predicted_emotion", 0, emotions, fit_emotions(vectors, emotions))
    np.testing.assert_array_equal(filter.predict(vectors), emotions)


def test_a_filter_is_kept_beside_its_index(space, tmp_path):
    assert load_filter(tmp_path) is None
    emotions = space[5]
    for kind, weights in (("gold_emotion", None), ("predicted_emotion", np.ones((DIM + 1, 32), np.float32))):
        turns = None if weights is None else np.arange(ROWS)
        ExemplarFilter(kind, 7, emotions, weights, turns, one_per_dialogue=weights is None).save(tmp_path)
        found = load_filter(tmp_path)
        assert (found.kind, found.searched, found.one_per_dialogue) == (kind, 7, weights is None)
        np.testing.assert_array_equal(found.turns, turns)
        np.testing.assert_array_equal(found.emotions, emotions)
        np.testing.assert_array_equal(found.weights, weights)
