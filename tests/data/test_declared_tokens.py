"""What stands beside a tokenizer.json: the tokens that transformers adds, and no field dropped without a word."""

import json
import logging

import pytest
import transformers

from empax.core.config import ConfigError
from empax.data.bpe import train_bpe
from empax.data.model_files import warn_once
from empax.data.tokenizer_folders import load_tokenizer

TEXTS = ["I feel sad today.", "today, oh no!", "oh today2 todays"]


@pytest.fixture(scope="module")
def trained():
    return train_bpe(["I feel sad today", "oh no what happened"], vocab_size=280)


@pytest.fixture
def folder(trained, tmp_path):
    trained.save(tmp_path)
    warn_once.cache_clear()
    return tmp_path


def write(folder, name, **fields):
    file = folder / name
    old = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(old | fields))


def added(content, **options):
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **plain, **options}


CASES = {
    "numbered": {"added_tokens_decoder": {"400": added("<two>"), "399": added("<one>"), "5": added("today")}},
    "numbered, no control token": {"added_tokens_decoder": {"400": added("today", special=False, single_word=True)}},
    "numbered, and named": {"pad_token": "<new>", "added_tokens_decoder": {"400": added("<b>"), "401": added("<new>")}},
    "list": {"additional_special_tokens": ["<one>", "<two>"]},
    "newer list": {"extra_special_tokens": ["<one>", "<two>"]},
    "by name": {"extra_special_tokens": {"one_token": "<one>"}},
    "all": {
        "mask_token": "[MASK]",
        "unk_token": "<unknown>",
        "additional_special_tokens": ["<three>"],
        "added_tokens_decoder": {"300": added("<first>"), "301": added("sad", special=False)},
    },
}


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_declared_tokens_are_those_of_transformers(case, folder):
    write(folder, "tokenizer_config.json", **CASES[case])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert ours.backend.get_vocab(with_added_tokens=True) == theirs.get_vocab()
    for text in TEXTS:
        special = any(token.special and token.content in text for token in theirs.added_tokens_decoder.values())
        if not special:  # control tokens are letters in a text here
            assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, text


@pytest.mark.oracle
def test_a_file_of_added_tokens_is_read(folder):
    (folder / "added_tokens.json").write_text(json.dumps({"<b>": 281, "<a>": 280}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert [ours.token_id(token) for token in ("<a>", "<b>")] == theirs.convert_tokens_to_ids(["<a>", "<b>"])


def test_unknown_fields_are_named_once(folder, caplog):
    write(folder, "tokenizer_config.json", cut_at_blanks=True)
    write(folder, "special_tokens_map.json", dropout=0.1)
    with caplog.at_level(logging.WARNING, logger="empax"):
        load_tokenizer(folder)
    assert "tokenizer_config.json sets cut_at_blanks = True" in caplog.text
    assert "special_tokens_map.json sets dropout = 0.1" in caplog.text
    caplog.clear()
    load_tokenizer(folder)
    assert not caplog.records


def test_what_transformers_writes_is_known(folder, caplog):
    for length in (512, None):
        transformers.AutoTokenizer.from_pretrained(folder, model_max_length=length).save_pretrained(folder)
    with caplog.at_level(logging.WARNING, logger="empax"):
        load_tokenizer(folder)
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eos_token": 5}, "eos_token = 5 must be a text"),
        ({"eos_token": {"text": "</s>"}}, "eos_token = .* must be a text"),
        ({"eos_token": {"content": "</s>", "lstrip": "no"}}, "eos_token = .* must be true or false"),
        ({"added_tokens_decoder": {"x": added("<a>")}}, "added_tokens_decoder = .* must map ids to tokens"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder = .* must map ids to tokens"),
        ({"additional_special_tokens": "<a>"}, "additional_special_tokens = '<a>' must be a list"),
        ({"additional_special_tokens": [1]}, "additional_special_tokens = 1 must be a text"),
        ({"add_prefix_space": True}, "add_prefix_space = True, but tokenizer.json says add_prefix_space = False"),
    ],
)
def test_what_is_no_token_or_contradicts_is_refused(fields, message, folder):
    write(folder, "tokenizer_config.json", **fields)
    with pytest.raises(ConfigError, match=f"tokenizer_config.json: {message}"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("do_lower_case", "lowercase"),
        ("strip_accents", "strip_accents"),
        ("tokenize_chinese_chars", "handle_chinese_chars"),
    ],
)
def test_a_normalizer_is_as_both_files_say(name, field, folder):
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    normalizer["lowercase"] = True
    for here, there in ((True, False), (False, True)):
        both = {"type": "Sequence", "normalizers": [normalizer | {field: there}]}
        write(folder, "tokenizer.json", normalizer=both)
        write(folder, "tokenizer_config.json", **{name: here})
        with pytest.raises(ConfigError, match=f"{name} = {here}, but tokenizer.json says {field} = {there}"):
            load_tokenizer(folder)
        write(folder, "tokenizer_config.json", **{name: there})
        load_tokenizer(folder)
