"""Checks of replies: their relevance, tone and openings.

The limits are calibrated on human replies of EmpatheticDialogues, which pass all of them, and on degenerate sets: one
reply for all, replies to other contexts, gladness at every misfortune.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int
from scipy import sparse

from empax.core.types import Prediction
from empax.evaluation.pairing import dialogues_of, replies_and_references
from empax.evaluation.text import token_f1_rows, word_counts

MIN_ROWS = 8
"""With fewer rows, the distribution of replies is not checked."""

OPENING_WORDS = 3
MAX_OPENING = 0.25
"""Maximum share of replies with one opening; 0.8% of human replies have one, 15 to 51% of eleven released systems'."""

MAX_CONTRADICTIONS = 0.35
"""Of human replies to negative emotions 5% are glad, and of those to positive ones 3% are sorry; of released systems'
at most 33% and 24%."""

MAX_COPIES, _COPIED_F1 = 0.1, 80.0
"""Maximum share of near-copies of the reference, and the token F1 of one. Released systems have at most 0.4%."""

_SHUFFLES = 99
ENOUGH_DIALOGUES = 24
MAX_AS_HIGH, MAX_AS_HIGH_OF_FEW = 0.02, 0.5
"""Maximum shares of shuffles that score as high. With 24 dialogues of any released system hardly ever 2 in 100 do; with
fewer, chance decides."""

_Z_95 = 1.959964
_WORDS = re.compile(r"\w+(?:'\w+)*")


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check: the finding is a clause of a sentence; unless `ok`, the run is degenerate."""

    name: str
    ok: bool
    found: str


def share(count: int, total: int) -> str:
    """Formats both numbers for a check."""
    return f"{count:,} of {total:,}"


def wilson_low(hits: int, total: int) -> float:
    """Returns the lower end of the 95% interval of a share (Wilson 1927).

    The upper end is one minus the lower end for the misses.
    """
    hit, z2 = hits / total, _Z_95**2
    reach = _Z_95 * math.sqrt(hit * (1 - hit) / total + z2 / (4 * total**2))
    return max(0.0, hit + z2 / (2 * total) - reach) / (1 + z2 / total)  # avoids -0.0 from rounding


def _plain(text: str) -> str:
    """Lower-cases a text, unifies apostrophes, and rejoins contractions that a tokenizer split ("i 'm")."""
    return re.sub(r"\s+(?='\w)", "", text.lower().replace("’", "'"))


def words(text: str) -> list[str]:
    """Returns the runs of letters and digits of the lower-cased text; "i'm" is one."""
    return _WORDS.findall(_plain(text))


def openings(rows: Sequence[Prediction]) -> list[Check]:
    """Checks that the commonest opening's share is not significantly above a quarter and twice that of references."""
    replies, references = (
        [found for text in texts if (found := words(text))] for texts in replies_and_references(rows)
    )
    opening, most = _commonest(replies)
    if len(replies) < MIN_ROWS or not most:
        return []
    usual = _commonest(references)[1] / len(references) if references else 0.0
    found = f"{share(most, len(replies))} replies begin with “{' '.join(opening)}”"
    return [Check("openings", wilson_low(most, len(replies)) <= max(MAX_OPENING, 2 * usual), found)]


def _commonest(texts: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], int]:
    begun = Counter(tuple(text[:OPENING_WORDS]) for text in texts if len(text) >= OPENING_WORDS)
    return begun.most_common(1)[0] if begun else ((), 0)


NEGATIVE = frozenset(
    {
        "afraid", "angry", "annoyed", "anxious", "apprehensive", "ashamed", "devastated", "disappointed", "disgusted",
        "embarrassed", "furious", "guilty", "jealous", "lonely", "sad", "terrified",
    }
)  # fmt: skip
POSITIVE = frozenset({"confident", "content", "excited", "grateful", "hopeful", "impressed", "joyful", "proud"})
"""Emotions of EmpatheticDialogues with a clear tone; replies to the other eight may have either."""

_VERY = r"(?:so |really |very |too |just |such |a |an |pretty |absolutely )*"
_THAT = rf"(?:that|it|this)(?:'?s| is| was| sounds| must be| must have been) {_VERY}"
_GLAD = re.compile(
    r"(?<!not )(?<!n't )(?<!never )(?<!be )\b(?:"
    r"glad|delighted|happy for|so happy|congrat\w*|awesome|amazing|wonderful|fantastic|good thing|good for you|"
    rf"so proud|proud of you|well done|{_THAT}(?:great|good|nice|cool|exciting|lovely|impressive|fun))\b"
)
_SORRY = re.compile(
    rf"\b(?:sorry|oh no|terrible|awful|horrible|sucks|unfortunate|heartbreaking|condolences|bummer|stinks|"
    rf"{_THAT}(?:sad|bad|tough|rough|scary))\b"
)


def contradictions(rows: Sequence[Prediction]) -> list[Check]:
    """Checks that few replies are glad about negative emotions or sorry about positive ones: at most a third."""
    checks = []
    for emotions, tone, of, pattern in ((NEGATIVE, "glad", "negative", _GLAD), (POSITIVE, "sorry", "positive", _SORRY)):
        replies = [_plain(row.response) for row in rows if row.emotion in emotions and row.response.strip()]
        if len(replies) >= MIN_ROWS:
            wrong = sum(bool(pattern.search(reply)) for reply in replies)
            found = f"{share(wrong, len(replies))} replies to {of} emotions are {tone}"
            checks.append(
                Check(f"{tone} about {of} emotions", wilson_low(wrong, len(replies)) <= MAX_CONTRADICTIONS, found)
            )
    return checks


def copies(rows: Sequence[Prediction]) -> list[Check]:
    """Checks that few replies nearly copy the reference or repeat a turn of the context."""
    replies, references = replies_and_references(rows)
    repeated = [
        bool(reply) and reply in (words(turn) for turn in row.context)
        for row, reply in zip(rows, map(words, replies), strict=True)
    ]
    counts = {
        "references": int(np.sum(token_f1_rows(replies, references) >= _COPIED_F1)),
        "turns of contexts": sum(repeated),
    }
    most = max(1, MAX_COPIES * len(rows))
    return [
        Check(f"copies of {of}", count <= most, f"{share(count, len(rows))} replies are copies of {of}")
        for of, count in counts.items()
    ]


def shuffled(rows: Sequence[Prediction]) -> list[Check]:
    """Checks that replies fit their own contexts and references better than those of other dialogues.

    A permutation test. The score is the mean cosine between the TF-IDF vectors of a reply and of its context with the
    reference. It is compared with the scores of 99 permutations of the replies to other dialogues.
    """
    groups = _dialogues(rows)
    if len(rows) < MIN_ROWS or 2 * np.bincount(groups).max() > len(rows):
        return []
    replies, targets = _vectors(rows)
    own = replies.multiply(targets).sum() / len(rows)
    scores = np.asarray([replies[moved].multiply(targets).sum() for moved in _moves(groups)]) / len(rows)
    if own == 0.0 == scores.max():
        return []  # no shared word, as in a language without spaces
    as_high = (1 + int(np.sum(scores >= own * (1 - 1e-9)))) / (1 + _SHUFFLES)
    ok = as_high <= (MAX_AS_HIGH if groups.max() + 1 >= ENOUGH_DIALOGUES else MAX_AS_HIGH_OF_FEW)
    found = f"the similarity of replies to their own dialogues is {own:.3f}, to others {scores.mean():.3f}"
    return [Check("own replies, shuffled", ok, found if ok else f"{found}: no better than shuffled replies")]


def _dialogues(rows: Sequence[Prediction]) -> Int[np.ndarray, " N"]:
    """Returns dialogue numbers, by ids or else by first turns."""
    told = dialogues_of(rows)
    if told is not None:
        return told
    numbers: dict[str, int] = {}
    first = [row.context[0] if row.context else f"row {i}" for i, row in enumerate(rows)]
    return np.asarray([numbers.setdefault(turn, len(numbers)) for turn in first])


def _moves(groups: Int[np.ndarray, " N"]) -> Iterator[Int[np.ndarray, " N"]]:
    """Yields permutations that move every row to another dialogue: dialogues in random order, then rotated."""
    rng, most = np.random.default_rng(0), int(np.bincount(groups).max())
    for _ in range(_SHUFFLES):
        order = np.argsort(rng.permutation(groups.max() + 1)[groups], kind="stable")
        moved = np.empty_like(order)
        moved[order] = np.roll(order, rng.integers(most, len(groups) - most + 1))
        yield moved


def _vectors(rows: Sequence[Prediction]) -> tuple[sparse.csr_matrix, sparse.csr_matrix]:
    """Returns the TF-IDF unit vectors of replies, and of contexts with references."""
    texts = [words(row.response) for row in rows]
    texts += [words(" ".join((*row.context, row.reference))) for row in rows]
    text, word, counts = sparse.find(word_counts(texts))
    weights = counts * np.log((len(texts) + 1) / np.bincount(word))[word]
    weights /= np.sqrt(np.bincount(text, weights**2))[text]
    vectors = sparse.csr_matrix((weights, (text, word)), (len(texts), word.max(initial=0) + 1))
    return vectors[: len(rows)], vectors[len(rows) :]
