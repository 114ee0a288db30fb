"""`generate` in the words of transformers, what a folder's own options do, and what is taken for texts."""

import dataclasses
import json
import logging

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import empax
from empax.data.bpe import train_bpe
from empax.data.words import train_words
from empax.decoding.settings import DecodeSettings
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder
from empax.serving import answering
from empax.serving.answering import TextGenerator
from tests.interop.test_gguf import tiny_llama, written
from tests.serving.models import PAIRS, saved

TEXTS = ["I feel sad today", "no", "oh no what happened to you and to me, I feel so sad"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("gpt2"), "gpt2", n_positions=48)


@pytest.fixture(scope="module")
def model(folder):
    return empax.load(folder)


def theirs(folder, texts=TEXTS, **options):
    """New texts of transformers, one source at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    said = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            rows = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        before = tokenizer.decode(ids[0], skip_special_tokens=True)
        said += [tokenizer.decode(row, skip_special_tokens=True).removeprefix(before) for row in rows]
    return said


@pytest.mark.oracle
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "max_new_tokens": 6, "num_return_sequences": 2, "length_penalty": 0.5},
        {"max_length": 34, "no_repeat_ngram_size": 2, "min_length": 32},
        {"num_beams": 2, "max_length": 32, "repetition_penalty": 1.3},
        {"max_new_tokens": 6, "bad_words_ids": [[270], [260]], "eos_token_id": [265, 266, 267, 268, 269]},
    ],
)
def test_same_names_give_the_texts_of_transformers(folder, model, options):
    assert model.generate(TEXTS, **options) == theirs(folder, **options)


def test_num_beams_alone_means_beams(model):
    beams = model.generate(TEXTS, num_beams=4, max_tokens=5)
    assert beams == model.generate(TEXTS, method="beam", max_new_tokens=5)
    assert beams != model.generate(TEXTS, max_tokens=5)
    drawn = model.generate(TEXTS, num_beams=4, max_new_tokens=5, do_sample=True, seed=1)
    assert drawn == model.generate(TEXTS, num_beams=4, max_new_tokens=5, do_sample=True, seed=1) != beams


def test_several_samples_give_one_text_and_several_texts_give_all(model):
    options = {"do_sample": True, "max_new_tokens": 4, "seed": 3}
    three = model.generate(TEXTS, num_return_sequences=3, **options)
    assert len(three) == 9
    assert len(set(three[:3])) > 1
    assert model.generate(TEXTS, num_samples=3, **options) == three[::3]
    assert model.generate(TEXTS, num_samples=3, num_return_sequences=2, **options) == [
        *three[:2],
        *three[3:5],
        *three[6:8],
    ]


def test_an_option_that_is_not_read_is_refused(model):
    with pytest.raises(empax.ConfigError, match=r"temperature = 5\.0 has no effect when the likeliest token is taken"):
        model.generate(TEXTS, temperature=5.0)


def with_generation(folder, target, fields, drop=()):
    """A copy of a folder with these options of decoding."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    file = target / "generation_config.json"
    own = {name: value for name, value in json.loads(file.read_text()).items() if name not in drop}
    file.write_text(json.dumps({**own, **fields}))
    return target


LLAMA_3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 40, "eos_token_id": [1, *range(261, 285)]}


@pytest.mark.oracle
def test_the_file_of_llama_3_decodes_as_it_says_and_stays_what_it_is(folder, tmp_path, caplog):
    place = with_generation(folder, tmp_path / "own", LLAMA_3)
    with caplog.at_level(logging.WARNING):
        model = empax.load(place)
        found = model.generate(TEXTS, do_sample=False)
    assert not caplog.records
    assert found == theirs(place, do_sample=False)
    assert max(map(len, found)) < 30, "one of the ends has come"
    assert model.generate(TEXTS, seed=1) != model.generate(TEXTS, seed=2)
    assert model.generate(TEXTS, seed=1) == model.generate(TEXTS, seed=1, temperature=0.6, top_p=0.9, top_k=50)
    model.save(tmp_path / "saved")
    files = [json.loads((path / "generation_config.json").read_text()) for path in (place, tmp_path / "saved")]
    assert files[0] == files[1]


@pytest.mark.oracle
def test_one_option_that_is_not_here_leaves_the_others_and_is_named_once(folder, tmp_path, caplog):
    fields = {**LLAMA_3, "do_sample": False, "guidance_scale": 1.5, "stop_strings": ["zz"], "num_return_sequences": 2}
    place = with_generation(folder, tmp_path / "own", fields)
    with caplog.at_level(logging.WARNING):
        model = empax.load(place)
        found = model.generate(TEXTS)
        model.generate(TEXTS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for said in (
        "guidance_scale = 1.5",
        "stop_strings = ['zz']",
        "num_return_sequences = 2",
        "reads all others",
    ):
        assert said in caplog.text
    assert found == theirs(with_generation(folder, tmp_path / "rest", {**LLAMA_3, "do_sample": False}))
    tuned = model.finetune(PAIRS, epochs=1, learning_rate=0.0)
    tuned.save(tmp_path / "saved")
    saved_fields = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved_fields == json.loads((place / "generation_config.json").read_text())


def test_a_folder_without_the_file_gets_one_that_knows_its_ends(folder, tmp_path):
    place = with_generation(folder, tmp_path / "own", {})
    (place / "generation_config.json").unlink()
    empax.load(place).save(tmp_path / "saved")
    fields = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert (fields["eos_token_id"], fields["pad_token_id"]) == (1, 0)
    assert "max_new_tokens" not in fields


def test_a_gguf_file_has_the_options_of_its_folder(tmp_path):
    tokenizer = train_bpe(TEXTS, vocab_size=300)
    tokenizer.save(tmp_path)
    written(tmp_path / "a.gguf", tiny_llama(vocab_size=tokenizer.vocab_size))
    file, folder = (empax.load(path).generator for path in (tmp_path / "a.gguf", tmp_path))
    assert file.call({}) == folder.call({})
    assert file.generation().fields() == folder.generation().fields()
    assert [file.call({}).settings.max_tokens, file.reply_call({}).settings.max_tokens] == [20, 64]
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 7}')
    assert empax.load(tmp_path / "a.gguf").generator.call({}).settings.max_tokens == 7


def test_a_text_that_fills_max_length_is_named(model):
    with pytest.raises(empax.ConfigError, match=r"text 2 has \d+ tokens, and max_length = 9 covers"):
        model.generate(TEXTS, max_length=9)


def test_an_answer_that_does_not_end_soon_gets_more_room(model, monkeypatch):
    for options in ({}, {"do_sample": True, "num_return_sequences": 2}, {"max_length": 33}):
        options = {"max_tokens": 11, **options} if "max_length" not in options else options
        wanted = model.generate(TEXTS, **options)
        with monkeypatch.context() as patch:
            patch.setattr(answering, "_ROOM", 2)
            assert model.generate(TEXTS, **options) == wanted


def test_few_texts_take_few_rows_and_nobody_waits_for_padding(model, monkeypatch):
    seen, answers_of = [], answering.answers_of

    def spied(task, params, batch, rng, limits, real):
        seen.append((*batch.source.shape[:1], *(side.tolist() for side in limits)))
        return answers_of(task, params, batch, rng, limits, real)

    monkeypatch.setattr(answering, "answers_of", spied)
    options = {"max_tokens": 4, "min_tokens": 2, "num_beams": 2}
    (alone,) = model.generate(TEXTS[:1], **options)
    assert model.generate(TEXTS, **options)[0] == model.generate(TEXTS, batch_size=2, **options)[0] == alone
    pair = (2, [2, 2], [4, 4])
    assert seen == [(1, [2], [4]), (4, [2, 2, 2, 1], [4, 4, 4, 1]), pair, (2, [2, 1], [4, 1])]


@pytest.mark.oracle
def test_a_text_beyond_half_of_the_positions_is_answered(folder, model):
    """Its length is padded to more positions than there are."""
    long = " ".join(TEXTS)
    assert 32 < len(model.tokenizer.encode(long)) <= 40
    assert model.generate([long], max_new_tokens=8) == theirs(folder, [long], max_new_tokens=8)
    assert model.nll([long], ["no"]).num_tokens > 1


def test_a_text_that_fills_all_positions_is_read(tmp_path):
    """Their number is no power of two."""
    model = empax.load(saved(tmp_path, "bart", max_position_embeddings=100))
    text = " ".join(["no"] * 98)
    assert 64 < len(model.tokenizer.encode(text)) <= 100
    assert len(model.generate([text], max_tokens=4)) == 1
    assert model.embed([text]).shape == (1, 16)
    assert model.nll([text], [text]).num_tokens == len(model.tokenizer.encode(text)) + 1
    model.finetune([(text, text)], epochs=1, batch_size=8)
    with pytest.raises(empax.ConfigError, match=r"the target of text 1 takes 101 positions; .* has 100: shorten it"):
        model.nll(["no", "no"], ["no", f"{text} no no"])
    with pytest.raises(empax.ConfigError, match=r"the answer to text 0 takes 101 positions; .* has 100: shorten it"):
        model.generate(["no"], max_tokens=101)


def test_a_reply_reads_what_the_answer_leaves_of_the_positions(model):
    turn = " ".join(["no no sad sad no no sad I feel"] * 2)
    length = len(model.tokenizer.encode(turn))
    assert 12 < length < 30
    for options in ({"max_length": 40}, {"max_length": 48}, {"max_new_tokens": 48 - length}):
        assert model.reply(turn, **options) == model.generate([turn], **options)[0].strip()
    shorter = model.reply(turn, max_new_tokens=46)  # two tokens are read
    assert shorter == model.reply(turn, max_new_tokens=46, max_source_tokens=2)
    with pytest.raises(empax.ConfigError, match=r"text 0 has \d+ tokens, and max_length = 12 covers"):
        model.reply(turn, max_length=12)
    for name, value in (("max_length", 49), ("max_new_tokens", 47), ("max_new_tokens", 100)):
        said = f"{name} = {value} does not fit into the 48 positions of .*, some of which the conversation needs; lower"
        with pytest.raises(empax.ConfigError, match=said):
            model.reply(turn, **{name: value})
    with pytest.raises(empax.ConfigError, match="max_source_tokens = 1 must be a whole number of at least 2"):
        model.reply(turn, max_source_tokens=1)


@pytest.mark.parametrize(
    ("argument", "message", "names"),
    [
        ({"batch_size": 0}, "batch_size = 0 must be a whole number of at least 1", ("generate", "embed", "nll")),
        ({"batch_size": True}, "batch_size = True must be a whole number", ("generate", "embed", "nll")),
        ({"batch_size": 2.0}, r"batch_size = 2\.0 must be a whole number", ("generate", "embed", "nll")),
        ({"seed": -1}, "seed = -1 must be a whole number of at least 0", ("generate",)),
        ({"seed": 2**40}, "at most 2147483647", ("generate",)),
    ],
)
def test_numbers_that_cannot_be_are_refused(reader, argument, message, names):
    for name in names:
        texts = (TEXTS, TEXTS) if name == "nll" else (TEXTS,)
        with pytest.raises(empax.ConfigError, match=message):
            getattr(reader, name)(*texts, **argument)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A model that generates and embeds."""
    return empax.load(saved(tmp_path_factory.mktemp("t5"), "t5"))


def test_whatever_gives_texts_is_taken(reader):
    wanted, vectors = reader.generate(TEXTS, max_tokens=4), reader.embed(TEXTS)
    nlls = reader.nll(TEXTS, TEXTS).nll
    table = pd.DataFrame({"source": TEXTS, "target": TEXTS}, index=[5, 7, 9])
    for give in (tuple, np.array, pd.Series, iter, lambda texts: (text for text in texts), lambda _: table["source"],
                 lambda texts: np.array(texts, dtype=object), lambda texts: dict.fromkeys(texts).keys()):  # fmt: skip
        assert reader.generate(give(TEXTS), max_tokens=4) == wanted
        np.testing.assert_array_equal(reader.embed(give(TEXTS)), vectors)
        np.testing.assert_array_equal(reader.nll(give(TEXTS), give(TEXTS)).nll, nlls)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("I feel sad", "NAME is one text"),
        (None, "NAME is None, a NoneType; give a list of texts"),
        (b"abc", "NAME is b'abc', a bytes; give a list"),
        ({"a": "b"}, "NAME is {'a': 'b'}, a dict; give a list"),
        ({"a"}, "NAME is {'a'}, a set; give a list"),
        (3, "NAME is 3, a int; give a list"),
        (np.array("a"), r"NAME is array\('a'.*, a ndarray; give a list"),
        (pd.DataFrame({"a": ["b"]}), "NAME is a DataFrame, a table; give one of its columns"),
        (["ok", None], r"NAME\[1\] is None, a NoneType; it must be a text"),
        (["ok", float("nan")], r"NAME\[1\] is nan, a float"),
        (pd.Series(["ok", None]), r"NAME\[1\] is (None|nan), a"),
        (["ok", b"ok"], r"NAME\[1\] is b'ok', a bytes"),
        (np.array([["a", "b"]]), r"NAME\[0\] is array.*, a ndarray"),
        ([["a"]], r"NAME\[0\] is \['a'\], a list"),
        (["ok", "a \ud800 b"], r"NAME\[1\] has half a character \('\\ud800'\) at position 2"),
    ],
)
def test_what_is_no_text_is_named(reader, texts, message):
    for call, name in (
        (lambda: reader.generate(texts), "texts"),
        (lambda: reader.embed(texts), "texts"),
        (lambda: reader.nll(texts, ["a"]), "sources"),
        (lambda: reader.nll(["a"], texts), "targets"),
    ):
        with pytest.raises(empax.ConfigError, match=message.replace("NAME", name)):
            call()


def test_a_table_of_pairs_is_read_by_its_columns(reader, tmp_path):
    """The work directory would be refused if other pairs were learnt from."""
    settings = {"epochs": 1, "learning_rate": 0.0, "workdir": tmp_path}
    reader.finetune(PAIRS, **settings)
    sources, targets = zip(*PAIRS, strict=True)
    reader.finetune(pd.DataFrame({"id": range(len(PAIRS)), "target": targets, "source": sources}), **settings)
    with pytest.raises(empax.ConfigError, match="pairs is a DataFrame without a column 'target'"):
        reader.finetune(pd.DataFrame({"source": sources, "reply": targets}))
    with pytest.raises(empax.ConfigError, match=r"pairs\[1\]: the target has half a character"):
        reader.finetune([("a", "b"), ("a", "\udc80")])


def test_settings_of_a_run_decode_as_they_say(reader):
    run = dataclasses.replace(reader, decoding=DecodeSettings("beam", 5, num_beams=3, rerank="consensus"))
    assert run.generate(TEXTS) == reader.generate(TEXTS, num_beams=3, max_tokens=5, rerank="consensus")
    assert run.generate(TEXTS, num_beams=1) == reader.generate(TEXTS, max_tokens=5)


def test_the_likelihood_of_an_answer_counts_the_token_that_a_run_forces_once(model):
    (token,) = model.tokenizer.encode(" feel")
    run = dataclasses.replace(model, decoding=DecodeSettings(max_tokens=4, first_token=token))
    assert model.generate(["no"], first_token=token, max_tokens=4) == run.generate(["no"])
    for target in (" feel sad", " sad"):
        assert run.nll(["no"], [target]) == model.nll(["no"], [" feel sad"])


def test_what_is_saved_never_says_the_unknown_word_either():
    tokenizer = train_words(["what a day", "what a cup"], min_count=1)
    assert tokenizer.unk_id is not None
    model = EncoderDecoder(t5_config("t5-tiny", vocab_size=tokenizer.vocab_size))
    said = TextGenerator(model, {}, tokenizer, DecodeSettings(suppress_tokens=(5,)), "here").generation()
    assert list(said.fields()["suppress_tokens"]) == [5, tokenizer.unk_id]
    free = TextGenerator(model, {}, tokenizer, DecodeSettings(allow_unknown=True), "here").generation()
    assert "suppress_tokens" not in free.fields()
