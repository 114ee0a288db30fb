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
from empax.data.exemplars import ContextExamples, padded


@flax.struct.dataclass
class PolicyBatch:
    """A batch of contexts with the inputs of the reward, which are fixed before any answer is sampled."""

    inputs: Batch  # inputs of the generator, and the gold response
    row: Int[Array, " B"]  # number of the example, -1 on filler rows
    context: Int[Array, "B C"]  # as the identifiers read it; C = 1 without identifiers
    context_mask: Bool[Array, "B C"]
    wanted: Float[Array, "B M 3"]  # reward of each level of each mechanism, see JudgedContexts
    turn: Int[Array, " B"]  # in a batch of whole dialogues: number of the listener turn, from 0
    merit: Float[Array, " B"]  # of the gold response, see JudgedContexts
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
    advantages: Float[Array, "B T"] | Float[Array, " B"] | None = None
    returns: Float[Array, "B T"] | None = None
    kl_coefficient: Float[Array, " B"] | None = None  # the same in all rows
    policy_weight: Float[Array, " B"] | None = None  # 0 while the value head learns alone, else 1
    reference_point: Float[Array, " B"] | None = None  # of KTO, the same in all rows

    @property
    def valid(self) -> Bool[Array, " B"]:
        return self.batch.valid


@dataclasses.dataclass(frozen=True)
class JudgedContexts:
    """The identifiers' input for each example, and the wanted levels of its response.

    Attributes:
      contexts: ids, framed for the identifiers, at most `max_tokens` of a context, to be padded with `pad_id`.
      wanted: [N, M, 3] float32: 1 for the gold response's level, else 0; or the gains of `expectations`.
      merit: [N] float32, reward of the gold response itself, in standard deviations above the mean of all.
    """

    contexts: list[list[int]]
    wanted: np.ndarray
    pad_id: int
    max_tokens: int
    merit: np.ndarray

    @classmethod
    def nobody(cls, size: int) -> JudgedContexts:
        """Returns empty contexts, for rewards without identifiers."""
        nothing = np.zeros((size, 1, len(LEVELS)), np.float32)
        return cls([[] for _ in range(size)], nothing, 0, 1, np.zeros(size, np.float32))


class PolicyExamples:
    """Random-access examples (`core.protocols.Examples`) of contexts to answer; or with given `answers[N, K, T]`."""

    def __init__(self, examples: ContextExamples, judged: JudgedContexts, answers: np.ndarray | None = None):
        self.examples, self.judged, self.instances, self.answers = examples, judged, examples.instances, answers
        self.lengths = examples.lengths[:, 0]  # the gold response is not read

    def __len__(self) -> int:
        return len(self.examples)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> PolicyBatch:
        return self.rows(np.asarray(indices), np.zeros(len(indices), np.int32), length, rng)

    def rows(self, indices: np.ndarray, turn: np.ndarray, length: int, rng: np.random.Generator) -> PolicyBatch:
        judged, known = self.judged, np.maximum(indices, 0)
        context, context_mask = padded(judged.contexts, indices, judged.max_tokens, judged.pad_id)
        # Numpy arrays until they are put on devices; the annotations are those of the training step.
        arrays: dict[str, Any] = {
            "row": indices.astype(np.int32),
            "context": context,
            "context_mask": context_mask,
            "wanted": judged.wanted[known],
            "turn": turn.astype(np.int32),
            "merit": judged.merit[known],
            "answers": None if self.answers is None else self.answers[known],
        }
        return PolicyBatch(self.examples.collate(indices, length, rng), **arrays)


class DialogueExamples:
    """Examples of whole dialogues: a batch of B has B * max_turns rows, the listener turns of a dialogue adjacent.

    A turn has the gold history, as everywhere in this package, so all turns are answered at once.
    """

    def __init__(self, turns: PolicyExamples, max_turns: int):
        self.turns, self.max_turns, self.instances = turns, max_turns, turns.instances
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
        indices = np.asarray(indices)
        rows = np.where(indices[:, None] >= 0, self.rows[np.maximum(indices, 0)], -1)
        turn = np.broadcast_to(np.arange(self.max_turns), rows.shape)
        return self.turns.rows(rows.ravel(), turn.ravel(), length, rng)


def repeat_rows(batch: PolicyBatch, times: int) -> PolicyBatch:
    """Repeats every row `times` times, in the order of a flattened `Generated.tokens[B, K, T]`."""
    return batch if times == 1 else jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), batch)
