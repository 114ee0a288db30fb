import math

import numpy as np
import pytest

from empax.evaluation import perplexity as ppl
from empax.evaluation.statistics import estimate

NLL = np.asarray([10.0, 30.0, 4.0])
TOKENS = np.asarray([5.0, 10.0, 4.0])
WORDS = np.asarray([4.0, 7.0, 2.0])
BYTES = np.asarray([20.0, 40.0, 9.0])
MOEL_WORDS = np.asarray([4.0, 9.0, 3.0])

EXPECTED = {
    "perplexity": math.exp(44 / 19),
    "perplexity:utterance_mean": math.exp((2 + 3 + 1) / 3),
    "perplexity:mean_of_utterances": (math.exp(2) + math.exp(3) + math.exp(1)) / 3,
    "perplexity_per_word": math.exp(44 / 16),
    "perplexity_per_word:without_eos": math.exp(44 / 13),
    "perplexity_per_word:utterance_mean": math.exp((10 / 5 + 30 / 8 + 4 / 3) / 3),
    "perplexity_per_word:moel": math.exp((10 / 5 + 30 / 10 + 4 / 4) / 3),
    "bits_per_byte": 44 / math.log(2) / 69,
}


def test_values_are_those_by_hand_and_leave_out_rows_without_tokens():
    # A row without tokens has no likelihood: whatever else it holds must not count.
    padded = [
        np.append(values, extra)
        for values, extra in ((NLL, 99.0), (TOKENS, 0.0), (WORDS, 50.0), (BYTES, 300.0), (MOEL_WORDS, 9.0))
    ]
    for arrays in ((NLL, TOKENS, WORDS, BYTES, MOEL_WORDS), padded):
        found = {name: estimate(statistic) for name, statistic in ppl.perplexity_statistics(*arrays).items()}
        assert found == pytest.approx(EXPECTED)
