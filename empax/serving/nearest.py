"""The second classifier of messages: compares their sentences with examples of danger and of harmless look-alikes.

Source: kernel ridge regression (Saunders et al. 1998) on labels of 1 and -1, with a kernel of the cosine between
MiniLM's vectors; the examples are ours.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Sequence
from importlib import resources

import numpy as np
from jaxtyping import Bool, Float

from empax.core.config import ConfigError
from empax.data.wheels import MINILM, NAMED
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.knowledge.vectors import TextEncoder

log = logging.getLogger("empax")

ENCODER = EncoderSettings(pretrained=MINILM, num_layers=5)
"""MiniLM without its last layer, which represents topics better and intents worse."""

SHARPNESS, RIDGE = 5.0, 0.3
"""The s of the kernel exp(s (cos - 1)), and the ridge added to its diagonal."""

ALARMS = 0.04
"""Share of harmless examples above the threshold, each compared with all others: about one in forty messages of
EmpatheticDialogues' training split, on which the share was chosen."""

MOST_SENTENCES = 16
"""Number of the newest sentences of a message that are read."""

_LENGTHS = (16, 32, 64)
"""Padded lengths of sentences in tokens; a longer sentence keeps its end."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One sentence, and its section, which is a kind of danger or not.

    `half` is 0 or 1; `tools.safety_rates` compares each half only with the other.
    """

    text: str
    kind: str
    dangerous: bool
    half: int


def read_examples() -> list[Example]:
    """Reads all examples, in order."""
    found: list[Example] = []
    kind, number = "", 0
    lines = resources.files("empax.serving").joinpath("safety_examples.txt").read_text(encoding="utf-8").splitlines()
    for line in (line.strip() for line in lines):
        if line.startswith("["):
            kind, number = line.strip("[]"), 0
        elif line and not line.startswith("#"):
            found.append(Example(line, kind.removeprefix("- "), not kind.startswith("-"), number % 2))
            number += 1
    return found


def sentences(text: str) -> list[str]:
    """Returns the newest sentences or lines of a message, and the whole message if it has several."""
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n", text))
    found = [part for part in parts if any(c.isalpha() for c in part)]
    return found if len(found) < 2 else [" ".join(text.split()), *found[-MOST_SENTENCES:]]


@dataclasses.dataclass(frozen=True)
class Nearest:
    r"""Classifier of messages that are nearer to danger than to harmless examples.

    .. math:: f(x) = \sum_i \alpha_i e^{s (\cos(x, x_i) - 1)}, \quad (K + \lambda I) \alpha = y

    with y = 1 for examples of danger and -1 for the others. The threshold is the quantile of the leave-one-out values
    of f at which a share of ALARMS of the harmless examples lies above it.

    `vectors` are the unit vectors of the examples, `weights` is alpha.
    """

    encoder: TextEncoder
    vectors: Float[np.ndarray, "N D"]
    weights: Float[np.ndarray, " N"]
    threshold: float

    @classmethod
    def of(cls, encoder: TextEncoder, examples: Sequence[Example]) -> Nearest:
        """Fits the classifier to all `examples`."""
        vectors = encoder([example.text for example in examples])
        dangerous = np.array([example.dangerous for example in examples])
        wide = vectors.astype(np.float64)
        inverse = np.linalg.inv(_kernel(wide @ wide.T) + RIDGE * np.eye(len(wide)))
        weights = inverse @ np.where(dangerous, 1.0, -1.0)
        left_out = np.where(dangerous, 1.0, -1.0) - weights / np.diag(inverse)  # leave-one-out scores
        return cls(encoder, vectors, weights, float(np.quantile(left_out[~dangerous], 1.0 - ALARMS)))

    def scores(self, vectors: Float[np.ndarray, "M D"]) -> Float[np.ndarray, " M"]:
        """Returns f of sentences from their unit vectors."""
        # Not `@`: NumPy's threads stay busy after it, and the next message is encoded half as fast.
        return _kernel(np.einsum("MD,ND->MN", vectors, self.vectors, dtype=np.float64)) @ self.weights

    def are_dangerous(self, messages: Sequence[str]) -> Bool[np.ndarray, " M"]:
        """Whether each message has a sentence above the threshold."""
        parts = [sentences(message) for message in messages]
        flat = [part for found in parts for part in found]
        above = self.scores(self.encoder(flat, progress="messages")) > self.threshold
        ends = np.cumsum([len(found) for found in parts])[:-1]
        return np.array([found.any() for found in np.split(above, ends)], bool)

    def __call__(self, message: str) -> bool:
        """Whether a message has a sentence above the threshold."""
        found = sentences(message)
        return bool(found) and bool((self.scores(self.encoder.few(found, lengths=_LENGTHS)) > self.threshold).any())


def _kernel(cosines: Float[np.ndarray, "M N"]) -> Float[np.ndarray, "M N"]:
    return np.exp(SHARPNESS * (cosines - 1.0))


@functools.cache
def load_nearest() -> Nearest | None:
    """Returns the classifier fitted to all examples; without the wheel of MiniLM, logs this and returns None."""
    try:
        NAMED[MINILM]()
    except ConfigError as error:
        log.warning("messages are checked by the list of phrases alone: %s", error)
        return None
    return Nearest.of(load_encoder(), read_examples())


@functools.cache
def load_encoder() -> TextEncoder:
    """Loads the encoder of sentences."""
    return TextEncoder.of(ENCODER, None, 0)
