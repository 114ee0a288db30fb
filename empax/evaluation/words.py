"""Word tokenizers of the metrics: NLTK's, and mteval's 13a. Tokens are cached, since texts and their parts recur."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable

from empax.data.english import ABBREVIATIONS, MOEL_CONTRACTIONS

# Words of letters and digits that NLTK nevertheless splits.
_CONTRACTIONS = frozenset({"cannot", "gimme", "gonna", "gotta", "lemme", "wanna"})
_INNER_SENTENCE_END = re.compile(r"[.?!]\s*\S")
_PLAIN_CHUNK = re.compile(r"(?P<word>[A-Za-z0-9]+(?:['-][A-Za-z]+)*)?(?P<end>,|[?!]+|\.)?")


@functools.cache
def _nltk_tokenizers() -> tuple[Callable[[str], list[str]], Callable[[str], Iterable[str]]]:
    # Imported on first use: NLTK takes seconds to import.
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS)  # Punkt may add to it
    return NLTKWordTokenizer().tokenize, PunktSentenceTokenizer(parameters).tokenize


@functools.lru_cache(maxsize=200_000)
def tokenize(text: str) -> tuple[str, ...]:
    """Returns NLTK word tokens like `nltk.word_tokenize`, case kept.

    The word tokenizer splits off a full stop only at the end of its input ("sorry. What" keeps "sorry."), so the text
    is split into sentences first. Departure: NLTK downloads a trained sentence model; this uses the same algorithm
    (Punkt) with a short list of abbreviations and no download.

    For a plain chunk of text, both depend only on the white space around it, so most chunks come from a cache; a text
    with any other chunk is tokenized by NLTK as a whole.
    """
    words: list[str] = []
    for chunk in text.split():
        found = _chunk_words(chunk)
        if found is None:
            return _whole(text)
        words += found
    return tuple(words)


@functools.lru_cache(maxsize=200_000)
def _chunk_words(chunk: str) -> tuple[str, ...] | None:
    """Returns NLTK's words of a chunk between white space; None if they depend on the surrounding text."""
    plain = _PLAIN_CHUNK.fullmatch(chunk)
    if plain is None:
        return None
    word, end = plain.group("word", "end")
    if end == "." and not _ends_sentence(word or ""):
        return None
    words, _ = _nltk_tokenizers()
    simple = not word or (word.isalnum() and word.lower() not in _CONTRACTIONS)
    parts = ((word,) if word else ()) if simple else tuple(words(word))
    return (*parts, *(end or ""))  # each mark is a separate token


def _ends_sentence(word: str) -> bool:
    """Whether a full stop after the word ends a sentence, whatever follows."""
    return len(word) > 1 and word.isalpha() and word.lower() not in ABBREVIATIONS


def _whole(text: str) -> tuple[str, ...]:
    words, sentences = _nltk_tokenizers()
    parts = sentences(text) if _INNER_SENTENCE_END.search(text) else (text,)
    return tuple(itertools.chain.from_iterable(words(part) for part in parts))


@functools.lru_cache(maxsize=200_000)
def lower_tokens(text: str) -> tuple[str, ...]:
    """Returns lower-cased `tokenize`: the words of every default of `evaluation.text`."""
    return tuple(token.lower() for token in tokenize(text))


_MOEL_CONTRACTION = re.compile("|".join(MOEL_CONTRACTIONS))


@functools.lru_cache(maxsize=200_000)
def moel_tokens(text: str) -> tuple[str, ...]:
    """Returns NLTK words of the lower-cased text with 23 contractions expanded ("i'm" to "i am").

    Source: `clean` in the code of MoEL (Lin et al. 2019). MIME, EmpDG, CEM, CASE and KEMP read the same data, so their
    released outputs and references are in this form; cleaning them again changes nothing. As there, contractions are
    also replaced inside longer words.
    """
    return tokenize(_MOEL_CONTRACTION.sub(lambda found: MOEL_CONTRACTIONS[found.group()], text.lower()))


def tokenize_13a(text: str) -> tuple[str, ...]:
    """Returns the tokens of mteval-v13a, sacrebleu's default: splits off punctuation outside numbers; case kept."""
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, sign in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(entity, sign)
    text = re.sub(r"""([!-&(-+/:-@\[-`{-~])""", r" \1 ", f" {text} ")
    text = re.sub(r"([^0-9])([.,])", r"\1 \2 ", text)
    text = re.sub(r"([.,])([^0-9])", r" \1 \2", text)
    return tuple(re.sub(r"([0-9])(-)", r"\1 \2 ", text).split())
