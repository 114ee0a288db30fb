"""Response intents: the nine intents of a listener, their labels, and the intents that answer each emotion.

Source: Welivita and Pu 2020 (taxonomy and labels of EmpatheticDialogues); Chen et al. 2022a (EmpatheticIntents).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.inputs import note
from empax.core.settings import DataSettings
from empax.core.text_files import read_lines
from empax.core.types import EMOTIONS, Instance
from empax.data import sample
from empax.data.corpora import find_corpus
from empax.data.exemplars import emotion_ids

INTENTS: tuple[str, ...] = (
    "agreeing", "acknowledging", "encouraging", "consoling", "sympathizing", "suggesting", "questioning", "wishing",
    "neutral",
)  # fmt: skip
"""Names in the order of EmpatheticIntents. Intents are stored by name; a number is always an index into this."""

_CSV_COLUMNS = ["conv_id", "utterance_idx", "actor", "label"]
_CSV = "listener_intents.csv"

_TABLE_1 = (
    ("surprised proud impressed nostalgic trusting faithful prepared", ("acknowledging", "encouraging", "neutral")),
    ("excited confident joyful grateful content caring", ("encouraging", "sympathizing", "acknowledging")),
    ("angry disappointed annoyed disgusted furious", ("consoling", "suggesting", "encouraging")),
    ("hopeful sentimental", ("encouraging", "wishing", "consoling")),
    (
        "anticipating lonely afraid anxious guilty embarrassed sad apprehensive terrified jealous devastated ashamed",
        ("consoling", "encouraging", "neutral"),
    ),
)

TABLE_1: Mapping[str, tuple[str, ...]] = {
    emotion: intents for emotions, intents in _TABLE_1 for emotion in emotions.split()
}
"""Reference intents of each emotion: ReflectDiffu, Table 1. Ours: the groups of the five emotions that it lacks;
faithful, which it lists twice, is in the first group; the row of hopeful and sentimental, also listed twice, is one."""


def intent_ids(names: Iterable[str]) -> Int[np.ndarray, " N"]:
    """Returns the index into INTENTS of each name, -1 for other names."""
    order = {name: i for i, name in enumerate(INTENTS)}
    return np.array([order.get(name, -1) for name in names], np.int32)


def load_intents(data: DataSettings) -> dict[str, str]:
    """Loads the intent of each listener turn, by instance id; turns labelled with an emotion instead are absent.

    Raises ConfigError if this corpus has no labels or they are not in its folder, DataError if their file is broken.
    """
    if data.name == "sample":
        return sample.load_intents()
    if data.name == "empathetic_dialogues":
        what = f"{_CSV} (EmpatheticDialogues' intents)"
        place = find_corpus(what, [_CSV], "empathetic_dialogues", data.dir) / _CSV
        note("the intents of EmpatheticDialogues", place)
        return read_listener_intents(place)
    raise ConfigError(
        f"config.data.name = {data.name!r} has no response intents; ReflectDiffu learns from those of "
        "'empathetic_dialogues' or 'sample'."
    )


def read_listener_intents(path: Path) -> dict[str, str]:
    """Reads the intents of `listener_intents.csv` by instance id; rows of speakers and with emotions are skipped.

    Raises DataError if the columns differ, or a label is neither an intent nor an emotion.
    """
    lines = read_lines(path)
    if (header := next(lines, (1, ""))[1]) != ",".join(_CSV_COLUMNS):
        raise DataError(f"{path}: the columns {header[:60]!r} must be {','.join(_CSV_COLUMNS)}.")
    found, emotions = {}, frozenset(EMOTIONS)
    for number, line in lines:
        row = line.split(",")
        if len(row) != len(_CSV_COLUMNS):
            raise DataError(f"{path}, line {number}: {len(row)} fields must be {len(_CSV_COLUMNS)}.")
        dialogue, turn, actor, label = row
        if label in INTENTS:
            if actor == "listener":
                found[f"{dialogue}#{turn}"] = label
        elif label not in emotions:
            raise DataError(f"{path}, line {number}: {label[:60]!r} is neither an intent nor an emotion.")
    return found


@dataclasses.dataclass(frozen=True)
class IntentTable:
    """Counts of the intents of responses by emotion, in the order of EMOTIONS and INTENTS."""

    counts: Int[np.ndarray, "E I"]

    @classmethod
    def of(cls, instances: Iterable[Instance], intents: Mapping[str, str]) -> IntentTable:
        """Counts the instances whose emotion and intent are known."""
        known = [i for i in instances if i.emotion in EMOTIONS and i.id in intents]
        counts = np.zeros((len(EMOTIONS), len(INTENTS)), np.int64)
        np.add.at(counts, (emotion_ids(known), intent_ids(intents[i.id] for i in known)), 1)
        return cls(counts)

    def top(self, n: int) -> dict[str, tuple[str, ...]]:
        """Returns the n most common intents of each emotion, most common first; ties in the order of INTENTS."""
        order = np.argsort(-self.counts, axis=1, kind="stable")[:, :n]
        return {name: tuple(INTENTS[i] for i in row) for name, row in zip(EMOTIONS, order, strict=True)}

    def covered(self, references: Mapping[str, Sequence[str]], *, by_any: bool = False) -> float:
        """Returns the percentage of instances whose intent is a reference of their emotion, or `by_any` of any one."""
        named = {intent for intents in references.values() for intent in intents}
        inside = np.array([[intent in (named if by_any else references[e]) for intent in INTENTS] for e in EMOTIONS])
        return 100.0 * float((self.counts * inside).sum() / max(self.counts.sum(), 1))


def references(
    kind: Literal["train_statistics", "table_1"], train: IntentTable, n: int
) -> Mapping[str, tuple[str, ...]]:
    """Returns the reference intents of each emotion: the n most common in training, or the first n of Table 1."""
    if kind == "train_statistics":
        return train.top(n)
    return {emotion: intents[:n] for emotion, intents in TABLE_1.items()}


def intent_report(train: IntentTable, judged: IntentTable) -> dict[str, Any]:
    """Reports ReflectDiffu's Fig. 3 and the ceilings of accuracy on `judged` by the commonest intents of training."""
    shares = train.counts / np.maximum(train.counts.sum(axis=1, keepdims=True), 1)
    return {
        "shares": {
            emotion: {intent: round(float(share), 4) for intent, share in zip(INTENTS, row, strict=True)}
            for emotion, row in zip(EMOTIONS, shares, strict=True)
        },
        "covered_by_commonest": {str(n): round(judged.covered(train.top(n)), 2) for n in range(1, 6)},
        "covered_by_table_1": round(judged.covered(TABLE_1), 2),
        "covered_by_table_1_whatever_the_emotion": round(judged.covered(TABLE_1, by_any=True), 2),
        "majority": round(100.0 * float(judged.counts.sum(axis=0).max() / max(judged.counts.sum(), 1)), 2),
    }


def majority_by_turn(
    train: Iterable[Instance], judged: Iterable[Instance], intents: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the most common intents of first and of later replies in training, and their accuracy in percent."""
    counts = Counter((len(i.context) == 1, intents[i.id]) for i in train if i.id in intents)
    said = {first: max(INTENTS, key=lambda intent, first=first: counts[first, intent]) for first in (True, False)}
    known = [i for i in judged if i.id in intents]
    right = sum(intents[i.id] == said[len(i.context) == 1] for i in known)
    return {"first": said[True], "later": said[False], "accuracy": round(100.0 * right / max(len(known), 1), 2)}
