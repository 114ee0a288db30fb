"""An encoder with its texts: instances in, vectors out, kept across runs by the hash of what made them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from empax.core.cache import kept_array
from empax.core.files import hash_json
from empax.core.settings import cache_dir
from empax.core.types import Instance, Params
from empax.retrieval.encode import BUCKETS, Encoder, embed

KEPT_FROM = 1000
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
        return self._embed(embedders(self.model)[0], self.query_text(instances), progress, mesh)

    def embed_keys(
        self, instances: Sequence[Instance], *, progress: str | None = None, mesh: Mesh | None = None
    ) -> Float[np.ndarray, "N D"]:
        """Embeds the exemplars."""
        vectors = self._embed(embedders(self.model)[1], self.key_text(instances), progress, mesh)
        return vectors if self.complete_keys is None else self.complete_keys(vectors, instances)

    def _embed(
        self, apply: Encoder, token_ids: list[list[int]], progress: str | None, mesh: Mesh | None
    ) -> Float[np.ndarray, "N D"]:
        def make() -> Float[np.ndarray, "N D"]:
            options = {"pad_id": self.pad_id, "buckets": self.buckets, "progress": progress, "mesh": mesh}
            return embed(apply, self.params, token_ids, **options)

        if len(token_ids) < KEPT_FROM:
            return make()
        path = cache_dir() / "embeddings" / f"{hash_json([self.hash, token_ids])}.npy"
        return kept_array(path, make)
