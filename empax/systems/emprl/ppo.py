"""Losses of PPO and GRPO on sampled responses, and metrics to monitor.

Losses are sums and weights, so that the micro-batches of a mini-batch add up exactly.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from empax.core.types import Mean, Metrics
from empax.systems.emprl.kl import Mask, Tokens, kl_penalty, log_ratios, real

Reduction = Literal["tokens", "sequences", "sequence_means"]
Level = Literal["token", "sequence"]

MAX_RATIO = 10.0
"""Mini-batches whose mean ratio is above this are skipped, as in TRL and thus EmpRL's runs."""


def reduce_tokens(values: Tokens, mask: Mask, reduction: Reduction) -> Mean:
    """Returns the mean over all "tokens" (TRL's PPO, thus EmpRL's runs), or over the responses that have any.

    A response's value is the sum over its tokens for "sequences" (EmpRL, Eq. 12 to 15), and their mean for
    "sequence_means" (Shao et al. 2024, Eq. 3).
    """
    if reduction == "tokens":
        return Mean.of(values, mask)
    sums = jnp.sum(real(values, mask), axis=1)
    if reduction == "sequence_means":
        sums = sums / jnp.maximum(jnp.sum(mask.astype(jnp.float32), axis=1), 1.0)
    return Mean.of(sums, jnp.any(mask, axis=1))


def weighted_sum(*parts: tuple[float | Float[Array, ""], Mean]) -> Mean:
    """Returns the weighted sum of losses with one mask and one reduction, which thus share their weight (Eq. 13)."""
    return Mean(sum((factor * part.total for factor, part in parts), start=jnp.zeros(())), parts[0][1].weight)


def near(log_probs: Tokens, old_log_probs: Tokens, mask: Mask) -> Mask:
    """Returns the mask of a mini-batch's losses: `mask`, or nothing if the mean ratio is above MAX_RATIO or NaN."""
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratios(log_probs, old_log_probs, mask)))
    return mask & (Mean.of(ratio, mask).value() <= MAX_RATIO)


def policy_loss(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip: float,
    epsilon_high: float | None = None,
    importance_sampling_level: Level = "token",
    reduction: Reduction = "tokens",
) -> tuple[Mean, Metrics]:
    r"""Returns the clipped surrogate loss of PPO.

    .. math:: L = -\mathrm{mean} \min(c_t A_t, \mathrm{clip}(c_t, 1 - \epsilon, 1 + \epsilon_{high}) A_t),
      \quad c_t = \pi_\theta(y_t) / \pi_{old}(y_t)

    Source: Schulman et al. 2017, Eq. 7; EmpRL, Eq. 14 (its sum over t is `reduction="sequences"`). Options, under TRL's
    names: Yu et al. 2025 (DAPO), Eq. 10 (epsilon_high); Zheng et al. 2025 (GSPO), Eq. 5 and 7 (sequences).

    `old_log_probs` are of the policy that sampled, neither tempered nor truncated; no gradient flows to them or to the
    `advantages` A_t. `clip` is epsilon > 0, `epsilon_high` the maximum rise of a ratio (None = epsilon); `reduction` is
    the form of `mean`. importance_sampling_level = "sequence" gives all tokens of a response the geometric mean of
    their ratios.

    Returns:
      The loss, and over tokens: `ratio` = mean c_t; `clip_fraction` = share of tokens where a bound is active;
      `approximate_kl` = mean c_t - 1 - log c_t, which estimates KL(old || new) in nats per token.
    """
    advantages = jax.lax.stop_gradient(real(advantages, mask))
    high = clip if epsilon_high is None else epsilon_high
    log_ratio = shared = log_ratios(log_probs, old_log_probs, mask)
    if importance_sampling_level == "sequence":
        length = jnp.maximum(jnp.sum(mask.astype(jnp.float32), axis=1, keepdims=True), 1.0)
        shared = jnp.broadcast_to(jnp.sum(log_ratio, axis=1, keepdims=True) / length, log_ratio.shape)
    ratio = jnp.exp(shared)
    free = ratio * advantages
    surrogate = jnp.minimum(free, jnp.clip(ratio, 1.0 - clip, 1.0 + high) * advantages)
    return reduce_tokens(-surrogate, mask, reduction), {
        "ratio": Mean.of(ratio, mask),
        "clip_fraction": Mean.of((surrogate != free).astype(jnp.float32), mask),
        "approximate_kl": Mean.of(jnp.expm1(log_ratio) - log_ratio, mask),
    }


def value_loss(
    values: Tokens,
    old_values: Tokens,
    returns: Tokens,
    mask: Mask,
    *,
    clip: float | None,
    reduction: Reduction = "tokens",
) -> tuple[Mean, Metrics]:
    r"""Returns half the squared error of the values; with clipping, the larger of two errors.

    .. math:: L = \tfrac{1}{2} \, \mathrm{mean} \max((V_t - R_t)^2, (V'_t - R_t)^2), \quad
      V'_t = \mathrm{clip}(V_t, V^{old}_t - \epsilon, V^{old}_t + \epsilon)

    Source: EmpRL, Eq. 15, which prints `clip=None, reduction="sequences"` and no half; its runs (TRL) clip at 0.2 and
    halve, as Dhariwal et al. 2017 (OpenAI Baselines) do.

    `clip` is epsilon > 0, in units of the values; None = no clipping. No gradient flows to `old_values` and `returns`.
    Other arguments are those of `policy_loss`. `value_clip_fraction` is the share of tokens whose clipped error counts.
    """
    values, returns = real(values, mask), jax.lax.stop_gradient(real(returns, mask))
    error = jnp.square(values - returns)
    cut = jnp.zeros(mask.shape, bool)
    if clip is not None:
        old_values = jax.lax.stop_gradient(real(old_values, mask))
        clipped = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)
        cut = clipped > error
        error = jnp.maximum(error, clipped)
    loss = reduce_tokens(0.5 * error, mask, reduction)
    return loss, {"value_clip_fraction": Mean.of(cut.astype(jnp.float32), mask)}


def kl_loss(
    log_probs: Tokens, reference_log_probs: Tokens, mask: Mask, *, reduction: Reduction
) -> tuple[Mean, Metrics]:
    """Returns the KL to the frozen reference by k3, which GRPO has in its loss, not in the reward.

    Source: Shao et al. 2024 (GRPO), Eq. 3 and 4. Arguments are those of `policy_loss`; `token_kl` is in nats per token.
    """
    kl = kl_penalty(log_probs, reference_log_probs, mask, estimator="k3")
    return reduce_tokens(kl, mask, reduction), {"token_kl": Mean.of(kl, mask)}


def entropy(logits: Float[Array, "B T V"], mask: Mask, *, reduction: Reduction = "tokens") -> Mean:
    """Returns the policy's entropy per position, in nats. Gradients flow; a logit of -inf is a probability of 0."""
    logits = jnp.where(mask[:, :, None], logits.astype(jnp.float32), 0.0)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    # Avoids 0 times -inf, also in the gradient.
    log_probs = jnp.where(jnp.isneginf(log_probs), 0.0, log_probs)
    probs = jnp.where(jnp.isneginf(logits), 0.0, jnp.exp(log_probs))
    return reduce_tokens(-jnp.sum(probs * log_probs, axis=-1), mask, reduction)


def explained_variance(values: Tokens, returns: Tokens, mask: Mask) -> Float[Array, ""]:
    """Returns 1 - Var(R - V) / Var(R) over the tokens of a whole rollout, at most 1; 0 if the returns do not vary."""

    def variance(x: Tokens) -> Float[Array, ""]:
        return Mean.of(jnp.square(x - Mean.of(x, mask).value()), mask).value()

    values, returns = real(values, mask), real(returns, mask)
    spread = variance(returns)
    return jnp.where(spread > 0.0, 1.0 - variance(returns - values) / jnp.where(spread > 0.0, spread, 1.0), 0.0)


def distinct_share(tokens: Int[Array, "B T"], mask: Mask) -> Mean:
    """Returns the share of responses (rows with tokens) that equal no earlier one of the batch.

    Ids are at least 0; `mask` is `response_mask`, with the first token.
    """
    ids = jnp.where(mask, tokens, -1)  # so that a response never equals a longer one
    counts = jnp.any(mask, axis=1)
    same = jnp.all(ids[:, None] == ids[None], axis=2)  # no row without tokens equals one with tokens
    earlier = jnp.tril(jnp.ones(same.shape, bool), k=-1)
    return Mean.of((~jnp.any(same & earlier, axis=1)).astype(jnp.float32), counts)
