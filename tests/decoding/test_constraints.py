"""Each option against Hugging Face's logits processor of the same name, on random scores and histories."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from empax.core.config import ConfigError
from empax.decoding.constraints import check_ids, constrain, force, penalise
from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings

BATCH, BEAMS, VOCAB, LENGTH, EOS = 5, 2, 12, 9, (1, 4)
SOURCE = np.random.default_rng(0).integers(0, VOCAB, (BATCH, 10)).astype(np.int32)
WORDS = ((3,), (1,), (2, 5), (7, 8), (0, 6, 2), (9, 9, 9), (8, 11), (0, 0, 10), (1, 1, 10), tuple(range(11)))
LONGER = DecodeSettings(no_repeat_ngram=LENGTH + 2, encoder_no_repeat_ngram=SOURCE.shape[1] + 2)
"""What is longer than any text comes in none."""

OPTIONS = {
    "repetition": ({"repetition_penalty": 1.7}, lambda: hf.RepetitionPenaltyLogitsProcessor(1.7)),
    "reward for repetition": ({"repetition_penalty": 0.6}, lambda: hf.RepetitionPenaltyLogitsProcessor(0.6)),
    **{
        f"encoder repetition by {by}": (
            {"encoder_repetition_penalty": by},
            lambda by=by: hf.EncoderRepetitionPenaltyLogitsProcessor(by, torch.tensor(SOURCE).long()),
        )
        for by in (0.7, 1.4)
    },
    **{
        f"{size}-grams": ({"no_repeat_ngram": size}, lambda size=size: hf.NoRepeatNGramLogitsProcessor(size))
        for size in (1, 2, 3)
    },
    **{
        f"{size}-grams of the source": (
            {"encoder_no_repeat_ngram": size},
            lambda size=size: hf.EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor(SOURCE).long()),
        )
        for size in (1, 2, 3)
    },
    "bad words": (
        {"bad_words": WORDS},
        lambda: hf.NoBadWordsLogitsProcessor([list(word) for word in WORDS], list(EOS)),
    ),
    "fewest tokens": ({"min_tokens": 3}, lambda: hf.MinNewTokensLengthLogitsProcessor(1, 3, list(EOS))),
    "suppressed": ({"suppress_tokens": (2, 11)}, lambda: hf.SuppressTokensLogitsProcessor([2, 11])),
    "suppressed at first": (
        {"begin_suppress_tokens": (3, 5)},
        lambda: hf.SuppressTokensAtBeginLogitsProcessor([3, 5], 1),
    ),
}


def processed(scores, text, index, settings, offset=0, source=SOURCE):
    given = (jnp.asarray(array) for array in (scores, text, index, offset, source))
    return np.asarray(process(*given, settings=settings))


@functools.partial(jax.jit, static_argnames="settings")
def process(scores, text, index, offset, source, *, settings):
    place = index + offset
    read = jnp.where(jnp.arange(text.shape[2]) <= place, text, -1)
    penalised = penalise(scores, read, settings, source)
    return constrain(penalised, text, place, index, EOS, settings, source)


def histories(seed, vocab=VOCAB):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(BATCH, BEAMS, VOCAB)).astype(np.float32)
    return scores, rng.integers(0, vocab, (BATCH, BEAMS, LENGTH)).astype(np.int32)


@pytest.mark.oracle
@pytest.mark.parametrize("name", OPTIONS)
def test_scores_are_those_of_the_processor(name):
    changes, processor = OPTIONS[name]
    changed = 0
    for index in (0, 1, 2, 4, 7):
        for vocab in (3, VOCAB):  # few tokens repeat themselves
            scores, text = histories(index, vocab)
            found = processed(scores, text, index, DecodeSettings(**changes))
            read = torch.tensor(text.reshape(-1, LENGTH)[:, : index + 1]).long()
            expected = processor()(read, torch.tensor(scores.reshape(-1, VOCAB))).numpy()
            np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=2.5e-7)  # one rounding
            changed += (found != scores).sum()
            np.testing.assert_array_equal(processed(scores, text, index, LONGER), scores)
    assert changed


@pytest.mark.oracle
def test_a_prompt_counts_as_part_of_the_text_and_its_padding_does_not():
    scores, text = histories(1, vocab=4)
    settings = DecodeSettings(repetition_penalty=1.5, no_repeat_ngram=2, bad_words=((2, 3), (1, 0, 2)))
    whole = processed(scores, text, 6, settings)
    padded = np.concatenate([np.full_like(text, -1), text], axis=2)
    np.testing.assert_array_equal(processed(scores, padded, 3, settings, offset=LENGTH + 3), whole)
    assert not np.array_equal(whole, processed(scores, text[:, :, 3:], 3, settings))


def test_padding_of_the_source_is_no_token_of_it():
    scores, text = histories(2, vocab=4)
    settings = DecodeSettings(encoder_repetition_penalty=1.5, encoder_no_repeat_ngram=2)
    short = np.where(np.arange(SOURCE.shape[1]) < 6, SOURCE % 4, -1)
    found = processed(scores, text, 5, settings, source=short)
    np.testing.assert_array_equal(found, processed(scores, text, 5, settings, source=short[:, :6]))
    assert not np.array_equal(found, processed(scores, text, 5, settings, source=SOURCE % 4))


def test_a_forced_token_is_certain_in_its_rows_alone():
    logits = jnp.arange(12.0).reshape(2, 1, 6)
    assert force(logits, None) is logits
    forced = np.asarray(force(logits, jnp.array([3, -1])))
    np.testing.assert_array_equal(forced[1], logits[1])
    np.testing.assert_array_equal(forced[0, 0], np.where(np.arange(6) == 3, 0.0, -np.inf))
    np.testing.assert_array_equal(force(logits, jnp.array([0]))[..., 0], [[0.0], [0.0]])


def test_what_is_suppressed_at_first_comes_second_behind_a_forced_token():
    scores, text = histories(3)
    settings = DecodeSettings(begin_suppress_tokens=(3,), first_token=5)
    np.testing.assert_array_equal(processed(scores, text, 0, settings), scores)
    assert np.isneginf(processed(scores, text, 1, settings)[..., 3]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suppress_tokens": (3, 12)}, "suppress_tokens names the token 12; it must be below 12"),
        ({"bad_words": ((1, 40),)}, "bad_words names the token 40"),
        ({"more_eos_ids": (13,)}, "more_eos_ids names the token 13"),
        ({"first_token": 12}, "first_token names the token 12"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(changes, message):
    check_ids(DecodeSettings(suppress_tokens=(11,), bad_words=((0, 11),), first_token=1), VOCAB)
    with pytest.raises(ConfigError, match=message):
        check_ids(DecodeSettings(**changes), VOCAB)


def test_options_of_the_source_need_it():
    ids = {"batch_size": 1, "start_id": 0, "eos_id": 1, "pad_id": 2}
    with pytest.raises(
        ConfigError, match=r"encoder_no_repeat_ngram = 1 .* look at the source, which is not known here"
    ):
        generate(lambda tokens, cache: (tokens, cache), None, settings=DecodeSettings(encoder_no_repeat_ngram=1), **ids)
