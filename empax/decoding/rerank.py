"""Re-ranking the hypotheses of a search by other criteria than their likelihood."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Generated
from empax.core.vectors import unit
from empax.decoding.hypotheses import gather
from empax.decoding.sampling import Randomness, noise
from empax.decoding.settings import DecodeSettings, SimilarityLikelihood

Utility: TypeAlias = Callable[..., Float[Array, " N"]]
"""`(candidates[N,T], candidate_mask, references[N,T], reference_mask)`: the quality of each candidate if the reference
is the right answer."""


@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """K hypotheses for each of B contexts, with further inputs of re-ranking.

    The mask is True at tokens, False at padding and the end-of-sequence token. `encoding` and `encode` return the
    model's encodings of the contexts and of texts, given with their mask; only rules that need them call these, as only
    rules that sample use `rng`. `exemplars` are M responses per context, with their mask. `ended` is False where the
    maximum length cut a hypothesis; None = all have ended.
    """

    tokens: Int[Array, "B K T"]
    mask: Bool[Array, "B K T"]
    log_probs: Float[Array, "B K"]
    encoding: Callable[[], Float[Array, "B D"]]
    encode: Callable[[Int[Array, "N T"], Bool[Array, "N T"]], Float[Array, "N D"]]
    rng: Randomness
    exemplars: tuple[Int[Array, "B M S"], Bool[Array, "B M S"]] | None = None
    ended: Bool[Array, "B K"] | None = None


Reranker: TypeAlias = Callable[[Hypotheses], Float[Array, "B K"]]
"""Scores each hypothesis; the one with the highest score comes first."""


@dataclasses.dataclass(frozen=True)
class Consensus:
    r"""Scores a hypothesis by its expected utility if any of the others is the right response.

    .. math:: u_k = |y_k|^a \Big( \tfrac{1}{K - 1} \sum_{j \ne k} F(y_k, y_j) + \tfrac{b}{M} \sum_m F(y_k, z_m) \Big)

    With hypotheses sampled from the model, this is Monte Carlo minimum Bayes risk decoding. It prefers a response that
    much of the probability mass agrees on to the single most probable one, which in dialogue is one of the same few
    sentences for every context. Source: Kumar and Byrne 2004; with samples, Eikema and Aziz 2020, Sec. 6. The exemplars
    z, human responses in similar situations, are ours.

    Hypotheses that were cut come after all that have ended: they are the longest, so the power would prefer half
    sentences. Ours.

    `utility` is F, of token ids; equal hypotheses count as often as they occur. `length_power` is a: above 0 it
    compensates for a utility that prefers short hypotheses. `exemplar_weight` is b; exemplars without tokens do not
    count.
    """

    utility: Utility
    length_power: float = 0.0
    exemplar_weight: float = 0.0

    def __call__(self, hypotheses: Hypotheses) -> Float[Array, "B K"]:
        tokens, made = hypotheses.tokens, hypotheses.mask
        num = tokens.shape[1]
        worth = (self._agreement(hypotheses, tokens, made) * (1.0 - jnp.eye(num)[None])).sum(axis=2) / (num - 1)
        if hypotheses.exemplars is not None and self.exemplar_weight:
            present = hypotheses.exemplars[1].any(axis=2)[:, None]
            found = jnp.where(present, self._agreement(hypotheses, *hypotheses.exemplars), 0.0).sum(axis=2)
            worth += self.exemplar_weight * found / jnp.maximum(present.sum(axis=2), 1)
        worth *= jnp.maximum(made.sum(axis=2), 1) ** self.length_power
        if hypotheses.ended is None:
            return worth
        return jnp.where(hypotheses.ended, worth, worth - jnp.ptp(worth, axis=1, keepdims=True) - 1.0)

    def _agreement(self, hypotheses: Hypotheses, others: Array, mask: Array) -> Float[Array, "B K M"]:
        """Returns F for every hypothesis and every one of `others`."""
        batch, num, length = hypotheses.tokens.shape
        shape, width = (batch, num, others.shape[1]), others.shape[2]
        given = hypotheses.tokens, hypotheses.mask
        own = [jnp.broadcast_to(x[:, :, None], (*shape, length)).reshape(-1, length) for x in given]
        theirs = [jnp.broadcast_to(x[:, None], (*shape, width)).reshape(-1, width) for x in (others, mask)]
        return self.utility(*own, *theirs).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Similarity:
    r"""Scores a hypothesis by its likelihood and the similarity of its encoding to that of the context.

    .. math:: u_k = (1 - \alpha) \frac{s_k}{\sum_j |s_j|} + \alpha \cos(z_{context}, z_k), \quad
              s_k = \frac{\log p(y_k)}{|y_k|}

    The length includes the end token. Source: NEC, Eq. 13 to 15, in the form of its code (CoNT's). Taken literally,
    Eq. 14 and 15 have the probability instead of the fraction (`likelihood` "probability"); then the cosine alone
    decides. `weight` is alpha, in [0, 1].
    """

    weight: float = 0.7
    likelihood: SimilarityLikelihood = "normalised"

    def __call__(self, hypotheses: Hypotheses) -> Float[Array, "B K"]:
        batch, num, length = hypotheses.tokens.shape
        flat = hypotheses.tokens.reshape(-1, length), hypotheses.mask.reshape(-1, length)
        said = unit(hypotheses.encode(*flat)).reshape(batch, num, -1)
        similar = jnp.einsum("BD,BKD->BK", unit(hypotheses.encoding()), said)
        return (1.0 - self.weight) * self._likely(hypotheses) + self.weight * similar

    def _likely(self, hypotheses: Hypotheses) -> Float[Array, "B K"]:
        if self.likelihood == "probability":
            return jnp.exp(hypotheses.log_probs)
        length = jnp.minimum(hypotheses.mask.sum(axis=2) + 1, hypotheses.tokens.shape[2])  # none if truncated
        scores = hypotheses.log_probs / length
        return scores / jnp.maximum(jnp.abs(scores).sum(axis=1, keepdims=True), 1e-9)


@dataclasses.dataclass(frozen=True)
class Random:
    """Random scores, so that each hypothesis is first equally often: a control for the other rules.

    Source: ours. Beams other than the first are less generic, so any rule that picks another one makes replies more
    diverse without judging them.
    """

    def __call__(self, hypotheses: Hypotheses) -> Float[Array, "B K"]:
        return noise(hypotheses.rng, jax.random.uniform, hypotheses.log_probs.shape)


def make_reranker(settings: DecodeSettings, utility: Utility) -> Reranker | None:
    """Builds the reranker named by `settings.rerank`; None = keep the order of the search."""
    made: dict[str, Reranker | None] = {
        "": None,
        "consensus": Consensus(utility, settings.rerank_length, settings.rerank_exemplars),
        "random": Random(),
        "similarity": Similarity(settings.rerank_similarity, settings.rerank_likelihood),
    }
    return made[settings.rerank]


def rerank(generated: Generated, worth: Float[Array, "B K"]) -> Generated:
    """Sorts hypotheses and log-probabilities by `worth`, best first; ties keep their order."""
    order = jnp.argsort(-worth, axis=1, stable=True)
    return jax.tree.map(lambda values: gather(values, order), generated)
