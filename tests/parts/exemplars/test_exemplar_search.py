"""The search behind an answer: own dialogue and filter."""

import numpy as np

from empax.core.types import EMOTIONS, Instance
from empax.data.exemplars import dialogue_groups, emotion_ids
from empax.parts.exemplars.parts import ExemplarSearch
from empax.retrieval.filters import ExemplarFilter
from empax.retrieval.index import IndexSettings, build_index

ROWS = [Instance(f"d{i}#2", (f"context {i}",), f"reply {i}", EMOTIONS[i % 3]) for i in range(12)]


class Encoder:
    """Embeds everything as one vector."""

    def embed_queries(self, instances, *, progress=None, mesh=None):
        return np.ones((len(instances), 2), np.float32)


def searched(filter):
    """Four rows for three contexts, which all like the first rows best: one of them is of the corpus, one unknown."""
    keys = np.linspace(2.0, 1.0, len(ROWS), dtype=np.float32)[:, None] * np.ones((1, 2), np.float32)
    index = build_index(keys, IndexSettings("exact"), encoder_hash="x", groups=dialogue_groups(ROWS))
    asked = [ROWS[4], Instance("other#2", ("new",), "", EMOTIONS[2]), Instance("chat#1", ("hello",), "", "")]
    search = ExemplarSearch(None, None, Encoder(), index, None, filter)
    return search.search(asked, 4)[0].tolist()


def test_without_a_filter_the_best_of_other_dialogues_come_first():
    assert searched(None) == [[0, 1, 2, 3]] * 3


def test_a_filter_holds_for_answers_too():
    gold = ExemplarFilter("gold_emotion", 8, emotion_ids(ROWS))
    assert searched(gold) == [[1, 7, -1, -1], [2, 5, -1, -1], [0, 1, 2, 3]]
    told = np.zeros((3, len(EMOTIONS)), np.float32)
    told[:, 0] = 1.0  # whoever asks is of the first emotion
    predicted = ExemplarFilter("predicted_emotion", 12, emotion_ids(ROWS), told)
    assert searched(predicted) == [[0, 3, 6, 9]] * 3
