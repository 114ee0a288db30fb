"""REG's retriever: embeds texts as vectors with their emotions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Params
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import EMOTION_HEAD, ClassificationHead, unit_variance
from empax.models.layers import apply


@dataclasses.dataclass(frozen=True)
class EmotionEncoder:
    r"""Embeds texts as vectors with emotions, so that one dot product weighs both.

    .. math:: s(q, k) = (1 - w) \, q^\top k + w \, p(e_k \mid q)

    Two encoders read a query, so that learning emotions does not impair relevance. If the exemplar's emotion e_k is
    unknown, the second term is 0. Ours; REG leaves emotions to the vectors.

    Parameters: "encoder" as in DualEncoder, "emotion_encoder" likewise if emotions have a share, the head's "emotion".

    Attributes:
      encoder: computes the vectors; without a share, the head reads them too.
      head: classifies vectors, each scaled by `unit_variance`.
      share: w, in [0, 1]; 0 = the encoder's vectors alone.
    """

    encoder: DualEncoder
    head: ClassificationHead = EMOTION_HEAD
    share: float = 0.0

    @property
    def size(self) -> int:
        """Size of a vector: the encoder's width and, with a share, one entry per emotion."""
        return self.encoder.width + (self.head.num_classes if self.share else 0)

    def init(self, rng: jax.Array, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Params:
        """Draws random parameters."""
        first, second, third = jax.random.split(rng, 3)
        width = jnp.zeros((1, self.encoder.width))
        params: Params = {
            "encoder": self.encoder.init(first, ids, mask)["params"],
            "emotion": self.head.init(second, width)["params"],
        }
        if self.share:
            params["emotion_encoder"] = self.encoder.init(third, ids, mask)["params"]
        return params

    def embed(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, rng: jax.Array | None = None
    ) -> Float[Array, "B D"]:
        """Returns the encoder's vectors, without emotions; an `rng` turns on dropout."""
        return apply(self.encoder, params["encoder"], ids, mask, rng=rng)

    def emotions(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, rng: jax.Array | None = None
    ) -> Float[Array, "B C"]:
        """Returns the emotion logits of queries."""
        first, second = (None, None) if rng is None else jax.random.split(rng)
        reader = params["emotion_encoder" if self.share else "encoder"]
        return self._classify(params, apply(self.encoder, reader, ids, mask, rng=first), second)

    def read(
        self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, rng: jax.Array | None = None
    ) -> tuple[Float[Array, "B E"], Float[Array, "B C"]]:
        """Returns the vectors of queries, `size` entries each, and their emotion logits."""
        first, second = (None, None) if rng is None else jax.random.split(rng)
        vectors = self.embed(params, ids, mask, rng=first)
        if not self.share:
            return vectors, self._classify(params, vectors, second)
        logits = self.emotions(params, ids, mask, rng=second)
        return self.join(vectors, jax.nn.softmax(logits)), logits

    def embed_queries(self, params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B E"]:
        """Returns the vectors that an index is searched with; without a share, the encoder's alone."""
        return self.read(params, ids, mask)[0] if self.share else self.embed(params, ids, mask)

    embed_keys = embed  # those of an index, before `keys` adds the emotions

    def keys(self, vectors: Float[Array, "N D"], emotion: Int[Array, " N"]) -> Float[Array, "N E"]:
        """Turns the encoder's vectors of exemplars into an index's; `emotion` counts from 0, -1 = unknown."""
        return self.join(vectors, jax.nn.one_hot(emotion, self.head.num_classes)) if self.share else vectors

    def join(self, vectors: Float[Array, "N D"], emotions: Float[Array, "N C"]) -> Float[Array, "N E"]:
        """Joins both, weighted so that the dot product of two joined vectors is the score above."""
        return jnp.concatenate([vectors * (1.0 - self.share) ** 0.5, emotions * self.share**0.5], axis=-1)

    def _classify(self, params: Params, vectors: Float[Array, "N D"], rng: jax.Array | None) -> Float[Array, "N C"]:
        return apply(self.head, params["emotion"], unit_variance(vectors), rng=rng)
