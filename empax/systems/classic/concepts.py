"""The concepts of a context, and the emotional intensity of words."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from empax.core.config import ConfigError, check_numbers
from empax.core.files import DataError
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.protocols import Tokenizer
from empax.core.text_files import read_lines
from empax.data.english import vader_lexicon
from empax.data.knowledge import Fact
from empax.data.wordnet import FUNCTION_WORDS, base_forms

_LEAST, _RANGE = 0.06467, 0.607468  # of NRC_VAD's words: KEMP's code scales their intensities to [0, 1]


@dataclasses.dataclass(frozen=True)
class ConceptsSettings:
    """Settings of the reader "concepts"; "alignment" reads all but `signal` and `published`.

    Attributes:
      most: maximum concepts of a context, those of the most intense emotion; 0 = none, and no graph (KEMP w/o ECE).
      each: maximum concepts of a word, likewise.
      least: minimum intensity of a concept, in [0, 1]. KEMP takes 0.6 with NRC_VAD; few nouns are in VADER's lexicon.
      intensity: "vader", or a file with a word, its valence and its arousal, in [0, 1], on each line.
      signal: whether every decoder layer reads the emotional signal (without it and the loss "attention": w/o EDD).
      published: follows the released code: nodes without an edge keep a share of the graph's attention, which is not
        scaled, padding counts in the signal, and attention goes through another softmax before copying.
    """

    most: int = 10
    each: int = 1
    least: float = 0.0
    intensity: str = "vader"
    signal: bool = True
    published: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "most", least=0)
        check_numbers(self, "each", least=1)
        check_numbers(self, "least", least=0, most=1)


@dataclasses.dataclass(frozen=True)
class ConceptPicker:
    """Picks the concepts of a context's words from facts about the things in it.

    `words` are the tokenizer's by id, in lower case, with their emotional `intensities`, in [0, 1].
    """

    settings: ConceptsSettings
    tokenizer: Tokenizer
    words: tuple[str, ...]
    intensities: Float[np.ndarray, " V"]

    @classmethod
    def of(cls, settings: ConceptsSettings, tokenizer: Tokenizer) -> ConceptPicker:
        words = tuple(tokenizer.decode([i]).strip() for i in range(tokenizer.vocab_size))
        known = _intensities(settings.intensity)
        found = np.array([known.get(word, 0.0) for word in words], np.float32)
        if not found.any():
            raise ConfigError(f"concepts.intensity = {settings.intensity!r} has none of the {len(words)} words; "
                              "give another.")  # fmt: skip
        return cls(settings, tokenizer, words, found)

    def __call__(self, source: Sequence[int], facts: Sequence[Fact]) -> list[tuple[int, int]]:
        """Returns the concepts of a source's words, each with the position of its word.

        A concept is the last word of a fact's tail, "animal" of "domestic animal". A fact belongs to each word of the
        source that is its head, or an inflected form of it. Ties of intensity go to the earlier fact.
        """
        s, intensities = self.settings, self.intensities
        by_head: dict[str, dict[int, None]] = {}
        for fact in facts:
            if fact.social or not (ids := self.tokenizer.encode(fact.tail)):
                continue
            word, head = self.words[ids[-1]], fact.head.lower()
            useful = word.isalpha() and word not in FUNCTION_WORDS  # the unknown word is <unk>
            if useful and word != head and intensities[ids[-1]] >= s.least:
                by_head.setdefault(head, {})[ids[-1]] = None
        found = []
        for place, word in enumerate(source):
            forms = base_forms(self.words[word], "noun")
            concepts = next((by_head[form] for form in forms if form in by_head), {})
            found += [(i, place) for i in sorted(concepts, key=lambda i: -intensities[i])[: s.each]]
        return sorted(sorted(found, key=lambda pair: -intensities[pair[0]])[: s.most], key=lambda pair: pair[1])


def check_intensity(name: str) -> None:
    """Raises ConfigError if the file does not exist, and DataError if it has another layout."""
    if name == "vader":
        return
    if not expand(name).is_file():
        raise ConfigError(
            f"concepts.intensity = {name!r} is not a file; give one with a word, its valence and its arousal "
            'on each line, or "vader".'
        )
    note(f"the intensities {name!r}", expand(name))
    for _ in _rated(name):
        pass


@functools.cache
def _intensities(name: str) -> Mapping[str, float]:
    r"""Reads the emotional intensity of each word; raises as `check_intensity` does.

    .. math:: (\lVert (v, a / 2) - (1/2, 0) \rVert_2 - 0.06467) / 0.607468

    for valence v and arousal a in [0, 1]; for VADER, the absolute valence over 4. Source: Li et al. 2022 (KEMP), Eq. 1,
    and its code. Departure: VADER's lexicon has no arousal, and NRC_VAD is not free.
    """
    check_intensity(name)
    if name == "vader":
        return {word: abs(valence) / 4.0 for word, valence in vader_lexicon().items()}
    return dict(_rated(name))


def _rated(name: str) -> Iterator[tuple[str, float]]:
    """Yields the words of a file with their intensities."""
    for number, line in read_lines(expand(name)):
        fields = line.split("\t") if "\t" in line else line.split()
        try:
            valence, arousal = float(fields[1]), float(fields[2])
        except (IndexError, ValueError):
            if number == 1 or not line.strip():
                continue  # a header or an empty line
            raise DataError(f"{name}, line {number}: {line[:60]!r} must be a word, its valence, its arousal.") from None
        if not (0 <= valence <= 1 and 0 <= arousal <= 1):
            raise DataError(f"{name}, line {number}: {valence}, {arousal} must lie in [0, 1], as NRC_VAD's do.")
        intensity = (math.hypot(valence - 0.5, arousal / 2) - _LEAST) / _RANGE
        yield fields[0].strip().lower(), min(max(intensity, 0.0), 1.0)
