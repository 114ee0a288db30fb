"""EPITOME (Sharma et al. 2020): pairs of posts with levels of three communication mechanisms of empathy."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from empax.core.config import ConfigError
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.text_files import DataError, check_length, located, read_lines
from empax.core.types import LEVELS, MECHANISMS
from empax.data.corpora import SETTING, data_folder, find_corpus

FILES = {
    "emotional_reaction": "emotional-reactions-reddit.csv",
    "interpretation": "interpretations-reddit.csv",
    "exploration": "explorations-reddit.csv",
}
"""The file of each mechanism."""

FOLDER = "empathy_mental_health"
"""Name of the corpus' folder inside a data folder."""

_COLUMNS = ("sp_id", "rp_id", "seeker_post", "response_post", "level", "rationales")


@dataclasses.dataclass(frozen=True)
class EpitomePair:
    """A seeker's post and a peer's response; `levels` maps each mechanism to one of LEVELS (0, 1, 2 in the files)."""

    seeker_id: str
    response_id: str
    seeker_post: str
    response_post: str
    levels: Mapping[str, str]


def find_epitome(data_dir: str | os.PathLike[str] | None = None, *, setting: str = SETTING) -> Path:
    """Finds the folder with the three files: `data_dir` (else EMPAX_DATA_DIR) or `empathy_mental_health/` in it.

    Raises ConfigError if no folder is named, or it does not hold the files.
    """
    place = find_corpus("EPITOME", list(FILES.values()), FOLDER, data_dir, setting=setting)
    note("EPITOME", place, [place / name for name in FILES.values()])
    return place


def is_absent(data_dir: str | os.PathLike[str] | None = None) -> bool:
    """Whether none of the files is where `find_epitome` looks; it reports missing files if some are there."""
    folder, _ = data_folder(data_dir)
    places = (expand(folder), expand(folder) / FOLDER) if folder else ()
    return not any((place / name).exists() for place in places for name in FILES.values())


def load_epitome(folder: Path | str) -> list[EpitomePair]:
    """Reads the three files and joins them, in the order of the first.

    A pair may have been annotated more than once; the n-th row of a pair in one file is joined with its n-th row in the
    others. The posts are those of the first file: the others differ from it in blanks only. Raises DataError if a file
    is missing, has other columns, a level other than 0, 1 or 2, or other pairs than the first.
    """
    tables = {mechanism: _read(Path(folder) / name) for mechanism, name in FILES.items()}
    first = tables[MECHANISMS[0]]
    for mechanism, table in tables.items():
        if table.keys() != first.keys():
            (seeker, response, _), *_ = table.keys() ^ first.keys()
            raise DataError(
                f"{folder}: {FILES[mechanism]} and {FILES[MECHANISMS[0]]} do not hold the same pairs: "
                f"sp_id {seeker}, rp_id {response} does not occur equally often in both."
            )
    return [
        EpitomePair(
            seeker_id=key[0],
            response_id=key[1],
            seeker_post=row["seeker_post"],
            response_post=row["response_post"],
            levels={mechanism: LEVELS[int(tables[mechanism][key]["level"])] for mechanism in MECHANISMS},
        )
        for key, row in first.items()
    ]


def _read(path: Path) -> dict[tuple[str, str, int], dict[str, str]]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; the folder must hold {', '.join(FILES.values())}.")
    rows: dict[tuple[str, str, int], dict[str, str]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for number, cells in _records(path):
        row = _checked_row(cells, f"{path}, line {number}")
        pair = row["sp_id"], row["rp_id"]
        rows[*pair, seen[pair]] = row
        seen[pair] += 1
    return rows


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows after the header, each with the number of its last line: a quoted text may have several lines."""
    reader = csv.reader((line + "\n" for _, line in read_lines(path)), strict=True)
    try:
        header = next(reader, [])
        if tuple(header) != _COLUMNS:
            raise DataError(f"{path}, line 1: the columns are {', '.join(header)}; must be {', '.join(_COLUMNS)}.")
        found = False
        for cells in reader:
            if cells:
                found = True
                yield reader.line_num, cells
        if not found:
            raise DataError(f"{path}, line 1: the file ends without a pair of posts.")
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error}).") from error


def _checked_row(cells: list[str], where: str) -> dict[str, str]:
    if len(cells) != len(_COLUMNS):
        raise DataError(f"{where}: {len(cells)} columns, must be {len(_COLUMNS)}: {', '.join(_COLUMNS)}.")
    row: dict[str, str] = dict(zip(_COLUMNS, cells, strict=True))
    if row["level"] not in ("0", "1", "2"):
        raise DataError(f"{where}: level is {row['level'][:60]!r}, must be 0, 1 or 2.")
    located(check_length, row["seeker_post"], row["response_post"], place=where)
    return row


def split_by_seeker(
    pairs: Sequence[EpitomePair], *, holdout: float = 0.2, seed: int = 0
) -> tuple[list[EpitomePair], list[EpitomePair]]:
    """Splits pairs so that no seeker's post is on both sides and each level of each mechanism keeps its share.

    Greedy: posts in seeded random order change sides while that brings the level counts of the held-out side closer to
    `holdout` times the total counts, with a larger weight for rare levels. Source: ours. Returns the training side and
    the held-out side, each in the order of `pairs`.

    Raises ConfigError if the share is outside (0, 1).
    """
    if not 0.0 < holdout < 1.0:
        raise ConfigError(f"holdout = {holdout} must lie between 0 and 1, both excluded.")
    # One column per level of each mechanism.
    labels = np.array([[pair.levels[m] == level for m in MECHANISMS for level in LEVELS] for pair in pairs], np.float64)
    wanted = holdout * labels.sum(axis=0)
    groups = _seeker_groups(pairs)
    sums = np.array([labels[rows].sum(axis=0) for rows in groups])
    order = np.random.default_rng(seed).permutation(len(groups))
    held = np.zeros(len(pairs), bool)
    for position in _closest_subset(sums, wanted, order):
        held[groups[position]] = True
    train = [pair for pair, out in zip(pairs, held, strict=True) if not out]
    return train, [pair for pair, out in zip(pairs, held, strict=True) if out]


def _closest_subset(sums: np.ndarray, wanted: np.ndarray, order: np.ndarray) -> list[int]:
    """Chooses rows of `sums[G, C]` with a total near `wanted[C]`: starts with none, toggles rows while that helps.

    Makes at most 20 passes.
    """
    weights = 1.0 / np.maximum(wanted, 1.0)
    inside, excess = np.zeros(len(sums), bool), -wanted
    for _ in range(20):
        changed = False
        for row in order:
            step = -sums[row] if inside[row] else sums[row]
            # (excess + step)^2 - excess^2, class by class.
            if np.sum(weights * step * (2.0 * excess + step)) < -1e-9:
                excess = excess + step
                inside[row] = not inside[row]
                changed = True
        if not changed:
            break
    return np.flatnonzero(inside).tolist()


def _seeker_groups(pairs: Sequence[EpitomePair]) -> list[list[int]]:
    """Groups rows whose seeker's posts share an id or a text, transitively, in order of first appearance."""
    from scipy.sparse import csgraph, csr_matrix  # slow to import

    first: dict[Hashable, int] = {}
    rows, firsts = np.transpose(
        [
            (row, first.setdefault(key, row))
            for row, pair in enumerate(pairs)
            for key in (("id", pair.seeker_id), ("text", " ".join(pair.seeker_post.lower().split())))
        ]
    )
    alike = csr_matrix((np.ones(len(rows)), (rows, firsts)), (len(pairs), len(pairs)))
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(csgraph.connected_components(alike, directed=False)[1]):
        groups[group].append(row)
    return list(groups.values())
