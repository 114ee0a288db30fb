"""Emotion classifier of texts: a linear head on MiniLM's vectors, included in empax (weights/emotions-minilm)."""

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
    r"""The emotion classifier of unit vectors: the argmax of s = x W + b.

    Source: `retrieval.filters.fit_emotions`, by `tools.emotion_head`. `accuracy` is that on the test split of
    EmpatheticDialogues.
    """

    emotions: tuple[str, ...]
    weight: Float[np.ndarray, "D E"]
    bias: Float[np.ndarray, " E"]
    accuracy: float

    def __call__(self, vectors: Float[np.ndarray, "N D"]) -> list[str]:
        """Returns the emotion of each vector."""
        return [self.emotions[best] for best in (vectors @ self.weight + self.bias).argmax(axis=1)]


def load_emotions(folder: Path | None = None) -> EmotionHead:
    """Loads the head in `folder`; None = the one included in empax.

    Raises:
      ConfigError: this copy of empax does not include it.
      DataError: its files are broken.
    """
    folder = folder or published_folder(NAME)
    about, tensors = read_json(folder / "config.json"), read_safetensors(folder / FILE)
    weight, bias = (np.asarray(tensors[name]).astype(np.float32) for name in ("weight", "bias"))
    return EmotionHead(tuple(about["emotions"]), weight, bias, about["accuracy"])
