import functools
import random
import warnings

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, f1_score

from empax.core.types import Prediction
from empax.evaluation import empathy
from empax.evaluation.scoring import make_statistics
from empax.evaluation.statistics import estimate

NAMES = ("low", "mid", "high", "never")


def labels(seed, rows=80):
    rng = random.Random(seed)
    gold = rng.choices(NAMES[:3], [5, 2, 1], k=rows)
    return gold, [label if rng.random() < 0.5 else rng.choice(NAMES[:3]) for label in gold]


def row(**fields):
    return Prediction(context=("hi",), response="r", reference="r", **fields)


@pytest.mark.parametrize("average", ["weighted", "macro"])
@pytest.mark.parametrize("seed", [0, 1])
def test_f1_matches_scikit_learn(average, seed):
    gold, guess = labels(seed)
    ours = functools.partial(empathy.f1, average=average)
    assert ours(gold, guess) == pytest.approx(100 * f1_score(gold, guess, average=average))
    only_low = ["low"] * len(gold)  # classes that are never predicted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = f1_score(gold, only_low, average=average)
    assert ours(gold, only_low) == pytest.approx(100 * expected)
    assert ours([], []) == 0.0


def test_confusion_matrix_matches_scikit_learn():
    gold, guess = labels(2)
    np.testing.assert_array_equal(
        empathy.confusion_matrix(gold, guess, NAMES), confusion_matrix(gold, guess, labels=list(NAMES))
    )


def test_f1_statistic_is_the_mean_over_classifiers_of_the_rows_that_count():
    (gold, guess), (gold2, guess2) = labels(3), labels(4)
    gold2[:10] = [""] * 10
    statistic = empathy.f1_statistic([gold, gold2], [guess, guess2], NAMES, "weighted")
    weighted = functools.partial(empathy.f1, average="weighted")
    expected = (weighted(gold, guess) + weighted(gold2[10:], guess2[10:])) / 2
    assert estimate(statistic) == pytest.approx(expected)
    weights = np.zeros((1, len(gold)))
    weights[0, 10:30] = 2.0
    expected = (weighted(gold[10:30], guess[10:30]) + weighted(gold2[10:30], guess2[10:30])) / 2
    assert statistic(weights)[0] == pytest.approx(expected)


def test_accuracies_count_only_rows_with_both():
    rows = [
        row(emotion="sad", emotion_prediction="sad", notes={"intent": "wishing", "intent_prediction": "agreeing"}),
        row(emotion="sad", emotion_prediction="joyful", notes={"intent": "wishing", "intent_prediction": "wishing"}),
        row(emotion="proud", emotion_prediction="proud", notes={"intent": "wishing"}),
        row(emotion="proud"),
    ]
    found = make_statistics(rows, ("emotion_accuracy", "intent_accuracy"))
    assert estimate(found["emotion_accuracy"]) == pytest.approx(200 / 3)
    assert estimate(found["intent_accuracy"]) == pytest.approx(50.0)
    assert list(make_statistics(rows[3:], ("emotion_accuracy", "intent_accuracy"))) == []
    assert empathy.accuracy([], []) == 0.0


def test_exemplar_emotion_match_is_over_exemplars_of_rows_with_an_emotion():
    rows = [
        row(emotion="sad", exemplars=({"emotion": "sad"}, {"emotion": "proud"}, {"text": "no emotion known"})),
        row(emotion="proud", exemplars=({"emotion": "proud"},)),
        row(exemplars=({"emotion": "proud"},)),
        row(emotion="proud"),
    ]
    np.testing.assert_array_equal(empathy.exemplar_matches(rows), [[1, 2], [1, 1], [0, 0], [0, 0]])
    name = "exemplar_emotion_match"
    assert estimate(make_statistics(rows, (name,))[name]) == pytest.approx(200 / 3)
    assert not make_statistics(rows[2:], (name,))


def test_sentiment_mae_is_the_distance_of_compound_scores():
    assert (
        empathy.sentiment("I love this, it is great!") > 0.5 > -0.5 > empathy.sentiment("This is horrible, I hate it.")
    )
    responses, references = ["I love it", ""], ["I hate it", "great"]
    expected = [empathy.sentiment("I love it") - empathy.sentiment("I hate it"), empathy.sentiment("great")]
    assert empathy.sentiment_distances(responses, references).tolist() == pytest.approx(expected)
    assert empathy.sentiment_distances(["same"], ["same"]).tolist() == [0.0]
