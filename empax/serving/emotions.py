"""An emotion for a text: a linear head on MiniLM's vectors, which comes with empax (weights/emotions-minilm)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from jaxtyping import Float

from empax.core.files import read_json
from empax.data.wheels import published_folder
from empax.interop.readers import read_safetensors

NAME = "emotions-minilm"
FILE = "head.safetensors"


@dataclasses.dataclass(frozen=True)
class EmotionHead:
    r"""Which emotion a unit vector has: the largest of s = x W + b.

    Source: `retrieval.filters.fit_emotions`, by `tools.emotion_head`.

    Attributes:
      emotions: E names.
      weight: W, [D, E].
      bias: b, [E].
      accuracy: the share of test rows of EmpatheticDialogues that it gets right.
    """

    emotions: tuple[str, ...]
    weight: Float[np.ndarray, "D E"]
    bias: Float[np.ndarray, " E"]
    accuracy: float

    def __call__(self, vectors: Float[np.ndarray, "N D"]) -> list[str]:
        """The emotion of each vector."""
        return [self.emotions[best] for best in (vectors @ self.weight + self.bias).argmax(axis=1)]


def load_emotions(folder: Path | None = None) -> EmotionHead:
    """The head in `folder`; None = that which comes with empax.

    Raises:
      ConfigError: this copy of empax came without it.
      DataError: its files are broken.
    """
    folder = folder or published_folder(NAME)
    about, tensors = read_json(folder / "config.json"), read_safetensors(folder / FILE)
    weight, bias = (np.asarray(tensors[name]).astype(np.float32) for name in ("weight", "bias"))
    return EmotionHead(tuple(about["emotions"]), weight, bias, about["accuracy"])
