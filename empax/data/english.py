"""English word lists that several parts of the library share."""

from __future__ import annotations

import functools
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


ABBREVIATIONS = (
    "mr mrs ms dr prof st jr sr vs etc inc co ltd corp dept approx est gen sgt capt lt col rev hon mt ft "
    + "a.m p.m u.s u.k e.g i.e ph.d b.a m.a d.c jan feb mar apr jun jul aug sep sept oct nov dec"
).split(" ")
"""Words whose full stop does not end a sentence. NLTK's English model knows more; these occur in dialogue."""
