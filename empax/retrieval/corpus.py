"""An encoder with its tokenizer: instances in, vectors out, kept across runs by the hash of what made them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from empax.core.cache import kept_array
from empax.core.files import hash_json
from empax.core.protocols import Tokenizer
from empax.core.run import cache_dir
from empax.core.types import Instance, Params
from empax.data.exemplars import emotion_ids, encode_keys, encode_queries
from empax.models.dual_encoder import EmotionEncoder
from empax.retrieval.encode import BUCKETS, Encoder, embed

KEPT_FROM = 1000
"""How many texts make it worth while to keep their embeddings."""


@functools.lru_cache(maxsize=8)
def embedders(model: EmotionEncoder) -> tuple[Encoder, Encoder]:
    """Functions for queries and for exemplars: one pair per model, so that their compiled code is found again."""
    return model.queries, model.embed


@dataclasses.dataclass(frozen=True)
class CorpusEncoder:
    """The retriever's tower as index stages, evaluation and chat use it.

    Attributes:
      hash: of parameters and settings; an index made with another one is refused.
      buckets: lengths in tokens to pad to; one alone compiles once, for whoever embeds single texts.
    """

    model: EmotionEncoder
    params: Params
    tokenizer: Tokenizer
    max_query_tokens: int
    max_key_tokens: int
    hash: str
    buckets: tuple[int, ...] = BUCKETS

    def embed_queries(
        self, instances: Sequence[Instance], *, progress: str | None = None, mesh: Mesh | None = None
    ) -> Float[np.ndarray, "N D"]:
        """Embeds the contexts, without looking at any response; over the devices of `mesh`, None = on one."""
        ids = encode_queries(self.tokenizer, instances, self.max_query_tokens)
        return self._embed(embedders(self.model)[0], ids, progress, mesh)

    def embed_keys(
        self, instances: Sequence[Instance], *, progress: str | None = None, mesh: Mesh | None = None
    ) -> Float[np.ndarray, "N D"]:
        """Embeds contexts with their responses: the exemplars."""
        ids = encode_keys(self.tokenizer, instances, self.max_key_tokens)
        vectors = self._embed(embedders(self.model)[1], ids, progress, mesh)
        return np.asarray(self.model.keys(jnp.asarray(vectors), jnp.asarray(emotion_ids(instances))))

    def _embed(
        self, apply: Encoder, token_ids: list[list[int]], progress: str | None, mesh: Mesh | None
    ) -> Float[np.ndarray, "N D"]:
        def make() -> Float[np.ndarray, "N D"]:
            options = {"pad_id": self.tokenizer.pad_id, "buckets": self.buckets, "progress": progress, "mesh": mesh}
            return embed(apply, self.params, token_ids, **options)

        if len(token_ids) < KEPT_FROM:
            return make()
        path = cache_dir() / "embeddings" / f"{hash_json([self.hash, token_ids])}.npy"
        return kept_array(path, make)
