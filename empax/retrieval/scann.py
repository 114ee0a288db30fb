"""Approximate maximum inner product search with ScaNN: a tree of partitions, anisotropic hashing, exact re-scoring."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from empax.core.config import ConfigError, check_numbers
from empax.core.files import DataError
from empax.core.manifest import remedy
from empax.retrieval.approximate import ApproximateIndex, Found
from empax.retrieval.exact import NO_GROUP, ExactIndex, Groups, RowGroups

BRUTE_FORCE_BELOW = 1_000
"""With fewer rows, ScaNN searches all of them: too few to train a tree, and too few to need one."""

_LEAST_SHARE, _LEAST_ROWS = 0.4, 4_000  # fewest leaves and rows searched per query by default
_LEAST_TRAINING = 16  # rows, one per center of a 4-bit code
_QUERIES_PER_THREAD = 32  # at a time; ScaNN's own 256 would leave a whole block to one thread


@dataclasses.dataclass(frozen=True)
class ScannSettings:
    """Trade-off between speed and recall.

    Source: Guo et al. 2020 (anisotropic hashing) and ScaNN's own advice (sqrt(N) leaves, 2 dimensions per block,
    threshold 0.2). The number of leaves to search is ours. In 384 dimensions, all misses are due to the tree (without
    one, recall is 1.0), and fewer rows need a larger share of leaves. recall@10 of MiniLM embeddings of
    EmpatheticDialogues, contexts with responses as rows, test contexts as queries:

    ======  ====  ====  ====  ====
    share    0.3   0.4   0.5   0.6
    ======  ====  ====  ====  ====
     1,000  0.83  0.89  0.93  0.96
     3,000  0.92  0.95  0.97  0.98
     8,000  0.98  0.99  0.99  0.99
    ======  ====  ====  ====  ====

    Attributes:
      num_leaves: partitions of the tree; None = sqrt(rows).
      leaves_to_search: partitions searched per query; None = two fifths of them, or more if that is under 4,000 rows.
        It affects recall most.
      dimensions_per_block: dimensions per 4-bit code.
      anisotropic_threshold: cosine to a row above which the hashing error along the row is weighted more.
      reorder: minimum number of candidates re-scored exactly per query. Embeddings of few dimensions have few codes and
        need more: with 16 dimensions (clusters, 9,000 rows) recall@10 is 0.94 at 64, 0.985 at 100, 1.0 at 200. In
        MiniLM's 384, 30 find as much as 100 (200 leaves, 18 searched: 0.956 and 0.957), twice as fast in batches.
      training_sample: rows on which tree and codes are trained; at least 16, and one per leaf.
    """

    num_leaves: int | None = None
    leaves_to_search: int | None = None
    dimensions_per_block: int = 2
    anisotropic_threshold: float = 0.2
    reorder: int = 100
    training_sample: int = 100_000

    def __post_init__(self):
        sizes = ("num_leaves", "leaves_to_search", "dimensions_per_block", "reorder", "training_sample")
        check_numbers(self, *sizes, least=1)
        check_numbers(self, "anisotropic_threshold", least=0, below=1)

    def leaves(self, num_rows: int) -> tuple[int, int]:
        """Returns the number of leaves of a tree with `num_rows` rows, and the number searched per query."""
        leaves = max(1, math.isqrt(num_rows)) if self.num_leaves is None else self.num_leaves
        if leaves > num_rows:
            raise ConfigError(
                f"store.scann.num_leaves = {leaves}, but there are only {num_rows} rows; set it to at most that, or "
                "None."
            )
        if min(self.training_sample, num_rows) < max(leaves, _LEAST_TRAINING):
            least = max(leaves, _LEAST_TRAINING)
            raise ConfigError(
                f"store.scann.training_sample = {self.training_sample} is too small for {num_rows} rows: a tree of "
                f"{leaves} leaves and codes of 16 centers are trained on it; set it to at least {least}."
            )
        share = max(_LEAST_SHARE, _LEAST_ROWS / num_rows)
        searched = math.ceil(share * leaves) if self.leaves_to_search is None else self.leaves_to_search
        return leaves, min(searched, leaves)


class ScannIndex(ApproximateIndex):
    """An index whose candidates come from ScaNN and are scored and sorted with the embeddings themselves.

    So scores are exact, excluded rows are dropped before the best k are chosen, and ScaNN's own copy of the rows is not
    needed: on disk, the index takes one byte per `dimensions_per_block` numbers in addition to the embeddings. The
    exact index answers a query with too few remaining candidates. Equal embeddings and settings train the same tree and
    codes, bit for bit.

    Embeddings and groups are as for ExactIndex, `mesh` is for the exact index. `folder` holds the output of `save` for
    these embeddings and settings; None = train. Raises ConfigError if ScaNN is not installed, or the tree has more
    leaves than there are rows, and DataError if `folder` holds no usable searcher.
    """

    def __init__(
        self,
        embeddings: Float[np.ndarray, "N D"],
        settings: ScannSettings,
        *,
        groups: RowGroups | None = None,
        mesh: Mesh | None = None,
        folder: Path | None = None,
    ):
        super().__init__(embeddings, groups, mesh)
        self._settings = settings
        if self.num_rows < BRUTE_FORCE_BELOW or folder is None:
            self._searcher = _train(embeddings, settings)
        else:
            self._searcher = _load(folder)

    def searched(self, *, leaves_to_search: int | None = None, reorder: int | None = None) -> ScannIndex:
        """Returns an index with the same tree and codes but other search settings (None = unchanged)."""
        changes = {"leaves_to_search": leaves_to_search, "reorder": reorder}
        other = copy.copy(self)
        other._settings = dataclasses.replace(self._settings, **{k: v for k, v in changes.items() if v is not None})
        return other

    @functools.cached_property
    def exact(self) -> ExactIndex:
        """Exact index of the same rows, placed on the device when first used."""
        return ExactIndex(self._embeddings, groups=self._groups, mesh=self._mesh)

    def best(self, queries: Float[np.ndarray, "Q D"], groups: Groups, k: int) -> Found:
        """Scores the candidates exactly; own group and missing ones come last."""
        ids = self._candidates(queries, k)
        vectors = np.asarray(self._embeddings[ids], np.float32)  # [Q, C, D]
        scores = np.matmul(vectors, queries[:, :, None])[:, :, 0]
        barred = ids < 0
        if self._groups is not None:
            barred |= (self._groups[ids] == groups[:, None]) & (groups > NO_GROUP)[:, None]
        scores[barred] = -np.inf
        rows, order = np.arange(len(ids))[:, None], np.lexsort((ids, -scores), axis=-1)[:, :k]
        return ids[rows, order], scores[rows, order]

    def _candidates(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Returns candidate row ids [Q, C] in no particular order, -1 = none."""
        options = {"final_num_neighbors": min(self.num_rows, max(self._settings.reorder, k + self._largest_group))}
        if self.num_rows >= BRUTE_FORCE_BELOW:
            options["leaves_to_search"] = self._settings.leaves(self.num_rows)[1]
        if len(queries) == 1:  # no threads to wake
            ids, scores = (part[None] for part in self._searcher.search(queries[0], **options))
        else:
            ids, scores = self._searcher.search_batched_parallel(queries, **options, batch_size=_QUERIES_PER_THREAD)
        # If its leaves hold too few rows, ScaNN pads with row 0 and score NaN.
        ids = ids.astype(np.int64)
        ids[np.isnan(scores)] = -1
        return ids

    def save(self, folder: Path) -> None:
        """Writes the trained tree and codes to `folder` (nothing for a brute-force index, which has neither)."""
        if self.num_rows < BRUTE_FORCE_BELOW:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._searcher.serialize(str(folder), relative_path=True)


def require() -> None:
    """Raises ConfigError if ScaNN is not installed; imports nothing."""
    if importlib.util.find_spec("scann") is None:
        raise ConfigError(
            "store.method = 'scann' needs ScaNN, which is not installed. On Linux: pip install scann. Elsewhere, and "
            "for up to about 100,000 rows, set store.method = 'exact'."
        )


def _scann() -> Any:
    require()
    from scann.scann_ops.py import scann_ops_pybind  # type: ignore[import-untyped]

    return scann_ops_pybind


def _train(embeddings: np.ndarray, settings: ScannSettings) -> Any:
    rows = np.ascontiguousarray(embeddings, np.float32)
    builder = _scann().builder(rows, min(settings.reorder, len(rows)), "dot_product")
    if len(rows) < BRUTE_FORCE_BELOW:
        return builder.score_brute_force().build()
    leaves, searched = settings.leaves(len(rows))
    # random_init=False is k-means++. ScaNN's random start has no seed: two runs would get different indexes.
    builder = builder.tree(leaves, searched, training_sample_size=settings.training_sample, random_init=False)
    builder = builder.score_ah(
        settings.dimensions_per_block,
        anisotropic_quantization_threshold=settings.anisotropic_threshold,
        training_sample_size=settings.training_sample,
    )
    # One thread: the index must not depend on the number of cores.
    return builder.set_n_training_threads(1).build()


def _load(folder: Path) -> Any:
    # Checked here, since ScaNN would print a notice and guess, and would unpickle a file of ids, which we never write.
    if not (folder / "scann_assets.pbtxt").is_file() or (folder / "scann_docids.pkl").exists():
        raise DataError(f"{folder} is not a ScaNN searcher that empax wrote. {remedy(folder.parents[1].name)}")
    try:
        return _scann().load_searcher(str(folder))
    except RuntimeError as error:
        raise DataError(f"{folder}: {error}. {remedy(folder.parents[1].name)}") from error
