"""The tokens of metrics against the libraries that define them."""

import itertools
import json
import random

import pytest
from nltk.tokenize.destructive import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

from empax.data.sample import load_dialogues
from empax.evaluation import words

PARAMETERS = PunktParameters()
PARAMETERS.abbrev_types = set(words.ABBREVIATIONS)
SENTENCES, WORDS = PunktSentenceTokenizer(PARAMETERS), NLTKWordTokenizer()


def nltk_words(text):
    """`nltk.word_tokenize`, with the abbreviations of empax in place of a trained model of sentences."""
    return tuple(itertools.chain.from_iterable(map(WORDS.tokenize, SENTENCES.tokenize(text))))


@pytest.fixture(scope="module")
def awkward():
    """Texts whose pieces meet in every way: what a chunk of text becomes may depend on what stands around it."""
    written = (
        "i sorry Oh cannot gonna wanna gimme can't it's dogs' 'tis 'cause d'ye U.S. Mr. st. etc p.m. 3.5 5. 1,000 a-b "
        "well--so no... yes.. ... what?! wow!! ok.so ok,so hi: 10:30 :) ) . ? ! , ' '' \" \"no.\" (yes) (yes.) foo.) x."
        " don't. we'll? we'll, they'll. sure, sure. $5 #tag user@mail.com naïve “so” ’s ;) * I'm I'M N'T shouldn't've"
        " rock'n'roll o'clock re-do. 3rd. cannot. gotta? lemme, half-time! -- - a.m., really.? word.Next ok!Next"
    )
    pieces = written.split()
    rng = random.Random(0)
    gaps = (" ", " ", " ", "  ", "\t", "\n")
    return ["".join(rng.choice(pieces) + rng.choice(gaps) for _ in range(rng.randint(1, 6))) for _ in range(1_000)]


def test_words_are_those_of_nltk(awkward):
    known = [turn.text for split in load_dialogues().values() for one in split for turn in one.utterances]
    for text in (*known, *awkward, "", " ", "\n"):
        expected = nltk_words(text)
        assert words.tokenize(text) == expected, repr(text)
        assert words.lower_tokens(text) == tuple(word.lower() for word in expected)


def test_13a_tokens_match_sacrebleu():
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    theirs = Tokenizer13a()
    for line in [
        'He said: "3.5%, or 1,000?" (a-b) 7-up',
        "it's &amp; &quot;x&quot; end.",
        "a/b [c] {d} ~e `f` g@h.com",
        "ok...",
        "I can't &#39;do&#39; it, you&not me &nbsp;a &amp;lt; &lt;b&gt;",
    ]:
        assert list(words.tokenize_13a(line)) == theirs(line).split()


def test_cleaning_as_moel_does_it():
    cases = {
        "I'm sure it's fine, they won't!": "i am sure it is fine , they will not !",
        "We can't; you'd": "we can not ; you would",  # NLTK parts "cannot"
        "He's here, she didn\u2019t": "he 's here , she didn \u2019 t",
        "doesn't": "does not",
        "hi'm": "hi am",  # inside a longer word, as there
    }
    for text, expected in cases.items():
        assert " ".join(words.moel_tokens(text)) == expected
    assert len(words.MOEL_CONTRACTIONS) == 23


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["transformer", "moel", "kemp"])
def test_released_outputs_are_clean_already(real_data, name):
    lines = (real_data / "peer_outputs" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:300]
    texts = [json.loads(line)[side] for line in lines for side in ("response", "reference")]
    changed = [text for text in texts if words.moel_tokens(text) != tuple(text.split())]
    assert len(changed) <= len(texts) // 100, changed
