"""EmpRL: empathy level alignment via reinforcement learning (Ma et al.), by PPO; also by GRPO and preferences.

Identifiers score the policy's answers (Eq. 2 to 5); the KL to the fine-tuned model is subtracted (Eq. 6 to 8); and the
policy is trained on the advantages (Eq. 9 to 15). PAPERS.md lists every equation and every departure.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from empax.core.types import Mean, Metrics, Params
from empax.systems.emprl import ppo, preferences
from empax.systems.emprl.advantages import (
    ScoreStatistics,
    generalized_advantages,
    grpo_advantages,
    token_rewards,
    whiten,
)
from empax.systems.emprl.kl import Mask, adapted, log_ratios
from empax.systems.emprl.policy import Found, Policy, once
from empax.systems.emprl.rollouts import Rollout
from empax.systems.emprl.settings import (
    GrpoTaskSettings,
    PolicyTaskSettings,
    PpoTaskSettings,
    PreferenceTaskSettings,
)


@flax.struct.dataclass
class Memory:
    """State carried from rollout to rollout."""

    kl_coefficient: Any  # Float[Array, ""]
    statistics: ScoreStatistics


class RatioPolicy(Policy):
    """Base of PPO and GRPO: clipped ratios and a KL penalty."""

    @property
    def level(self) -> ppo.Level:
        """The level at which a response's ratios are taken."""
        return "token"

    def init_memory(self) -> Memory:
        return Memory(jnp.asarray(self.settings.kl.coefficient, jnp.float32), ScoreStatistics.empty())

    def scored(self, rollout: Any, memory: Memory) -> tuple[Float[Array, " B"], ScoreStatistics]:
        """Returns the scores for the advantages, and the updated statistics."""
        scores = rollout.scores.astype(jnp.float32)
        statistics = memory.statistics.update(scores, rollout.mask.any(axis=1))
        return (statistics.normalise(scores) if self.settings.normalize_scores else scores), statistics

    def remembered(self, rollout: Any, memory: Memory, statistics: ScoreStatistics) -> tuple[Rollout, Memory, Metrics]:
        """Returns the rollout with its KL coefficient, the updated memory, and metrics."""
        kl, now, metrics = self.settings.kl, memory.kl_coefficient, self.watched(rollout)
        after = now
        if kl.controller == "adaptive":
            after = adapted(now, metrics["kl"], target=kl.target, horizon=kl.horizon)
        metrics["kl_coefficient"] = once(now)
        credited = rollout.replace(kl_coefficient=jnp.full(rollout.tokens.shape[:1], now), parts=None)
        return credited, Memory(after, statistics), metrics

    def objective(self, found: Found, batch: Any, mask: Mask) -> tuple[Mean, Metrics]:
        """Returns the clipped policy loss with the other loss, less the entropy bonus (EmpRL, Eq. 13)."""
        settings, mask = self.settings, ppo.near(found.log_probs, batch.log_probs, mask)
        policy, metrics = ppo.policy_loss(
            found.log_probs, batch.log_probs, batch.advantages, mask, clip=settings.clip,
            epsilon_high=settings.epsilon_high, reduction=settings.reduction, importance_sampling_level=self.level,
        )  # fmt: skip
        weight, other, more = self.other_loss(found, batch, mask)
        parts = [(1.0, policy), (weight, other)]
        if settings.entropy_weight:
            bonus = ppo.entropy(found.logits, mask, reduction=settings.reduction)
            parts.append((-settings.entropy_weight, bonus))
        return ppo.weighted_sum(*parts), {**metrics, **more, "policy_loss": policy}

    def other_loss(self, found: Found, batch: Any, mask: Mask) -> tuple[Any, Mean, Metrics]:
        """Returns the loss beside the policy's, with its weight and metrics."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Ppo(RatioPolicy):
    """Stage 2 of EmpRL: policy and value share a trunk; the value head reads the decoder's last states."""

    settings: PpoTaskSettings
    has_values: ClassVar[bool] = True

    def learns_from(self, name: str) -> int:
        return 0 if name.startswith("value/") else self.settings.value_warmup_steps

    def credit(self, frozen: Params, batch: Any, memory: Memory) -> tuple[Rollout, Memory, Metrics]:
        settings, mask = self.settings, self.counted(batch)
        scores, statistics = self.scored(batch, memory)
        rewards = token_rewards(scores, self.token_kl(batch), mask, beta=memory.kl_coefficient)
        if settings.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        advantages, returns = generalized_advantages(
            rewards, batch.values, mask, gamma=settings.gamma, lam=settings.lam, form=settings.advantages
        )
        credited = batch.replace(advantages=whiten(advantages, mask), returns=returns)
        credited, after, metrics = self.remembered(credited, memory, statistics)
        metrics["explained_variance"] = once(ppo.explained_variance(batch.values, returns, mask))
        return credited, after, metrics

    def other_loss(self, found: Found, batch: Any, mask: Mask) -> tuple[Any, Mean, Metrics]:
        """Returns the loss of the values (Eq. 15)."""
        assert found.values is not None
        settings, given = self.settings, (found.values, batch.values, batch.returns, mask)
        loss, metrics = ppo.value_loss(*given, clip=settings.value_clip, reduction=settings.reduction)
        return settings.value_weight, loss, {**metrics, "value_loss": loss}


@dataclasses.dataclass(frozen=True)
class Grpo(RatioPolicy):
    """GRPO: compares several responses to each context with each other; the KL is in the loss."""

    settings: GrpoTaskSettings

    @property
    def level(self) -> ppo.Level:
        return self.settings.importance_sampling_level

    def credit(self, frozen: Params, batch: Any, memory: Memory) -> tuple[Rollout, Memory, Metrics]:
        scores, statistics = self.scored(batch, memory)
        size, scale = self.settings.rollout.num_samples, self.settings.scale_rewards
        advantages = grpo_advantages(scores, batch.mask.any(axis=1), group_size=size, scale_rewards=scale)
        spread = jnp.broadcast_to(advantages[:, None], batch.mask.shape)
        return self.remembered(batch.replace(advantages=spread), memory, statistics)

    def other_loss(self, found: Found, batch: Any, mask: Mask) -> tuple[Any, Mean, Metrics]:
        """Returns the KL to the reference."""
        reduction = self.settings.reduction
        loss, metrics = ppo.kl_loss(found.log_probs, batch.reference_log_probs, mask, reduction=reduction)
        return batch.kl_coefficient[0], loss, metrics


@dataclasses.dataclass(frozen=True)
class Preference(Policy):
    """Compares the best with the worst of several responses to each context (DPO, IPO), or each with the mean (KTO)."""

    settings: PreferenceTaskSettings

    tie: ClassVar[str] = "beta"

    def rate(self, frozen: Params, batch: Any) -> Rollout:
        if not self.settings.pairs:
            return super().rate(frozen, batch)
        return batch.replace(scores=jnp.tile(jnp.array([1.0, 0.0]), len(batch.tokens) // 2))

    def credit(self, frozen: Params, batch: Any, memory: Any) -> tuple[Any, Any, Metrics]:
        metrics, valid, rated = self.watched(batch), batch.mask.any(axis=1), batch.replace(parts=None)
        size = 2 if self.settings.pairs else self.settings.rollout.num_samples
        if self.settings.loss == "kto":
            # Departure: the KL of the policy's own responses; the paper has none and takes mismatched pairs.
            point = jnp.broadcast_to(jnp.maximum(metrics["kl"].value(), 0.0), rated.scores.shape)
            side = preferences.sides(rated.scores, valid, group_size=size)
            return rated.replace(advantages=side, reference_point=point), memory, metrics
        best, worst, counts = preferences.best_and_worst(rated.scores, valid, group_size=size)
        chosen = jax.tree.map(lambda leaf: leaf[best], rated)
        rejected = jax.tree.map(lambda leaf: leaf[worst], rated)
        metrics["pairs"] = Mean.of(counts.astype(jnp.float32), chosen.valid)
        return preferences.Pairs(chosen, rejected, counts), memory, metrics

    def learnt(self, batch: Any) -> Rollout:
        return batch.both if isinstance(batch, preferences.Pairs) else batch

    def objective(self, found: Found, batch: Any, mask: Mask) -> tuple[Mean, Metrics]:
        """Returns the loss of `preferences` that the settings name."""
        settings, reference = self.settings, self.learnt(batch).reference_log_probs
        ratios = log_ratios(found.log_probs, reference, mask).sum(axis=1)
        if settings.loss == "kto":
            side, point = batch.advantages, batch.reference_point
            loss = preferences.kto_loss(ratios, side, point, beta=settings.beta)
            margin, counts = side * (ratios - point), side != 0.0
        else:
            (chosen, rejected), counts = jnp.split(ratios, 2), batch.counts
            objective = preferences.ipo_loss if settings.loss == "ipo" else preferences.dpo_loss
            loss = objective(chosen, rejected, counts, beta=settings.beta)
            margin = chosen - rejected
        margin = jax.lax.stop_gradient(margin)
        right = (margin > 0.0).astype(jnp.float32)
        return loss, {"policy_loss": loss, "margin": Mean.of(margin, counts), "accuracy": Mean.of(right, counts)}


ALGORITHMS: dict[type[PolicyTaskSettings], type[Policy]] = {
    PpoTaskSettings: Ppo,
    GrpoTaskSettings: Grpo,
    PreferenceTaskSettings: Preference,
}
