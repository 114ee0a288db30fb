"""A vocabulary of words: MoEL's cleaning and NLTK's words by Rust normalizers."""

import csv
import io
import random
import tarfile

import pytest

from empax.core.config import ConfigError, to_settings
from empax.data.store import TokenizerSettings
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.words import BASE_TOKENS, train_words
from empax.decoding.settings import DecodeSettings, without_unknown
from empax.evaluation.words import moel_tokens, tokenize

CONTRACTIONS = (
    ("it's", "it is"), ("don't", "do not"), ("doesn't", "does not"), ("didn't", "did not"), ("you'd", "you would"),
    ("you're", "you are"), ("you'll", "you will"), ("i'm", "i am"), ("they're", "they are"), ("that's", "that is"),
    ("what's", "what is"), ("couldn't", "could not"), ("i've", "i have"), ("we've", "we have"), ("can't", "cannot"),
    ("i'd", "i would"), ("aren't", "are not"), ("isn't", "is not"), ("wasn't", "was not"), ("weren't", "were not"),
    ("won't", "will not"), ("there's", "there is"), ("there're", "there are"),
)  # fmt: skip
TURNS = [
    "I'm sorry to hear that. What happened?",
    "It's  3,000 miles away, isn't it?! I can't go... maybe",
    "He wouldn't say: \"why?\" (at 5:30 p.m.) - we'd've asked Mr. Smith. Then he'd gone.",
    "Back in the 90's. Man, it was 2010. we were kids. 2010. 5 of us. So did I. yes",
    "gonna, gotta, wanna go; lemme see. I cannot. wanna.",
    "My dog's toys & the dogs' toys cost $5.50!!! #sad *cries* me@home.com",
    "rock 'n' roll, 'tis true, y'all've 'said' it''s   odd",
    "I\u2019m \u201cfine\u201d\u2014really -- ok.what, then :) he said \"ok.\" So.",
    "5'11\" 190. 5pm. then", "ends with a comma, ", "a.m", "", " . ", "?", "u.s. troops in the U.S. they left.",
]  # fmt: skip


def expected(text):
    text = text.lower()
    for short, whole in CONTRACTIONS:
        text = text.replace(short, whole)
    return list(tokenize(text))


def words_of(tokenizer, text):
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)]


@pytest.mark.oracle
@pytest.mark.parametrize("turn", TURNS)
def test_moels_words_are_those_of_replacements_and_nltk(turn):
    assert words_of(train_words(TURNS, min_count=1), turn) == expected(turn)


@pytest.mark.oracle
@pytest.mark.real_data
def test_words_of_two_thousand_real_turns(real_data):
    archive = real_data / "empathetic_dialogues" / "empatheticdialogues.tar.gz"
    with tarfile.open(archive) as opened:
        member = opened.extractfile("empatheticdialogues/valid.csv")
        lines = io.TextIOWrapper(member, "utf-8")
        rows = csv.DictReader(lines, quoting=csv.QUOTE_NONE)
        turns = [row["utterance"].replace("_comma_", ",") for row in rows]
    turns = random.Random(0).sample(turns, 2000)
    tokenizer = train_words(turns, min_count=1)
    found = [[tokenizer.backend.id_to_token(i) for i in ids] for ids in tokenizer.encode_batch(turns)]
    assert sum(ours != list(moel_tokens(turn)) for ours, turn in zip(found, turns, strict=True)) <= 2


def test_rare_words_are_unknown_and_the_tokenizer_remembers_how_many(tmp_path):
    made = train_words(["We won we won!", "we lost?"], min_count=2)
    assert made.vocab_size == len(BASE_TOKENS) + 2
    assert words_of(made, "We won, we lost") == ["we", "won", "<unk>", "we", "<unk>"]
    assert made.rare_words == 3
    made.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.rare_words, loaded.unk_id, loaded.cls_id) == (3, made.unk_id, made.token_id("[CLS]"))
    assert (loaded.pad_id, loaded.eos_id, loaded.start_id) == (made.pad_id, made.eos_id, made.start_id)
    assert loaded.encode("We lost") == made.encode("We lost")


def test_answers_are_words_between_spaces_and_show_unknown_ones():
    made = train_words(["i am so sorry !"], min_count=1, special_tokens=("<sentiment:high>",))
    ids = [made.start_id, made.token_id("<sentiment:high>"), *made.encode("I'm sorry!"), made.unk_id, made.eos_id, 9]
    assert made.decode(ids) == "i am sorry ! <unk>"


def test_the_commonest_words_stay_where_room_is_short():
    made = train_words(["b a a", "c a b"], min_count=1, vocab_size=len(BASE_TOKENS) + 2)
    assert words_of(made, "a b c") == ["a", "b", "<unk>"]
    with pytest.raises(ConfigError, match="vocab_size = 5 is too small: there are 8 special tokens"):
        train_words(["a"], vocab_size=5)


def test_a_text_holds_no_control_token():
    made = train_words(["<s> </s> <unk> [CLS] <pad>"], min_count=1)
    ids = made.encode("<s> a </s> <unk> [CLS]")
    assert not {made.start_id, made.eos_id, made.cls_id, made.pad_id} & set(ids)
    assert words_of(made, "<unk>") == ["<", "unk", ">"]
    assert made.encode(made.mark("[CLS]") + "s")[0] == made.cls_id


def test_unknown_words_are_written_only_where_they_are_allowed():
    made = train_words(["a"], min_count=1)
    settings = DecodeSettings(suppress_tokens=(9,))
    assert without_unknown(settings, made.unk_id).suppress_tokens == (9, made.unk_id)
    allowed = DecodeSettings(allow_unknown=True)
    assert without_unknown(allowed, made.unk_id) == allowed
    assert without_unknown(settings, None) == settings


def test_lempexs_words():
    made = train_words(["It's OK, I'm fine!!"], min_count=1, style="whitespace")
    assert words_of(made, "It's OK, I'm fine!!") == ["it", "'", "s", "ok", ",", "i", "'", "m", "fine", "!!"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"splits_in_vocabulary": ("train", "tset")}, "holds 'tset'; it takes train, validation, test"),
        ({"splits_in_vocabulary": ("test",)}, "lacks 'train'; add it"),
        ({"pretrained": "minilm"}, "built from the corpus; set pretrained"),
        ({"style": "nltk"}, "takes one of 'moel', 'whitespace'"),
    ],
)
def test_bad_settings_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        to_settings(TokenizerSettings, {"kind": "words", **values}, where="config.prepare.tokenizer")
