"""Filters of what an index finds: exemplars of one emotion, of one turn, of different dialogues."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int

from empax.core.files import write_atomically
from empax.core.manifest import verify
from empax.core.types import EMOTIONS, Retrieved
from empax.retrieval.index import Index

Filter: TypeAlias = Literal["none", "predicted_emotion", "gold_emotion"]
"""Whose emotion exemplars must have: anybody's, that predicted from the context, or that of the context's dialogue."""

_FILE = "filter.npz"
_QUERIES = 1024  # at a time: the rows of each before the filter are many
_RIDGE = 1e-3  # of the mean of the diagonal


@dataclasses.dataclass(frozen=True)
class ExemplarFilter:
    """Searches more rows than are wanted, and keeps those that fit the query.

    Source: LEMPEx' code searches 2,047 rows and filters by the gold emotion, which nobody knows at test time: a leak.
    The predicted emotion, turns and dialogues are ours.

    Attributes:
      kind: whose emotion rows must have.
      searched: rows that are looked at for each query.
      emotions: of each row of the index; index into EMOTIONS, -1 = unknown.
      weights: of `predict`; None but with the predicted emotion.
      turns: of each row, how many turns stand before its response: rows of the query's turn come first, the others
        behind them; None = the turn counts for nothing.
      one_per_dialogue: whether of rows of one group of the index the best alone stays.
    """

    kind: Filter
    searched: int
    emotions: Int[np.ndarray, " N"]
    weights: Float[np.ndarray, "E C"] | None = None
    turns: Int[np.ndarray, " N"] | None = None
    one_per_dialogue: bool = False

    def predict(self, queries: Float[np.ndarray, "Q D"]) -> Int[np.ndarray, " Q"]:
        """The emotion of each query, by least squares on its vector; index into EMOTIONS."""
        assert self.weights is not None
        return (_with_one(queries) @ self.weights).argmax(axis=1)

    def wanted(self, queries: Float[np.ndarray, "Q D"], gold: Int[np.ndarray, " Q"]) -> Int[np.ndarray, " Q"]:
        """The emotion that exemplars of each query must have; -1 = any, also where the gold emotion is not known."""
        if self.kind == "none":
            return np.full(len(queries), -1, np.int32)
        return gold if self.kind == "gold_emotion" else self.predict(queries)

    def search(
        self,
        index: Index,
        queries: Float[np.ndarray, "Q D"],
        k: int,
        groups: np.ndarray,
        gold: np.ndarray,
        turns: np.ndarray,
    ) -> Retrieved:
        """As `Index.search`, rows that do not fit left out; id -1 where the searched rows hold too few."""
        wanted, most = self.wanted(queries, gold), min(max(self.searched, k), len(index))
        ids, scores = np.full((len(queries), k), -1, np.int32), np.full((len(queries), k), -np.inf, np.float32)
        for start in range(0, len(queries), _QUERIES):
            part = slice(start, start + _QUERIES)
            found = index.search(queries[part], most, query_groups=groups[part])
            rows = np.maximum(found.ids, 0)
            fits = (found.ids >= 0) & ((self.emotions[rows] == wanted[part, None]) | (wanted[part, None] < 0))
            later = np.zeros_like(fits) if self.turns is None else self.turns[rows] != turns[part, None]
            order = np.argsort(2 * ~fits + later, axis=1, kind="stable")  # those that fit first, best first
            if self.one_per_dialogue:
                assert index.groups is not None
                repeated = _repeats(np.take_along_axis(index.groups[rows], order, axis=1))
                fits &= ~np.take_along_axis(repeated, np.argsort(order, axis=1), axis=1)
                order = np.take_along_axis(order, np.argsort(repeated, axis=1, kind="stable"), axis=1)
            best = order[:, :k]
            there, width = np.take_along_axis(fits, best, axis=1), best.shape[1]
            ids[part, :width] = np.where(there, np.take_along_axis(found.ids, best, axis=1), -1)
            scores[part, :width] = np.where(there, np.take_along_axis(found.scores, best, axis=1), -np.inf)
        return Retrieved(ids=ids, scores=scores)

    def save(self, folder: Path) -> None:
        """Writes the filter into the folder of the index stage."""
        about: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        write_atomically(folder / _FILE, lambda temporary: np.savez(temporary, **about))


def _repeats(values: Int[np.ndarray, "Q N"]) -> Bool[np.ndarray, "Q N"]:
    """Whether a value stands further left in its row, too."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered, found = np.take_along_axis(values, order, axis=1), np.zeros(values.shape, bool)
    np.put_along_axis(found, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return found


def load_filter(folder: Path) -> ExemplarFilter | None:
    """The filter of the index stage in `folder`; None where that has none.

    Raises:
      DataError: it is gone, or not what was written.
    """
    path = folder / _FILE
    verify(path)
    if not path.exists():
        return None
    with np.load(path) as arrays:
        scalars = {name: arrays[name].item() for name in ("kind", "searched", "one_per_dialogue")}
        return ExemplarFilter(
            **scalars, emotions=arrays["emotions"], weights=arrays.get("weights"), turns=arrays.get("turns")
        )


def find_exemplars(
    index: Index,
    queries: Float[np.ndarray, "Q D"],
    k: int,
    *,
    groups: Int[np.ndarray, " Q"],
    emotions: Int[np.ndarray, " Q"],
    turns: Int[np.ndarray, " Q"],
    filter: ExemplarFilter | None,
) -> Retrieved:
    """The k best rows of each query through `filter`, if there is one; never of the query's own group.

    Groups, emotions and turns are those of the queries. Emotions are the gold ones, index into EMOTIONS, -1 = unknown;
    only the filter "gold_emotion" looks at them.
    """
    if filter is None:
        return index.search(queries, k, query_groups=groups)
    return filter.search(index, queries, k, groups, emotions, turns)


def fit_emotions(vectors: Float[np.ndarray, "N D"], emotions: Int[np.ndarray, " N"]) -> Float[np.ndarray, "E C"]:
    r"""Weights that tell the emotion of a vector: ridge regression of the 32 indicators, with a constant.

    .. math:: W = (X^\top X + \lambda I)^{-1} X^\top Y

    with lambda a thousandth of the mean of the diagonal. Rows whose emotion is unknown do not count. Ours: it needs no
    training stage, and takes the retriever's vectors as they are.
    """
    known = emotions >= 0
    rows, labels = _with_one(vectors[known]).astype(np.float64), np.eye(len(EMOTIONS))[emotions[known]]
    penalty = _RIDGE * np.trace(rows.T @ rows) / rows.shape[1]
    weights = np.linalg.solve(rows.T @ rows + penalty * np.eye(rows.shape[1]), rows.T @ labels)
    return weights.astype(np.float32)


def _with_one(vectors: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N E"]:
    return np.concatenate([vectors, np.ones((len(vectors), 1), np.float32)], axis=1)
