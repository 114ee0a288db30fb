"""Advantages from the scores of sampled responses: token rewards, whitening, GAE, group baselines.

No gradient flows through a result. Values under a False mask (NaN too) have no effect, and results there are 0.
"""

from __future__ import annotations

from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.systems.emprl.kl import Mask, Tokens, real

Form = Literal["sound", "paper_literal"]


def response_mask(tokens: Int[Array, "B T"], valid: Bool[Array, " B"] | None = None, *, eos_id: int) -> Mask:
    """Returns a mask that is True up to and including the first end-of-sequence token, in `valid` rows.

    It does not look for padding: a policy can sample the padding id, and in some models it is the end's id.
    """
    is_end = (tokens == eos_id).astype(jnp.int32)
    mask = jnp.cumsum(is_end, axis=1) - is_end == 0
    return mask if valid is None else mask & valid[:, None]


def mask_first_token(mask: Mask) -> Mask:
    """Returns the mask without each response's first token, as in EmpRL's runs: TRL 0.9's mask starts one token late.

    Right if the first token is forced (BART), else a departure from Eq. 8 to 15: a response of one token has no score.
    """
    return mask.at[:, 0].set(False)


def token_rewards(scores: Float[Array, " B"], kl: Tokens, mask: Mask, *, beta: Float[Array, ""] | float) -> Tokens:
    r"""Returns the reward of every token: the KL penalty, plus the score on the last token.

    .. math:: r_t = [t = T] \, R - \beta \, \mathrm{KL}_t

    with the `scores` R of whole responses, the `kl` in nats per token, and T the last True of a row's mask.
    Source: EmpRL, Eq. 7 and 8; Ziegler et al. 2019, Eq. 2.
    """
    rewards = -beta * real(kl, mask) + jnp.where(_remaining(mask) == 1, scores.astype(jnp.float32)[:, None], 0.0)
    return jax.lax.stop_gradient(jnp.where(mask, rewards, 0.0))


def whiten(values: Float[Array, "..."], mask: Bool[Array, "..."], *, shift_mean: bool = True) -> Float[Array, "..."]:
    r"""Scales values to variance 1 over the mask.

    .. math:: w = (v - m) / \sqrt{s^2 + 10^{-8}} \quad (+ m \text{ unless } \texttt{shift\_mean})

    with the unbiased variance; fewer than two values become their mean, or 0. It is for whole rollouts, not parts.
    Source: the code of Ziegler et al. 2019, and TRL's, which keeps the mean of rewards, but not of advantages.
    """
    values = real(values, mask)
    count = jnp.sum(mask.astype(jnp.float32))
    mean = jnp.sum(values) / jnp.maximum(count, 1.0)
    centred = jnp.where(mask, values - mean, 0.0)
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1.0, 1.0)
    whitened = centred * jax.lax.rsqrt(variance + 1e-8)
    return jax.lax.stop_gradient(jnp.where(mask, whitened if shift_mean else whitened + mean, 0.0))


@flax.struct.dataclass
class ScoreStatistics:
    """Count, mean and sum of squared deviations of all scores so far; float32 scalars. Source: Chan et al. 1979.

    Fields are `Any` because checkpoints, shardings and `jax.eval_shape` use other leaves than arrays.
    """

    count: Any  # Float[Array, ""]; exact up to 2^24 scores
    mean: Any
    m2: Any

    @classmethod
    def empty(cls) -> ScoreStatistics:
        return cls(*(jnp.zeros((), jnp.float32) for _ in range(3)))

    def update(self, scores: Float[Array, " B"], valid: Bool[Array, " B"]) -> ScoreStatistics:
        """Adds the scores of a batch; filler rows do not count."""
        scores = real(scores, valid)
        added = jnp.sum(valid.astype(jnp.float32))
        mean = jnp.sum(scores) / jnp.maximum(added, 1.0)
        m2 = jnp.sum(jnp.square(jnp.where(valid, scores - mean, 0.0)))
        count = self.count + added
        share = added / jnp.maximum(count, 1.0)
        delta = mean - self.mean
        m2 = self.m2 + m2 + jnp.square(delta) * self.count * share
        return jax.lax.stop_gradient(ScoreStatistics(count, self.mean + delta * share, m2))

    def std(self) -> Float[Array, ""]:
        """Returns the unbiased standard deviation; 1 while all scores are equal, so that dividing by it is safe."""
        std = jnp.sqrt(self.m2 / jnp.maximum(self.count - 1.0, 1.0))
        # Departure: TRL divides by 1e-7 then, which turns a first batch of equal scores into a reward of 1e7.
        return jnp.where(std > 1e-6, std, 1.0)

    def normalise(self, scores: Float[Array, " B"]) -> Float[Array, " B"]:
        """Standardizes scores by the running mean and deviation; `update` with these scores first, as TRL does."""
        return jax.lax.stop_gradient((scores.astype(jnp.float32) - self.mean) / self.std())


def generalized_advantages(
    rewards: Tokens, values: Tokens, mask: Mask, *, gamma: float, lam: float, form: Form = "sound"
) -> tuple[Tokens, Tokens]:
    r"""Returns generalized advantage estimates, and the returns A + V that values are trained on.

    .. math:: A_t = \sum_{l=0}^{T-t} (\gamma\lambda)^l \delta_{t+l}, \quad
      \delta_t = r_t + \gamma V(s_{t+1}) - V(s_t), \quad V(s_{T+1}) = 0

    Source: Schulman et al. 2016, Eq. 16; EmpRL, Eq. 10. Tokens t = 1 .. T are the ones under the mask, at any position.

    Departure: EmpRL's Eq. 9 ends at delta_{T-1}, with exponent T-t+1, so that the empathy reward r_T teaches nothing.
    "paper_literal" computes that: A_T = 0, A_{T-1} = delta_{T-1}, and for t < T-1

    .. math:: A_t = \sum_{l=0}^{T-2-t} (\gamma\lambda)^l \delta_{t+l} + (\gamma\lambda)^{T-t+1} \delta_{T-1}

    `rewards` are r_t (`token_rewards`), `values` V(s_t) of the policy that sampled. The advantages are not whitened.
    """
    rewards, values = real(rewards, mask), real(values, mask)
    decay = gamma * lam

    def body(carry: tuple[jax.Array, jax.Array], step: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        next_value, next_advantage = carry
        reward, value, counts, left = step
        advantage = reward + gamma * next_value - value + decay * next_advantage
        handed_on = advantage
        if form == "paper_literal":
            advantage = jnp.where(left == 1, 0.0, advantage)
            handed_on = jnp.where(left == 2, decay**2 * advantage, advantage)
        carry = jnp.where(counts, value, next_value), jnp.where(counts, handed_on, next_advantage)
        return carry, jnp.where(counts, advantage, 0.0)

    start = (jnp.zeros(len(rewards), jnp.float32),) * 2
    steps = (rewards.T, values.T, mask.T, _remaining(mask).T)
    advantages = jax.lax.scan(body, start, steps, reverse=True)[1].T
    return jax.lax.stop_gradient((advantages, advantages + values))


def grpo_advantages(
    scores: Float[Array, " B"], valid: Bool[Array, " B"], *, group_size: int, scale_rewards: bool = True
) -> Float[Array, " B"]:
    r"""Returns the advantage of each response over the others to the same context.

    .. math:: A_i = (R_i - \mathrm{mean}(R)) / (\mathrm{std}(R) + 10^{-4})

    Source: Shao et al. 2024 (GRPO), Sec. 4.1.2; std unbiased and its 1e-4 as in TRL. `scale_rewards=False` leaves out
    the division (Liu et al. 2025, Dr. GRPO, Sec. 3.2).

    The `group_size` responses to a context, at least 2, are adjacent: [B, K, T] as [B K, T]. `valid` is False on filler
    rows, which do not belong to their group.
    """
    grouped, counts, size = by_group(scores, valid, group_size)
    mean = jnp.sum(grouped, axis=1, keepdims=True) / jnp.maximum(size, 1.0)
    centred = jnp.where(counts, grouped - mean, 0.0)
    if scale_rewards:
        variance = jnp.sum(jnp.square(centred), axis=1, keepdims=True) / jnp.maximum(size - 1.0, 1.0)
        centred = centred / (jnp.sqrt(variance) + 1e-4)
    return jax.lax.stop_gradient(centred.reshape(-1))


def by_group(
    scores: Float[Array, " B"], valid: Bool[Array, " B"], group_size: int
) -> tuple[Float[Array, "G K"], Bool[Array, "G K"], Float[Array, "G 1"]]:
    """Returns the scores by group, the mask of those that count, and their number."""
    counts = valid.reshape(-1, group_size)
    grouped = real(scores.reshape(-1, group_size), counts)
    return grouped, counts, jnp.sum(counts.astype(jnp.float32), axis=1, keepdims=True)


def _remaining(mask: Mask) -> Int[Array, "B T"]:
    """Returns the number of tokens that count from each one on, including itself; 0 where it does not count."""
    return jnp.where(mask, jnp.cumsum(mask[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1], 0)
