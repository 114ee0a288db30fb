"""Text metrics: BLEU, Distinct, ROUGE-L, token F1, and repetitiveness.

Papers use the same names for different computations; here each computation has a separate name. BLEU and Distinct
keep per-row counts, so that intervals are arithmetic on arrays. Letters: N rows, R resamples.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float
from scipy import sparse

from empax.evaluation.statistics import (
    CountStatistic,
    DistinctStatistic,
    Statistic,
    SumStatistic,
    divide,
    mean_statistic,
    ratio_statistic,
)
from empax.evaluation.words import lower_tokens, moel_tokens, tokenize, tokenize_13a

MAX_ORDER = 4
SAMPLED, SAMPLED_VARIANT = 10_000, "of_10000"
"""Number of sampled n-grams of a Distinct-n that does not depend on the length of replies, and its variant's name."""

_EPSILON = 1e-12  # NLTK's method1 with the argument of NEC and DCKS
_METHOD4_K = 5  # NLTK's constant of Chen and Cherry's method 4


_BLEU_TOKENS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "nltk": lower_tokens,
    "nltk_cased": tokenize,
    "sentence_avg": lower_tokens,
    "precision": lower_tokens,
    "moses": lambda text: tuple(text.lower().split()),
    "sacrebleu": tokenize_13a,
    "moel": moel_tokens,
}
BLEU_VARIANTS = tuple(_BLEU_TOKENS)


def _ngrams(texts: Sequence[Sequence[str]], orders: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields for n = 1 to `orders` all n-grams of all texts: ids that equal n-grams share, and the text of each."""
    vocabulary: dict[str, int] = {}
    words = np.asarray([vocabulary.setdefault(word, len(vocabulary)) for text in texts for word in text], np.int64)
    lengths = np.asarray([len(text) for text in texts], np.int64)
    rows = np.repeat(np.arange(len(texts)), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))  # remaining words of the text
    starts, ids = np.arange(len(words)), words
    for order in range(1, orders + 1):
        if order > 1:
            inside = left[starts] >= order
            starts = starts[inside]
            pairs = ids[inside] * max(len(vocabulary), 1) + words[starts + order - 1]
            ids = np.unique(pairs, return_inverse=True)[1]
        yield ids, rows[starts]


def word_counts(texts: Sequence[Sequence[str]]) -> sparse.csr_matrix:
    """Returns the count of each word in each of N texts, [N, V], words in order of first appearance."""
    vocabulary: dict[str, int] = {}
    ids = np.asarray([vocabulary.setdefault(word, len(vocabulary)) for text in texts for word in text], np.int64)
    rows = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    counts = sparse.csr_matrix((np.ones(len(ids)), (rows, ids)), (len(texts), max(len(vocabulary), 1)))
    counts.sum_duplicates()
    return counts


def bleu_tokens(variant: str) -> Callable[[str], tuple[str, ...]]:
    """Returns the tokenizer of a BLEU variant; variants with the same one share their `count_matches`."""
    return _BLEU_TOKENS[variant]


def count_matches(
    hypotheses: Sequence[str], references: Sequence[str], variant: str, *, longest: Sequence[int] | None = None
) -> Float[np.ndarray, "N 10"]:
    """Returns the counts of each row for BLEU.

    Columns 0-3: clipped n-gram matches for n = 1..4; 4-7: n-grams of the hypothesis; 8: its length; 9: the reference's.
    `longest` is the maximum number of the hypothesis's tokens to use per row; None = all.
    """
    split = bleu_tokens(variant)
    n, texts = len(hypotheses), [split(text) for text in (*hypotheses, *references)]
    if longest is not None:
        texts[:n] = [text[:most] for text, most in zip(texts[:n], longest, strict=True)]
    counts = np.zeros((n, 2 * MAX_ORDER + 2))
    lengths = np.asarray([len(text) for text in texts], np.float64).reshape(2, n)
    for order, (ids, rows) in enumerate(_ngrams(texts, MAX_ORDER), start=1):
        keys = (rows % n) * (ids.max(initial=0) + 1) + ids  # an n-gram of a pair of texts
        said, wanted = (np.unique(keys[side], return_counts=True) for side in (rows < n, rows >= n))
        shared, in_said, in_wanted = np.intersect1d(said[0], wanted[0], assume_unique=True, return_indices=True)
        clipped = np.minimum(said[1][in_said], wanted[1][in_wanted])
        counts[:, order - 1] = np.bincount(shared // (ids.max(initial=0) + 1), weights=clipped, minlength=n)
        counts[:, MAX_ORDER + order - 1] = np.maximum(lengths[0] - order + 1, 0)
    counts[:, 8], counts[:, 9] = lengths
    return counts


def bleu_statistic(counts: Float[np.ndarray, "N 10"], order: int, variant: str = "nltk") -> SumStatistic:
    r"""Returns BLEU-`order` in percent, one reference each, of rows counted by `count_matches` with the same variant.

    .. math:: BLEU_n = 100 \min(1, e^{1 - r/c}) \exp\Big(\frac{1}{n} \sum_{i=1}^{n} \log p_i\Big)

    Source: Papineni et al. 2002. Variants:
      nltk: corpus level, lower case, NLTK words, zero precisions become 1e-12 / total (NLTK's method 1): DCKS.
      nltk_cased: the same with the case kept: NEC.
      sentence_avg: mean over rows of sentence BLEU, NLTK words, NLTK's smoothing method 4: DiffusEmp.
      precision: mean over rows of p_n alone, no brevity penalty: EmpDG.
      moses: multi-bleu.perl -lc: white-space tokens, lower case, no smoothing: MoEL, MIME.
      sacrebleu: corpus level, 13a tokens, case kept, exponential smoothing (Post 2018).
      moel: as nltk, of texts cleaned by `words.moel_tokens`, like the released outputs of MoEL and its descendants.
    An empty hypothesis has no n-grams and length 0.
    """
    if variant in ("nltk", "nltk_cased", "moel"):
        return SumStatistic(_nltk_counts(counts), functools.partial(_corpus_bleu, order=order, smooth=_epsilon))
    if variant == "moses":
        return SumStatistic(counts, functools.partial(_corpus_bleu, order=order, smooth=_no_smoothing))
    if variant == "sacrebleu":
        return SumStatistic(counts, functools.partial(_corpus_bleu, order=order, smooth=_exponential))
    if variant == "sentence_avg":
        smooth = functools.partial(_chen_cherry, said=counts[:, 8])
        scores = _corpus_bleu(_nltk_counts(counts), order=order, smooth=smooth)
    else:
        scores = 100.0 * np.nan_to_num(divide(counts[:, order - 1], counts[:, MAX_ORDER + order - 1]))
    return mean_statistic(scores)


def length_ratio_statistic(counts: Float[np.ndarray, "N 10"]) -> SumStatistic:
    """Returns words of all hypotheses over words of all references, of rows counted by `count_matches`."""
    return ratio_statistic(counts[:, 8], counts[:, 9])


def brevity_penalty_statistic(counts: Float[np.ndarray, "N 10"]) -> SumStatistic:
    """Returns BLEU's factor min(1, exp(1 - r / c)) for short hypotheses, in [0, 1]; 0 without a word."""
    return SumStatistic(counts[:, 8:], lambda sums: np.where(sums[:, 0] > 0, np.exp(_log_penalty(sums)), 0.0))


def precision_statistic(counts: Float[np.ndarray, "N 10"], order: int) -> SumStatistic:
    """Returns corpus BLEU without the brevity penalty, in percent: the geometric mean of precisions up to `order`."""

    def combine(sums: Float[np.ndarray, "R 10"]) -> Float[np.ndarray, " R"]:
        precisions = np.nan_to_num(divide(sums[:, :order], sums[:, MAX_ORDER : MAX_ORDER + order]))
        return 100.0 * np.prod(precisions, axis=1) ** (1.0 / order)

    return SumStatistic(counts, combine)


def _log_penalty(lengths: Float[np.ndarray, "R 2"]) -> Float[np.ndarray, " R"]:
    return np.minimum(0.0, 1.0 - lengths[:, 1] / np.maximum(lengths[:, 0], 1e-9))


def _nltk_counts(counts: Float[np.ndarray, "N 10"]) -> Float[np.ndarray, "N 10"]:
    # NLTK counts at least one n-gram per row, even if the row is too short to have one.
    counts = counts.copy()
    counts[:, MAX_ORDER : 2 * MAX_ORDER] = np.maximum(counts[:, MAX_ORDER : 2 * MAX_ORDER], 1.0)
    return counts


_Smooth = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _corpus_bleu(sums: Float[np.ndarray, "R 10"], *, order: int, smooth: _Smooth) -> Float[np.ndarray, " R"]:
    matches, totals = sums[:, :order], sums[:, MAX_ORDER : MAX_ORDER + order]
    precisions = smooth(matches, totals)
    # Without any match there is nothing to smooth; a zero precision makes the product zero.
    positive = (precisions > 0).all(axis=1) & (matches > 0).any(axis=1)
    log_mean = np.log(np.where(precisions > 0, precisions, 1.0)).mean(axis=1)
    return np.where(positive & (sums[:, 8] > 0), 100.0 * np.exp(_log_penalty(sums[:, 8:]) + log_mean), 0.0)


def _no_smoothing(matches: np.ndarray, totals: np.ndarray) -> np.ndarray:
    return matches / np.maximum(totals, 1.0)


def _epsilon(matches: np.ndarray, totals: np.ndarray) -> np.ndarray:
    return np.where(matches == 0, _EPSILON, matches) / np.maximum(totals, 1.0)


def _exponential(matches: np.ndarray, totals: np.ndarray) -> np.ndarray:
    zeros_so_far = np.cumsum(matches == 0, axis=1)
    return np.where(totals == 0, 0.0, np.where(matches == 0, 0.5**zeros_so_far, matches) / np.maximum(totals, 1.0))


def _chen_cherry(matches: np.ndarray, totals: np.ndarray, said: np.ndarray) -> np.ndarray:
    zeros_so_far = np.cumsum(matches == 0, axis=1)
    log_length = np.log(np.maximum(said, 2.0))[:, None]
    smoothed = np.where(matches == 0, log_length / (_METHOD4_K * 2.0**zeros_so_far), matches) / np.maximum(totals, 1.0)
    # One word has no bigram to smooth; NLTK leaves those precisions out of the product.
    return np.where((matches == 0) & (said[:, None] <= 1), 1.0, smoothed)


_PUNCTUATION = frozenset(",.?!")
_DISTINCT_TOKENS: dict[str, Callable[[str], Sequence[str]]] = {
    "nltk": lower_tokens,
    "cased": tokenize,
    "no_punctuation": lambda text: [token for token in lower_tokens(text) if token not in _PUNCTUATION],
    "whitespace": str.split,
    "moel": moel_tokens,
}
DISTINCT_VARIANTS = tuple(_DISTINCT_TOKENS)


def distinct_statistic(responses: Sequence[str], n: int, variant: str = "nltk") -> DistinctStatistic:
    """Returns corpus-level Distinct-n: distinct n-grams over all n-grams, in percent; 0.0 if no response has n tokens.

    Source: Li et al. 2016, Sec. 5.1. It falls as the corpus or the responses grow: compare systems only at an equal
    number of n-grams (`DistinctStatistic.sample`). Variants:
      nltk: lower case, NLTK words: DCKS, CEM, CASE. cased: EmpRL. no_punctuation: lower case without , . ? !: NEC.
      whitespace: unchanged white-space tokens: EmpDG, KEMP (whose bigrams are joined without a separator).
      moel: texts cleaned by `words.moel_tokens`.
    """
    split = _DISTINCT_TOKENS[variant]
    *_, (ids, rows) = _ngrams([split(response) for response in responses], n)
    return DistinctStatistic(ids, rows, len(responses))


def _clauses(responses: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns all clauses as (id, row) pairs, ids in order of appearance."""
    index: dict[str, int] = {}
    pairs = [(index.setdefault(one, len(index)), row) for row, text in enumerate(responses) for one in clauses(text)]
    array = np.asarray(pairs, np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def rouge_l_rows(responses: Sequence[str], references: Sequence[str]) -> Float[np.ndarray, " N"]:
    """Returns the ROUGE-L F-measure (longest common subsequence, Lin 2004) of every row, in [0, 1].

    Tokens are runs of a-z and 0-9 of the lower-cased text, no stemming, as in Google's rouge-score.
    """
    words = [[re.findall(r"[a-z0-9]+", text.lower()) for text in texts] for texts in (responses, references)]
    pairs = zip(*words, strict=True)
    return np.asarray([2.0 * _common_length(a, b) / max(1, len(a) + len(b)) for a, b in pairs], np.float64)


def _common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence, one bit per token of `second` (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, token in enumerate(second):
        places[token] = places.get(token, 0) | (1 << i)
    full = (1 << len(second)) - 1
    row = full
    for token in first:
        matched = row & places.get(token, 0)
        row = ((row + matched) | (row - matched)) & full
    return len(second) - row.bit_count()


def token_f1_rows(responses: Sequence[str], references: Sequence[str]) -> Float[np.ndarray, " N"]:
    """Returns the F1 of shared words (lower case, NLTK words, punctuation kept) of every row, in percent."""
    pairs = zip(map(lower_tokens, responses), map(lower_tokens, references), strict=True)
    scores = [200.0 * (Counter(a) & Counter(b)).total() / max(1, len(a) + len(b)) for a, b in pairs]
    return np.asarray(scores, np.float64)


def clauses(response: str) -> list[str]:
    """Splits a response at , ? ! . and drops empty pieces; keeps the case."""
    return [clause for part in re.split(r"[,?!.]", response) if (clause := part.strip())]


def _deviation(counts: Float[np.ndarray, "R K"]) -> Float[np.ndarray, " R"]:
    num_distinct = np.maximum((counts > 0).sum(axis=1), 1)
    mean = counts.sum(axis=1) / num_distinct
    return np.sqrt(np.where(counts > 0, (counts - mean[:, None]) ** 2, 0.0).sum(axis=1) / num_distinct)


def _top5(counts: Float[np.ndarray, "R K"]) -> Float[np.ndarray, " R"]:
    kept = min(5, counts.shape[1])
    top = np.partition(counts, counts.shape[1] - kept, axis=1)[:, counts.shape[1] - kept :].sum(axis=1)
    return 100.0 * top / np.maximum(counts.sum(axis=1), 1e-9)


def sentence_std_statistic(responses: Sequence[str]) -> Statistic:
    """Returns the population standard deviation of distinct clauses' counts (NEC's Sent-Std); 0.0 without clauses.

    High = a few stock phrases are frequent. Grows with the number of responses.
    """
    return CountStatistic(*_clauses(responses), len(responses), _deviation, (0.0, float("inf")))


def top5_share_statistic(responses: Sequence[str]) -> Statistic:
    """Returns the five most frequent clauses as a percentage of all clauses (NEC's Top-5); 0.0 without clauses."""
    return CountStatistic(*_clauses(responses), len(responses), _top5, (0.0, 100.0))
