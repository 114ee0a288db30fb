"""The index of a run: building, searching, saving and loading it, and refusing it when the encoder has changed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from empax.core.config import ConfigError, to_settings
from empax.core.files import DataError, read_json, sync, system_errors, write_json
from empax.core.manifest import remedy, verify
from empax.core.types import Retrieved
from empax.retrieval import milvus, scann
from empax.retrieval.exact import ExactIndex, ExactInParts
from empax.retrieval.milvus import MilvusIndex, MilvusSettings
from empax.retrieval.scann import ScannIndex, ScannSettings

Searcher: TypeAlias = ExactIndex | ScannIndex | MilvusIndex

_EMBEDDINGS, _GROUPS, _SCANN, _DESCRIPTION = "embeddings.npy", "groups.npy", "scann", "index.json"


class StaleIndexError(DataError):
    """Raised for an index of another encoder or of other texts than expected."""


@dataclasses.dataclass(frozen=True)
class IndexSettings:
    """Search and storage of the exemplars.

    Attributes:
      method: "scann" is fast and misses a few rows; "exact" misses none and runs on the accelerator; "milvus" uses a
        server and its memory.
      dtype: type of the stored embeddings; float16 halves disk and memory, with a relative error of about 1e-3.
      scann: trade-off between speed and recall of "scann".
      milvus: location and search options of "milvus".
    """

    method: Literal["exact", "scann", "milvus"] = "scann"
    dtype: Literal["float32", "float16"] = "float32"
    scann: ScannSettings = dataclasses.field(default_factory=ScannSettings)
    milvus: MilvusSettings = dataclasses.field(default_factory=MilvusSettings)


class Index:
    """Embeddings with a searcher, created by `build_index` and `load_index`.

    `embeddings`, for re-scoring candidates, have the stored dtype, and are memory-mapped if the index was loaded.
    `groups` has the group of each row, or is None. `encoder_hash` is of the encoder that computed the embeddings.
    """

    def __init__(
        self,
        embeddings: Float[np.ndarray, "N D"],
        settings: IndexSettings,
        *,
        groups: Int[np.ndarray, " N"] | None,
        encoder_hash: str,
        mesh: Mesh | None = None,
        scann_folder: Path | None = None,
    ):
        self.embeddings, self.groups, self.settings = embeddings, groups, settings
        self.encoder_hash = encoder_hash
        self._mesh = mesh
        self._searcher: Searcher | None = None
        if settings.method == "scann":
            self._searcher = ScannIndex(embeddings, settings.scann, groups=groups, mesh=mesh, folder=scann_folder)
        if settings.method == "milvus":
            self._searcher = MilvusIndex(
                embeddings, settings.milvus, encoder_hash=encoder_hash, groups=groups, mesh=mesh
            )

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def searcher(self) -> Searcher:
        """The searcher; an exact index is placed on the device when first used, so that loading reads no rows."""
        if self._searcher is None:
            self._searcher = ExactIndex(self.embeddings, groups=self.groups, mesh=self._mesh)
        return self._searcher

    @property
    def exact(self) -> ExactIndex | ExactInParts:
        """Exact search of the same rows, for measuring recall."""
        return self.searcher if isinstance(self.searcher, ExactIndex) else self.searcher.exact

    def search(
        self, queries: Float[np.ndarray | Array, "Q D"], k: int, query_groups: Int[np.ndarray, " Q"] | None = None
    ) -> Retrieved:
        """Finds the k best rows of each query, best first; id -1 and score -inf if there are fewer.

        Rows of the query's own group are never returned (a dialogue must not retrieve itself); -1 excludes nothing, and
        None excludes nothing for all queries. Raises as `ExactIndex.search`.
        """
        return self.searcher.search(queries, k, query_groups=query_groups)

    def save(self, folder: Path) -> None:
        """Writes the index, whose files the `DONE` of its stage will list; replaces one of an interrupted stage.

        Raises DataError if it cannot be written; says why.
        """
        shutil.rmtree(folder, ignore_errors=True)
        with system_errors(folder, "written"):
            folder.mkdir(parents=True)
            np.save(folder / _EMBEDDINGS, self.embeddings)
            if self.groups is not None:
                np.save(folder / _GROUPS, self.groups)
            if isinstance(self._searcher, ScannIndex):
                self._searcher.save(folder / _SCANN)
            about = {"settings": dataclasses.asdict(self.settings), "encoder_hash": self.encoder_hash}
            write_json(folder / _DESCRIPTION, about)
            for path in (*folder.rglob("*"), folder, folder.parent):
                sync(path)


def check_installed(settings: IndexSettings) -> None:
    """Raises ConfigError if the package for `settings.method` is not installed."""
    missing = {"scann": scann.require, "milvus": milvus.require}
    if settings.method in missing:
        missing[settings.method]()


def build_index(
    embeddings: Float[np.ndarray, "N D"],
    settings: IndexSettings,
    *,
    encoder_hash: str,
    groups: Int[np.ndarray, " N"] | None = None,
    mesh: Mesh | None = None,
) -> Index:
    """Builds an index in memory.

    Embeddings are stored as `settings.dtype`, so results are the same before and after saving. `encoder_hash` is the
    hash of the encoder's parameters and settings, which `load_index` compares. `groups` has one number >= 0 per row, or
    -1; rows of a query's own group can be excluded. `mesh`: devices of an exact index; None = one device. Raises
    ConfigError if the package of the method is not installed, or the settings do not suit the rows, and DataError if
    there are no rows, or embeddings are not finite (in float16: above 65504).
    """
    with np.errstate(over="ignore"):  # the check below gives a better message
        stored = np.ascontiguousarray(embeddings, settings.dtype)
    if not len(stored):
        raise DataError("There is nothing to index: 0 embeddings. Is the training split empty?")
    # Both propagate NaN; unlike isfinite of all entries, they need no array of the corpus's size.
    bad = np.flatnonzero(~(np.isfinite(stored.min(axis=1)) & np.isfinite(stored.max(axis=1))))
    if len(bad):
        raise DataError(
            f"{len(bad)} of {len(stored)} embeddings are not finite in {settings.dtype}, the first is row {bad[0]}. "
            "Check the encoder's parameters; store.dtype = 'float32' has a wider range than 'float16'."
        )
    groups = None if groups is None else groups.astype(np.int32)
    return Index(stored, settings, groups=groups, encoder_hash=encoder_hash, mesh=mesh)


def load_index(folder: Path, *, encoder_hash: str | None = None, mesh: Mesh | None = None) -> Index:
    """Loads a saved index; the embeddings stay on disk until they are used.

    `encoder_hash` is the hash of the encoder of the queries; None = do not compare. `mesh` as for `build_index`. Raises
    StaleIndexError if the index was made with another encoder, DataError if there is none, or files are not as the
    `DONE` of its stage says, and ConfigError if the package of the method is not installed.
    """
    again = remedy(folder.parent.name)
    verify(folder)
    try:
        about = read_json(folder / _DESCRIPTION)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{folder} holds no index ({_DESCRIPTION} is missing); run the index stage.") from error
    if encoder_hash is not None and about["encoder_hash"] != encoder_hash:
        raise StaleIndexError(
            f"{folder} was made with encoder {about['encoder_hash']!r}, but {encoder_hash!r} is asked for; its rows "
            f"would be compared with queries they do not belong to. {again}"
        )
    try:
        settings = to_settings(IndexSettings, about["settings"], where=f"{folder / _DESCRIPTION}: settings")
    except ConfigError as error:
        raise DataError(f"{error} Another version of empax wrote the index. {again}") from error
    embeddings = np.load(folder / _EMBEDDINGS, mmap_mode="r")
    groups = np.load(folder / _GROUPS, mmap_mode="r") if (folder / _GROUPS).exists() else None
    return Index(
        embeddings, settings, groups=groups, encoder_hash=about["encoder_hash"], mesh=mesh, scann_folder=folder / _SCANN
    )


def measure_recall(
    index: Index | Searcher, exact: ExactIndex | ExactInParts, queries: Float[np.ndarray | Array, "Q D"], k: int = 10
) -> float:
    """Returns the share of the k best rows of `exact` that `index` finds, in [0, 1], over at least one query."""
    found, wanted = np.asarray(index.search(queries, k).ids), np.asarray(exact.search(queries, k).ids)
    real = wanted >= 0
    hits = (found[:, None, :] == wanted[:, :, None]).any(axis=2) & real
    return float(hits.sum() / real.sum())
