"""Expectations from gold responses: empathy levels given a context, their gain in F1, and the novelty of id pairs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from empax.core.config import ConfigError
from empax.core.types import LEVELS, Params
from empax.systems.emprl.rollouts import Rollout

FOLDS = 5
STRENGTH = 0.3
"""Inverse regularization strength (C): the best of 0.3 to 10 on validation."""
LEAST_SHARE = 0.01
"""Rarer levels are not worth more: a few rows would decide everything that is learnt."""
OUTPUTS = 5_000
"""The number of responses among which a pair of tokens should be new."""
SHARE = 0.05
"""The share of distinct pairs in that many responses; below the policy's it rewards long ones, above it short ones."""
_ROUNDS = 50
_BITS = 20
"""Bits of the hash of a pair: a million slots, of which a corpus fills a tenth."""


def expected_levels(
    embeddings: Float[np.ndarray, "N D"], levels: Int[np.ndarray, "N M"], groups: Sequence[str]
) -> Float[np.ndarray, "N M 3"]:
    """Returns the cross-validated probability of each level of the response to each context.

    By multinomial logistic regressions on the other folds than the row's; the rows of a dialogue, which `groups` names,
    are in one fold. Embeddings have about unit length; levels, here and below, are indices into LEVELS. Source: ours.
    """
    from sklearn.linear_model import LogisticRegression  # takes a second to import

    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    if len(numbers) < 2:
        raise ConfigError(
            "goal = 'f1' needs training contexts of two dialogues or more; raise max_examples, or set goal = 'gold'."
        )
    folds = np.array([numbers[group] % FOLDS for group in groups])
    found = np.zeros((*levels.shape, len(LEVELS)), np.float32)
    for fold, m in itertools.product(range(FOLDS), range(levels.shape[1])):
        asked, seen = np.flatnonzero(folds == fold), folds != fold
        known = np.unique(levels[seen, m])
        if len(known) == 1 or not len(asked):
            found[asked, m, known[0]] = 1.0
            continue
        model = LogisticRegression(C=STRENGTH, max_iter=500).fit(embeddings[seen], levels[seen, m])
        found[asked[:, None], m, known] = model.predict_proba(embeddings[asked])
    return found


def f1_gains(expected: Float[np.ndarray, "N M 3"]) -> Float[np.ndarray, "N M 3"]:
    r"""Returns N times what each level of each response adds to its mechanism's weighted F1, up to a constant.

    .. math:: F_w = \sum_l s_l F_l, \quad
      F_l = \frac{2 \sum_n q_{n,l} \, a_{n,l}}{\sum_n q_{n,l} + \sum_n a_{n,l}}, \qquad
      G_{n,l} = N \frac{\partial F_w}{\partial a_{n,l}} = \frac{2 s_l}{s_l + t_l} (q_{n,l} - F_l / 2)

    with a = 1 where response n has level l, `expected` q the probability that the gold response has it, and s and t the
    shares of the levels in q and in a. F and t are those of the optimum, a = 1 at the largest G of each response, found
    by iteration. Source: ours, after Koyejo et al. 2014 (optimal decisions compare q with half the optimal F1).
    """
    shares = expected.mean(axis=0)
    f1, weights = np.full(shares.shape, 0.5), np.ones(shares.shape)
    for _ in range(_ROUNDS):
        chosen = np.eye(expected.shape[2])[(weights * (expected - f1 / 2)).argmax(axis=2)]
        both = np.maximum(shares + chosen.mean(axis=0), 1e-9)
        # Half steps: full steps may oscillate.
        f1 = 0.5 * (f1 + 2 * (expected * chosen).mean(axis=0) / both)
        weights = 0.5 * (weights + 2 * shares / both)
    return (weights * (expected - f1 / 2)).astype(np.float32)


def balanced_gains(levels: Int[np.ndarray, "N M"]) -> Float[np.ndarray, "N M 3"]:
    r"""Returns the reward of each level of each response: the inverse share of the gold level, 0 for others.

    .. math:: G_{n,l} = \frac{[l = l_n]}{3 s_l}

    with s the shares of the gold levels, at least LEAST_SHARE: without knowledge of the gold level, any level that is
    not rarer earns 1/3 on average. Source: ours; the weights are those of balanced accuracy (Brodersen et al. 2010).
    """
    gold = np.eye(len(LEVELS), dtype=np.float32)[levels]
    shares = np.maximum(gold.mean(axis=0), LEAST_SHARE)
    return (gold / (len(LEVELS) * shares)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Novelty:
    r"""The derivative of Distinct-2 by a response's pairs, in units of the most that an average response can add.

    .. math:: D = \frac{\sum_b (1 - e^{-\lambda_b})}{\sum_b \lambda_b}, \qquad
      R = \frac{1}{\bar T} \sum_{b \in y} (1_{\lambda_b > 0} \, e^{-\lambda_b} - D)

    with lambda_b the expected count of the pair b in n gold responses: a pair adds a distinct one only if no other
    response has it. A pair that no gold response has is not rewarded, since from a model it is most likely an error. As
    in Distinct-2, the end token is in no pair. Source: ours.

    Attributes:
      params: {"new": [2 ** 20]}, exp(-lambda) of each pair's slot, or 0.
      share: D of the policy.
      pairs: mean T, the average number of pairs of a gold response.
      eos_id: the end token.
    """

    params: Params
    share: float
    pairs: float
    eos_id: int

    @classmethod
    def of(
        cls, responses: Sequence[Sequence[int]], *, outputs: int = OUTPUTS, share: float = SHARE, eos_id: int
    ) -> Novelty:
        """Counts the pairs of the gold responses, ids without an end; `outputs` is n, `share` is D."""
        counts = np.zeros(2**_BITS, np.float64)
        pairs = [slots(np.array(ids[:-1]), np.array(ids[1:])) for ids in responses]
        np.add.at(counts, np.concatenate(pairs), outputs / len(responses))
        new = np.where(counts > 0, np.exp(-counts), 0.0)
        total = max(sum(map(len, pairs)), 1)  # responses of one token have no pairs
        return cls({"new": jnp.asarray(new, jnp.float32)}, share, total / len(responses), eos_id)

    def __call__(self, params: Params, rollout: Rollout) -> Float[Array, " B"]:
        """Returns R of each response, 0 on filler rows."""
        gained = params["new"][slots(rollout.tokens[:, :-1], rollout.tokens[:, 1:])] - self.share
        counted = rollout.mask[:, 1:] & (rollout.tokens[:, 1:] != self.eos_id)
        return jnp.where(counted, gained, 0.0).sum(axis=1) / self.pairs


def slots(first: Array | np.ndarray, second: Array | np.ndarray) -> UInt32[Array, "..."] | np.ndarray:
    """Returns the slots of pairs of ids, by Knuth's multiplicative hash."""
    mixed = first.astype("uint32") * np.uint32(2654435761) + second.astype("uint32") * np.uint32(40503)
    return mixed >> np.uint32(32 - _BITS)
