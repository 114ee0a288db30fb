"""WordNet (Fellbaum 1998), read from its database files: finds the things in a text, and facts about them.

The folder holds the database files of WordNet 3.0 or later (`index.noun`, `data.noun`, `cntlist.rev`, ...; Debian's
package wordnet-base installs them in /usr/share/wordnet). Formats: wndb(5WN), senseidx(5WN), morphy(7WN).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from empax.core.files import DataError, hash_file, hash_json
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.text_files import read_lines
from empax.data.knowledge import Fact, ranked

_POINTERS: Mapping[str, tuple[str, ...]] = {
    "IsA": ("@",),
    "MadeUpOf": ("%p", "%s", "%m"),
    "AtLocation": ("#p", "#s", "#m"),
    "HasProperty": ("=",),
}
"""Relations and their pointers: hypernyms, meronyms, holonyms, attributes."""

RELATIONS: tuple[str, ...] = (*_POINTERS, "ObjectUse")

_USE = re.compile(r"\bused (?:to|for|as) ([^;,()]+)")
_PARTS = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
"""Parts of speech by the digit in a sense key; 5 is a satellite adjective."""
_FILES = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}
_IRREGULAR = (("oes", "o"), ("ves", "fe"), ("children", "child"), ("feet", "foot"), ("teeth", "tooth"),
              ("geese", "goose"), ("mice", "mouse"), ("lice", "louse"))  # fmt: skip
"""Plurals that morphy finds in noun.exc; ours, for words without a database."""
_ENDINGS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "noun": (("s", ""), ("ses", "s"), ("ves", "f"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh"),
             ("men", "man"), ("ies", "y"), *_IRREGULAR),
    "verb": (("s", ""), ("ies", "y"), ("es", "e"), ("es", ""), ("ed", "e"), ("ed", ""), ("ing", "e"), ("ing", "")),
    "adj": (("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
    "adv": (),
}  # fmt: skip
"""Endings of inflected forms, with the ending of the base form. Source: morphy(7WN)."""

_TAGGED = "cntlist.rev"
"""How often each sense occurs."""
_WORD = re.compile(r"\b[^\W\d_]{3,}\b(?!['’]t\b)")
"""Whole words, but not "haven't"."""
_RULES = 2
"""Version of the rules that find things in a text: facts of earlier versions in the cache are not read."""
_FUNCTION_WORD_LIST = """
    about above after again against all and any are because been before being below between both but can cannot
    could did does doing down during each few for from further had has have having her here hers herself him himself
    his how into its itself just let might more most must myself nor not now off once one only other our ours
    ourselves out over own same shall she should some such than that the their theirs them themselves then there
    these they this those through too under until upon very was were what when where which while who whom why will
    with would yes you your yours yourself
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORD_LIST.split())
"""Words that never name a thing."""


def base_forms(word: str, part: str) -> list[str]:
    """Returns possible base forms of a word, by its ending alone, for a part of speech; the word itself first."""
    return [word, *(word.removesuffix(end) + base for end, base in _ENDINGS[part] if word.endswith(end))]


@dataclasses.dataclass(frozen=True)
class WordNet:
    """The database in a folder.

    Raises DataError if a file is missing or is not one of WordNet's.
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", expand(self.folder))
        needed = (_TAGGED, *(f"index.{part}" for part in _ENDINGS), "data.noun", "data.adj")
        if missing := [name for name in needed if not (self.folder / name).is_file()]:
            raise DataError(
                f"{self.folder} has no {missing[0]}; name the folder of WordNet's database files (with Debian, of the "
                "package wordnet-base: /usr/share/wordnet)."
            )
        note("WordNet", self.folder)

    @property
    def hash(self) -> str:
        """Hash of the files that facts are derived from, and of the rules."""
        parts = [f"{kind}.{part}" for part in _ENDINGS for kind in ("index", "data")]
        names = [_TAGGED, *parts, *(f"{part}.exc" for part in _ENDINGS)]
        found = [(name, hash_file(path)) for name in names if (path := self.folder / name).is_file()]
        return hash_json([_RULES, found])

    def entities(self, text: str) -> list[str]:
        """Returns the things in a text, in order, each once: words that occur most often as nouns.

        A word has at least 3 letters and is not a function word. Plurals are replaced by their singular.
        """
        found = (self._entity(word.lower()) for word in _WORD.findall(text))
        return list(dict.fromkeys(lemma for lemma in found if lemma))

    def _entity(self, word: str) -> str:
        if word in FUNCTION_WORDS:
            return ""
        counts = {part: max((self._counts[lemma, part] for lemma in self.lemmas(word, part)), default=-1)
                  for part in _ENDINGS}  # fmt: skip
        best = max(counts, key=lambda part: counts[part])  # the noun in case of a tie
        return next(iter(self.lemmas(word, "noun"))) if best == "noun" and counts["noun"] >= 0 else ""

    def lemmas(self, word: str, part: str) -> list[str]:
        """Returns the base forms of a word in the database, for a part of speech; the word itself first."""
        first, *rest = base_forms(word, part)
        forms = [first, *self._exceptions(part).get(word, ()), *rest]
        return list(dict.fromkeys(form for form in forms if (form, part) in self._counts))

    def facts(self, lemma: str) -> list[Fact]:
        """Returns facts about a thing in its first sense; none if the database has no such noun."""
        offset = self._first_senses.get(lemma)
        if offset is None:
            return []
        synset = self._synset("noun", offset)
        found = []
        for relation, symbols in _POINTERS.items():
            targets = [target for symbol, target in synset.pointers if symbol in symbols]
            found += [Fact(lemma, relation, self._synset(*target).word) for target in targets]
        found += [Fact(lemma, "ObjectUse", use.strip()) for use in _USE.findall(synset.gloss)]
        return ranked(found)

    @functools.cached_property
    def _counts(self) -> Counter[tuple[str, str]]:
        """Counts of each lemma by part of speech in the texts that WordNet's authors tagged, including zeros."""
        counts: Counter[tuple[str, str]] = Counter()
        for part in _ENDINGS:
            for _, line in read_lines(self.folder / f"index.{part}"):
                if not line.startswith("  "):  # the licence
                    counts[line.partition(" ")[0], part] = 0
        path = self.folder / _TAGGED
        for number, line in read_lines(path):
            key, *rest = line.split()
            lemma, _, sense = key.rpartition("%")
            if len(rest) != 2 or sense[:1] not in _PARTS or not rest[1].isdecimal():
                raise DataError(f"{path}, line {number}: {line[:60]!r} is not a line of a count list.")
            counts[lemma, _PARTS[sense[0]]] += int(rest[1])
        return counts

    @functools.cached_property
    def _first_senses(self) -> dict[str, int]:
        """Offset of the first sense of each noun in data.noun."""
        path = self.folder / "index.noun"
        found = {}
        for number, line in read_lines(path):
            if line.startswith("  "):  # the licence
                continue
            fields = line.split()
            # lemma, "n", senses, p, p pointers, senses, tagged senses, offsets
            try:
                place = 6 + int(fields[3])
                found[fields[0]] = int(fields[place])
            except (IndexError, ValueError) as error:
                raise DataError(f"{path}, line {number}: {line[:60]!r} is not a line of a noun index.") from error
        return found

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a handful of words for each database
    def _exceptions(self, part: str) -> Mapping[str, tuple[str, ...]]:
        path = self.folder / f"{part}.exc"
        if not path.is_file():
            return {}
        rows = (line.split() for _, line in read_lines(path))
        return {row[0]: tuple(row[1:]) for row in rows if len(row) > 1}

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a handful of files for each database
    def _data(self, part: str) -> bytes:
        return (self.folder / f"data.{part}").read_bytes() + b"\n"  # in case the last line has no end

    def _synset(self, part: str, offset: int) -> _Synset:
        data = self._data(part)
        line = data[offset : data.find(b"\n", offset)]
        where = f"{self.folder / f'data.{part}'}, byte {offset}"
        try:
            text = line.decode("ascii")
            fields, _, gloss = text.partition("|")
            return _parsed(iter(fields.split()), gloss.strip(), offset)
        except (UnicodeDecodeError, ValueError, KeyError, StopIteration) as error:
            raise DataError(f"{where}: no synset begins there; the files do not belong together.") from error


@dataclasses.dataclass(frozen=True)
class _Synset:
    word: str  # the first one
    pointers: tuple[tuple[str, tuple[str, int]], ...]  # symbol, (part of speech, offset)
    gloss: str


def _parsed(fields: Iterator[str], gloss: str, offset: int) -> _Synset:
    if int(next(fields)) != offset:
        raise ValueError("another offset")
    _, _, num_words = next(fields), next(fields), int(next(fields), 16)
    words = [(next(fields), next(fields))[0] for _ in range(num_words)]
    pointers = []
    for _ in range(int(next(fields))):
        symbol, target, part, _ = next(fields), int(next(fields)), next(fields), next(fields)
        pointers.append((symbol, (_FILES[part], target)))
    return _Synset(words[0].partition("(")[0].replace("_", " "), tuple(pointers), gloss)
