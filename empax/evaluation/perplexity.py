"""Perplexity in the usual units: per subword token, per word, bits per byte.

Numbers in different units are not comparable: a word-level model reports 35 where a subword model of the same quality
reports 17. Perplexity per word and bits per byte do not depend on the tokenizer. All take, for each of N rows, the
summed negative log-likelihood of the reference in nats, including its end-of-sequence token.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from empax.evaluation.statistics import SumStatistic, divide, ratio_statistic


def perplexity_statistics(
    nll: Float[np.ndarray, " N"],
    num_tokens: Float[np.ndarray, " N"],
    num_words: Float[np.ndarray, " N"],
    num_bytes: Float[np.ndarray, " N"],
    num_moel_words: Float[np.ndarray, " N"],
) -> dict[str, SumStatistic]:
    """Returns every definition by name, as statistics for intervals. Rows without tokens are ignored.

    "perplexity" is exp(total NLL / total tokens). "perplexity_per_word" counts the NLTK words of the references and,
    since the NLL includes the end of the sequence, one more per row, as MoEL and its descendants do. Without the extra
    word (":without_eos") it is higher. ":utterance_mean" is exp of the mean over rows of their mean NLL. The mean of
    exp, "perplexity:mean_of_utterances", is DCKS's and never below the others. "perplexity_per_word:moel" is the one of
    MoEL, MIME, EmpDG, CEM, CASE and KEMP: the utterance mean over the words of their cleaned references and the end
    token. "bits_per_byte" divides by the UTF-8 bytes of the references.
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
