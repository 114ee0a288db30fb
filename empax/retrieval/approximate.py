"""What approximate indexes share: candidates in blocks of queries, and exact search where too few remain."""

from __future__ import annotations

import functools
from typing import TypeAlias

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from empax.core.types import Retrieved
from empax.retrieval.exact import ExactIndex, ExactInParts, Groups, Queries, blocks, check_search, largest_group

Found: TypeAlias = tuple[Int[np.ndarray, "Q K"], Float[np.ndarray, "Q K"]]
"""Ids and scores of at most k rows of other groups, best first; where there are fewer, the score is -inf."""


class ApproximateIndex:
    """An index that may miss rows (`retrieval.index.measure_recall`); a subclass gives `best` and `exact`.

    Exact search answers a query for which too few rows remain. Arguments are as for ExactIndex; `mesh` is for `exact`.
    """

    def __init__(self, embeddings: Float[np.ndarray, "N D"], groups: Int[np.ndarray, " N"] | None, mesh: Mesh | None):
        self.num_rows, self.dim = embeddings.shape
        self.has_groups = groups is not None
        self._embeddings, self._groups, self._mesh = embeddings, groups, mesh
        # A query's own group displaces at most as many candidates as the largest group has rows.
        self._largest_group = largest_group(groups)

    @functools.cached_property
    def exact(self) -> ExactIndex | ExactInParts:
        """Exact search of the same rows."""
        raise NotImplementedError

    def best(self, queries: Float[np.ndarray, "Q D"], groups: Groups, k: int) -> Found:
        """Finds rows in one block of queries."""
        raise NotImplementedError

    def search(self, queries: Queries, k: int, *, query_groups: Groups | None = None) -> Retrieved:
        """Searches like `ExactIndex.search`, but may miss rows."""
        queries = np.asarray(queries, np.float32)
        groups = check_search(queries, query_groups, has_groups=self.has_groups)
        ids = np.full((len(queries), k), -1, np.int32)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        for start, stop, _ in blocks(len(queries)):
            found = self.best(queries[start:stop], groups[start:stop], k)
            width = found[0].shape[1]
            ids[start:stop, :width], scores[start:stop, :width] = found
        short = np.flatnonzero(scores[:, min(k, self.num_rows) - 1] == -np.inf)
        if len(short):
            exact = self.exact.search(queries[short], k, query_groups=groups[short] if self.has_groups else None)
            ids[short], scores[short] = exact.ids, exact.scores
        return Retrieved(ids=ids, scores=scores)
