"""Metrics of texts as numbers."""

from empax.evaluation import text
from empax.evaluation.statistics import estimate


def bleu(hypotheses, references, order=4, variant="nltk"):
    return estimate(text.bleu_statistic(text.count_matches(hypotheses, references, variant), order, variant))


def distinct(responses, n, variant="nltk", *, count=None, seed=0):
    statistic = text.distinct_statistic(responses, n, variant)
    return estimate(statistic if count is None else statistic.sample(count, seed=seed))
