"""Words of English that more than one part of the library must treat alike."""

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
"""What `clean` in the code of MoEL (Lin et al. 2019) writes out, inside of longer words too."""


@functools.cache
def vader_lexicon() -> Mapping[str, float]:
    """VADER's words and signs, and the mean valence of each, from -4 to 4. Source: Hutto and Gilbert 2014."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # reads its lexicon: only when asked

    return SentimentIntensityAnalyzer().lexicon


ABBREVIATIONS = (
    "mr mrs ms dr prof st jr sr vs etc inc co ltd corp dept approx est gen sgt capt lt col rev hon mt ft "
    + "a.m p.m u.s u.k e.g i.e ph.d b.a m.a d.c jan feb mar apr jun jul aug sep sept oct nov dec"
).split(" ")
"""Words whose full stop ends no sentence. NLTK's trained English model knows more; these are the ones of dialogue."""
