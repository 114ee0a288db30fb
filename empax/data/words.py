"""Our own word tokenizer: the words of a corpus, with one token for all rare words."""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import tokenizers as rust
from tokenizers import Regex, models, normalizers, pre_tokenizers

from empax.core.config import ConfigError
from empax.data.english import ABBREVIATIONS, MOEL_CONTRACTIONS
from empax.data.tokenizers import (
    EOS_TOKEN,
    LISTENER_TOKEN,
    PAD_TOKEN,
    SEPARATOR,
    SPEAKER_TOKEN,
    START_TOKEN,
    SubwordTokenizer,
)

log = logging.getLogger("empax")

UNKNOWN_TOKEN, CONTEXT_TOKEN = "<unk>", "[CLS]"

BASE_TOKENS = (
    PAD_TOKEN, EOS_TOKEN, START_TOKEN, UNKNOWN_TOKEN, CONTEXT_TOKEN, SEPARATOR, SPEAKER_TOKEN, LISTENER_TOKEN,
)  # fmt: skip
"""Tokens with the first ids of every word vocabulary, in this order."""

Style: TypeAlias = Literal["moel", "whitespace"]
"""How texts are split into words, see `train_words`."""

_CLOSING = r"""[\])}>"'»”’]*"""


def _around(characters: str) -> str:
    """Returns a pattern for the positions before and after each of `characters`."""
    return f"(?=[{characters}])|(?<=[{characters}])"


def _full_stops() -> str:
    """Returns a pattern for the position before a full stop that ends a sentence, by Punkt's rules, or the text."""
    abbreviations = "|".join(rf"(?<![\w.]){word.replace('.', chr(92) + '.')}" for word in ABBREVIATIONS)
    # A single letter is an initial; a number before a lower-case letter may not end the sentence.
    word = rf"(?<!{abbreviations})(?<!(?<!\S)[^\W\d])(?<!\d)"
    ends = rf"\.{_CLOSING} *$|(?:{word}|(?<=\d)(?=\. [^a-z;:,.!?]))\.{_CLOSING} "
    return rf"(?<=[^.])(?={ends})"


_SPLITS = (
    _full_stops(),
    r"(?<=[^.] \.)(?=[^ .])",  # closing signs after it
    r"(?<!\.)(?=\.\.)|(?<=\.\.)(?!\.)",
    r"(?=[:,](?!\d))|(?<=[:,])(?!\d)",
    _around(";@#$%&?!*‒-―«“‘„»”’"),
    _around(r"\]\[(){}<>"),
    r"(?=--)|(?<=--)",
    r"(?<=')(?<!\w')(?=\w)(?!(?:re|ve|ll|m|t|s|d|n)\b)",
    r"(?<!')(?='')|(?<='')(?!')",
    r"(?<=[^' ])(?=(?:'s|'m|'d|'|'ll|'re|'ve|n't)(?: |$))",
    r"(?<=\bcan)(?=not\b)|(?<=\bd)(?='ye\b)|(?<=\bgim)(?=me\b)|(?<=\bgon)(?=na\b)|(?<=\bgot)(?=ta\b)"
    r"|(?<=\blem)(?=me\b)|(?<=\bmore)(?='n\b)|(?<=\bwan)(?=na(?: |$))|(?<= 't)(?=is\b|was\b)",
)
"""Positions, in order, where NLTK's word tokenizer puts a space."""


def _moel() -> normalizers.Normalizer:
    """Builds MoEL's cleaning and NLTK's word splitting, with a single space between two words."""
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()]
    steps += [normalizers.Replace(short, whole) for short, whole in MOEL_CONTRACTIONS.items()]
    steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    steps += [normalizers.Replace(Regex(r'(?:^|(?<=[ (\[{<]))(?:"|\'\')'), " `` "), normalizers.Replace('"', " '' ")]
    steps += [normalizers.Replace(Regex(place), " ") for place in _SPLITS]
    return normalizers.Sequence(steps)


def train_words(
    texts: Iterable[str],
    *,
    min_count: int = 2,
    style: Style = "moel",
    vocab_size: int | None = None,
    special_tokens: Sequence[str] = (),
) -> SubwordTokenizer:
    """Builds a word vocabulary. All other words are `<unk>`; `decode` joins words with single spaces.

    The style "moel" is lower case, 23 contractions expanded, NLTK words of each sentence. Source: `clean` in the code
    of MoEL (Lin et al. 2019). "whitespace" is lower case, runs of letters and digits and runs of signs, as in LEMPEx.

    Words rarer than `min_count` are left out, and the rarest so that at most `vocab_size` tokens remain, special tokens
    included. `special_tokens` are atomic tokens in addition to BASE_TOKENS; `decode` skips them. Raises ConfigError if
    `vocab_size` is smaller than the number of special tokens.
    """
    special = list(dict.fromkeys((*BASE_TOKENS, *special_tokens)))
    if vocab_size is not None and vocab_size < len(special):
        raise ConfigError(
            f"vocab_size = {vocab_size} is too small: there are {len(special)} special tokens; set it higher."
        )
    normalizer = _moel() if style == "moel" else normalizers.Lowercase()
    splitter = pre_tokenizers.WhitespaceSplit() if style == "moel" else pre_tokenizers.Whitespace()
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    order = sorted((word for word in counts if word not in special), key=lambda word: (-counts[word], word))
    kept = [word for word in order if counts[word] >= min_count]
    kept = kept if vocab_size is None else kept[: vocab_size - len(special)]
    vocabulary = {word: number for number, word in enumerate((*special, *kept))}
    backend = rust.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    backend.normalizer = normalizer  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = splitter  # pyright: ignore[reportAttributeAccessIssue]
    # Without the unknown word, so that `decode` shows it.
    backend.add_special_tokens([token for token in special if token != UNKNOWN_TOKEN])
    made = SubwordTokenizer(backend, pad=PAD_TOKEN, eos=EOS_TOKEN, start=START_TOKEN)
    made.rare_words = len(order) - len(kept)
    if counts:
        share = 1.0 - sum(counts[word] for word in kept) / counts.total()
        log.info("%d words, %d rarer ones are unknown: %.2f%% of all words", len(kept), made.rare_words, 100 * share)
    return made
