"""English word lists, and the blanks of tokenised texts, for several parts of the library."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

MOEL_CONTRACTIONS = {
    "it's": "it is", "don't": "do not", "doesn't": "does not", "didn't": "did not", "you'd": "you would",
    "you're": "you are", "you'll": "you will", "i'm": "i am", "they're": "they are", "that's": "that is",
    "what's": "what is", "couldn't": "could not", "i've": "i have", "we've": "we have", "can't": "cannot",
    "i'd": "i would", "aren't": "are not", "isn't": "is not", "wasn't": "was not", "weren't": "were not",
    "won't": "will not", "there's": "there is", "there're": "there are",
}  # fmt: skip
"""Contractions that `clean` in the code of MoEL (Lin et al. 2019) expands, also inside longer words."""


@functools.cache
def vader_lexicon() -> Mapping[str, float]:
    """Loads VADER's words and signs with their mean valence, from -4 to 4. Source: Hutto and Gilbert 2014."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # reads its lexicon, so only when needed

    return SentimentIntensityAnalyzer().lexicon


_TYPOGRAPHIC = str.maketrans("‘’ʼ“”", "'''\"\"")


def with_plain_quotes(text: str) -> str:
    """Replaces typographic apostrophes and quotation marks, which telephones write, by those of a keyboard.

    Corpora hardly have others. A word vocabulary reads "can't" as "cannot", but "can’t" as "can ’ t"; for a byte-level
    BPE, "’" is three rare bytes.
    """
    return text.translate(_TYPOGRAPHIC)


ABBREVIATIONS = (
    "mr mrs ms dr prof st jr sr vs etc inc co ltd corp dept approx est gen sgt capt lt col rev hon mt ft "
    + "a.m p.m u.s u.k e.g i.e ph.d b.a m.a d.c jan feb mar apr jun jul aug sep sept oct nov dec"
).split(" ")
"""Words whose full stop does not end a sentence. NLTK's English model knows more; these occur in dialogue."""

_JOINS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=\w) ['’] (?=(?:s|t|m|d|re|ll|[vV]e|am|clock)\b)"), "'"),
    (re.compile(r"(?<=\w)['’]Ve\b"), "'ve"),  # "I ' Ve" comes from DailyDialog's own clean-up
    (re.compile(r"(?<=\w) (?=(?:n['’]t|['’](?:s|m|d|re|ll|ve))\b)"), ""),  # NLTK's "did n't"
    (re.compile(r"(?<=\d) ([.:]) (?=\d)"), r"\1"),  # 6 . 5; a comma there often separates two numbers
    (re.compile(r" (?=[.,!?;:%)])"), ""),
    (re.compile(r"(?<=[$¥(]) "), ""),
)
_APART, _TOUCHING = (re.compile(rf"\w{blank}[.,!?](?:\s|$)") for blank in (" ", ""))


def written(text: str) -> str:
    """Removes the blanks that a tokeniser has put before punctuation and around apostrophes, and line breaks.

    Quotation marks and hyphens are unchanged, since their side is unknown.
    """
    text = " ".join(text.split())
    for pattern, replacement in _JOINS:
        text = pattern.sub(replacement, text)
    return text


_STARTS = re.compile(r"""(?:^|(?<=[^.][.!?] )|(?<=[^.][.!?]["'] ))["'(]?[a-z]""")
_I = re.compile(r"(?<![\w'.-])i(?=$|[\s,.!?;:)]|'(?:m|d|ve|ll)\b)(?!\.e\b)")


def with_capitals(text: str) -> str:
    """Returns a text in lower case with the capitals of its sentences and of "I"; other texts are unchanged."""
    if text != text.lower():
        return text
    return _I.sub("I", _STARTS.sub(lambda found: found[0].upper(), text))


def as_typed(text: str) -> str:
    """Returns `written(text)` for a line in which a blank precedes every `.`, `,`, `!` and `?` after a word.

    A tokeniser did that. Other texts are unchanged: in "Great :)", a person typed the blank.
    """
    tokenised = "\n" not in text and _APART.search(text) and not _TOUCHING.search(text)
    return written(text) if tokenised else text
