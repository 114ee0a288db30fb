"""Emotion, intent and empathy: accuracies, F1 scores, confusion matrices, sentiment distance.

Letters: N rows, C classes, R resamples.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from empax.core.types import LEVELS, Prediction
from empax.evaluation.statistics import SumStatistic, divide

Average = Literal["weighted", "macro"]


def accuracy(labels: Sequence[str], predictions: Sequence[str]) -> float:
    """Returns the percentage of predictions equal to their labels; 0.0 for empty input.

    Raises ValueError if the numbers of labels and predictions differ.
    """
    hits = sum(label == prediction for label, prediction in zip(labels, predictions, strict=True))
    return 100.0 * hits / len(labels) if labels else 0.0


def exemplar_matches(rows: Sequence[Prediction]) -> Float[np.ndarray, "N 2"]:
    """Counts per row the exemplars whose dialogue has the row's emotion, and all exemplars with a known emotion.

    Both are 0 in rows without an emotion. Source: REG, Table 5 (there judged by hand, on 500 contexts).
    """
    counts = np.zeros((len(rows), 2))
    for i, row in enumerate(rows):
        emotions = [exemplar["emotion"] for exemplar in row.exemplars if exemplar.get("emotion")] if row.emotion else []
        counts[i] = sum(emotion == row.emotion for emotion in emotions), len(emotions)
    return counts


@functools.cache
def _vader():
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # slow: it reads its lexicon

    return SentimentIntensityAnalyzer()


@functools.lru_cache(maxsize=100_000)
def sentiment(text: str) -> float:
    """Returns VADER's compound score, in [-1, 1]; 0.0 for an empty text."""
    return float(_vader().polarity_scores(text)["compound"])


def sentiment_distances(responses: Sequence[str], references: Sequence[str]) -> Float[np.ndarray, " N"]:
    """Returns |compound(response) - compound(reference)| of every row, in [0, 2]. Source: LEMPEx."""
    pairs = zip(responses, references, strict=True)
    return np.asarray([abs(sentiment(a) - sentiment(b)) for a, b in pairs], np.float64)


def confusion_matrix(labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]) -> Int[np.ndarray, "C C"]:
    """Returns counts, rows = label, columns = prediction, both in the order of `names`, which has all of them."""
    matrix = np.zeros((len(names), len(names)), np.int64)
    np.add.at(matrix, _indices(labels, predictions, names), 1)
    return matrix


def f1_of_confusion(matrices: Float[np.ndarray, "R C C"], average: Average) -> Float[np.ndarray, " R"]:
    r"""Returns the F1 in percent of confusion matrices.

    .. math:: F_1(c) = \frac{2 m_{cc}}{\sum_j m_{cj} + \sum_i m_{ic}}

    averaged over the classes that occur as label or prediction ("macro"), or weighted by their number of labels
    ("weighted"). Equals scikit-learn's with zero_division=0; NaN for an empty matrix.
    """
    hits = np.diagonal(matrices, axis1=1, axis2=2)
    num_labels, num_predictions = matrices.sum(axis=2), matrices.sum(axis=1)
    scores = np.nan_to_num(divide(2.0 * hits, num_labels + num_predictions))
    weights = num_labels if average == "weighted" else (num_labels + num_predictions > 0).astype(np.float64)
    return 100.0 * divide((scores * weights).sum(axis=1), weights.sum(axis=1))


def merge_levels(levels: Sequence[str]) -> list[str]:
    """Merges the levels mid and high of a mechanism into "some"; keeps ""."""
    return ["some" if level in LEVELS[1:] else level for level in levels]


MERGED_LEVELS = (LEVELS[0], "some")
"""The levels after `merge_levels`."""


def kappa_of_confusion(matrices: Float[np.ndarray, "R C C"]) -> Float[np.ndarray, " R"]:
    r"""Returns Cohen's kappa of confusion matrices: agreement beyond that of the marginals, in [-1, 1].

    .. math:: \kappa = \frac{p_o - p_e}{1 - p_e}

    0.0 for an empty matrix, or if the marginals alone agree fully. Source: Cohen 1960.
    """
    totals = matrices.sum(axis=(1, 2))
    observed = np.nan_to_num(divide(np.trace(matrices, axis1=1, axis2=2), totals))
    chance = np.nan_to_num(divide((matrices.sum(axis=1) * matrices.sum(axis=2)).sum(axis=1), totals**2))
    return np.nan_to_num(divide(observed - chance, 1.0 - chance))


def cohens_kappa(labels: Sequence[str], predictions: Sequence[str]) -> float:
    """Returns the agreement of two lists beyond chance, see `kappa_of_confusion`; 0.0 for empty input."""
    return float(kappa_of_confusion(_matrix_of_found(labels, predictions))[0])


def f1(labels: Sequence[str], predictions: Sequence[str], average: Average) -> float:
    """Returns the F1 in percent, 0.0 for empty input: weighted by label counts (EmpRL's Emp-F1), or macro (LEMPEx)."""
    return float(np.nan_to_num(f1_of_confusion(_matrix_of_found(labels, predictions), average))[0])


def _matrix_of_found(labels: Sequence[str], predictions: Sequence[str]) -> Float[np.ndarray, "1 C C"]:
    """Returns the confusion matrix over the classes that occur."""
    return confusion_matrix(labels, predictions, sorted({*labels, *predictions})).astype(np.float64)[None]


def f1_statistic(
    labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]], names: Sequence[str], average: Average
) -> SumStatistic:
    """Returns the mean F1 of several classifiers over the same N rows, for intervals.

    Rows with an unknown label or prediction "" are ignored; `names` are the classes.
    """
    num_classes, num_rows = len(names), len(labels[0])
    cells = np.zeros((num_rows, len(labels), num_classes, num_classes))
    for task, (golds, guesses) in enumerate(zip(labels, predictions, strict=True)):
        known = np.asarray([bool(gold and guess) for gold, guess in zip(golds, guesses, strict=True)], bool)
        rows = np.flatnonzero(known).tolist()
        gold, guess = _indices([golds[i] for i in rows], [guesses[i] for i in rows], names)
        cells[rows, task, gold, guess] = 1.0

    def combine(sums: Float[np.ndarray, "R M"]) -> Float[np.ndarray, " R"]:
        matrices = sums.reshape(len(sums) * len(labels), num_classes, num_classes)
        return f1_of_confusion(matrices, average).reshape(len(sums), len(labels)).mean(axis=1)

    return SumStatistic(cells.reshape(num_rows, -1), combine)


def _indices(
    labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    index = {name: i for i, name in enumerate(names)}
    gold, guess = (np.asarray([index[label] for label in side], np.int64) for side in (labels, predictions))
    return gold, guess
