"""Training data of a dense retriever: contexts, their responses, and negative responses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Int

from empax.core.config import ConfigError
from empax.core.files import DataError, read_json
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.text_files import check_length
from empax.core.types import Instance
from empax.data import features
from empax.data.corpora import data_folder

Negative: TypeAlias = Literal["other_emotion", "same_emotion"]
"""Kinds of negatives: a response from another dialogue, with another emotion or the same one."""

FOLDER = "lempex_dpr"
"""Folder of the authors' pairs inside a data folder."""

FILES = {"train": "reddit-train.json", "validation": "reddit-valid.json"}

_NEGATIVE_LISTS: Mapping[Negative, str] = {"other_emotion": "negative_ctxs", "same_emotion": "hard_negative_ctxs"}


@flax.struct.dataclass
class RetrievalBatch:
    """Contexts with K keys each: the response, then its negatives.

    A missing key is all padding. Equal texts have equal numbers in `key_text`, equal dialogues in `key_group`.
    """

    source: Int[Array, "B S"]
    source_mask: Bool[Array, "B S"]
    key: Int[Array, "B K P"]
    key_mask: Bool[Array, "B K P"]
    key_text: Int[Array, "B K"]
    key_group: Int[Array, "B K"]
    valid: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Keys:
    """All texts that may be positives or negatives: the response to each context, in order, and then others.

    Attributes:
      ids: ids of each text, as the retriever reads it.
      groups: number of each text's dialogue; see `data.exemplars.dialogue_groups`.
      emotions: index into EMOTIONS; -1 = unknown: the text is never drawn.
    """

    ids: Sequence[Sequence[int]]
    groups: Int[np.ndarray, " M"]
    emotions: Int[np.ndarray, " M"]


class RetrievalExamples:
    """Contexts with their responses as random-access examples (`core.protocols.Examples`).

    Args:
      queries: ids of each context.
      keys: texts that may be positives or negatives.
      negatives: kinds of negatives of each response, one of each kind.
      given: rows of `keys` for the negatives, [N, kinds]; -1 = one is drawn for every batch. None = all are drawn.
      pad_id: padding id.
      max_key_tokens: padded length of keys.
    """

    def __init__(
        self,
        queries: Sequence[Sequence[int]],
        keys: Keys,
        negatives: Sequence[Negative],
        *,
        given: Int[np.ndarray, "N C"] | None = None,
        pad_id: int,
        max_key_tokens: int,
    ):
        self.queries, self.keys, self.negatives = queries, keys, tuple(negatives)
        self.given = np.full((len(queries), len(self.negatives)), -1) if given is None else given
        self.pad_id, self.max_key_tokens = pad_id, max_key_tokens
        self.lengths = np.fromiter(map(len, queries), np.int64, len(queries))
        numbers: dict[tuple[int, ...], int] = {}
        self._texts = np.array([numbers.setdefault(tuple(ids), len(numbers)) for ids in keys.ids], np.int32)
        known = np.flatnonzero(keys.emotions >= 0)
        emotions = keys.emotions[known]
        self._rows: dict[Negative, dict[int, np.ndarray]] = {
            "same_emotion": {int(e): known[emotions == e] for e in np.unique(emotions)},
            "other_emotion": {int(e): known[emotions != e] for e in np.unique(emotions)},
        }

    def __len__(self) -> int:
        return len(self.queries)

    def draw(self, i: int, kind: Negative, rng: np.random.Generator) -> int:
        """Draws a negative of example i, a row of the keys, never from its own dialogue; -1 if there is none."""
        rows = self._rows[kind].get(int(self.keys.emotions[i]), np.zeros(0, np.int64))
        rows = rows[self.keys.groups[rows] != self.keys.groups[i]]
        return int(rng.choice(rows)) if len(rows) else -1

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> RetrievalBatch:
        """Collates the rows `indices` (-1 = filler).

        Raises:
          ValueError: a context is longer than `length`.
        """
        rows = np.full((len(indices), 1 + len(self.negatives)), -1, np.int64)
        for b, i in enumerate(int(i) for i in indices):
            if i < 0:
                continue
            rows[b, 0] = i
            for c, kind in enumerate(self.negatives):
                rows[b, 1 + c] = self.given[i, c] if self.given[i, c] >= 0 else self.draw(i, kind, rng)
        source = features.pad([self.queries[i] if i >= 0 else [] for i in indices], length, self.pad_id)
        texts = [self.keys.ids[row] if row >= 0 else [] for row in rows.ravel().tolist()]
        key, key_mask = features.pad(texts, self.max_key_tokens, self.pad_id)
        there, picked = rows >= 0, np.maximum(rows, 0)
        # Numpy arrays until they are put on devices; the annotations are those of the training step.
        arrays: dict[str, Any] = {
            "source": source[0],
            "source_mask": source[1],
            "key": key.reshape(*rows.shape, -1),
            "key_mask": key_mask.reshape(*rows.shape, -1),
            "key_text": np.where(there, self._texts[picked], -1).astype(np.int32),
            "key_group": np.where(there, self.keys.groups[picked], -1).astype(np.int32),
            "valid": np.asarray(indices) >= 0,
        }
        return RetrievalBatch(**arrays)


@dataclasses.dataclass(frozen=True)
class GivenPair:
    """A post with its answer, and answers to other posts as negatives."""

    instance: Instance
    negatives: Mapping[Negative, str]


def find_given_pairs(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of the Reddit pairs that LEMPEx' authors trained on, in `data_dir` (empty = EMPAX_DATA_DIR).

    Raises:
      ConfigError: no folder is named, or it does not have the files.
    """
    folder, origin = data_folder(data_dir)
    place = expand(folder or ".") / FOLDER
    if folder and all((place / name).is_file() for name in FILES.values()):
        note("LEMPEx' pairs of Reddit", place, [place / name for name in FILES.values()])
        return place
    raise ConfigError(
        f"{origin} = {str(folder)!r} holds no {FOLDER}/ with {' and '.join(FILES.values())}, the pairs that the "
        "authors of LEMPEx released (declare-lab/exemplary-empathy); put them there, or set dpr_data = 'ed'."
    )


def load_given_pairs(folder: Path, split: str) -> list[GivenPair]:
    """Loads the pairs of a split from a file in the format of DPR's training data.

    A post shared by several pairs is one dialogue: its answers are not negatives of each other.

    Raises:
      DataError: the file is not in that format; names the entry.
    """
    path = folder / FILES[split]
    found = read_json(path)
    if not isinstance(found, list) or not found:
        raise DataError(f"{path} must be a non-empty list of pairs.")
    posts: dict[str, int] = {}
    pairs = []
    for number, entry in enumerate(found):
        where = f"{path}, entry {number}"
        if not isinstance(entry, dict):
            raise DataError(f"{where} must be an object with question and positive_ctxs.")
        post = _text(entry.get("question"), f"{where}: question")
        dialogue = posts.setdefault(post, len(posts))
        negatives: dict[Negative, str] = {kind: _first(entry, name, where) for kind, name in _NEGATIVE_LISTS.items()}
        instance = Instance(f"reddit-{split}-{dialogue}#{number}", (post,), _first(entry, "positive_ctxs", where), "")
        pairs.append(GivenPair(instance, negatives))
    return pairs


def _first(entry: Mapping[str, Any], name: str, where: str) -> str:
    """Returns the text of the first passage of a list; each list of the files has one."""
    passages = entry.get(name)
    if not isinstance(passages, list) or not passages or not isinstance(passages[0], dict):
        raise DataError(f"{where}: {name} must be a list of at least one object with text.")
    return _text(passages[0].get("text"), f"{where}: {name}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where} = {str(value)[:60]!r} must be a text that is not blank.")
    try:
        check_length(value)
    except DataError as error:
        raise DataError(f"{where}: {error}.") from error
    return value
