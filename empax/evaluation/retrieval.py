"""Evaluation of a retriever of responses: the rank of the gold response, and properties of the retrieved ones.

Letters: Q contexts, N candidate responses, K retrieved ones, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import sparse

from empax.evaluation.significance import Interval, confidence_intervals
from empax.evaluation.statistics import DistinctStatistic, Statistic, mean_statistic, ratio_statistic
from empax.evaluation.text import word_counts
from empax.evaluation.words import lower_tokens

RECALL_AT = (1, 10, 100)
MATCH_AT = (5, 10)
SHOWN = 10
"""Number of retrieved responses for the counts of words, distinct responses and overlaps."""

POOL = 2500
"""Number of training responses, sampled with the run's seed, among which a gold response is ranked."""

_BLOCK = 512
_TIE = 1e-5
"""Relative difference of scores up to which they are equal: equal texts differ by rounding, see `encode.embed`."""


def text_numbers(texts: Sequence[str]) -> Int[np.ndarray, " N"]:
    """Returns numbers that equal texts share. `np.unique` would give every text the memory of the longest."""
    numbers: dict[str, int] = {}
    return np.asarray([numbers.setdefault(text, len(numbers)) for text in texts], np.int64)


def gold_ranks(
    queries: Float[np.ndarray, "Q D"] | sparse.csr_matrix,
    gold: Float[np.ndarray, "Q D"] | sparse.csr_matrix,
    keys: Float[np.ndarray, "N D"] | sparse.csr_matrix,
    ignored: Sequence[tuple[Int[np.ndarray, " Q"], Int[np.ndarray, " N"]]],
) -> Int[np.ndarray, " Q"]:
    """Returns the rank of each context's gold response among it and all keys, 1 = first.

    Half of the keys with the gold response's score come before it (of one: none), so an encoder that gives all texts
    one vector finds nothing.

    The vectors are of contexts, their gold responses, and other responses; all may be sparse (`bm25_vectors`). A key is
    `ignored` by a context with the same number: that of its gold response's text (`text_numbers`), or of its dialogue.
    """
    ranks = np.ones(len(ignored[0][0]), np.int64)
    for start in range(0, len(ranks), _BLOCK):
        part = slice(start, start + _BLOCK)
        own, scores = _scores(queries[part], gold[part], keys)
        counts = np.all([others[None, :] != mine[part, None] for mine, others in ignored], axis=0)
        ahead, tie = scores - own[:, None], _TIE * np.abs(own)[:, None]
        ranks[part] += ((ahead > tie) & counts).sum(axis=1) + ((np.abs(ahead) <= tie) & counts).sum(axis=1) // 2
    return ranks


def _scores(queries: Any, gold: Any, keys: Any) -> tuple[Float[np.ndarray, " Q"], Float[np.ndarray, "Q N"]]:
    """Returns each context's score of its gold response, and of all keys."""
    if sparse.issparse(queries):
        return np.asarray(queries.multiply(gold).sum(axis=1)).ravel(), (queries @ keys.T).toarray()
    return np.einsum("QD,QD->Q", queries, gold), queries @ keys.T


def bm25_vectors(
    contexts: Sequence[str], gold: Sequence[str], keys: Sequence[str], *, k1: float = 1.5, b: float = 0.75
) -> tuple[sparse.csr_matrix, sparse.csr_matrix, sparse.csr_matrix]:
    r"""Returns vectors of contexts and responses whose dot product is Okapi BM25.

    .. math:: \sum_w n_w(q) \, \log\Big(1 + \frac{N - d_w + .5}{d_w + .5}\Big)
        \frac{n_w(r) (k_1 + 1)}{n_w(r) + k_1 (1 - b + b\, |r| / \overline{|r|})}

    with n_w the count of a word in a text, and d_w the number of the N responses that contain it. Source: Robertson and
    Zaragoza 2009, Sec. 3.4, with an inverse document frequency that is never negative (Lucene's).

    The N responses are the contexts' own (`gold`) and the others (`keys`), so that both have the same document
    frequencies.
    """
    counted = word_counts([lower_tokens(text) for text in (*contexts, *gold, *keys)])
    queries, said = counted[: len(contexts)], counted[len(contexts) :]
    lengths = np.asarray(said.sum(axis=1)).ravel()
    norm = k1 * (1 - b + b * lengths / max(lengths.mean(), 1e-9))
    rows, ids, counts = sparse.find(said)
    rare = np.bincount(ids, minlength=said.shape[1])
    rarity = np.log1p((len(lengths) - rare + 0.5) / (rare + 0.5))
    weights = rarity[ids] * counts * (k1 + 1) / (counts + norm[rows])
    weighted = sparse.csr_matrix((weights, (rows, ids)), said.shape)
    return queries, weighted[: len(gold)], weighted[len(gold) :]


def recall_statistics(ranks: Int[np.ndarray, " Q"], among: str) -> dict[str, Statistic]:
    """Returns the recall at several ranks in percent; `among` names the set in which the gold response is ranked."""
    return {f"gold_recall_at_{k}:{among}": mean_statistic(_real(ranks <= k), scale=100.0) for k in RECALL_AT}


def exemplar_statistics(
    found: Int[np.ndarray, "Q K"],
    *,
    texts: Sequence[str],
    emotions: Int[np.ndarray, " N"],
    wanted: Int[np.ndarray, " Q"],
    dialogues: Int[np.ndarray, " Q"],
    turns: Int[np.ndarray, " Q"],
) -> dict[str, Statistic]:
    """Returns statistics of the retrieved responses, in percent except for the words.

    - `exemplar_emotion_match_at_K`: share of the first K from dialogues with the context's emotion.
    - `exemplar_words`: mean number of words of the first ten.
    - `exemplar_distinct`: share of distinct texts among the first ten of all contexts.
    - `exemplar_overlap`: share of a later turn's first ten texts that the first turn of its dialogue also retrieved;
      `:T_turns` for contexts of T turns alone.

    Source: LEMPEx, Table 3 (words, emotions) and Sec. 6 (2) (overlap), both described there and not measured.

    `found` are indices of the retrieved responses, best first; -1 = none. `texts` and `emotions` are those of the N
    responses, `wanted` emotions, `dialogues` and numbers of `turns` those of the Q contexts; emotion -1 = unknown.
    """
    statistics: dict[str, Statistic] = {}
    there, rows = found >= 0, np.maximum(found, 0)
    known = there & (emotions[rows] >= 0) & (wanted >= 0)[:, None]
    equal = known & (emotions[rows] == wanted[:, None])
    for k in MATCH_AT:
        parts = (equal[:, :k].sum(axis=1), known[:, :k].sum(axis=1))
        statistics[f"exemplar_emotion_match_at_{k}"] = ratio_statistic(*map(_real, parts), scale=100.0)
    there, rows = there[:, :SHOWN], rows[:, :SHOWN]
    numbers = text_numbers(texts)[rows]  # [Q, K]
    words = np.array([len(text.split()) for text in texts])[rows]
    count = _real(there.sum(axis=1))
    statistics["exemplar_words"] = ratio_statistic(_real((words * there).sum(axis=1)), count)
    shown = np.nonzero(there)
    statistics["exemplar_distinct"] = DistinctStatistic(numbers[shown], shown[0], len(found))
    repeated, later = _overlaps(numbers, there, dialogues, turns)
    statistics["exemplar_overlap"] = ratio_statistic(repeated, count * later, scale=100.0)
    for length in np.unique(turns[later]):
        chosen = later & (turns == length)
        parts = repeated * chosen, count * chosen
        statistics[f"exemplar_overlap:{length}_turns"] = ratio_statistic(*parts, scale=100.0)
    return statistics


def _overlaps(
    numbers: Int[np.ndarray, "Q K"], there: Bool[np.ndarray, "Q K"], dialogues: np.ndarray, turns: np.ndarray
) -> tuple[Float[np.ndarray, " Q"], Bool[np.ndarray, " Q"]]:
    """Returns each context's number of texts shared with its dialogue's first context, and which are later ones."""
    first = {int(dialogues[i]): i for i in np.flatnonzero(turns == 1)}
    repeated, later = np.zeros(len(numbers)), np.zeros(len(numbers), bool)
    for i, dialogue in enumerate(dialogues.tolist()):
        begun = first.get(dialogue, i)
        if begun != i:
            later[i] = True
            repeated[i] = np.isin(numbers[i][there[i]], numbers[begun][there[begun]]).sum()
    return repeated, later


def _real(values: np.ndarray) -> Float[np.ndarray, " Q"]:
    return values.astype(np.float64)


def with_intervals(statistics: Mapping[str, Statistic], dialogues: Int[np.ndarray, " Q"]) -> dict[str, Interval]:
    """Returns the value and 95% interval of each, resampling whole dialogues; omits statistics without a value."""
    found = confidence_intervals(statistics, dialogues=np.unique(dialogues, return_inverse=True)[1])
    return {name: cell for name, cell in found.items() if np.isfinite(cell["value"])}
