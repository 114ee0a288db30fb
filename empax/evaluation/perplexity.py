"""Perplexity in the units of the field: per subword token, per word, bits per byte.

Numbers in different units are not comparable: word-level models print 35 where subword models print 17 for the same
quality. `perplexity_per_word` and `bits_per_byte` do not depend on the tokenizer. All take, for each of N rows, the
summed negative log-likelihood of the reference in nats, its end-of-sequence token included.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from empax.evaluation.significance import SumStatistic, divide, ratio_statistic


def perplexity(nll: Float[np.ndarray, " N"], num_tokens: Float[np.ndarray, " N"]) -> float:
    """exp(total NLL / total tokens), over the corpus; tokens include the end-of-sequence token."""
    return float(np.exp(np.sum(nll) / np.sum(num_tokens)))


def perplexity_per_word(nll: Float[np.ndarray, " N"], num_words: Float[np.ndarray, " N"], *, eos: bool = True) -> float:
    """exp(total NLL / total words), a word being an NLTK token of the reference.

    With `eos` each row counts one word more: the NLL holds the end of the sequence, and the word-level models of the
    field (MoEL and its descendants) count words and the end token. Without, the number is higher.
    """
    return float(np.exp(np.sum(nll) / np.sum(num_words + float(eos))))


def bits_per_byte(nll: Float[np.ndarray, " N"], num_bytes: Float[np.ndarray, " N"]) -> float:
    """Total NLL in bits over the UTF-8 bytes of the references; the end token costs bits and has no byte."""
    return float(np.sum(nll) / math.log(2) / np.sum(num_bytes))


def utterance_mean_perplexity(nll: Float[np.ndarray, " N"], num_tokens: Float[np.ndarray, " N"]) -> float:
    """exp of the mean over utterances of their mean NLL: MoEL, MIME, EmpDG, CEM, CASE, KEMP with test batch 1."""
    return float(np.exp(np.mean(nll / num_tokens)))


def mean_utterance_perplexity(nll: Float[np.ndarray, " N"], num_tokens: Float[np.ndarray, " N"]) -> float:
    """Mean over utterances of exp(mean NLL), as DCKS prints; never below the others."""
    return float(np.mean(np.exp(nll / num_tokens)))


def perplexity_statistics(
    nll: Float[np.ndarray, " N"],
    num_tokens: Float[np.ndarray, " N"],
    num_words: Float[np.ndarray, " N"],
    num_bytes: Float[np.ndarray, " N"],
    num_moel_words: Float[np.ndarray, " N"],
) -> dict[str, SumStatistic]:
    """Every convention by name, as statistics for intervals.

    A row with no tokens is left out of all sums (it has no likelihood). "perplexity_per_word:moel" is what MoEL, MIME,
    EmpDG, CEM, CASE and KEMP print: `utterance_mean_perplexity` over the words of their cleaned references and the end
    token.
    """
    known = (num_tokens > 0).astype(np.float64)
    nll = np.where(known > 0, nll, 0.0)
    with_eos = num_words + 1.0
    per_token, per_word = divide(nll, num_tokens), divide(nll, with_eos)
    per_moel_word = divide(nll, num_moel_words + 1.0)
    return {
        "perplexity": _exp_ratio(nll, num_tokens * known),
        "perplexity:utterance_mean": _exp_ratio(np.nan_to_num(per_token) * known, known),
        "perplexity:mean_of_utterances": ratio_statistic(np.exp(np.nan_to_num(per_token)) * known, known),
        "perplexity_per_word": _exp_ratio(nll, with_eos * known),
        "perplexity_per_word:without_eos": _exp_ratio(nll, num_words * known),
        "perplexity_per_word:utterance_mean": _exp_ratio(per_word * known, known),
        "perplexity_per_word:moel": _exp_ratio(per_moel_word * known, known),
        "bits_per_byte": ratio_statistic(nll / math.log(2), num_bytes * known),
    }


def _exp_ratio(numerators: Float[np.ndarray, " N"], denominators: Float[np.ndarray, " N"]) -> SumStatistic:
    return SumStatistic(
        np.stack([numerators, denominators], axis=-1), lambda sums: np.exp(divide(sums[:, 0], sums[:, 1]))
    )
