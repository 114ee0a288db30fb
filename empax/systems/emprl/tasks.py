"""EmpRL: empathy level alignment via reinforcement learning (Ma et al.), by PPO, and by GRPO beside it.

The policy answers, identifiers say how likely its answers have the gold responses' empathy levels (Eq. 2 to 5), the KL
to the fine-tuned model is taken off (Eq. 6 to 8), and the policy learns from what was better than expected (Eq. 9 to
15). PAPERS.md lists every equation and every departure.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from empax.core.types import Mean, Metrics, Params
from empax.systems.emprl import ppo
from empax.systems.emprl.advantages import (
    generalized_advantages,
    grpo_advantages,
    rloo_advantages,
    token_rewards,
    whiten,
)
from empax.systems.emprl.policy import Memory, Policy, once
from empax.systems.emprl.rollouts import PolicyBatch, Rollout
from empax.systems.emprl.settings import GrpoTaskSettings, PolicyTaskSettings, PpoTaskSettings


@dataclasses.dataclass(frozen=True)
class Ppo(Policy):
    """Stage 2 of EmpRL: policy and value share a trunk; the value head reads the decoder's last states."""

    settings: PpoTaskSettings
    has_values: ClassVar[bool] = True

    def learns_from(self, name: str) -> int:
        return 0 if name.startswith("value/") else self.settings.value_warmup_steps

    def credit(self, frozen: Params, batch: Any, memory: Memory) -> tuple[Rollout, Memory, Metrics]:
        del frozen
        settings, mask = self.settings, self.counted(batch)
        scores, statistics = self.scored(batch, memory)
        rewards = token_rewards(scores, self.token_kl(batch), mask, beta=memory.kl.coefficient)
        if settings.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        advantages, returns = generalized_advantages(
            rewards, batch.values, mask, gamma=settings.gamma, lam=settings.lam, form=settings.advantages
        )
        advantages = whiten(advantages, mask)
        warm = (memory.rollouts >= settings.value_warmup_steps).astype(jnp.float32)
        credited = batch.replace(
            advantages=advantages, returns=returns, policy_weight=jnp.broadcast_to(warm, batch.tokens.shape[:1])
        )
        credited, after, metrics = self.remembered(credited, memory, statistics)
        metrics["explained_variance"] = once(ppo.explained_variance(batch.values, returns, mask))
        return credited, after, metrics

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        """Eq. 13 to 15 on a rollout; on mere contexts, the likelihood of their gold responses."""
        del rng, train  # no dropout: it would make the ratio noise
        if isinstance(batch, PolicyBatch):
            return self.on_gold(params, batch, self.encoded(params, batch))
        settings, mask, encoded = self.settings, self.counted(batch), self.encoded(params, batch.batch)
        warm = batch.policy_weight[0]
        log_probs, values, logits = self.read(params, batch.batch, batch.tokens, encoded, 1.0 - warm)
        assert values is not None
        keep = ppo.ratio_below(log_probs, batch.log_probs, mask, cap=settings.max_ratio)
        options: dict[str, Any] = {"reduction": settings.reduction, "keep": keep}
        given = log_probs, batch.log_probs, batch.advantages, mask
        policy, metrics = ppo.policy_loss(*given, **self.bounds, **options)
        value, more = ppo.value_loss(values, batch.values, batch.returns, mask, clip=settings.value_clip, **options)
        loss = ppo.weighted_sum((warm, policy), (settings.value_weight, value))
        loss = self.with_entropy(loss, logits, mask, warm * keep)
        loss, gold = self.with_likelihood(loss, params, batch, encoded, warm * keep)
        return loss, {
            **metrics,
            **more,
            **gold,
            "policy_loss": policy,
            "value_loss": value,
            "entropy": ppo.entropy(jax.lax.stop_gradient(logits), mask),
            **self.guarded(log_probs, batch, mask),
        }


@dataclasses.dataclass(frozen=True)
class Grpo(Policy):
    """Several responses to each context, each compared with the others; the KL is in the loss."""

    settings: GrpoTaskSettings

    def credit(self, frozen: Params, batch: Any, memory: Memory) -> tuple[Rollout, Memory, Metrics]:
        del frozen
        scores, statistics = self.scored(batch, memory)
        size = self.settings.rollout.num_samples
        valid = batch.mask.any(axis=1)
        if self.settings.baseline == "leave_one_out":
            advantages = rloo_advantages(scores, valid, group_size=size)
        else:
            scale = self.settings.scale_rewards
            advantages = grpo_advantages(scores, valid, group_size=size, scale_rewards=scale)
        return self.remembered(batch.replace(advantages=advantages), memory, statistics)

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        """`ppo.grpo_loss` on a rollout; on mere contexts, the likelihood of their gold responses."""
        del rng, train
        if isinstance(batch, PolicyBatch):
            return self.on_gold(params, batch, self.encoded(params, batch))
        settings, mask, encoded = self.settings, self.counted(batch), self.encoded(params, batch.batch)
        log_probs, _, logits = self.read(params, batch.batch, batch.tokens, encoded)
        keep = ppo.ratio_below(log_probs, batch.log_probs, mask, cap=settings.max_ratio)
        given = log_probs, batch.log_probs, batch.reference_log_probs, batch.advantages, mask
        level, coefficient = settings.importance_sampling_level, batch.kl_coefficient[0]
        options: dict[str, Any] = {"reduction": settings.reduction, "keep": keep, "importance_sampling_level": level}
        loss, metrics = ppo.grpo_loss(*given, kl_coefficient=coefficient, **self.bounds, **options)
        loss = self.with_entropy(loss, logits, mask, keep.astype(jnp.float32))
        loss, gold = self.with_likelihood(loss, params, batch, encoded, keep.astype(jnp.float32))
        metrics["token_kl"] = metrics.pop("kl")
        return loss, {
            **metrics,
            **gold,
            "entropy": ppo.entropy(jax.lax.stop_gradient(logits), mask),
            **self.guarded(log_probs, batch, mask),
        }


ALGORITHMS: dict[type[PolicyTaskSettings], type[Ppo] | type[Grpo]] = {PpoTaskSettings: Ppo, GrpoTaskSettings: Grpo}
