"""Embedding texts and instances with a pretrained or a trained encoder."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from empax.core.cache import kept_array
from empax.core.files import hash_json
from empax.core.progress import Progress
from empax.core.settings import cache_dir
from empax.core.types import Instance, Params
from empax.data.features import pad

log = logging.getLogger("empax")

Encoder: TypeAlias = Callable[[Params, Int[Array, "B S"], Bool[Array, "B S"]], Float[Array, "B ..."]]
"""`(params, ids, mask) -> embeddings`, one array per row; traceable by JAX, and rows must be independent."""

BUCKETS: tuple[int, ...] = (16, 24, 32, 48, 64, 96, 128, 200, 256)
"""Lengths in tokens to which texts are padded."""

_STEP = 4  # lengths between buckets are multiples of this many tokens


@dataclasses.dataclass(frozen=True)
class Economy:
    """Trade-off between compilations and padding.

    Attributes:
      tokens_per_batch: padded tokens in one batch.
      full_batches: texts of a length between two buckets are padded to that length if they fill this many batches.
      growth: the number of rows of an incomplete batch is rounded up to a power of this.
      slack: lengths are merged into longer ones while the padded tokens grow by at most this share,
      padding: or by at most this many tokens, if that is more.
    """

    tokens_per_batch: int
    full_batches: int
    growth: int
    slack: float
    padding: int


# Small batches keep activations in the CPU's cache, and a shape compiles within a second.
CPU = Economy(tokens_per_batch=1024, full_batches=8, growth=2, slack=0.0, padding=4096)
# A batch takes milliseconds, and a shape ten seconds or more to compile.
ACCELERATOR = Economy(tokens_per_batch=32768, full_batches=1000, growth=16, slack=0.1, padding=0)


def economy(tokens_per_batch: int | None = None) -> Economy:
    """Returns the trade-off for the default backend, with `tokens_per_batch` replaced if given."""
    found = CPU if jax.default_backend() == "cpu" else ACCELERATOR
    return found if tokens_per_batch is None else dataclasses.replace(found, tokens_per_batch=tokens_per_batch)


_ANNOUNCED = 10_000  # texts; fewer take seconds on a CPU

_IN_FLIGHT = 2  # one batch computes while the next is assembled; more would only cost memory


def embed(
    apply: Encoder,
    params: Params,
    token_ids: Sequence[Sequence[int]],
    *,
    pad_id: int,
    tokens_per_batch: int | None = None,
    buckets: Sequence[int] = BUCKETS,
    mesh: Mesh | None = None,
    progress: str | None = None,
) -> Float[np.ndarray, "N ..."]:
    """Embeds every text of a corpus, in the order given.

    Texts are sorted by length and padded to the next bucket, or to a multiple of 4 below it if texts of that length
    fill many batches: 8 on a CPU, 1,000 elsewhere, where compilation costs more than padding. Lengths that save little
    padding are merged into the next longer one. One length always has the same number of rows
    (`tokens_per_batch // length`, fewer only if it has fewer texts); the last batch is filled up. So a corpus compiles
    once per length in use, and embedding it again compiles nothing if `apply` is the same object.

    The same call gives the same numbers, bit for bit, if the device's sums are deterministic (`core.determinism`). An
    embedding depends on its own text alone: other rows and padding change only the rounding of matrix products with
    other shapes (about 1e-6).

    `apply` is jitted here: pass the same function each time, not a new lambda, to reuse its compiled code. `token_ids`
    are texts with their special tokens; the caller truncates them, since only the caller knows which end matters.
    `tokens_per_batch` (padded) bounds memory; None = 32,768, on a CPU 1,024. `mesh` shards the rows of a batch over its
    axis "data"; None = the default device. With `progress` (see `core.progress`), 10,000 texts or more are also
    announced in the log.

    Raises ValueError if a text is empty or longer than `max(buckets)`.
    """
    worth = economy(tokens_per_batch)
    lengths = np.array([len(ids) for ids in token_ids], np.int64)
    ordered = np.array(sorted(buckets))
    _check_lengths(lengths, int(ordered[-1]))
    shards = 1 if mesh is None else mesh.shape["data"]
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))
    params = params if sharding is None else jax.device_put(params, NamedSharding(sharding.mesh, PartitionSpec()))
    run = jax.jit(apply)
    example = jax.ShapeDtypeStruct((shards, int(ordered[0])), np.int32)
    shape = jax.eval_shape(apply, params, example, jax.ShapeDtypeStruct(example.shape, np.bool_)).shape[1:]
    embeddings = np.empty((len(lengths), *shape), np.float32)
    pending: collections.deque[tuple[np.ndarray, Any]] = collections.deque()

    def collect() -> None:
        rows, output = pending.popleft()
        embeddings[rows] = np.asarray(output, np.float32)[: len(rows)]  # without filler rows
        shown.advance(len(rows))

    if progress and len(lengths) >= _ANNOUNCED:  # a progress bar does not appear in a log file
        log.info("%s: embedding %d texts", progress, len(lengths))
    with Progress(progress, total=len(lengths), unit="texts") as shown:
        for rows, length, height in plan_batches(lengths, ordered, worth, shards):
            ids, mask = _pad([token_ids[row] for row in rows], length, height, pad_id)
            if sharding is not None:
                ids, mask = jax.device_put((ids, mask), sharding)
            pending.append((rows, run(params, ids, mask)))
            if len(pending) > _IN_FLIGHT:
                collect()
        while pending:
            collect()
    return embeddings


def _check_lengths(lengths: np.ndarray, longest: int) -> None:
    for wrong in np.flatnonzero((lengths < 1) | (lengths > longest))[:1]:
        raise ValueError(
            f"Text {wrong} has {lengths[wrong]} tokens; an encoder takes 1 to {longest}. "
            "Cut long texts and add the special tokens before embedding, or pass longer buckets."
        )


def plan_batches(
    lengths: np.ndarray, buckets: np.ndarray, worth: Economy, shards: int = 1
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yields (texts, padded length, rows of the batch), longest first, so that a lack of memory shows at once."""
    order = np.argsort(-lengths, kind="stable")
    padded = _padded_lengths(lengths, buckets, worth)[order]
    for length in np.unique(padded)[::-1].tolist():
        texts = order[padded == length]
        # A single query must not pay for hundreds of filler rows; powers keep the number of shapes small.
        height = 1
        while height < len(texts):
            height *= worth.growth
        height = min(height, max(1, worth.tokens_per_batch // length))
        height = -(-height // shards) * shards
        for start in range(0, len(texts), height):
            yield texts[start : start + height], length, height


def _padded_lengths(lengths: np.ndarray, buckets: np.ndarray, worth: Economy) -> Int[np.ndarray, " N"]:
    """Returns the padded length of each text."""
    bucket = buckets[np.searchsorted(buckets, lengths)]
    finer = np.minimum(-(-lengths // _STEP) * _STEP, bucket)
    texts = np.bincount(finer, minlength=1)  # of each length
    many = worth.full_batches * worth.tokens_per_batch
    return _fewer(np.where((texts * np.arange(len(texts)))[finer] >= many, finer, bucket), worth)


def _fewer(padded: Int[np.ndarray, " N"], worth: Economy) -> Int[np.ndarray, " N"]:
    """Merges lengths as far as `worth` allows: repeatedly, the cheapest one into the next longer one."""
    lengths, texts = np.unique(padded, return_counts=True)
    padded, left = padded.copy(), max(worth.slack * padded.sum(), worth.padding)
    while len(lengths) > 1:
        costs = texts[:-1] * np.diff(lengths)
        least = int(np.argmin(costs))
        if costs[least] > left:
            break
        left -= costs[least]
        padded[padded == lengths[least]] = lengths[least + 1]
        texts[least + 1] += texts[least]
        lengths, texts = np.delete(lengths, least), np.delete(texts, least)
    return padded


def _pad(
    texts: Sequence[Sequence[int]], length: int, height: int, pad_id: int
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    ids, mask = pad([*texts, *[()] * (height - len(texts))], length, pad_id)
    # A filler row is a text of one padding token: the mean over no tokens would be 0 / 0.
    mask[len(texts) :, 0] = True
    return ids, mask


KEPT_FROM = 256
"""Fewest texts whose embeddings are cached."""

Texts: TypeAlias = Callable[[Sequence[Instance]], list[list[int]]]
"""Converts instances to token ids."""


@runtime_checkable
class Embedder(Protocol):
    """Embeds queries and keys in one vector space, with a shared tower or separate towers. Hashable."""

    def embed_queries(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]
    ) -> Float[Array, "B D"]: ...

    def embed_keys(self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B D"]: ...


@functools.lru_cache(maxsize=8)
def embedders(model: Embedder) -> tuple[Encoder, Encoder]:
    """Returns functions for queries and keys; cached per model, so that their compiled code is reused."""
    return model.embed_queries, model.embed_keys


@dataclasses.dataclass(frozen=True)
class CorpusEncoder:
    """The encoder of index stages, evaluation and chat, with one tower or two.

    `query_text` returns the token ids of contexts, without any response, `key_text` those of exemplars, whose vectors
    `complete_keys` extends by other properties. An index with another `hash`, of parameters and settings, is refused.
    Texts are padded to one of `buckets`; a single one compiles only once, for callers that embed single texts.
    """

    model: Embedder
    params: Params
    pad_id: int
    query_text: Texts
    key_text: Texts
    hash: str
    buckets: tuple[int, ...] = BUCKETS
    complete_keys: Callable[[Float[np.ndarray, "N D"], Sequence[Instance]], Float[np.ndarray, "N E"]] | None = None

    def embed_queries(
        self, instances: Sequence[Instance], *, progress: str | None = None, mesh: Mesh | None = None
    ) -> Float[np.ndarray, "N D"]:
        """Embeds the contexts, without using any response; on the devices of `mesh`, None = on one."""
        return self._embed("queries", self.query_text(instances), progress, mesh)

    def embed_keys(
        self, instances: Sequence[Instance], *, progress: str | None = None, mesh: Mesh | None = None
    ) -> Float[np.ndarray, "N D"]:
        """Embeds the exemplars."""
        vectors = self._embed("keys", self.key_text(instances), progress, mesh)
        return vectors if self.complete_keys is None else self.complete_keys(vectors, instances)

    def _embed(
        self, side: Literal["queries", "keys"], token_ids: list[list[int]], progress: str | None, mesh: Mesh | None
    ) -> Float[np.ndarray, "N D"]:
        apply = embedders(self.model)[0 if side == "queries" else 1]

        def make() -> Float[np.ndarray, "N D"]:
            options = {"pad_id": self.pad_id, "buckets": self.buckets, "progress": progress, "mesh": mesh}
            return embed(apply, self.params, token_ids, **options)

        if len(token_ids) < KEPT_FROM:
            return make()
        path = cache_dir() / "embeddings" / f"{hash_json([self.hash, repr(self.model), side, token_ids])}.npy"
        return kept_array(path, make)
