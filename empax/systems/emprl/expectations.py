"""What gold responses let expect: levels of empathy by context, with their gain in F1, and how new a pair of ids is."""

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
"""Of the fit to the data against the penalty on weights (C): the best of 0.3 to 10 on validation."""
_ROUNDS = 50
_BITS = 20
"""Pairs are told apart by so many bits of a hash: a million slots, of which a corpus fills a tenth."""


def expected_levels(
    embeddings: Float[np.ndarray, "N D"], levels: Int[np.ndarray, "N M"], groups: Sequence[str]
) -> Float[np.ndarray, "N M 3"]:
    """How likely the response to each context has each level, by a regression that has not seen its group.

    One multinomial regression for each mechanism, fitted on four of five folds and asked about the fifth, in turns.
    Source: ours.

    Args:
      embeddings: of the contexts, of about unit length.
      levels: of the gold responses, index into LEVELS.
      groups: of each row, its dialogue: all of a group is in one fold.
    """
    from sklearn.linear_model import LogisticRegression  # takes a second to import: only when asked

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
    r"""What each response adds to the weighted F1 of its mechanism by having a level, N times, a constant aside.

    .. math:: F_w = \sum_l s_l F_l, \quad
      F_l = \frac{2 \sum_n q_{n,l} \, a_{n,l}}{\sum_n q_{n,l} + \sum_n a_{n,l}}, \qquad
      G_{n,l} = N \frac{\partial F_w}{\partial a_{n,l}} = \frac{2 s_l}{s_l + t_l} (q_{n,l} - F_l / 2)

    with a = 1 where response n has level l, s and t the shares of the levels in q and in a. G depends on all responses
    through F and t; these are of the best ones, a = 1 at the largest G of each, by iteration.
    Source: ours; Koyejo et al. 2014 (Consistent binary classification with generalized performance metrics) have the
    best decisions compare probabilities with a threshold, which is half the best value for F1.

    Args:
      expected: q, how likely the gold response to each context has each level.
    """
    shares = expected.mean(axis=0)
    f1, weights = np.full(shares.shape, 0.5), np.ones(shares.shape)
    for _ in range(_ROUNDS):
        chosen = np.eye(expected.shape[2])[(weights * (expected - f1 / 2)).argmax(axis=2)]
        both = np.maximum(shares + chosen.mean(axis=0), 1e-9)
        # Half of the way: a whole step may go to and fro for ever.
        f1 = 0.5 * (f1 + 2 * (expected * chosen).mean(axis=0) / both)
        weights = 0.5 * (weights + 2 * shares / both)
    return (weights * (expected - f1 / 2)).astype(np.float32)


def balanced_gains(levels: Int[np.ndarray, "N M"]) -> Float[np.ndarray, "N M 3"]:
    r"""What each response earns by having a level: the inverse share of the gold level, nothing at others.

    .. math:: G_{n,l} = \frac{[l = l_n]}{3 s_l}

    with s the shares of the gold levels. Whoever knows nothing of the gold level earns 1/3 on average, whatever level
    is shown: the commonest is worth no more than the others. Source: ours; the weights are those of balanced accuracy
    (Brodersen et al. 2010).

    Args:
      levels: of the gold responses, index into LEVELS.
    """
    gold = np.eye(len(LEVELS), dtype=np.float32)[levels]
    shares = np.maximum(gold.mean(axis=0), 1.0 / len(levels))  # a level that nobody has earns nothing anyway
    return (gold / (len(LEVELS) * shares)).astype(np.float32)


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
