"""Common types of the library: text as frozen dataclasses, arrays as pytrees.

One legend of dimension letters for einsum, shape annotations and comments:
B batch, K passages or beams, S source, T target, D model, H heads, N head dim, V vocabulary, L layers, Q queries.
Masks are True at real entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Params: TypeAlias = Any
"""A pytree of arrays, nested dicts with string keys."""

EMOTIONS: tuple[str, ...] = (
    "afraid", "angry", "annoyed", "anticipating", "anxious", "apprehensive", "ashamed", "caring",
    "confident", "content", "devastated", "disappointed", "disgusted", "embarrassed", "excited", "faithful",
    "furious", "grateful", "guilty", "hopeful", "impressed", "jealous", "joyful", "lonely",
    "nostalgic", "prepared", "proud", "sad", "sentimental", "surprised", "terrified", "trusting",
)  # fmt: skip
"""The 32 emotions of EmpatheticDialogues, alphabetical. They are stored by name; a number is an index into this."""

POSITIVE_EMOTIONS = frozenset({
    "caring", "confident", "content", "excited", "faithful", "grateful", "hopeful", "impressed", "joyful", "prepared",
    "proud", "surprised", "trusting",
})  # fmt: skip
"""The 13 emotions that MIME (Majumder et al. 2020) counts as positive; the other 19 are negative."""

IS_POSITIVE = np.array([emotion in POSITIVE_EMOTIONS for emotion in EMOTIONS])
"""Whether each of EMOTIONS is positive."""

LEVELS: tuple[str, ...] = ("low", "mid", "high")
"""The three levels of every emotion attribute."""

ATTRIBUTES: tuple[str, ...] = ("sentiment", "emotional_reaction", "interpretation", "exploration")
"""REG's four emotion attributes, in the order of their tokens in an input."""

MECHANISMS: tuple[str, ...] = ATTRIBUTES[1:]
"""EPITOME's three communication mechanisms, which a trained classifier labels."""


@dataclasses.dataclass(frozen=True)
class Utterance:
    """One turn. `speaker` is "speaker" (who tells a story) or "listener" (who responds)."""

    speaker: str
    text: str


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """One conversation, turns in order; `situation` is the speaker's prompt.

    `notes` are further corpus fields by name, as in JSON; every instance of the dialogue gets them.
    """

    id: str
    emotion: str
    situation: str
    utterances: tuple[Utterance, ...]
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Instance:
    """One listener turn with its whole history: the basic unit of text.

    Attributes:
      id: the dialogue's id, "#", and the 1-based index of the response in it.
      context: the turns before the response, oldest first; they alternate, and the last is the speaker's.
      response: the gold listener turn; empty if there is none (chat).
      emotion: one of EMOTIONS, or empty if unknown.
      notes: further corpus fields, and the output of earlier stages: attributes, labels, knowledge.
    """

    id: str
    context: tuple[str, ...]
    response: str
    emotion: str
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def dialogue_id(self) -> str:
        return self.id.rsplit("#", 1)[0]


@flax.struct.dataclass
class Batch:
    """Token ids of one step. A system may extend it (Fusion-in-Decoder: `source[B,K,S]`).

    `target` ends with the end-of-sequence id unless it was truncated, and has no start id; models shift it right.
    """

    source: Int[Array, "B S"]
    source_mask: Bool[Array, "B S"]
    target: Int[Array, "B T"]
    target_mask: Bool[Array, "B T"]
    valid: Bool[Array, " B"]  # False for filler rows


AnyBatch: TypeAlias = Any
"""A `Batch`, an extension or a wrapper of one: a pytree of arrays with a common leading axis, with `valid`."""


@flax.struct.dataclass
class Mean:
    """A mean stored as two sums, so that parts add up exactly over micro-batches, devices and batches."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    @classmethod
    def of(
        cls, values: Float[Array, "..."], mask: Bool[Array, "..."], weights: Float[Array, "..."] | None = None
    ) -> Mean:
        """Builds the mean of `values` where `mask` is True, optionally weighted; all arrays have one shape."""
        weight = mask.astype(jnp.float32)
        if weights is not None:
            weight = jnp.where(mask, weights.astype(jnp.float32), 0.0)
        # `where` instead of a product: a masked NaN must not leak into the sum.
        return cls(total=jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0) * weight), weight=jnp.sum(weight))

    @classmethod
    def zero(cls) -> Mean:
        return cls(total=jnp.zeros((), jnp.float32), weight=jnp.zeros((), jnp.float32))

    def __add__(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, weight=self.weight + other.weight)

    def scale(self, factor: float) -> Mean:
        """Multiplies the mean by `factor`."""
        return Mean(total=self.total * factor, weight=self.weight)

    def value(self) -> Float[Array, ""]:
        """Returns total / weight; 0 for an empty mean."""
        return self.total / jnp.maximum(self.weight, 1e-9)


Metrics: TypeAlias = dict[str, Mean]


@flax.struct.dataclass
class TrainState:
    """The state that a training step changes; it holds no frozen parameters."""

    step: Int[Array, ""]  # number of updates
    params: Params
    opt_state: Any
    rng: jax.Array  # typed PRNG key
    memory: Any = flax.struct.field(default_factory=dict)  # of a ReinforcedTask: controllers, running statistics


@flax.struct.dataclass
class Retrieved:
    """The best K rows of an index for each query, best first; id -1 = none (score -inf). On the host."""

    ids: Int[np.ndarray, "Q K"]
    scores: Float[np.ndarray, "Q K"]


@flax.struct.dataclass
class Generated:
    """Decoded ids, best first. `tokens` has no start id and is padded after the end-of-sequence id.

    `log_probs` is the sum of the tokens' log-probabilities under the model (not length-normalised).
    """

    tokens: Int[Array, "B K T"]
    log_probs: Float[Array, "B K"]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One row of predictions.jsonl, with all inputs of metrics and reports."""

    context: tuple[str, ...]
    response: str
    reference: str
    id: str = ""
    emotion: str = ""
    emotion_prediction: str = ""
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    exemplars: tuple[Mapping[str, Any], ...] = ()
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def level(self, note: str, mechanism: str) -> str:
        """Returns the level of a mechanism according to the judge of this note; empty if it gives none."""
        levels = self.notes.get(note)
        return (levels.get(mechanism) or "") if isinstance(levels, Mapping) else ""
