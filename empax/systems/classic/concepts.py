"""The concepts of a context."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from empax.core.config import check_numbers
from empax.core.protocols import Tokenizer
from empax.data.knowledge import Fact
from empax.data.wordnet import FUNCTION_WORDS, base_forms
from empax.systems.classic.lexicons import rated_words


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
        return cls(settings, tokenizer, words, rated_words("concepts.intensity", settings.intensity, tokenizer))

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
