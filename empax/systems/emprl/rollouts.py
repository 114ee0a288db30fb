"""Batches for a policy to answer, and rollouts of sampled answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import LEVELS, Batch
from empax.data.exemplars import ContextExamples


@flax.struct.dataclass
class PolicyBatch:
    """A batch of contexts with what the reward wants, which is known before any answer is sampled."""

    inputs: Batch  # inputs of the generator, and the gold response
    row: Int[Array, " B"]  # number of the example, -1 on filler rows
    wanted: Float[Array, "B M 3"]  # reward of each level of each mechanism, see Goals
    merit: Float[Array, " B"]  # of the gold response, see Goals
    answers: Int[Array, "B K T"] | None = None  # given answers, in place of sampled ones

    @property
    def valid(self) -> Bool[Array, " B"]:
        return self.inputs.valid


@flax.struct.dataclass
class Rollout:
    """Sampled responses of at most T tokens; all fields except `tokens` and `mask` are float32.

    Fields are None until they are known: `scores` until rating, the later fields until credit assignment.
    """

    batch: PolicyBatch
    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]  # up to and including the end-of-sequence token, in valid rows
    log_probs: Float[Array, "B T"]  # under the policy that sampled, neither tempered nor truncated
    reference_log_probs: Float[Array, "B T"]
    values: Float[Array, "B T"] | None = None
    scores: Float[Array, " B"] | None = None
    parts: Float[Array, "B P"] | None = None  # of the scores, before their weights
    advantages: Float[Array, "B T"] | None = None
    returns: Float[Array, "B T"] | None = None
    kl_coefficient: Float[Array, " B"] | None = None  # the same in all rows
    reference_point: Float[Array, " B"] | None = None  # of KTO, the same in all rows

    @property
    def valid(self) -> Bool[Array, " B"]:
        return self.batch.valid


@dataclasses.dataclass(frozen=True)
class Goals:
    """What the reward wants of the response to each example.

    Attributes:
      wanted: [N, M, 3] float32: 1 for the gold response's level, else 0; or the gains of `expectations`.
      merit: [N] float32, reward of the gold response itself, in standard deviations above the mean of all.
    """

    wanted: np.ndarray
    merit: np.ndarray

    @classmethod
    def of(cls, wanted: Float[np.ndarray, "N M 3"], levels: Int[np.ndarray, "N M"]) -> Goals:
        """Returns the goals of gold responses with these levels."""
        earned = np.take_along_axis(wanted, levels[:, :, None], axis=2).mean(axis=(1, 2))
        merit = (earned - earned.mean()) / max(earned.std(), 1e-6)
        return cls(wanted, merit.astype(np.float32))

    @classmethod
    def none(cls, size: int) -> Goals:
        """Returns the goals of a reward without identifiers."""
        return cls(np.zeros((size, 1, len(LEVELS)), np.float32), np.zeros(size, np.float32))


class PolicyExamples:
    """Random-access examples (`core.protocols.Examples`) of contexts to answer; or with given `answers[N, K, T]`."""

    def __init__(self, examples: ContextExamples, goals: Goals, answers: np.ndarray | None = None):
        self.examples, self.goals, self.instances, self.answers = examples, goals, examples.instances, answers
        self.lengths = examples.lengths[:, 0]  # the gold response is not read

    def __len__(self) -> int:
        return len(self.examples)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> PolicyBatch:
        known = np.maximum(indices, 0)
        # Numpy arrays until they are put on devices; the annotations are those of the training step.
        arrays: dict[str, Any] = {
            "row": np.asarray(indices, np.int32),
            "wanted": self.goals.wanted[known],
            "merit": self.goals.merit[known],
            "answers": None if self.answers is None else self.answers[known],
        }
        return PolicyBatch(self.examples.collate(indices, length, rng), **arrays)


class DialogueExamples:
    """Examples of whole dialogues: a batch of B has B * max_turns rows, the listener turns of a dialogue adjacent.

    A turn has the gold history, as everywhere in this package, so all turns are answered at once.
    """

    def __init__(self, turns: PolicyExamples, max_turns: int):
        self.turns, self.instances = turns, turns.instances
        found: dict[str, list[int]] = {}
        for i, instance in enumerate(turns.instances):
            found.setdefault(instance.dialogue_id, []).append(i)
        self.rows = np.full((len(found), max_turns), -1, np.int64)
        for d, rows in enumerate(found.values()):
            kept = sorted(rows, key=lambda i: len(turns.instances[i].context))[:max_turns]
            self.rows[d, : len(kept)] = kept
        self.lengths = np.where(self.rows >= 0, turns.lengths[np.maximum(self.rows, 0)], 0).max(axis=1)

    def __len__(self) -> int:
        return len(self.rows)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> PolicyBatch:
        rows = np.where(indices[:, None] >= 0, self.rows[np.maximum(indices, 0)], -1)
        return self.turns.collate(rows.ravel(), length, rng)


def repeat_rows(batch: PolicyBatch, times: int) -> PolicyBatch:
    """Repeats every row `times` times, in the order of a flattened `Generated.tokens[B, K, T]`."""
    return batch if times == 1 else jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), batch)
