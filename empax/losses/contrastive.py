"""Contrastive losses: matching pairs score higher than others.

A loss with in-batch negatives is not the mean of the losses of parts of the batch. With gradient accumulation, the
negatives would be those of the micro-batch, a different loss. A task with such a loss sets `splits_batches = False`
(`training.settings.check_whole_batches`), and accumulation is refused.

Letters: B examples, P passages, C candidates, N rows, D features.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Mean, Metrics
from empax.core.vectors import unit

_MASKED = -1e9  # not -inf: a row without a negative must give numbers, not NaN


def dense_retrieval_nll(
    queries: Float[Array, "B D"],
    passages: Float[Array, "P D"],
    positives: Int[Array, " B"],
    allowed: Bool[Array, "B P"],
    valid: Bool[Array, " B"],
    *,
    temperature: float,
) -> tuple[Mean, Metrics]:
    r"""Computes the negative log-likelihood of each query's positive among all passages of the batch.

    .. math:: L = -\log \frac{\exp(q \cdot p^+ / \tau)}{\sum_j \exp(q \cdot p_j / \tau)}

    Source: Karpukhin et al. 2020, Eq. 2; LEMPEx (Majumder et al. 2022), Eq. 11.

    Args:
      queries: one row per example.
      passages: the positives and all additional negatives.
      positives: the row of each query's positive in `passages`.
      allowed: False for a passage that is not a negative of the query: the same text, the same dialogue, padding. The
        positive always counts.
      valid: False on filler rows.
      temperature: tau > 0.

    Returns:
      The loss, and `accuracy`: the share of queries whose positive scores highest.
    """
    scores = jnp.einsum("BD,PD->BP", queries.astype(jnp.float32), passages.astype(jnp.float32)) / temperature
    is_positive = jnp.arange(passages.shape[0])[None, :] == positives[:, None]
    scores = jnp.where(allowed | is_positive, scores, _MASKED)
    own = jnp.take_along_axis(scores, positives[:, None], axis=1)[:, 0]
    loss = jax.nn.logsumexp(scores, axis=1) - own
    best_other = jnp.max(jnp.where(is_positive, _MASKED, scores), axis=1)
    return Mean.of(loss, valid), {"accuracy": Mean.of((own > best_other).astype(jnp.float32), valid)}


def rank_margin(
    similarities: Float[Array, "B C"],
    scores: Float[Array, "B C"],
    mask: Bool[Array, "B C"],
    *,
    margin: float = 0.01,
    least_gap: float = 0.01,
) -> Mean:
    r"""Computes a ranking loss: candidates more like the response must be more similar to the context, by a margin.

    .. math:: L = \sum_{i \ge 1} \mathrm{mean}_r \max(0, s_{r+i} - s_r + \gamma i)

    over candidates in the order of their scores, best first. A pair counts if its scores differ by more than
    `least_gap`. Source: NEC, Eq. 9 to 12, over all pairs as in CoNT (An et al. 2022).

    Args:
      similarities: similarity of each candidate to the context, such as cosines.
      scores: quality of each candidate; no gradient flows. The response itself has the highest score.
      mask: True at real candidates.
      margin: gamma >= 0, the margin per rank.
      least_gap: pairs whose scores differ by at most this are ignored.

    Returns:
      The sum over offsets i of the mean over all pairs of the batch, as one `Mean` of weight 1.
    """
    order = jnp.argsort(-jnp.where(mask, jax.lax.stop_gradient(scores), -jnp.inf), axis=1)
    similarities, scores, mask = (
        jnp.take_along_axis(values, order, axis=1) for values in (similarities.astype(jnp.float32), scores, mask)
    )
    total = jnp.zeros(())
    for i in range(1, similarities.shape[1]):
        gap = scores[:, :-i] - scores[:, i:]
        counts = mask[:, :-i] & mask[:, i:] & (gap > least_gap)
        hinge = jax.nn.relu(similarities[:, i:] - similarities[:, :-i] + margin * i)
        total = total + Mean.of(hinge, counts).value()
    return Mean(total=total, weight=jnp.ones(()))


def supervised_contrastive(
    features: Float[Array, "N D"], labels: Int[Array, " N"], valid: Bool[Array, " N"], *, temperature: float = 0.07
) -> Mean:
    r"""Computes the supervised contrastive loss: rows with the same label attract each other, all others repel.

    .. math:: L_i = \frac{-1}{|P(i)|} \sum_{p \in P(i)} \log \frac{\exp(z_i \cdot z_p / \tau)}
              {\sum_{a \ne i} \exp(z_i \cdot z_a / \tau)}

    Source: Khosla et al. 2020, Eq. 2. With two rows per label it is NT-Xent.

    Args:
      features: rows of any length; they are normalised here.
      labels: labels of the rows.
      valid: False on filler rows, which neither attract nor repel.
      temperature: tau > 0.

    Returns:
      The mean over the rows that share their label with another row.
    """
    rows = unit(features.astype(jnp.float32))
    others = valid[:, None] & valid[None, :] & ~jnp.eye(features.shape[0], dtype=bool)
    similar = jnp.where(others, jnp.einsum("ND,MD->NM", rows, rows) / temperature, _MASKED)
    log_probs = similar - jax.nn.logsumexp(similar, axis=1, keepdims=True)
    positive = others & (labels[:, None] == labels[None, :])
    count = jnp.sum(positive, axis=1)
    loss = -jnp.sum(jnp.where(positive, log_probs, 0.0), axis=1) / jnp.maximum(count, 1)
    return Mean.of(loss, count > 0)
