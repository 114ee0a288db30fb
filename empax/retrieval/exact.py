"""Exact maximum inner product search on the device, sharded over a mesh; the oracle of approximate search."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from empax.core.files import DataError
from empax.core.largest import GROUP, group_width, largest
from empax.core.types import Retrieved

NO_GROUP = -1
"""Group of a row or query without a group: such a row is never excluded, such a query excludes no rows."""

Queries: TypeAlias = Float[np.ndarray | Array, "Q D"]
Groups: TypeAlias = Int[np.ndarray, " Q"]
RowGroups: TypeAlias = Int[np.ndarray, " N"]
"""Groups of queries and of rows, >= 0 or NO_GROUP; None in place of all = no exclusion."""

_QUERY_BLOCKS = (1, 8, 64, 256)

_CHUNK_ROWS = 65_536  # 64 MB of scores for 256 queries
_SHARE_OF_SCORES = 1 / 32  # of an accelerator's memory; an H200 then scores three million rows at a time


class ExactIndex:
    """Finds the rows with the largest inner product by exhaustive search.

    Scores are float32, whatever the type of the embeddings. Rows are read in chunks and queries in blocks, so at most
    `256 * chunk_rows` scores exist at a time; with fewer queries, more rows are scored at once. Searches of the same
    shapes share compiled code, also between indexes, so re-embedding a corpus compiles nothing.

    Args:
      embeddings: N >= 1 rows, float32 or float16, finite; a memory-mapped array is read shard by shard.
      groups: one number >= 0 per row (the dialogue it comes from), or NO_GROUP; None = no exclusion.
      mesh: shards the rows over its axis "data"; each device searches its own rows. None = one device.
      chunk_rows: rows scored at a time on one device for 256 queries; None = chosen by its memory.
    """

    def __init__(
        self,
        embeddings: Float[np.ndarray, "N D"],
        *,
        groups: RowGroups | None = None,
        mesh: Mesh | None = None,
        chunk_rows: int | None = None,
    ):
        chunk_rows = _rows_at_a_time() if chunk_rows is None else chunk_rows
        self.num_rows, self.dim = embeddings.shape
        self.has_groups = groups is not None
        self._mesh = Mesh(np.array(jax.local_devices()[:1]), ("data",)) if mesh is None else mesh
        row_groups = np.full(self.num_rows, NO_GROUP, np.int32) if groups is None else groups.astype(np.int32)
        shards = self._mesh.shape["data"]
        per_shard = -(-self.num_rows // shards)
        self._chunks = -(-per_shard // chunk_rows)
        chunk = -(-per_shard // self._chunks)
        if chunk > 64 * GROUP and jax.default_backend() != "cpu":
            chunk += -chunk % GROUP  # so that `largest` can be used
        padded = chunk * self._chunks * shards
        self._rows = self._place(embeddings, padded, 0)
        self._groups = self._place(row_groups, padded, NO_GROUP)
        self._count = jax.device_put(np.int32(self.num_rows), NamedSharding(self._mesh, PartitionSpec()))

    def _place(self, values: np.ndarray, padded: int, filler: int) -> Array:
        """Places `values`, padded to `padded` rows, on the mesh; each device reads only its shard."""

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(padded)
            rows = np.asarray(values[start:stop])
            missing = np.full((stop - start - len(rows), *values.shape[1:]), filler, values.dtype)
            return np.concatenate([rows, missing]) if len(missing) else rows

        sharding = NamedSharding(self._mesh, PartitionSpec("data"))
        return jax.make_array_from_callback((padded, *values.shape[1:]), sharding, part)

    def search(self, queries: Queries, k: int, *, query_groups: Groups | None = None) -> Retrieved:
        """Finds the k best rows of each query, best first; of equal scores the lower id first.

        Rows of a query's own group are never returned. If there are fewer than k, the rest has id -1, score -inf.
        Raises ValueError if the index was built without groups, but the queries have some, and DataError if a query is
        not finite.
        """
        queries = np.ascontiguousarray(queries, np.float32)
        query_groups = check_search(queries, query_groups, has_groups=self.has_groups)
        found = []
        for start, stop, block in blocks(len(queries)):
            # One array each way, as bits: each transfer takes a tenth of a millisecond on the host.
            asked = np.zeros((block, self.dim + 1), np.int32)
            asked[: stop - start, :-1] = queries[start:stop].view(np.int32)
            asked[:, -1] = NO_GROUP
            asked[: stop - start, -1] = query_groups[start:stop]
            result = _search(self._rows, self._groups, asked, self._count, k=k,
                             chunks=self._chunks_for(block), mesh=self._mesh,
                             gpu=jax.default_backend() == "gpu")  # fmt: skip
            found.append((stop - start, result))  # asynchronous: the next block is prepared meanwhile
        rows = [np.asarray(result)[:count] for count, result in found]
        both = np.concatenate([np.zeros((0, 2 * k), np.int32), *rows])
        return Retrieved(ids=both[:, :k], scores=both[:, k:].view(np.float32))

    def _chunks_for(self, queries: int) -> int:
        """Returns the number of chunks to score rows in; few queries need fewer, and each of several is a copy."""
        if self._rows.dtype != np.float32 and jax.default_backend() != "gpu":  # converted part by part
            return self._chunks
        fewest = -(-self._chunks * queries // _QUERY_BLOCKS[-1])
        return next(count for count in range(fewest, self._chunks + 1) if self._chunks % count == 0)


def _rows_at_a_time() -> int:
    """Returns the number of rows whose scores for 256 queries fit into the device's share of memory."""
    if jax.default_backend() == "cpu":
        return _CHUNK_ROWS
    return max(_CHUNK_ROWS, int(_device_memory() * _SHARE_OF_SCORES) // (4 * _QUERY_BLOCKS[-1]))


def _device_memory() -> int:
    """Returns the bytes of the first device's memory that JAX may use; 16 GiB if unknown."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 16 * 2**30)


class ExactInParts:
    """`ExactIndex` for more rows than fit on the devices: only `part_rows` rows are there at a time.

    A memory-mapped array is read part by part.
    """

    def __init__(
        self,
        embeddings: Float[np.ndarray, "N D"],
        *,
        groups: RowGroups | None = None,
        mesh: Mesh | None = None,
        part_rows: int = 262_144,
    ):
        self.num_rows = len(embeddings)
        self._embeddings, self._groups, self._mesh, self._part_rows = embeddings, groups, mesh, part_rows

    def search(self, queries: Queries, k: int, *, query_groups: Groups | None = None) -> Retrieved:
        """See `ExactIndex.search`."""
        ids, scores = np.full((len(queries), 0), -1, np.int32), np.zeros((len(queries), 0), np.float32)
        for start in range(0, self.num_rows, self._part_rows):
            part = slice(start, start + self._part_rows)
            groups = None if self._groups is None else self._groups[part]
            index = ExactIndex(self._embeddings[part], groups=groups, mesh=self._mesh)
            found = index.search(queries, k, query_groups=query_groups)
            ids = np.concatenate([ids, np.where(found.ids >= 0, found.ids + start, -1)], axis=1, dtype=np.int32)
            scores = np.concatenate([scores, found.scores], axis=1)
            best = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # of equal scores the lower id first
            ids, scores = np.take_along_axis(ids, best, axis=1), np.take_along_axis(scores, best, axis=1)
        return Retrieved(ids=ids, scores=scores)


def largest_group(groups: RowGroups | None) -> int:
    """Returns the size of the largest group, the most candidates that a query's own group can displace."""
    members = np.zeros(0, np.int64) if groups is None else groups[groups > NO_GROUP]
    return int(np.unique(members, return_counts=True)[1].max()) if len(members) else 0


def check_search(queries: np.ndarray, query_groups: np.ndarray | None, *, has_groups: bool) -> Groups:
    """Checks queries and groups as `ExactIndex.search` says; returns the groups, NO_GROUP where there are none."""
    if len(bad := np.flatnonzero(~np.isfinite(queries).all(axis=1))):
        raise DataError(
            f"{len(bad)} of {len(queries)} queries are not finite, the first is row {bad[0]}: the encoder that made "
            "them is broken. Train it again with a lower learning rate."
        )
    if query_groups is None:
        return np.full(len(queries), NO_GROUP, np.int32)
    if not has_groups:
        raise ValueError("query_groups given, but the index was built without groups; pass them when building it.")
    return query_groups.astype(np.int32)


def blocks(num_queries: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first query, last + 1, padded size); few sizes, for few compilations."""
    for start in range(0, num_queries, _QUERY_BLOCKS[-1]):
        stop = min(start + _QUERY_BLOCKS[-1], num_queries)
        yield start, stop, next(size for size in _QUERY_BLOCKS if size >= stop - start)


@functools.partial(jax.jit, static_argnames=("k", "chunks", "mesh", "gpu"))
def _search(rows, groups, asked, num_rows, *, k, chunks, mesh, gpu):
    """Finds the best k of each shard, then the best k of those; returns ids and bits of scores, replicated."""
    spread, whole = PartitionSpec("data"), PartitionSpec()
    queries, query_groups = jax.lax.bitcast_convert_type(asked[:, :-1], jnp.float32), asked[:, -1]
    local = functools.partial(_best_of_rows, k=k, chunks=chunks, gpu=gpu)
    side_by_side = PartitionSpec(None, "data")
    searched = jax.shard_map(
        local, mesh=mesh, in_specs=(spread, spread, whole, whole, whole), out_specs=(side_by_side, side_by_side)
    )
    # In order of the shards, so that the lower id still comes first.
    ids, scores = searched(rows, groups, queries, query_groups, num_rows)
    replicated = NamedSharding(mesh, whole)
    ids, scores = jax.lax.with_sharding_constraint((ids, scores), replicated)
    ids, scores = _merge(ids, scores, k)
    ids = jnp.where(scores == -jnp.inf, -1, ids)
    return jnp.concatenate([ids, jax.lax.bitcast_convert_type(scores, jnp.int32)], axis=1)


def _products(queries: Float[Array, "Q D"], rows: Float[Array, "R D"], *, gpu: bool) -> Float[Array, "Q R"]:
    """Computes inner products in float32, whatever the type of the rows."""
    if gpu and rows.dtype == jnp.float16:
        return _products_of_halves(queries, rows)
    # HIGHEST: a TPU would otherwise multiply in bfloat16, and this is the oracle. On a GPU, three products of tensor
    # cores are as exact, and faster with enough queries that reading the rows does not dominate.
    many = gpu and queries.shape[0] > _QUERY_BLOCKS[1]
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if many else jax.lax.Precision.HIGHEST
    return jnp.einsum("QD,RD->QR", queries, rows.astype(jnp.float32), precision=precision)


def _products_of_halves(queries: Float[Array, "Q D"], rows: Float[Array, "R D"]) -> Float[Array, "Q R"]:
    """Splits each query into two float16, q = s (h + 2^-11 l), so that no row is converted; error 2^-22 of |q|."""
    _, exponents = jnp.frexp(jnp.max(jnp.abs(queries), axis=1, keepdims=True))
    scaled = jnp.ldexp(queries, -exponents)  # below 1, whatever the encoder
    high = scaled.astype(jnp.float16)
    low = jnp.ldexp(scaled - high.astype(jnp.float32), 11).astype(jnp.float16)
    both = jnp.einsum("QD,RD->QR", jnp.concatenate([high, low]), rows, preferred_element_type=jnp.float32)
    high_products, low_products = jnp.split(both, 2)
    return jnp.ldexp(high_products + low_products * 2.0**-11, exponents)


def _best_of_rows(rows, groups, queries, query_groups, num_rows, *, k, chunks, gpu):
    """Finds the best k of one shard."""
    first, size = jax.lax.axis_index("data") * rows.shape[0], rows.shape[0] // chunks
    # `largest` would copy all scores to fill the last group.
    best_of = jax.lax.top_k if size % group_width(size) else largest

    def one_chunk(best, chunk):
        vectors, chunk_groups, start = chunk
        scores = _products(queries, vectors, gpu=gpu)
        ids = start + jnp.arange(size, dtype=jnp.int32)
        own = (chunk_groups[None, :] == query_groups[:, None]) & (query_groups >= 0)[:, None]
        scores = jnp.where(own | (ids >= num_rows)[None, :], -jnp.inf, scores)
        top_scores, places = best_of(scores, min(k, size))  # of equal scores, the lower index first
        ids = jnp.concatenate([best[0], start + places], axis=1)
        scores = jnp.concatenate([best[1], top_scores], axis=1)
        return _merge(ids, scores, k), None

    none = (jnp.full((queries.shape[0], k), -1, jnp.int32), jnp.full((queries.shape[0], k), -jnp.inf, jnp.float32))
    none = jax.lax.pcast(none, ("data",), to="varying")  # every shard finds its own
    starts = first + size * jnp.arange(chunks, dtype=jnp.int32)
    parts = (rows.reshape(chunks, size, rows.shape[1]), groups.reshape(chunks, size), starts)
    best, _ = jax.lax.scan(one_chunk, none, parts)
    return best


def _merge(ids, scores, k):
    """Returns the best k candidates; candidates with equal scores must be in order of their ids."""
    scores, places = jax.lax.top_k(scores, k)
    return jnp.take_along_axis(ids, places, axis=1), scores
