"""Choosing among what a search found by more than its likelihood."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Generated
from empax.core.vectors import unit
from empax.decoding.hypotheses import gather
from empax.decoding.sampling import Randomness, noise
from empax.decoding.settings import DecodeSettings, SimilarityLikelihood

Utility: TypeAlias = Callable[..., Float[Array, " N"]]
"""`(candidates[N,T], candidate_mask, references[N,T], reference_mask)`: how good each candidate is as an answer where
the reference is right."""


@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """What is ranked: K hypotheses of each of B contexts, and what is known beside them.

    Attributes:
      tokens: [B, K, T].
      mask: True on tokens, False on padding and the end-of-sequence token.
      log_probs: [B, K], under the model.
      encoding: the model's encoding of each context, [B, D]; called only by rules that look at it.
      encode: the model's encoding of texts, (ids[N, T], mask) to [N, D]; likewise.
      rng: for rules that draw.
      exemplars: M responses for each context, ids [B, M, S] with their mask; None = there are none.
    """

    tokens: Int[Array, "B K T"]
    mask: Bool[Array, "B K T"]
    log_probs: Float[Array, "B K"]
    encoding: Callable[[], Float[Array, "B D"]]
    encode: Callable[[Int[Array, "N T"], Bool[Array, "N T"]], Float[Array, "N D"]]
    rng: Randomness
    exemplars: tuple[Int[Array, "B M S"], Bool[Array, "B M S"]] | None = None


@runtime_checkable
class Reranker(Protocol):
    def __call__(self, hypotheses: Hypotheses) -> Float[Array, "B K"]:
        """What each hypothesis is worth; the one of most worth comes first."""
        ...


@dataclasses.dataclass(frozen=True)
class Consensus:
    r"""Hypotheses are worth what they are if any of the others is what should have been said.

    .. math:: u_k = |y_k|^a \Big( \tfrac{1}{K - 1} \sum_{j \ne k} F(y_k, y_j) + \tfrac{b}{M} \sum_m F(y_k, z_m) \Big)

    With hypotheses drawn from the model this is the Monte Carlo form of the decision with the least Bayes risk: it
    prefers what much of the probability agrees on to what has the single highest probability, which in dialogue is the
    same few sentences for everybody. Source: Kumar and Byrne 2004; with samples, Eikema and Aziz 2020, Sec. 6. The
    exemplars z, what people said in like situations, are ours.

    Attributes:
      utility: F, of token ids. Equal hypotheses count as often as they occur.
      length_power: a; above 0 makes up for a utility that prefers short hypotheses.
      exemplar_weight: b; an exemplar without a token does not count.
    """

    utility: Utility
    length_power: float = 0.0
    exemplar_weight: float = 0.0

    def __call__(self, hypotheses: Hypotheses) -> Float[Array, "B K"]:
        tokens, made = hypotheses.tokens, hypotheses.mask
        num = tokens.shape[1]
        worth = (self._agreement(hypotheses, tokens, made) * (1.0 - jnp.eye(num)[None])).sum(axis=2) / max(num - 1, 1)
        if hypotheses.exemplars is not None and self.exemplar_weight:
            present = hypotheses.exemplars[1].any(axis=2)[:, None]
            found = jnp.where(present, self._agreement(hypotheses, *hypotheses.exemplars), 0.0).sum(axis=2)
            worth += self.exemplar_weight * found / jnp.maximum(present.sum(axis=2), 1)
        return worth * made.sum(axis=2) ** self.length_power

    def _agreement(self, hypotheses: Hypotheses, others: Array, mask: Array) -> Float[Array, "B K M"]:
        """F of every hypothesis with every one of `others`."""
        batch, num, length = hypotheses.tokens.shape
        shape, width = (batch, num, others.shape[1]), others.shape[2]
        given = hypotheses.tokens, hypotheses.mask
        own = [jnp.broadcast_to(x[:, :, None], (*shape, length)).reshape(-1, length) for x in given]
        theirs = [jnp.broadcast_to(x[:, None], (*shape, width)).reshape(-1, width) for x in (others, mask)]
        return self.utility(*own, *theirs).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Likelihood:
    r"""Hypotheses are worth their log-probability: of several samples the likeliest.

    .. math:: u_k = \log p(y_k) / |y_k|^a

    Attributes:
      length_power: a; 0 = the log-probability itself, 1 = over the number of words, the end not counted.
    """

    length_power: float = 0.0

    def __call__(self, hypotheses: Hypotheses) -> Float[Array, "B K"]:
        return hypotheses.log_probs / jnp.maximum(hypotheses.mask.sum(axis=2), 1) ** self.length_power


@dataclasses.dataclass(frozen=True)
class Similarity:
    r"""Hypotheses are worth their likelihood and how near their encoding is to that of the context.

    .. math:: u_k = (1 - \alpha) \frac{s_k}{\sum_j |s_j|} + \alpha \cos(z_{context}, z_k), \quad
              s_k = \frac{\log p(y_k)}{|y_k|}

    with the end token counted in the length. Source: NEC, Eq. 13 to 15, in the form of its code (CoNT's). To the letter
    Eq. 14 and 15 take the probability in place of the fraction, beside which the cosine decides alone.

    Attributes:
      weight: alpha, in [0, 1].
      likelihood: "normalised", or "probability", as the equations have it.
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
        length = jnp.minimum(hypotheses.mask.sum(axis=2) + 1, hypotheses.tokens.shape[2])  # one cut short has no end
        scores = hypotheses.log_probs / length
        return scores / jnp.maximum(jnp.abs(scores).sum(axis=1, keepdims=True), 1e-9)


@dataclasses.dataclass(frozen=True)
class Random:
    """Any hypothesis may come first, each as often: the control of a rule that chooses.

    Source: ours. Beams other than the first are less generic, so a rule that takes any other of them makes replies less
    alike without judging them.
    """

    def __call__(self, hypotheses: Hypotheses) -> Float[Array, "B K"]:
        return noise(hypotheses.rng, jax.random.uniform, hypotheses.log_probs.shape)


def make_reranker(settings: DecodeSettings, utility: Utility) -> Reranker | None:
    """The reranker that `settings.rerank` names; None = the order stays that of the search."""
    made: dict[str, Reranker | None] = {
        "": None,
        "consensus": Consensus(utility, settings.rerank_length, settings.rerank_exemplars),
        "likelihood": Likelihood(settings.rerank_length),
        "random": Random(),
        "similarity": Similarity(settings.rerank_similarity, settings.rerank_likelihood),
    }
    return made[settings.rerank]


def rerank(generated: Generated, worth: Float[Array, "B K"]) -> Generated:
    """The same hypotheses and log-probabilities, the best first; equal ones keep their order."""
    order = jnp.argsort(-worth, axis=1, stable=True)
    return jax.tree.map(lambda values: gather(values, order), generated)
