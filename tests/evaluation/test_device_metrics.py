"""Metrics on token ids against sacrebleu, NLTK and rouge-score on the same ids written as words."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from empax.evaluation.device_metrics import UtilityWeights, ngram_precision, rouge_l, sentence_bleu, token_f1, utility

WIDTH, REFERENCE_WIDTH = 13, 11

EDGES = [
    ([5, 6, 7, 8, 9], [5, 6, 7, 8, 9]),  # identical
    ([5], [5]),
    ([5, 6], [5, 6]),
    ([5, 6, 7], [5, 6, 7]),
    ([5, 6], [6, 5]),
    ([], [5, 6, 7]),
    ([5, 6, 7], []),
    ([], []),
    ([5, 6, 7], [8, 9]),  # nothing in common
    ([5, 5, 5, 5, 5, 5], [5, 5]),  # clipped
    ([5, 5], [5, 5, 5, 5, 5, 5]),  # short
    ([0, 0, 0], [0, 1, 0]),  # the padding id as a real token
    (list(range(WIDTH)), list(range(REFERENCE_WIDTH))),  # no padding
    ([5, 6, 7, 8], [1, 5, 6, 7, 8, 2]),
]


def make_pairs(seed=0, num=86):
    """Random pairs over a small vocabulary, some of them edited copies, and all edge cases."""
    rng = np.random.default_rng(seed)
    pairs = list(EDGES)
    for index in range(num):
        reference = rng.integers(0, 9, rng.integers(1, REFERENCE_WIDTH + 1)).tolist()
        candidate = rng.integers(0, 9, rng.integers(1, WIDTH + 1)).tolist()
        if index % 2:  # a copy with a few tokens changed
            candidate = [int(rng.integers(0, 9)) if rng.random() < 0.2 else token for token in reference]
        pairs.append((candidate, reference))
    return pairs


PAIRS = make_pairs()


def arrays(pairs, width=WIDTH, reference_width=REFERENCE_WIDTH):
    """Padded ids and masks, as the metrics take them. Padding is 0, which is also a real token."""

    def pad(rows, width):
        ids, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
        for index, row in enumerate(rows):
            ids[index, : len(row)], mask[index, : len(row)] = row, True
        return jnp.asarray(ids), jnp.asarray(mask)

    return *pad([pair[0] for pair in pairs], width), *pad([pair[1] for pair in pairs], reference_width)


def words(ids):
    return [f"w{token}" for token in ids]


@functools.cache
def jitted(metric, **settings):
    return jax.jit(functools.partial(metric, **settings))


class Whitespace:
    def tokenize(self, text):
        return text.split()


@pytest.mark.oracle
def test_sentence_bleu_is_sacrebleus():
    found = jitted(sentence_bleu)(*arrays(PAIRS))
    texts = [(" ".join(words(candidate)), [" ".join(words(reference))]) for candidate, reference in PAIRS]
    expected = [sacrebleu.sentence_bleu(*pair, tokenize="none").score / 100 for pair in texts]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert len(set(np.round(expected, 4))) > 30


@pytest.mark.oracle
def test_rouge_l_is_rouge_scores():
    scorer = RougeScorer(["rougeL"], tokenizer=Whitespace())
    expected = [
        scorer.score(" ".join(words(reference)), " ".join(words(candidate)))["rougeL"].fmeasure
        for candidate, reference in PAIRS
    ]
    np.testing.assert_allclose(jitted(rouge_l)(*arrays(PAIRS)), expected, atol=1e-6)


def squad_f1(candidate, reference):
    common = (Counter(candidate) & Counter(reference)).total()
    if not common:
        return 0.0
    precision, recall = common / len(candidate), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def test_token_f1_is_squads():
    expected = [squad_f1(candidate, reference) for candidate, reference in PAIRS]
    np.testing.assert_allclose(jitted(token_f1)(*arrays(PAIRS)), expected, atol=1e-6)


@pytest.mark.parametrize("metric", [sentence_bleu, token_f1, rouge_l])
def test_padding_changes_nothing(metric):
    narrow = jitted(metric)(*arrays(PAIRS))
    ids, mask, references, reference_mask = arrays(PAIRS, WIDTH + 6, REFERENCE_WIDTH + 9)
    # What stands in the padding does not matter either.
    noisy = jnp.where(mask, ids, 5), mask, jnp.where(reference_mask, references, 5), reference_mask
    np.testing.assert_allclose(jitted(metric)(*noisy), narrow, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_arrays_narrower_than_the_longest_ngram(width):
    pairs = [([4, 5, 6][:width], [4, 5, 6][:width]), ([4, 4, 4][:width], [4, 5, 6][:width])]
    found = jitted(sentence_bleu)(*arrays(pairs, width, width))
    expected = [
        sacrebleu.sentence_bleu(" ".join(words(c)), [" ".join(words(r))], tokenize="none").score / 100 for c, r in pairs
    ]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        (UtilityWeights(), (1 / 3, 1 / 3, 1 / 3)),
        (UtilityWeights(bleu=0.0), (0.0, 0.5, 0.5)),
        (UtilityWeights(bleu=2.0, f1=0.0, rouge_l=6.0), (0.25, 0.0, 0.75)),
        (UtilityWeights(bleu=0.0, f1=0.2, rouge_l=0.0), (0.0, 1.0, 0.0)),
    ],
)
def test_utility_is_the_weighted_mean(weights, parts):
    texts = arrays(PAIRS)
    scores = [np.asarray(jitted(metric)(*texts)) for metric in (sentence_bleu, token_f1, rouge_l)]
    expected = sum(part * score for part, score in zip(parts, scores, strict=True))
    np.testing.assert_allclose(jitted(utility, weights=weights)(*texts), expected, atol=1e-6)


def test_weights_say_what_is_allowed():
    with pytest.raises(ValueError, match=r"f1 = -0.1 .* at least 0"):
        UtilityWeights(f1=-0.1)
    with pytest.raises(ValueError, match="at least one weight"):
        UtilityWeights(0.0, 0.0, 0.0)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_ngram_precision_is_that_of_a_loop_and_padding_counts_nothing(order):
    """The n-grams of a candidate that the reference has, each as often as it comes: unlike BLEU's, not clipped."""
    pairs = make_pairs(3)
    rows = [jnp.asarray([ids + [7] * (15 - len(ids)) for ids in side]) for side in zip(*pairs, strict=True)]
    masks = [jnp.asarray([[t < len(ids) for t in range(15)] for ids in side]) for side in zip(*pairs, strict=True)]
    found = jax.jit(functools.partial(ngram_precision, order=order))(rows[0], masks[0], rows[1], masks[1])
    for (candidate, reference), value in zip(pairs, found, strict=True):
        grams, known = (
            [tuple(ids[i : i + order]) for i in range(len(ids) - order + 1)] for ids in (candidate, reference)
        )
        share = np.mean([gram in known for gram in grams]) if grams else 0.0
        brevity = np.exp(min(0.0, 1.0 - len(reference) / max(len(candidate), 1)))
        assert float(value) == pytest.approx(share * brevity, abs=1e-6)
