"""Text that grows: no half character, nothing taken back, and stops that hold however many tokens come at once."""

import types

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from empax.data.tokenizers import SubwordTokenizer
from empax.models.transformer import EncoderDecoder
from empax.serving.answering import TextGenerator
from empax.serving.streaming import Wording, room_of

EOS = 1
TEXT = "Oh no, naïve 😀👩‍👩‍👧 don't … 日本 ok."


def reader(backend, clean_up=None):
    for token in ("<pad>", "</s>"):
        backend.add_special_tokens([token])
    tokenizer = SubwordTokenizer(backend, pad="<pad>", eos="</s>", start="<pad>", clean_up=clean_up)
    model = types.SimpleNamespace(spec=EncoderDecoder)  # no decoder-only model: its texts stand alone
    return TextGenerator(model, {}, tokenizer, {}, "x")


def of_bytes():
    """Byte-level BPE without merges: a token is a byte."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {"<pad>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(sorted(letters))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return reader(backend)


def of_letters_and_bytes():
    """Llama's: letters where the vocabulary has them, else bytes, of which a run is read as one."""
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"<0x{i:02X}>": i + 3 for i in range(256)}
    vocab |= {letter: 300 + i for i, letter in enumerate("▁abcdefghijklmnopqrstuvwxyzO,.'")}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return reader(backend)


def of_words():
    """Words, with the blanks before signs taken out of the text."""
    words = ["<pad>", "</s>", "do", "it", "n't", "'", "s", "so", ".", "?"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return reader(backend, clean_up=True)


def read(generator, ids, size, *, stop=(), most=None, forced=False):
    """The pieces when `size` tokens come at once, and how it ended."""
    most = len(ids) if most is None else most
    wording = Wording(generator, "", (EOS,), most, stop, forced)
    tokens, pieces = np.array([*ids, *[0] * 4]), []
    for settled in range(size, len(tokens) + size, size):
        if not wording.over:
            pieces.append(wording.read(tokens, settled, settled >= most))
    assert wording.over
    assert "".join(pieces) == wording.text
    return wording, pieces


@pytest.mark.parametrize("make", [of_bytes, of_letters_and_bytes])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_piece_has_half_a_character(make, size):
    generator = make()
    ids = generator.tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT)
    whole = generator.tokenizer.decode(ids)
    wording, pieces = read(generator, [*ids, EOS], size)
    assert wording.text == whole == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert sum(map(bool, pieces)) > len(TEXT) / size / 4
    assert (wording.count, wording.cut) == (len(ids) + 1, False)
    cut, _ = read(generator, ids, size, most=len(ids) - 1)
    assert cut.cut
    for most, expected in ((len(ids) + 1, True), (len(ids) + 2, False)):  # at the limit, a forced end is none
        cut, _ = read(generator, [*ids, EOS], size, most=most, forced=True)
        assert (cut.text, cut.count, cut.cut) == (TEXT, len(ids) + 1, expected)


@pytest.mark.parametrize("make", [of_bytes, of_letters_and_bytes])
def test_broken_bytes_read_the_same_at_once_and_one_by_one(make):
    generator = make()
    half, other = generator.tokenizer.encode("é")[-2:], generator.tokenizer.encode("a")[-1:]
    for ids in ([*half, half[0], *other, EOS], [*half, half[0], EOS]):
        assert read(generator, ids, 1)[0].text == read(generator, ids, len(ids))[0].text


@pytest.mark.parametrize("text", ["do n't", "it ' s so .", "do it .", "so ' so ' so ?"])
def test_blanks_that_go_with_what_comes_are_not_told_before(text):
    generator = of_words()
    ids = [*generator.tokenizer.encode(text), EOS]
    one, _ = read(generator, ids, 1)
    assert one.text == read(generator, ids, len(ids))[0].text == generator.tokenizer.decode(ids).strip()


@pytest.mark.parametrize(
    "stop", [("naïve",), (" don",), ("😀👩",), (" ok", "…"), ("n't … 日本", "n't"), ("nowhere",), ("Oh",)]
)
def test_stops_end_the_text_at_the_same_place_and_cost_the_same_however_many_tokens_come(stop):
    generator = of_bytes()
    ids = [*generator.tokenizer.encode(TEXT), EOS]
    whole = read(generator, ids, len(ids), stop=stop)[0]
    first = min((TEXT.find(text) for text in stop if text in TEXT), default=len(TEXT))
    assert whole.text == TEXT[:first]
    assert whole.count == len(generator.tokenizer.encode(TEXT[:first])) + 1 or stop != ("nowhere",)
    for size in (1, 2, 5):
        part = read(generator, ids, size, stop=stop)[0]
        assert (part.text, part.count, part.cut) == (whole.text, whole.count, False)
    assert (whole.count < len(ids)) == (first < len(TEXT))


def test_caches_are_few():
    assert {room_of(n) for n in range(1, 257)} == {64, 128, 256}


def test_a_stop_that_is_longer_than_the_text_is_compared_with_no_more_than_that():
    class Stop(str):
        slices = 0

        def __getitem__(self, key):
            Stop.slices += 1
            return super().__getitem__(key)

    generator = of_bytes()
    wording, _ = read(generator, [*generator.tokenizer.encode("Oh no"), EOS], 1, stop=(Stop("x" * 1000),))
    assert (wording.text, Stop.slices < 100) == ("Oh no", True)
