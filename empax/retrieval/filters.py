"""Filters of search results: exemplars of one emotion, of one turn, of different dialogues."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int

from empax.core.files import replacing
from empax.core.manifest import verify
from empax.core.types import EMOTIONS, Retrieved
from empax.retrieval.exact import largest_group
from empax.retrieval.index import Index

Filter: TypeAlias = Literal["none", "predicted_emotion", "gold_emotion"]
"""The required emotion of exemplars: any, the emotion predicted from the context, or that of the context's dialogue."""

_FILE = "filter.npz"
_QUERIES = 1024  # queries at a time, since each has many rows before the filter
_SHRINKAGE = 0.01  # of the covariance towards its mean variance
_NEVER = -1e30  # the constant of an emotion that no row has; of few rows in many dimensions, others have -1e4 and less


@dataclasses.dataclass(frozen=True)
class ExemplarFilter:
    """Searches more rows than are requested, and keeps those that match the query.

    Source: LEMPEx' code searches 2,047 rows and filters by the gold emotion, which is unknown at test time: a leak.
    The predicted emotion, turns and dialogues are ours.

    Attributes:
      kind: required emotion of rows.
      searched: rows to search for each query; 0 = as many as hold k dialogues.
      emotions: emotion of each row of the index; index into EMOTIONS, -1 = unknown.
      weights: weights of `predict`; None unless the emotion is predicted.
      turns: number of turns before each row's response; rows with the query's number come first. None = ignore turns.
      one_per_dialogue: whether to keep only the best row of each group of the index.
    """

    kind: Filter
    searched: int
    emotions: Int[np.ndarray, " N"]
    weights: Float[np.ndarray, "E C"] | None = None
    turns: Int[np.ndarray, " N"] | None = None
    one_per_dialogue: bool = False

    def predict(self, queries: Float[np.ndarray, "Q D"]) -> Int[np.ndarray, " Q"]:
        """Predicts the emotion of each query from its vector; index into EMOTIONS."""
        assert self.weights is not None
        return (_with_one(queries) @ self.weights).argmax(axis=1)

    def wanted(self, queries: Float[np.ndarray, "Q D"], gold: Int[np.ndarray, " Q"]) -> Int[np.ndarray, " Q"]:
        """Returns the required emotion of each query's exemplars; -1 = any, also for an unknown gold emotion."""
        if self.kind == "none":
            return np.full(len(queries), -1, np.int32)
        return gold if self.kind == "gold_emotion" else self.predict(queries)

    def refitted(self, contexts: Float[np.ndarray, "N D"]) -> ExemplarFilter:
        """Returns the filter with weights for another encoder's vectors of the rows' contexts."""
        return dataclasses.replace(self, weights=fit_emotions(contexts, self.emotions))

    def save(self, folder: Path) -> None:
        """Writes the filter into the folder of the index stage."""
        about: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        with replacing(folder / _FILE) as temporary:
            np.savez(temporary, **about)


def _repeats(values: Int[np.ndarray, "Q N"]) -> Bool[np.ndarray, "Q N"]:
    """Returns True for each value that also occurs further left in its row."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered, found = np.take_along_axis(values, order, axis=1), np.zeros(values.shape, bool)
    np.put_along_axis(found, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return found


def load_filter(folder: Path) -> ExemplarFilter | None:
    """Loads the filter of the index stage in `folder`; None if it has none.

    Raises DataError if the file is missing although it was written, or was altered.
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
    """Finds the k best rows of each query, through `filter` if given; never of the query's own group.

    Groups, emotions and turns are those of the queries. Emotions are the gold ones, index into EMOTIONS, -1 = unknown;
    only the filter "gold_emotion" uses them. Rows have id -1 where too few of the searched rows match.
    """
    if filter is None:
        return index.search(queries, k, query_groups=groups)
    searched = filter.searched or k * largest_group(index.groups)
    wanted, most = filter.wanted(queries, emotions), max(min(searched, len(index)), k)
    ids, scores = np.empty((len(queries), k), np.int32), np.empty((len(queries), k), np.float32)
    for start in range(0, len(queries), _QUERIES):
        part = slice(start, start + _QUERIES)
        found = index.search(queries[part], most, query_groups=groups[part])
        rows = np.maximum(found.ids, 0)
        fits = (found.ids >= 0) & ((filter.emotions[rows] == wanted[part, None]) | (wanted[part, None] < 0))
        later = np.zeros_like(fits) if filter.turns is None else filter.turns[rows] != turns[part, None]
        order = np.argsort(2 * ~fits + later, axis=1, kind="stable")  # matching rows first, best first
        if filter.one_per_dialogue:
            assert index.groups is not None
            repeated = _repeats(np.take_along_axis(index.groups[rows], order, axis=1))
            fits &= ~np.take_along_axis(repeated, np.argsort(order, axis=1), axis=1)
            order = np.take_along_axis(order, np.argsort(repeated, axis=1, kind="stable"), axis=1)
        best = order[:, :k]
        there = np.take_along_axis(fits, best, axis=1)
        ids[part] = np.where(there, np.take_along_axis(found.ids, best, axis=1), -1)
        scores[part] = np.where(there, np.take_along_axis(found.scores, best, axis=1), -np.inf)
    return Retrieved(ids=ids, scores=scores)


def fit_emotions(vectors: Float[np.ndarray, "N D"], emotions: Int[np.ndarray, " N"]) -> Float[np.ndarray, "E C"]:
    r"""Fits weights that predict the emotion of a vector by linear discriminant analysis, with a constant.

    .. math:: w_e = \Sigma^{-1} (\mu_e - \mu), \quad b_e = \log \pi_e - \tfrac{1}{2} w_e^\top (\mu_e + \mu)

    with the means mu_e and shares pi_e of the emotions, the mean mu of all vectors, and the covariance Sigma within
    emotions, shrunk towards its mean variance. Rows with an unknown emotion are ignored.

    Ours: it needs no training stage, and uses the retriever's vectors unchanged. Least squares on indicators would
    hardly ever predict an emotion whose vectors lie between those of others (Hastie et al. 2009, Sec. 4.2).
    """
    known = emotions >= 0
    rows, labels = vectors[known].astype(np.float64), emotions[known]
    counts, size = np.bincount(labels, minlength=len(EMOTIONS)), rows.shape[1]
    middle = rows.mean(axis=0)
    means = np.eye(len(EMOTIONS))[labels].T @ rows / np.maximum(counts, 1)[:, None]
    apart = rows - means[labels]
    within = apart.T @ apart / len(rows)
    variance = max(float(np.trace(within)) / size, 1e-12)
    within = (1.0 - _SHRINKAGE) * within + _SHRINKAGE * variance * np.eye(size)
    weights = np.linalg.solve(within, (means - middle).T)
    constants = np.log(np.maximum(counts, 1) / len(rows)) - 0.5 * ((means + middle) * weights.T).sum(axis=1)
    weights[:, counts == 0] = 0.0
    return np.concatenate([weights, np.where(counts > 0, constants, _NEVER)[None]]).astype(np.float32)


def _with_one(vectors: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N E"]:
    return np.concatenate([vectors, np.ones((len(vectors), 1), np.float32)], axis=1)
