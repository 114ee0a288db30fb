"""Options of one call: transformers' names and ours, what is refused, and what of a folder stays silent."""

import dataclasses

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.decoding.generation_config import options_that_can_be_had
from empax.decoding.options import call_of
from empax.decoding.settings import DecodeSettings

EOS = 1


PLAIN = DecodeSettings()


def call(fields=None, *, own=PLAIN, encoder_decoder=True, **options):
    known = {"encoder_decoder": encoder_decoder, "eos_id": EOS, "vocab_size": 90}
    return call_of(options, fields or {}, own=own, **known)


def settings(fields=None, **options):
    return call(fields, **options).settings


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_new_tokens": 30}, {"max_tokens": 30}),
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({"num_beams": 4}, {"method": "beam"}),
        ({"num_beams": 3, "length_penalty": 2.0}, {"method": "beam", "num_beams": 3, "length_penalty": 2.0}),
        ({"do_sample": True}, {"method": "sample"}),
        ({"do_sample": True, "top_k": 7}, {"method": "sample", "top_k": 7}),
        ({"do_sample": False}, {"method": "greedy"}),
        ({"num_beams": 1}, {}),
        ({"method": "greedy", "num_beams": 1}, {}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram": 2}),
        ({"encoder_no_repeat_ngram_size": 2}, {"encoder_no_repeat_ngram": 2}),
        ({"bad_words_ids": [[4], [5, 6]]}, {"bad_words": [[4], [5, 6]]}),
        ({"forced_bos_token_id": 7}, {"first_token": 7}),
        ({"eos_token_id": (EOS, 8)}, {"more_eos_ids": [8]}),
        ({"max_length": 31}, {"max_tokens": 30}),  # the start token of a decoder counts
        ({"max_new_tokens": np.int64(5), "suppress_tokens": np.array([4, 5])},
         {"max_tokens": 5, "suppress_tokens": (4, 5)}),
        ({"use_cache": True, "pad_token_id": 0, "bos_token_id": 2, "output_scores": False}, {}),
        ({"do_sample": False, "num_beams": 1, "temperature": 1.0, "top_k": 50, "length_penalty": 1.0}, {}),
        ({"do_sample": False, "temperature": None, "top_p": None, "num_beams": None, "allow_unknown": None}, {}),
    ],
)  # fmt: skip
def test_names_of_transformers_mean_what_ours_mean(theirs, ours):
    assert call(**theirs) == call(**ours)


def test_what_they_mean():
    assert settings() == DecodeSettings(max_tokens=20)
    assert settings(num_beams=3) == DecodeSettings("beam", 20, num_beams=3, num_return_sequences=1)
    assert settings(do_sample=True) == DecodeSettings("sample", 20, top_k=50)
    assert settings(do_sample=True, top_k=None).top_k == 0
    drawn = settings(do_sample=True, num_beams=3, temperature=0.5)
    assert drawn == DecodeSettings(
        "beam", 20, num_beams=3, num_return_sequences=1, draw_beams=True, top_k=50, temperature=0.5
    )


def test_several_texts_and_several_samples_are_not_the_same():
    assert (call(num_beams=4, num_return_sequences=3).num_texts, call(num_beams=4).num_texts) == (3, 1)
    three = call(do_sample=True, num_return_sequences=3)
    assert (three.num_texts, three.settings.num_samples) == (3, 3)
    one = call(do_sample=True, num_samples=4)
    assert (one.num_texts, one.settings.num_samples) == (1, 4)
    best = call(do_sample=True, num_samples=4, num_return_sequences=2)
    assert (best.num_texts, best.settings.num_samples) == (2, 4)
    ranked = call(num_beams=4, num_return_sequences=2, rerank="random")
    assert (ranked.num_texts, ranked.settings.num_return_sequences) == (2, None)


FOLDER = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 40, "eos_token_id": [5, 8]}


def test_what_a_folder_says_stays_and_is_silent_where_it_is_not_read():
    drawn = DecodeSettings("sample", 39, temperature=0.6, top_p=0.9, top_k=50, more_eos_ids=(5, 8))
    assert settings(FOLDER) == drawn
    assert settings(FOLDER, do_sample=False) == DecodeSettings("greedy", 39, more_eos_ids=(5, 8))
    assert settings(FOLDER, num_beams=1) == drawn
    assert settings(FOLDER, num_beams=2).method == "beam"
    assert not settings(FOLDER, num_beams=2).draw_beams
    assert settings(FOLDER, num_beams=2, do_sample=True).temperature == 0.6
    assert settings({**FOLDER, "do_sample": False}, do_sample=True) == drawn
    beams = {"num_beams": 3, "length_penalty": 2.0, "num_return_sequences": 3}
    assert settings(beams) == DecodeSettings("beam", 20, num_beams=3, length_penalty=2.0, num_return_sequences=1)
    assert settings(beams, num_beams=1) == settings(beams, method="greedy") == DecodeSettings(max_tokens=20)
    assert settings(beams, method="sample") == DecodeSettings("sample", 20, top_k=50)
    assert settings(beams, do_sample=True).draw_beams
    assert settings({"num_beams": 2}, method="beam").num_beams == 2


def test_a_length_of_the_call_goes_before_one_of_the_folder():
    assert settings(FOLDER, max_new_tokens=6).max_tokens == 6
    assert settings({"max_new_tokens": 40}, max_length=9).max_tokens == 8
    assert settings({"min_new_tokens": 30}, max_tokens=9).min_tokens == 9
    assert settings({"min_new_tokens": 5}, min_length=3).min_tokens == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 4, "max_new_tokens": 40, "length_penalty": 2.0, "suppress_tokens": [5]},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_length": 30, "repetition_penalty": 1.2},
        {"eos_token_id": [EOS, 8], "decoder_start_token_id": 3, "forced_bos_token_id": 7},
    ],
)
def test_none_leaves_an_option_to_the_folder(fields):
    assert call(fields, **dict.fromkeys(fields)) == call(fields)
    assert settings({"do_sample": True, "top_k": 7}, top_k=None).top_k == 0  # as in transformers


def test_behind_a_prompt_lengths_count_it():
    counted = call(FOLDER, encoder_decoder=False)
    assert (counted.settings.max_tokens, counted.counts_prompt) == (40, {"max_tokens"})
    prompts = np.array([3, 38])
    np.testing.assert_array_equal(counted.limits(prompts), [[0, 0], [37, 2]])
    both = call(max_length=12, min_length=9, encoder_decoder=False)
    np.testing.assert_array_equal(both.limits(np.array([3, 11])), [[6, 0], [9, 1]])
    assert not call({"max_length": 40, "max_new_tokens": 5}, encoder_decoder=False).counts_prompt
    one = call(max_length=12, min_new_tokens=4, encoder_decoder=False)
    np.testing.assert_array_equal(one.limits(np.array([3, 11])), [[4, 1], [9, 1]])
    plain = call(FOLDER, max_new_tokens=4, min_new_tokens=2, encoder_decoder=False)
    np.testing.assert_array_equal(plain.limits(prompts), [[2, 2], [4, 4]])


def test_ends_and_starts_are_those_of_the_call():
    assert (call(eos_token_id=8).eos_id, call(eos_token_id=8).settings.more_eos_ids) == (8, ())
    assert (call(FOLDER).eos_id, call({"eos_token_id": EOS}).settings.more_eos_ids) == (EOS, ())
    forced = call(forced_eos_token_id=[8], eos_token_id=[EOS, 8])
    assert (forced.eos_id, forced.settings.end_at_limit, forced.settings.more_eos_ids) == (8, True, (EOS,))
    assert call(eos_token_id=[]).eos_id == EOS
    assert (call().start_id, call(decoder_start_token_id=4).start_id) == (None, 4)
    assert call({"decoder_start_token_id": 3}).start_id == 3


def test_what_a_run_sets_stays_where_it_can_be():
    own = DecodeSettings("beam", 20, num_beams=4, rerank="similarity", rerank_similarity=0.4)
    fields = {"num_beams": 4, "max_new_tokens": 20}
    assert settings(fields, own=own) == dataclasses.replace(own, num_return_sequences=None)
    assert settings(fields, own=own, method="greedy").rerank == ""
    drawn = DecodeSettings("sample", num_samples=16, rerank="consensus", rerank_length=0.35)
    assert settings({"do_sample": True}, own=drawn).rerank == "consensus"
    assert settings({"do_sample": True}, own=drawn, num_samples=1).rerank == ""
    beam = settings({"do_sample": True}, own=drawn, num_beams=4)
    assert dataclasses.replace(beam, num_samples=1) == settings(num_beams=4)
    assert settings({}, own=DecodeSettings(first_token=3), encoder_decoder=False).first_token == 3


@pytest.mark.parametrize(
    ("options", "message", "advised"),
    [
        ({"temperature": 0.5}, "temperature = 0.5 has no effect when the likeliest token is taken; add do_sample",
         {"temperature": 0.5, "do_sample": True}),
        ({"temperature": 1.0, "length_penalty": 2.0}, "length_penalty = 2.0 has no effect .* add num_beams=4",
         {"length_penalty": 2.0, "num_beams": 4}),
        ({"num_beams": 3, "top_p": 0.5}, "top_p = 0.5 has no effect when a beam is searched; add do_sample=True",
         {"num_beams": 3, "top_p": 0.5, "do_sample": True}),
        ({"do_sample": True, "early_stopping": True}, "early_stopping = True has no effect when tokens are drawn",
         {"do_sample": True}),
        ({"num_samples": 4}, "num_samples = 4 has no effect .* add method='sample', or leave",
         {"num_samples": 4, "method": "sample"}),
        ({"num_return_sequences": 2}, "taking the likeliest token gives one text; add do_sample=True or num",
         {"num_return_sequences": 2, "do_sample": True}),
        ({"num_return_sequences": 3, "num_beams": 2}, "is more than num_beams = 2; raise that",
         {"num_return_sequences": 3, "num_beams": 3}),
        ({"num_return_sequences": 3, "num_samples": 2, "do_sample": True}, "is more than num_samples = 2; raise that",
         {"num_return_sequences": 3, "num_samples": 3, "do_sample": True}),
        ({"method": "greedy", "num_beams": 2}, "num_beams = 2 has no effect with method = 'greedy'; give one of them",
         {"num_beams": 3}),
        ({"method": "greedy", "do_sample": True}, "do_sample = True contradicts method = 'greedy'",
         {"do_sample": True}),
        ({"max_tokens": 3, "max_new_tokens": 3}, "max_tokens and max_new_tokens mean the same", {"max_tokens": 3}),
        ({"max_length": 9, "max_tokens": 3}, "max_length = 9 has no effect beside max_tokens; give one",
         {"max_length": 9}),
        ({"guidance_scale": 1.5},
         "guidance_scale = 1.5 would change the text and is not supported; leave guidance_scale",
         {}),
        ({"stop_strings": ["x"]}, r"stop_strings = \['x'\] would change the text", {}),
        ({"output_scores": True}, "output_scores = True asks for more than texts", {}),
        ({"rerank_length": 1.0, "num_beams": 4}, "rerank_length = 1.0 has no effect with rerank = ''; set rerank to",
         {"rerank_length": 1.0, "num_beams": 4, "rerank": "consensus"}),
        ({"rerank_exemplars": 1.0, "rerank": "consensus", "num_beams": 4}, "there are no exemplars", {}),
        ({"max_new_tokens": 0}, r"max_new_tokens = 0 must", {"max_new_tokens": 1}),
        ({"max_tokens": 0, "max_length": None}, r"max_tokens = 0 must", {"max_tokens": 1}),
        ({"max_tokens": "9"}, r"max_tokens = '9' must be an integer", {"max_tokens": 9}),
        ({"no_repeat_ngram_size": 2.5}, "no_repeat_ngram_size = 2.5 must be an integer", {"no_repeat_ngram_size": 2}),
        ({"eos_token_id": [8, 90]}, r"eos_token_id = \[8, 90\] must lie in \[0, 90\), the vocabulary",
         {"eos_token_id": 89}),
        ({"eos_token_id": -1}, r"eos_token_id = -1 must lie in \[0, 90\)", {"eos_token_id": 0}),
        ({"eos_token_id": [EOS, 8], "forced_eos_token_id": [EOS, 8]}, r"forced_eos_token_id = \[1, 8\] must be one of",
         {"eos_token_id": [EOS, 8]}),
        ({"bad_words_ids": [[4, 90]]}, "bad_words_ids names the token 90; it must be below 90", {}),
        ({"bos": 4}, r"generate\.bos is not a setting of generate. It takes: allow_unknown, bad_words,", {}),
        ({"num_beams": 0}, "num_beams = 0 must be a whole number of at least 1", {"num_beams": 1}),
        ({"num_beams": True}, "num_beams = True must be a whole number", {}),
        ({"do_sample": 1}, "do_sample = 1 must be True or False", {}),
        ({"num_return_sequences": 0}, "num_return_sequences = 0 must be a whole number", {}),
        ({"method": "beams"}, "generate.method = 'beams' is not allowed", {"method": "beam"}),
        ({"num_beams": 4, "draw_beams": True}, r"generate\.draw_beams is not a setting of generate",
         {"num_beams": 4, "do_sample": True}),
        ({"num_beam": 4}, "num_beam is not a setting of generate; did you mean 'num_beams'", {"num_beams": 4}),
        ({"num_beams": 4, "do_sample": True, "num_beam_groups": 2}, "do_sample with num_beam_groups = 2",
         {"num_beams": 4, "do_sample": True}),
    ],
)  # fmt: skip
def test_what_would_change_nothing_or_cannot_be_is_refused_in_the_callers_words(options, message, advised):
    with pytest.raises(ConfigError, match=message):
        call(**options)
    assert call(**advised)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}])
def test_samples_of_a_folder_with_beams_need_another_method(options):
    beams = {"num_beams": 4, "max_new_tokens": 9}
    with pytest.raises(ConfigError, match="num_samples = 8 has no effect when a beam is searched; add method='sample'"):
        call(beams, num_samples=8, **options)
    found = settings(beams, num_samples=8, method="sample", rerank="consensus", **options)
    assert (found.method, found.num_samples, found.rerank) == ("sample", 8, "consensus")


@pytest.mark.parametrize("name", ["forced_bos_token_id", "decoder_start_token_id"])
def test_behind_a_prompt_nothing_is_forced(name):
    with pytest.raises(ConfigError, match=f"{name} = 4 has no effect after a prompt; first_token"):
        call(**{name: 4}, encoder_decoder=False)
    assert call(first_token=4, encoder_decoder=False).settings.first_token == 4


def kept(fields, **known):
    return options_that_can_be_had(fields, **{"encoder_decoder": False, "eos_id": EOS, "vocab_size": 40, **known})


@pytest.mark.parametrize(
    "left",
    [
        {"guidance_scale": 1.5},
        {"stop_strings": ["zz"]},
        {"penalty_alpha": 0.6},
        {"eta_cutoff": 0.1},
        {"top_p": 2.0},
        {"no_repeat_ngram_size": "two"},
        {"suppress_tokens": 3},
        {"bad_words_ids": [[99]]},
        {"forced_eos_token_id": 3},
        {"forced_eos_token_id": 5},  # of the folder, but not the end of the tokenizer
        {"eos_token_id": [EOS, "x"]},
        {"num_beams": 0},
        {"min_length": "9"},
        {"guidance_scale": 1.5, "max_new_tokens": 2.5},
    ],
)
def test_one_option_that_cannot_be_had_leaves_all_others(left):
    rest = {**FOLDER, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "begin_suppress_tokens": [4]}
    rest = {name: value for name, value in rest.items() if name not in left}
    assert kept({**left, **rest}) == (rest, left)
    assert kept({**rest, **left}) == (rest, left)


def test_of_several_ends_those_stay_that_the_model_can_say():
    assert kept({"eos_token_id": [EOS, 40, 8]}) == ({"eos_token_id": [EOS, 8]}, {})
    assert kept({"num_return_sequences": 3, "temperature": None}) == ({}, {})


def test_what_a_folder_keeps_can_be_chosen_by_any_method():
    fields, _ = kept({"do_sample": True, "num_beams": 4, "penalty_alpha": 0.6, "eta_cutoff": 0.2, "top_p": 0.9})
    for method in ("greedy", "beam", "sample"):
        assert settings(fields, method=method).method == method
