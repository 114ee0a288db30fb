"""Words of emotion, and the intensities of words: VADER's, or those of a file."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from jaxtyping import Float

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.protocols import Tokenizer
from empax.core.text_files import read_lines
from empax.data.english import vader_lexicon

_FILES = {
    "lexicon": ("the lexicon", "a word"),
    "concepts.intensity": ("the intensities", "a word, its valence and its arousal"),
}
"""By setting: what a file of it holds, and what each line has."""

_LEAST, _RANGE = 0.06467, 0.607468  # of NRC_VAD's words: KEMP's code scales their intensities to [0, 1]


def check_lexicon(setting: str, name: str) -> None:
    """Raises ConfigError if the file does not exist, and DataError if it has another layout."""
    if name == "vader":
        return
    (holds, line), path = _FILES[setting], expand(name)
    if not path.is_file():
        raise ConfigError(f'{setting} = {name!r} is not a file; give one with {line} on each line, or "vader".')
    note(f"{holds} {name!r}", path)
    _read(setting, name)


def rated_words(setting: str, name: str, tokenizer: Tokenizer) -> Float[np.ndarray, " V"]:
    r"""Returns the intensity of each word of a vocabulary, in [0, 1], 0 for unknown ones; in a "lexicon" 1 for each.

    .. math:: (\lVert (v, a / 2) - (1/2, 0) \rVert_2 - 0.06467) / 0.607468

    for valence v and arousal a in [0, 1]; for VADER, the absolute valence over 4. Source: Li et al. 2022 (KEMP), Eq. 1,
    and its code. Departure: VADER's lexicon has no arousal, and NRC's, which KEMP and EmpDG take, are not free.

    Raises ConfigError if none of the words is known, else as `check_lexicon` does.
    """
    check_lexicon(setting, name)
    known = _read(setting, name)
    found = np.array([known.get(tokenizer.decode([i]).strip(), 0.0) for i in range(tokenizer.vocab_size)], np.float32)
    if not found.any():
        raise ConfigError(f"{setting} = {name!r} has none of the {tokenizer.vocab_size} words; give another.")
    return found


@functools.cache
def _read(setting: str, name: str) -> Mapping[str, float]:
    plain = setting == "lexicon"
    if name == "vader":
        return {word: 1.0 if plain else abs(valence) / 4.0 for word, valence in vader_lexicon().items()}
    lines = read_lines(expand(name))
    if plain:
        return {line.strip().lower(): 1.0 for _, line in lines if line.strip()}
    return dict(_rated(name, lines))


def _rated(name: str, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, float]]:
    for number, line in lines:
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
