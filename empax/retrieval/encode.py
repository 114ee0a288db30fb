"""Texts and instances to vectors: with a pretrained or a trained encoder."""

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

log = logging.getLogger("empax")

Encoder: TypeAlias = Callable[[Params, Int[Array, "B S"], Bool[Array, "B S"]], Float[Array, "B ..."]]
"""`(params, ids, mask) -> embeddings`, an array for each row; jax-traceable, and rows must not look at each other."""

BUCKETS: tuple[int, ...] = (16, 24, 32, 48, 64, 96, 128, 200, 256)
"""Lengths in tokens to which texts are padded."""

_STEP = 4  # between the buckets: multiples of so many tokens


@dataclasses.dataclass(frozen=True)
class Economy:
    """What a compiled shape is worth.

    Attributes:
      tokens_per_batch: padded tokens in one batch.
      full_batches: texts of a length between two buckets are padded to it, not to the bucket, if they fill so many.
      growth: batches of fewer texts than fill one have a power of this as their rows.
      slack: lengths are given up for longer ones while the padded tokens grow by no more than this share,
      padding: or by so many, if that is more.
    """

    tokens_per_batch: int
    full_batches: int
    growth: int
    slack: float
    padding: int


# The layers of a small batch find what the last one wrote in the cache, and a shape compiles within a second.
CPU = Economy(tokens_per_batch=1024, full_batches=8, growth=2, slack=0.0, padding=4096)
# A batch takes milliseconds, and a shape ten seconds or more to compile.
ACCELERATOR = Economy(tokens_per_batch=32768, full_batches=1000, growth=16, slack=0.1, padding=0)


def economy(tokens_per_batch: int | None = None) -> Economy:
    """That of the default backend; `tokens_per_batch` if given replaces its own."""
    found = CPU if jax.default_backend() == "cpu" else ACCELERATOR
    return found if tokens_per_batch is None else dataclasses.replace(found, tokens_per_batch=tokens_per_batch)


_ANNOUNCED = 10_000  # texts: fewer take seconds on a CPU

_IN_FLIGHT = 2  # one batch computes while the next is being assembled; more only costs memory


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

    Texts are sorted by length and padded to the next bucket, or to a multiple of 4 below it that fills many batches:
    8 on a CPU, 1,000 elsewhere, where compiling takes longer than what that saves, and lengths that save little become
    the next longer one. One length always runs with the
    same number of rows (`tokens_per_batch // length`, fewer only if it has fewer texts), the last batch being filled
    up. So a corpus compiles once per length in use, and embedding it again compiles nothing, provided `apply` is the
    same object.

    The same call gives the same numbers, bit for bit, where the device repeats its sums (`core.determinism`). An
    embedding depends on its own text alone: the neighbours and the padding are masked, and change it only by the
    rounding of a differently shaped matrix product (about 1e-6).

    Args:
      apply: the encoder; jitted here. Pass one long-lived function, not a fresh lambda, to keep its compiled code.
      params: its parameters.
      token_ids: N texts with their special tokens, each of 1 to `max(buckets)` tokens. Cutting is the caller's work,
        since only the caller knows which end matters.
      pad_id: what to fill with; masked.
      tokens_per_batch: padded tokens in one batch, the bound on memory; None = 32,768, on a CPU 1,024.
      buckets: allowed padded lengths.
      mesh: spreads the rows of a batch over its axis "data"; None = the default device.
      progress: see `core.progress`; None = nothing is shown. 10,000 texts or more are announced in the log too.

    Returns:
      float32, one row per text.

    Raises:
      ValueError: a text with no token or with more than `max(buckets)`, no bucket, or `tokens_per_batch` < 1.
    """
    worth = economy(tokens_per_batch)
    if not buckets or worth.tokens_per_batch < 1:
        raise ValueError(f"buckets = {tuple(buckets)}, tokens_per_batch = {tokens_per_batch}: both must be positive.")
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
        embeddings[rows] = np.asarray(output, np.float32)[: len(rows)]  # the rest are filler rows
        shown.advance(len(rows))

    if progress and len(lengths) >= _ANNOUNCED:  # a bar is not seen in a log file
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
    """Yields (texts, padded length, rows of the batch), longest first: memory trouble shows at once."""
    order = np.argsort(-lengths, kind="stable")
    padded = _padded_lengths(lengths, buckets, worth)[order]
    for length in np.unique(padded)[::-1].tolist():
        texts = order[padded == length]
        # A lone query must not pay for hundreds of filler rows; powers keep the shapes few.
        height = 1
        while height < len(texts):
            height *= worth.growth
        height = min(height, max(1, worth.tokens_per_batch // length))
        height = -(-height // shards) * shards
        for start in range(0, len(texts), height):
            yield texts[start : start + height], length, height


def _padded_lengths(lengths: np.ndarray, buckets: np.ndarray, worth: Economy) -> Int[np.ndarray, " N"]:
    """The length that each text is padded to."""
    bucket = buckets[np.searchsorted(buckets, lengths)]
    finer = np.minimum(-(-lengths // _STEP) * _STEP, bucket)
    texts = np.bincount(finer, minlength=1)  # of each length
    many = worth.full_batches * worth.tokens_per_batch
    return _fewer(np.where((texts * np.arange(len(texts)))[finer] >= many, finer, bucket), worth)


def _fewer(padded: Int[np.ndarray, " N"], worth: Economy) -> Int[np.ndarray, " N"]:
    """Of as few lengths as `worth` allows: the one that costs least becomes the next longer one, and so on."""
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
    ids = np.full((height, length), pad_id, np.int32)
    mask = np.zeros((height, length), np.bool_)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = True
    # A filler row is a text of one pad token: the mean over no token at all would be 0 / 0.
    mask[len(texts) :, 0] = True
    return ids, mask


KEPT_FROM = 256
"""How many texts make it worth while to keep their embeddings."""

Texts: TypeAlias = Callable[[Sequence[Instance]], list[list[int]]]
"""Instances to ids."""


@runtime_checkable
class Embedder(Protocol):
    """Ids to vectors of one space: by one tower for queries and keys, or by one for each. Hashable."""

    def embed_queries(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]
    ) -> Float[Array, "B D"]: ...

    def embed_keys(self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B D"]: ...


@functools.lru_cache(maxsize=8)
def embedders(model: Embedder) -> tuple[Encoder, Encoder]:
    """Functions for queries and for keys: one pair per model, so that their compiled code is found again."""
    return model.embed_queries, model.embed_keys


@dataclasses.dataclass(frozen=True)
class CorpusEncoder:
    """What index stages, evaluation and chat embed with.

    Attributes:
      model: one tower or two.
      params: of `model`.
      pad_id: fills texts up.
      query_text: contexts as the model reads them, without any response.
      key_text: exemplars as it reads them.
      hash: of parameters and settings; an index made with another one is refused.
      buckets: lengths in tokens to pad to; one alone compiles once, for whoever embeds single texts.
      complete_keys: adds to the vectors of exemplars what is known of them; None = nothing.
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
        """Embeds the contexts, without looking at any response; over the devices of `mesh`, None = on one."""
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
