"""Metrics of texts as numbers, and rows of predictions."""

from empax.core.types import Prediction
from empax.evaluation import text
from empax.evaluation.statistics import estimate


def bleu(hypotheses, references, order=4, variant="nltk"):
    return estimate(text.bleu_statistic(text.count_matches(hypotheses, references, variant), order, variant))


def distinct(responses, n, variant="nltk", *, count=None, seed=0):
    statistic = text.distinct_statistic(responses, n, variant)
    return estimate(statistic if count is None else statistic.sample(count, seed=seed))


def rows_of(responses, references=None, **fields):
    """Rows of dialogues of two turns each; the fields are of every row."""
    references = references or [f"word{i % 7} and word{i % 3} ." for i in range(len(responses))]
    return [
        Prediction((f"turn {i}",), response, reference, **{"id": f"d{i // 2}#{2 + 2 * (i % 2)}", **fields})
        for i, (response, reference) in enumerate(zip(responses, references, strict=True))
    ]
