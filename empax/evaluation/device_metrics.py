"""Sentence-level BLEU, token F1 and ROUGE-L on token ids: REG's metric F, as array programs under `jax.jit`.

N-grams are counted by comparing all pairs of positions, [N, T, T]: responses are short, no hash table or sort is
needed, and no shape depends on the data. Rows are independent; the caller reshapes [B, K] candidates to [B * K].
Masks are True at real tokens, which come first; the caller masks padding and the end-of-sequence token. A row without
a candidate or without a reference scores 0 everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import check_numbers

_MAX_ORDER = 4

Ids: TypeAlias = Int[Array, "N T"]
Mask: TypeAlias = Bool[Array, "N T"]
OtherIds: TypeAlias = Int[Array, "N R"]
OtherMask: TypeAlias = Bool[Array, "N R"]
"""Ids and masks of candidates, and of references."""

Scores: TypeAlias = Float[Array, " N"]


@dataclasses.dataclass(frozen=True)
class UtilityWeights:
    """Weights of the metrics in F; normalised to sum 1, and 0 leaves a metric out.

    Attributes:
      bleu, f1, rouge_l: weights of BLEU, of the F1 of words, of ROUGE-L.
    """

    bleu: float = 1 / 3
    f1: float = 1 / 3
    rouge_l: float = 1 / 3

    def __post_init__(self) -> None:
        check_numbers(self, "bleu", "f1", "rouge_l", least=0)
        if self.total == 0.0:
            raise ValueError("bleu = f1 = rouge_l = 0 is not allowed; at least one weight must be above 0.")

    @property
    def total(self) -> float:
        return self.bleu + self.f1 + self.rouge_l


def utility(
    candidates: Ids,
    candidate_mask: Mask,
    references: OtherIds,
    reference_mask: OtherMask,
    *,
    weights: UtilityWeights = UtilityWeights(),
) -> Scores:
    """Returns F: the weighted mean of sentence BLEU, token F1 and ROUGE-L, in [0, 1].

    Source: REG (Wang et al.), Eq. 3, which leaves F open; its ablation removes each of the three in turn.
    """
    texts = candidates, candidate_mask, references, reference_mask
    total = jnp.zeros(candidates.shape[0], jnp.float32)
    for weight, metric in ((weights.bleu, sentence_bleu), (weights.f1, token_f1), (weights.rouge_l, rouge_l)):
        if weight > 0.0:
            total = total + weight / weights.total * metric(*texts)
    return total


def sentence_bleu(candidates: Ids, candidate_mask: Mask, references: OtherIds, reference_mask: OtherMask) -> Scores:
    """Returns the smoothed BLEU-4 of each row, in [0, 1]; 0 if no token matches.

    Equals `sacrebleu.sentence_bleu` / 100: successive orders without matches count 1/2, 1/4, ... of a match, and orders
    that a short candidate does not have are left out. So it still ranks candidates that share tokens but no 4-gram, as
    most replies do, and does not change the counts of matching orders.

    Source: Papineni et al. 2002; smoothing: Chen and Cherry 2014, method 3.
    """
    matches, totals = _count_ngrams(candidates, candidate_mask, references, reference_mask, _MAX_ORDER)
    lengths = _length(candidate_mask), _length(reference_mask)
    nth_miss = jnp.cumsum(matches == 0, axis=1).astype(jnp.float32)
    hits = jnp.where(matches == 0, jnp.exp2(-nth_miss), matches.astype(jnp.float32))
    sizes = totals.astype(jnp.float32)
    counted = sizes > 0.0
    log_precisions = jnp.where(counted, jnp.log(hits) - jnp.log(jnp.where(counted, sizes, 1.0)), 0.0)
    mean = jnp.sum(log_precisions, axis=1) / jnp.maximum(jnp.sum(counted, axis=1), 1).astype(jnp.float32)
    score = jnp.exp(mean + _log_brevity(*lengths))
    return jnp.where(matches[:, 0] > 0, score, 0.0)


def token_f1(candidates: Ids, candidate_mask: Mask, references: OtherIds, reference_mask: OtherMask) -> Scores:
    """Returns the F1 of two bags of tokens, in [0, 1]. Source: Rajpurkar et al. 2016 (SQuAD), without its clean-up."""
    matches, _ = _count_ngrams(candidates, candidate_mask, references, reference_mask, 1)
    return _f_measure(matches[:, 0], _length(candidate_mask), _length(reference_mask))


def rouge_l(candidates: Ids, candidate_mask: Mask, references: OtherIds, reference_mask: OtherMask) -> Scores:
    """Returns the F-measure (beta 1) of the longest common subsequence, in [0, 1]. Source: Lin 2004, Eq. 4."""
    equal = _equal(candidates, candidate_mask, references, reference_mask)  # [N, T, R]
    common = _longest_common_subsequence(equal)
    return _f_measure(common, _length(candidate_mask), _length(reference_mask))


def ngram_precision(
    candidates: Ids, candidate_mask: Mask, references: OtherIds, reference_mask: OtherMask, *, order: int = 2
) -> Scores:
    """Returns the share of a candidate's n-grams in the reference, times BLEU's brevity penalty, in [0, 1].

    Unlike in BLEU, counts are not clipped; start and end tokens count unless they are masked.
    Source: the code of CoNT (An et al. 2022), NEC's.
    """
    *_, ngrams = _equal_ngrams(_equal(candidates, candidate_mask, references, reference_mask), order)
    found = jnp.sum(jnp.any(ngrams, axis=2), axis=1, dtype=jnp.int32)
    lengths = _length(candidate_mask), _length(reference_mask)
    total = jnp.maximum(lengths[0] - order + 1, 1)
    return found.astype(jnp.float32) / total.astype(jnp.float32) * jnp.exp(_log_brevity(*lengths))


def _length(mask: Mask) -> Int[Array, " N"]:
    return jnp.sum(mask, axis=1, dtype=jnp.int32)


def _equal(left: Ids, left_mask: Mask, right: OtherIds, right_mask: OtherMask) -> Bool[Array, "N T R"]:
    """Returns where token t of the left equals token r of the right, both unmasked."""
    return (left[:, :, None] == right[:, None, :]) & left_mask[:, :, None] & right_mask[:, None, :]


def _equal_ngrams(equal: Bool[Array, "N T R"], max_order: int) -> Iterator[Bool[Array, "N t r"]]:
    """Yields for orders 1 to `max_order` where the n-grams that start at t and at r are equal."""
    ngrams = equal
    yield ngrams
    for order in range(2, max_order + 1):
        # An n-gram is the (n-1)-gram at the same start plus one token.
        ngrams = ngrams[:, :-1, :-1] & equal[:, order - 1 :, order - 1 :]
        yield ngrams


def _count_ngrams(
    candidates: Ids, candidate_mask: Mask, references: OtherIds, reference_mask: OtherMask, max_order: int
) -> tuple[Int[Array, "N n"], Int[Array, "N n"]]:
    """Returns clipped matches and n-gram counts of the candidates, orders 1 to `max_order`."""
    across = _equal_ngrams(_equal(candidates, candidate_mask, references, reference_mask), max_order)
    within = _equal_ngrams(_equal(candidates, candidate_mask, candidates, candidate_mask), max_order)
    matches = []
    for to_reference, to_self in zip(across, within, strict=True):
        supply = jnp.sum(to_reference, axis=2, dtype=jnp.int32)  # [N, t]: count in the reference
        earlier = jnp.tril(jnp.ones(to_self.shape[1:], bool), -1)[None]
        used = jnp.sum(to_self & earlier, axis=2, dtype=jnp.int32)  # count in the candidate before t
        # The first `supply` occurrences match, later ones are clipped.
        matches.append(jnp.sum(used < supply, axis=1, dtype=jnp.int32))
    orders = jnp.arange(max_order, dtype=jnp.int32)[None]
    totals = jnp.maximum(_length(candidate_mask)[:, None] - orders, 0)
    return jnp.stack(matches, axis=1), totals


def _longest_common_subsequence(equal: Bool[Array, "N T R"]) -> Int[Array, " N"]:
    def row(best: Int[Array, "N R"], same: Bool[Array, "N R"]) -> tuple[Int[Array, "N R"], None]:
        # best[r]: the longest within the first t tokens of the left and the first r + 1 of the right.
        shorter = jnp.pad(best[:, :-1], ((0, 0), (1, 0)))
        best = jnp.maximum(best, jnp.where(same, shorter + 1, 0))
        return jax.lax.cummax(best, axis=1), None  # best never falls along r: this is the step from r - 1

    start = jnp.zeros((equal.shape[0], equal.shape[2]), jnp.int32)
    best, _ = jax.lax.scan(row, start, jnp.moveaxis(equal, 1, 0))
    return jnp.max(best, axis=1, initial=0)


def _f_measure(
    common: Int[Array, " N"], candidate_length: Int[Array, " N"], reference_length: Int[Array, " N"]
) -> Scores:
    # 2PR / (P + R) with P = common / candidate length and R = common / reference length.
    both = jnp.maximum(candidate_length + reference_length, 1)
    return 2.0 * common.astype(jnp.float32) / both.astype(jnp.float32)


def _log_brevity(candidate_length: Int[Array, " N"], reference_length: Int[Array, " N"]) -> Scores:
    candidate = jnp.maximum(candidate_length, 1).astype(jnp.float32)
    return jnp.minimum(0.0, 1.0 - reference_length.astype(jnp.float32) / candidate)
