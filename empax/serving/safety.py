"""What chat answers by default to messages that speak of self-harm or danger: a fixed text, never the model's.

The list of phrases stands in danger_phrases.txt. It finds what is said in so many words, in English, and no more: it is
no judge of danger. See docs/intended-use.md.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from importlib import resources

ANSWER = (
    "I am a computer program, and I cannot help in an emergency. If you or somebody else may be in danger, please call "
    "your local emergency number now (112 in Europe, 911 in the US and Canada, 999 in the UK). If you think of hurting "
    "yourself, please talk to a person now: somebody whom you trust, a doctor, or a crisis line (988 in the US and "
    "Canada, 116 123 in the UK and Ireland; findahelpline.com lists those of other countries). You do not have to go "
    "through this alone."
)
"""The fixed answer."""


def answer_to_danger(text: str) -> str | None:
    """`ANSWER` to a message that speaks of self-harm or danger, None to any other: a `before` hook of `Session`."""
    return ANSWER if speaks_of_danger(text) else None


def speaks_of_danger(text: str) -> bool:
    """Whether a phrase of the list stands in `text`, in whatever case, spacing or kind of apostrophe."""
    harmless, danger = _patterns()
    return danger.search(harmless.sub(" … ", normalised(text))) is not None


def normalised(text: str) -> str:
    """Lower case without apostrophes, accents, signs or invisible characters, in single blanks; NFKC and casefold.

    One line a sentence. Letters that stand alone, three or more in a row ("k i l l"), are joined.
    """
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    # Marks (accents) and invisible characters (zero-width blanks, soft hyphens) go.
    text = "".join(c for c in text if unicodedata.category(c) not in ("Mn", "Me", "Cf"))
    text = re.sub(r"['`´‘’‛ʼʻʹ′]", "", text)
    text = " ".join(text.split())
    sentences = re.split(r"[.!?]+(?= |$)", text)
    sentences = [re.sub(r"[\W_]+", " ", sentence).strip() for sentence in sentences]
    joined = [re.sub(r"\b\w(?: \w){2,}\b", lambda found: found[0].replace(" ", ""), s) for s in sentences if s]
    return "\n".join(joined)


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What is harmless, and what speaks of danger."""
    lines = resources.files("empax.serving").joinpath("danger_phrases.txt").read_text(encoding="utf-8").splitlines()
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    harmless = [line.removeprefix("-").strip() for line in lines if line.startswith("-")]
    danger = [line for line in lines if not line.startswith("-")]
    harmless, danger = (rf"\b(?:{'|'.join(group).replace(' ', ' ?')})\b" for group in (harmless, danger))
    return re.compile(harmless, re.MULTILINE), re.compile(danger, re.MULTILINE)
