"""What the settings of a search refuse, and in which words."""

import pytest

from empax.core.config import ConfigError, to_settings
from empax.decoding.settings import DecodeSettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens = 0 must lie in \[1, 1000000\]"),
        ({"min_tokens": -1}, r"min_tokens = -1 must lie in \[0, 30\]"),
        ({"min_tokens": 31}, r"min_tokens = 31 must lie in \[0, 30\]"),
        ({"num_beams": 0}, "num_beams = 0"),
        ({"num_samples": 0}, "num_samples = 0"),
        ({"temperature": 0.0}, "temperature = 0.0 .* at least 0.0001"),
        ({"temperature": 1e-38}, "temperature = 1e-38 .* at least 0.0001"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.1}, r"top_p = 1.1 must lie in \(0, 1\]"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"typical_p": 0.0}, "typical_p = 0.0"),
        ({"no_repeat_ngram": -2}, "no_repeat_ngram = -2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"bad_words": ((),)}, "at least one id"),
        ({"bad_words": ((3, -1),)}, "each at least 0"),
        ({"suppress_tokens": (-1,)}, "suppress_tokens = .* at least 0"),
        ({"suppress_tokens": (3,), "first_token": 3}, "first_token = 3 is in suppress_tokens"),
        ({"first_token": -1}, "first_token = -1"),
        ({"method": "beam", "num_beams": 4, "num_beam_groups": 3}, "num_beam_groups = 3 must divide num_beams = 4"),
        ({"diversity_penalty": 1e5}, r"diversity_penalty = 100000\.0 must lie in \[0, 10000\.0\]"),
        ({"method": "beam", "diversity_penalty": 1.0}, "diversity_penalty = 1.0 .* num_beam_groups above 1"),
        (
            {"method": "beam", "num_beams": 2, "num_return_sequences": 3},
            r"num_return_sequences = 3 must lie in \[1, 2\]",
        ),
        ({"method": "beam", "num_return_sequences": 1, "rerank": "consensus"}, "one hypothesis; set num_return_s"),
        ({"method": "beam", "num_beams": 1, "rerank": "consensus"}, "one hypothesis; set num_beams"),
        ({"method": "sample", "rerank": "consensus"}, "not allowed with one hypothesis"),
        ({"method": "beam", "rerank_exemplars": 1.0}, r"rerank_exemplars = 1\.0 is not allowed without rerank"),
        ({"method": "beam", "rerank": "random", "rerank_exemplars": 1.0}, "not allowed without rerank"),
        ({"method": "beam", "rerank": "similarity", "rerank_similarity": 1.5}, r"rerank_similarity = 1\.5"),
    ],
)
def test_settings_say_what_is_allowed(changes, message):
    with pytest.raises(ConfigError, match=message):
        DecodeSettings(**changes)
    with pytest.raises(ConfigError, match=rf"config\.x: .*{message}"):
        to_settings(DecodeSettings, changes, where="config.x")


def test_the_least_that_is_allowed_is_taken():
    DecodeSettings("sample", num_samples=2, rerank="random")
    DecodeSettings("greedy", num_beam_groups=3)  # read by "beam" alone
    DecodeSettings(suppress_tokens=(0,), bad_words=((0,),), min_tokens=30)
