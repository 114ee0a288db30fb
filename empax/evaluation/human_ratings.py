"""Evaluation of judges of empathy: rank correlation with human ratings of replies, by row and within a dialogue.

Ratings: Welivita and Pu 2024: three replies (a person's and two of GPT-4) to the first turn of 2,000 dialogues of
EmpatheticDialogues, each rated 1 (bad), 2 or 3 (good) by people.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.paths import expand
from empax.evaluation.significance import tails

FILE = "human_ratings/empathy_ratings.csv"
SOURCES = ("human", "chatgpt", "chatgpt_empathy")
PARTS = {"by_row": "all replies", "human_replies": "people's replies", "within_dialogue": "within a dialogue"}
"""The parts of `correlations`, and their titles."""

_COLUMNS = ("dialog_id", "speaker_uttr", *(f"{kind}_{who}" for kind in ("response", "rating") for who in SOURCES))


@dataclasses.dataclass(frozen=True)
class RatedReply:
    """A reply with its rating, 1 to 3; `source` is one of SOURCES."""

    dialogue: str
    context: str
    reply: str
    source: str
    rating: int


def find_ratings(data_dir: str | Path) -> Path:
    """Returns the file of ratings: `data_dir` itself, or a file in it.

    Raises ConfigError if the file does not exist.
    """
    root = expand(data_dir)
    for place in (root, root / FILE, root / Path(FILE).name):
        if place.is_file():
            return place
    raise ConfigError(f"{root} holds no {FILE}; set --data to the folder that does, or to the file.")


def load_ratings(path: Path) -> list[RatedReply]:
    """Reads every reply of the file, the SOURCES of each dialogue in turn.

    Raises DataError if the file is not UTF-8 text, lacks columns or has no rows, or a rating is not 1, 2 or 3.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            found = list(_read(path, csv.DictReader(file)))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8 ({error}).") from error
    if not found:
        raise DataError(f"{path} has a header, but no ratings.")
    return found


def _read(path: Path, reader: csv.DictReader[str]) -> Iterator[RatedReply]:
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise DataError(f"{path} lacks the columns {', '.join(missing)}.")
    for row in reader:
        for source in SOURCES:
            rating, reply = row[f"rating_{source}"], row[f"response_{source}"]
            if rating not in ("1", "2", "3") or reply is None:
                raise DataError(f"{path}, line {reader.line_num}: rating_{source} is {rating!r}, must be 1, 2 or 3.")
            yield RatedReply(row["dialog_id"], row["speaker_uttr"], reply, source, int(rating))


Scores = Float[np.ndarray, " N"]


def correlations(
    scores: Scores, replies: Sequence[RatedReply], *, samples: int = 1000, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Returns rank correlations of a judge's scores, higher = more empathetic, with the ratings.

    Returns:
      `by_row` over all replies (the three sources also differ in other ways); `human_replies` over human replies alone,
      if there are any; and `within_dialogue`: over pairs of replies to one context with different ratings (`kendall`:
      the share that the judge orders in the same way minus the share in the opposite way), and the correlation of ranks
      within each dialogue (`spearman`). Each has `spearman` and `kendall` with `..._low` and `..._high`, a 95%
      bootstrap interval over dialogues, and `rows` or `pairs`.
    """
    ratings = np.asarray([reply.rating for reply in replies])
    index = {name: i for i, name in enumerate(dict.fromkeys(reply.dialogue for reply in replies))}
    groups = np.asarray([index[reply.dialogue] for reply in replies])
    people = np.asarray([reply.source == SOURCES[0] for reply in replies])
    within = _Within(scores, ratings, groups)
    found = {
        "by_row": _with_interval(_ByRow(scores, ratings), groups, samples, seed) | {"rows": len(replies)},
        "within_dialogue": _with_interval(within, groups, samples, seed) | {"pairs": within.num_pairs},
    }
    if people.any():
        theirs = _ByRow(scores[people], ratings[people])
        found["human_replies"] = _with_interval(theirs, groups[people], samples, seed) | {"rows": int(people.sum())}
    return found


class _ByRow:
    """Spearman's rho and Kendall's tau-b of weighted rows."""

    def __init__(self, scores: Scores, ratings: Int[np.ndarray, " N"]):
        values, codes = np.unique(scores, return_inverse=True)
        levels, columns = np.unique(ratings, return_inverse=True)
        self._shape = (len(values), len(levels))
        self._cells = codes * len(levels) + columns

    def __call__(self, weights: Float[np.ndarray, " N"]) -> dict[str, float]:
        size = self._shape[0] * self._shape[1]
        table = np.bincount(self._cells, weights=weights, minlength=size).reshape(self._shape)
        rows, columns, total = table.sum(axis=1), table.sum(axis=0), table.sum()
        below = np.cumsum(np.cumsum(table, axis=0), axis=1)
        smaller = np.pad(below, ((1, 0), (1, 0)))[:-1, :-1]  # [U, L]: rows with lower values of both
        agreeing = float((table * smaller).sum())
        pairs, tied, tied_too = (float((n * (n - 1)).sum()) / 2 for n in (total[None], rows, columns))
        tied_in_both = float((table * (table - 1)).sum()) / 2
        opposed = pairs - tied - tied_too + tied_in_both - agreeing
        apart = (pairs - tied) * (pairs - tied_too)
        ranks = [np.cumsum(n) - n / 2 - total / 2 for n in (rows, columns)]  # midranks, centred
        spread = float((rows * ranks[0] ** 2).sum() * (columns * ranks[1] ** 2).sum())
        return {
            "spearman": float(ranks[0] @ table @ ranks[1]) / spread**0.5 if spread > 0 else 0.0,
            "kendall": (agreeing - opposed) / apart**0.5 if apart > 0 else 0.0,
        }


class _Within:
    """Correlations within dialogues; all rows of a dialogue have the same weight."""

    def __init__(self, scores: Scores, ratings: Int[np.ndarray, " N"], groups: Int[np.ndarray, " N"]):
        self._signs, self._pairs = np.zeros(len(groups)), np.zeros(len(groups))
        ranks = np.zeros((2, len(groups)))
        order = np.argsort(groups, kind="stable")
        for rows in np.split(order, np.cumsum(np.bincount(groups))[:-1]):
            differences = [np.sign(values[rows][:, None] - values[rows][None, :]) for values in (scores, ratings)]
            ranks[:, rows] = [one.sum(axis=1) / 2 for one in differences]  # centred
            self._signs[rows] = (differences[0] * differences[1]).sum(axis=1) / 2
            self._pairs[rows] = np.abs(differences[1]).sum(axis=1) / 2
        self.num_pairs = int(self._pairs.sum())
        self._products = np.stack([ranks[0] * ranks[1], ranks[0] ** 2, ranks[1] ** 2])

    def __call__(self, weights: Float[np.ndarray, " N"]) -> dict[str, float]:
        both, first, second = self._products @ weights
        pairs = self._pairs @ weights
        return {
            "spearman": float(both / np.sqrt(first * second)) if first * second > 0 else 0.0,
            "kendall": float(self._signs @ weights / pairs) if pairs else 0.0,
        }


def _with_interval(
    measure: Callable[[Float[np.ndarray, " N"]], Mapping[str, float]],
    groups: Int[np.ndarray, " N"],
    samples: int,
    seed: int,
) -> dict[str, float]:
    """Returns the correlations of all rows, with intervals over resampled dialogues, see `significance.tails`."""
    rng = np.random.default_rng(seed)
    size = int(groups.max()) + 1
    drawn = [
        measure(np.bincount(rng.integers(size, size=size), minlength=size)[groups].astype(np.float64))
        for _ in range(samples)
    ]
    found: dict[str, float] = {}
    for name, value in measure(np.ones(len(groups))).items():
        low, high = np.quantile([one[name] for one in drawn], tails(size))
        found |= {name: value, f"{name}_low": float(low), f"{name}_high": float(high)}
    return found
