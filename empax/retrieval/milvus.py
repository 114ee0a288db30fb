"""Search with a Milvus server, or Milvus Lite in this process: for corpora too large for the memory of one host."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from empax.core.config import ConfigError, check_numbers
from empax.core.files import DataError
from empax.core.paths import expand
from empax.retrieval.approximate import ApproximateIndex, Found
from empax.retrieval.exact import NO_GROUP, ExactInParts, Groups, RowGroups


@dataclasses.dataclass(frozen=True)
class MilvusSettings:
    """Location and search options of the rows in Milvus.

    Attributes:
      uri: "http://HOST:PORT" of a server or cluster, or a file "NAME.db" for Milvus Lite. A password is read from the
        environment, MILVUS_TOKEN="USER:PASSWORD": it must not be in a recipe.
      collection: prefix of collection names; a digest of encoder and rows completes them.
      index_type: Milvus' name of the index, such as "FLAT" (exact), "HNSW", "IVF_FLAT", "DISKANN".
      build: parameters of the index.
      search: parameters of a search.
      insert_rows: rows sent at a time.
    """

    uri: str = "milvus.db"
    collection: str = "empax"
    index_type: str = "HNSW"
    build: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"M": 32, "efConstruction": 200})
    search: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"ef": 256})
    insert_rows: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "insert_rows", least=1)
        if not self.collection.isidentifier():  # Milvus says so once the corpus is embedded
            raise ConfigError(f"collection = {self.collection!r} must be a word of letters, digits and underscores.")


class MilvusIndex(ApproximateIndex):
    """An index in a Milvus collection, which is created if it does not exist yet.

    While it is filled, the collection has a temporary name, nine characters longer; one left incomplete may be dropped.
    Rows may be memory-mapped: they are sent in parts. The digest in the name is of the rows, their groups (as for
    ExactIndex) and `encoder_hash`. `mesh`: devices of `exact`. Raises ConfigError if pymilvus is not installed, or the
    server cannot be reached or refuses the settings.
    """

    def __init__(
        self,
        embeddings: Float[np.ndarray, "N D"],
        settings: MilvusSettings,
        *,
        encoder_hash: str,
        groups: RowGroups | None = None,
        mesh: Mesh | None = None,
    ):
        super().__init__(embeddings, groups, mesh)
        self._settings = settings
        self.collection = f"{settings.collection}_{_digest(embeddings, groups, settings, encoder_hash)}"
        self._client = _connect(settings)
        try:
            self._fill()
        except _milvus().MilvusException as error:
            raise ConfigError(f"Milvus at {settings.uri!r} rejects store.milvus: {error}") from error

    @functools.cached_property
    def exact(self) -> ExactInParts:
        """Exact search of the same rows, with only a part of them on the devices at a time."""
        return ExactInParts(self._embeddings, groups=self._groups, mesh=self._mesh)

    def best(self, queries: Float[np.ndarray, "Q D"], groups: Groups, k: int) -> Found:
        """Asks Milvus; raises DataError if it fails to answer."""
        ids, scores = np.full((len(queries), k), -1, np.int32), np.full((len(queries), k), -np.inf, np.float32)
        for row, hits in enumerate(self._found(queries, min(self.num_rows, k + self._largest_group))):
            kept = [hit for hit in hits if not NO_GROUP < groups[row] == hit["entity"]["group"]][:k]
            ids[row, : len(kept)] = [hit["id"] for hit in kept]
            scores[row, : len(kept)] = [hit["distance"] for hit in kept]
        return ids, scores

    def _found(self, queries: np.ndarray, limit: int) -> Any:
        # HNSW refuses an ef below the number of rows to return.
        params = {name: max(value, limit) if name == "ef" else value for name, value in self._settings.search.items()}
        try:
            return self._client.search(
                self.collection,
                data=list(queries),
                anns_field="vector",
                limit=limit,
                search_params={"metric_type": "IP", "params": params},
                output_fields=["group"],
            )
        except _milvus().MilvusException as error:
            raise DataError(f"Milvus at {self._settings.uri!r} could not search {self.collection}: {error}") from error

    def _fill(self) -> None:
        client, settings = self._client, self._settings
        if client.has_collection(self.collection):
            client.load_collection(self.collection)
            return
        # It gets its final name once complete; meanwhile, another run may fill one with the same rows.
        filled = f"{self.collection}_{uuid.uuid4().hex[:8]}"
        kinds = _milvus().DataType
        schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", kinds.INT64, is_primary=True)
        schema.add_field("group", kinds.INT64)
        schema.add_field("vector", kinds.FLOAT_VECTOR, dim=self.dim)
        index = client.prepare_index_params()
        build = dict(settings.build)
        index.add_index("vector", index_type=settings.index_type, metric_type="IP", params=build)
        client.create_collection(filled, schema=schema, index_params=index)
        for start in range(0, self.num_rows, settings.insert_rows):
            rows = np.asarray(self._embeddings[start : start + settings.insert_rows], np.float32)
            groups = np.full(len(rows), NO_GROUP) if self._groups is None else self._groups[start : start + len(rows)]
            client.insert(
                filled,
                [
                    {"id": start + i, "group": int(group), "vector": row}
                    for i, (group, row) in enumerate(zip(groups, rows, strict=True))
                ],
            )
        client.flush(filled)
        try:
            client.rename_collection(filled, self.collection)
        except _milvus().MilvusException:
            if not client.has_collection(self.collection):
                raise
            client.drop_collection(filled)  # another run was first
        client.load_collection(self.collection)


def _digest(embeddings: np.ndarray, groups: np.ndarray | None, settings: MilvusSettings, encoder_hash: str) -> str:
    """Returns a digest of the collection's contents; reads rows in parts, since they may not fit into memory."""
    digest = hashlib.sha256(f"{encoder_hash} {embeddings.shape} {settings.index_type} {dict(settings.build)}".encode())
    for start in range(0, len(embeddings), settings.insert_rows):
        digest.update(np.ascontiguousarray(embeddings[start : start + settings.insert_rows]).tobytes())
    if groups is not None:
        digest.update(np.ascontiguousarray(groups).tobytes())
    return digest.hexdigest()[:16]


def require() -> None:
    """Raises ConfigError if pymilvus is not installed; imports nothing."""
    if importlib.util.find_spec("pymilvus") is None:
        raise ConfigError(
            "store.method = 'milvus' needs pymilvus, which is not installed; pip install 'empax[milvus]', or set "
            "store.method = 'scann' or 'exact'."
        )


@functools.cache
def _milvus() -> Any:
    require()
    import pymilvus

    return pymilvus


def _connect(settings: MilvusSettings) -> Any:
    try:
        uri = settings.uri if "://" in settings.uri else str(expand(settings.uri))
        return _milvus().MilvusClient(uri, token=os.environ.get("MILVUS_TOKEN", ""))
    except _milvus().MilvusException as error:
        raise ConfigError(f"there is no Milvus at store.milvus.uri = {settings.uri!r}: {error}") from error
