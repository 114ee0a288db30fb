"""Retrieval measured: the place of the gold response, and what exemplars are like."""

import tracemalloc

import numpy as np
import pytest

from empax.evaluation.retrieval import bm25_vectors, exemplar_statistics, gold_ranks, recall_statistics, with_intervals
from empax.evaluation.statistics import estimate


def test_the_place_of_the_gold_response_among_all_others():
    rng = np.random.default_rng(0)
    queries, gold = rng.normal(size=(2, 700, 4))
    keys = rng.normal(size=(90, 4))
    key_texts, gold_texts = rng.integers(50, size=90), rng.integers(50, size=700)
    key_groups, groups = rng.integers(30, size=90), rng.integers(30, size=700)
    found = gold_ranks(queries, gold, keys, [(gold_texts, key_texts), (groups, key_groups)])
    expected = [
        1
        + sum(
            queries[q] @ keys[n] > queries[q] @ gold[q]
            for n in range(90)
            if key_texts[n] != gold_texts[q] and key_groups[n] != groups[q]
        )
        for q in range(700)
    ]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_an_encoder_with_one_vector_for_all_texts_finds_no_gold_response(noise):
    rng = np.random.default_rng(0)
    vectors = 0.5 + noise * rng.normal(size=(300, 4))
    ranks = gold_ranks(vectors[:9], vectors[9:18], vectors[18:], [(np.arange(9), np.arange(9, 291))] * 2)
    np.testing.assert_array_equal(ranks, 1 + 282 // 2)


def test_recall_is_the_share_of_contexts_whose_response_is_among_the_first():
    found = recall_statistics(np.array([1, 2, 10, 11, 101]), "all")
    values = {name: estimate(statistic) for name, statistic in found.items()}
    expected = {"gold_recall_at_1:all": 20.0, "gold_recall_at_10:all": 60.0, "gold_recall_at_100:all": 80.0}
    assert values == pytest.approx(expected)


# Two contexts of one dialogue, one of another, with ten places for exemplars.
TEXTS = ("oh no", "that is great", "why", "oh no", "i see now")
FOUND = np.full((3, 10), -1)
FOUND[0, :3] = 0, 1, 2
FOUND[1, :2] = 3, 4
FOUND[2, :6] = 1, 1, 2, 4, 0, 1


def statistics(found=FOUND, **changes):
    options = {
        "texts": TEXTS,
        "emotions": np.array([7, 8, -1, 7, 9]),
        "wanted": np.array([7, 7, 8]),
        "dialogues": np.array([40, 40, 50]),
        "turns": np.array([1, 3, 1]),
    }
    return exemplar_statistics(found, **{**options, **changes})


def test_exemplars_of_worked_numbers():
    found = {name: estimate(statistic) for name, statistic in statistics().items()}
    # Of the first: one of two that are known; of the second one of two; of the third two of four, three of five.
    assert found["exemplar_emotion_match_at_5"] == pytest.approx(100 * 4 / 8)
    assert found["exemplar_emotion_match_at_10"] == pytest.approx(100 * 5 / 9)
    assert found["exemplar_words"] == pytest.approx((2 + 3 + 1 + 2 + 3 + 3 + 3 + 1 + 3 + 2 + 3) / 11)
    assert found["exemplar_distinct"] == pytest.approx(100 * 4 / 11)
    # "oh no" again, "i see now" not.
    assert found["exemplar_overlap"] == found["exemplar_overlap:3_turns"] == pytest.approx(50.0)


def test_without_a_later_turn_there_is_no_overlap_to_tell():
    told = with_intervals(statistics(dialogues=np.array([1, 2, 3])), np.array([1, 2, 3]))
    assert "exemplar_overlap" not in told
    assert "exemplar_words" in told


def test_unknown_emotions_match_nothing():
    told = with_intervals(statistics(wanted=np.full(3, -1)), np.array([40, 40, 50]))
    assert not any("match" in name for name in told)


def test_one_long_text_makes_no_other_text_large():
    """A corpus may hold texts of 100,000 characters: 300 times that would be 120 MB."""
    tracemalloc.start()
    found = statistics(texts=[*TEXTS, *map(str, range(300)), "x" * 100_000], emotions=np.full(306, 7))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10e6
    assert estimate(found["exemplar_distinct"]) == pytest.approx(100 * 4 / 11)


def test_intervals_draw_whole_dialogues():
    """Contexts of one dialogue that always agree count as one."""
    rng = np.random.default_rng(1)
    hits = np.repeat(rng.random(100) < 0.4, 4)
    apart, together = (
        with_intervals(recall_statistics(np.where(hits, 1, 200), "all"), dialogues)["gold_recall_at_1:all"]
        for dialogues in (np.arange(400), np.repeat(np.arange(100) + 7, 4))
    )
    assert apart["value"] == together["value"]
    width = [m["high"] - m["low"] for m in (apart, together)]
    assert width[1] == pytest.approx(2 * width[0], rel=0.25)


def test_bm25_is_the_dot_product_of_its_vectors():
    contexts = ["My dog died.", "we won the cup , we won"]
    gold = ["i am sorry about your dog", "you won ? you won !"]
    keys = ["what a dog", "sorry", "which cup did you win , the cup of the year ?", ""]
    queries, of_gold, of_keys = bm25_vectors(contexts, gold, keys, k1=1.2, b=0.6)
    texts = [text.lower().replace(".", " .").split() for text in (*gold, *keys)]
    length = np.mean([len(text) for text in texts])

    def score(context, text):
        total = 0.0
        for word in context.lower().replace(".", " .").split():
            count, among = text.count(word), sum(word in other for other in texts)
            rarity = np.log(1 + (6 - among + 0.5) / (among + 0.5))
            total += rarity * count * 2.2 / (count + 1.2 * (0.4 + 0.6 * len(text) / length))
        return total

    expected = np.array([[score(context, text) for text in texts] for context in contexts])
    np.testing.assert_allclose((queries @ of_gold.T).toarray(), expected[:, :2])
    np.testing.assert_allclose((queries @ of_keys.T).toarray(), expected[:, 2:])
    ignored = [(np.array([0, 1]), np.array([2, 3, 4, 5])), (np.array([0, 1]), np.array([2, 2, 2, 2]))]
    ranks = gold_ranks(queries, of_gold, of_keys, ignored)
    np.testing.assert_array_equal(ranks, gold_ranks(*(m.toarray() for m in (queries, of_gold, of_keys)), ignored))
    np.testing.assert_array_equal(ranks, 1 + (expected[:, 2:] > expected[[0, 1], [0, 1], None]).sum(axis=1))
