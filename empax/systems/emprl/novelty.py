"""What a response adds to Distinct-2: a reward for pairs of tokens that people use and few of many responses have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from empax.core.types import Params
from empax.systems.emprl.rollouts import Rollout

_BITS = 20
"""Pairs are told apart by so many bits of a hash: a million slots, of which a corpus fills a tenth."""


@dataclasses.dataclass(frozen=True)
class Novelty:
    r"""The derivative of Distinct-2 by the pairs of a response, in units of what all pairs of a usual one could add.

    .. math:: D = \frac{\sum_b (1 - e^{-\lambda_b})}{\sum_b \lambda_b}, \qquad
      R = \frac{1}{\bar T} \sum_{b \in y} (1_{\lambda_b > 0} \, e^{-\lambda_b} - D)

    with lambda_b how often n gold responses are expected to have the pair b: a pair that is said once more adds another
    distinct one only if nobody else has said it. So neither long responses nor short ones are paid for as such. What no
    gold response has would add one too, and is not paid for: from a model it is rather a slip than a find.
    Source: ours.

    Attributes:
      params: {"new": [2 ** 20]}, exp(-lambda) of each pair's slot, or 0; placed like any other frozen parameters.
      share: D of the policy.
      pairs: T, of a gold response.
    """

    params: Params
    share: float
    pairs: float

    @classmethod
    def of(cls, responses: Sequence[Sequence[int]], *, outputs: int, share: float) -> Novelty:
        """By the gold responses.

        Args:
          responses: their ids, end of sequence included.
          outputs: n, among how many responses a pair is to be new.
          share: D.
        """
        counts = np.zeros(2**_BITS, np.float64)
        pairs = [slots(np.array(ids[:-1]), np.array(ids[1:])) for ids in responses]
        np.add.at(counts, np.concatenate(pairs), outputs / len(responses))
        new = np.where(counts > 0, np.exp(-counts), 0.0)
        return cls({"new": jnp.asarray(new, jnp.float32)}, share, sum(map(len, pairs)) / len(responses))

    def __call__(self, params: Params, rollout: Rollout) -> Float[Array, " B"]:
        """R of each response, 0 on filler rows."""
        gained = params["new"][slots(rollout.tokens[:, :-1], rollout.tokens[:, 1:])] - self.share
        return jnp.where(rollout.mask[:, 1:], gained, 0.0).sum(axis=1) / self.pairs


def slots(first: Array | np.ndarray, second: Array | np.ndarray) -> UInt32[Array, "..."] | np.ndarray:
    """Of pairs of ids, by Knuth's multiplicative hash."""
    mixed = first.astype("uint32") * np.uint32(2654435761) + second.astype("uint32") * np.uint32(40503)
    return mixed >> np.uint32(32 - _BITS)
