"""ReflectDiffu with rewards for the second intent."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from empax.core import distributed
from empax.core.types import IS_POSITIVE, Mean, Metrics, Params
from empax.systems.reflectdiffu.examples import ReflectBatch
from empax.systems.reflectdiffu.replies import ReplyEmpathy
from empax.systems.reflectdiffu.tasks import ReflectDiffu
from empax.systems.reflectdiffu.thought import Thought
from empax.training.accumulation import TrainingError

log = logging.getLogger("empax")

_BASELINE_DECAY = 0.99
_MOST_RATIO_ERROR = 1e-3
_LEAST_SPREAD = 1e-6


@flax.struct.dataclass
class Baseline:
    """A running mean of rewards: its two sums."""

    total: Any  # Float[Array, ""]
    weight: Any  # Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class ReinforcedReflectDiffu(ReflectDiffu):
    """The same with rewards for the second intent: a `core.protocols.ReinforcedTask`.

    Attributes:
      empathy: what rewards replies where reward = "empathy"; None while nothing is trained.
    """

    empathy: ReplyEmpathy | None = None

    @property
    def rates_on_host(self) -> bool:
        return self.stage.reward == "empathy"

    def learns_from(self, name: str) -> int:
        del name
        return 0

    def init_memory(self) -> Baseline:
        return Baseline(jnp.zeros(()), jnp.zeros(()))

    def rollout(self, params: Params, frozen: Params, batch: ReflectBatch, rng: jax.Array) -> ReflectBatch:
        """The batch with a second intent drawn for each row, and with what the update need not compute again."""
        draw, choose = jax.random.split(rng)
        known: dict[str, Any] = {"noise": self.noise_of(batch, draw)}
        if self.annotator is not None:
            known["reasoning"], known["reasons"] = self.annotated(frozen, batch)
        batch = batch.replace(**known)  # type: ignore[attr-defined]
        thought = self.think(params, batch, noise=batch.noise)
        assert thought.policy is not None
        action = jax.random.categorical(choose, thought.policy)
        log_prob = jnp.take_along_axis(thought.policy, action[:, None], axis=1)[:, 0]
        batch = batch.replace(action=action, log_prob=log_prob)  # type: ignore[attr-defined]
        if self.stage.reward == "empathy":
            reply = self.generate(params, frozen, batch, rng).tokens[:, 0]
            return batch.replace(reply=reply)  # type: ignore[attr-defined]
        return batch.replace(reward=self.reward(params, batch, thought, action))  # type: ignore[attr-defined]

    def reward(
        self, params: Params, batch: ReflectBatch, thought: Thought, action: Int[Array, " B"]
    ) -> Float[Array, " B"]:
        r"""How well the chosen intent suits the emotion.

        .. math:: R = \mathrm{sigmoid}(E_s[e] \cdot I[a])

        with the embedding of the predicted emotion by the expert of its polarity, and that of the chosen intent.
        Source: ReflectDiffu, Eq. 9. With reward = "label", 1 for the listener's own intent and 0 for others; ours.
        """
        assert thought.actions is not None
        intent = jnp.take_along_axis(thought.actions, action[:, None], axis=1)[:, 0]
        if self.stage.reward == "label":
            return (intent == batch.intent).astype(jnp.float32)
        emotion = thought.emotion.argmax(axis=1)
        side = jnp.where(jnp.asarray(IS_POSITIVE)[emotion], 0, 1)
        felt = thought.emotion_embedding[side, emotion]
        return jax.nn.sigmoid(jnp.sum(felt * params["intents"]["intent_embedding"][intent], axis=1))

    def rate(self, frozen: Params, batch: ReflectBatch) -> ReflectBatch:
        """The batch as it is, whose rewards come from the parameters that drew; or with those of its replies."""
        del frozen
        if self.stage.reward != "empathy":
            return batch
        assert self.empathy is not None
        rows, replies = (np.asarray(part) for part in distributed.whole((batch.row, batch.reply)))
        return batch.replace(reward=jnp.asarray(self.empathy(rows, replies)), reply=None)  # type: ignore[attr-defined]

    def credit(self, frozen: Params, batch: ReflectBatch, memory: Baseline) -> tuple[ReflectBatch, Baseline, Metrics]:
        """Advantages over the running mean of earlier rewards; over the batch's own mean in the first iteration."""
        del frozen
        assert batch.reward is not None
        counted = self.rewarded(batch)
        reward = Mean.of(batch.reward, counted)
        before = jnp.where(memory.weight > 0, memory.total / jnp.maximum(memory.weight, 1e-9), reward.value())
        keep, new = _BASELINE_DECAY, 1.0 - _BASELINE_DECAY
        after = Baseline(keep * memory.total + new * reward.value(), keep * memory.weight + new)
        positive = jnp.asarray(IS_POSITIVE)[jnp.maximum(batch.emotion, 0)] & (batch.emotion >= 0)
        spread = jnp.abs(batch.reward - reward.value())
        metrics = {
            "reward": reward,
            "reward_positive": Mean.of(batch.reward, counted & positive),
            "reward_negative": Mean.of(batch.reward, counted & ~positive),
            "reward_spread": Mean.of(spread, counted),
            "baseline": Mean(before, jnp.ones(())),
        }
        return batch.replace(advantage=batch.reward - before), after, metrics  # type: ignore[attr-defined]

    def check_start(self, metrics: Mapping[str, float], *, step: int) -> None:
        error = metrics["ratio_error"]
        if not error <= _MOST_RATIO_ERROR:  # NaN is not
            raise TrainingError(
                f"before the first update (step {step}) ratio_error = {error:.3g} must be at most "
                f"{_MOST_RATIO_ERROR:g}: the update reads a context otherwise than the rollout did. In bfloat16 the "
                "two round differently: set model.dtype = 'float32'."
            )

    def check_progress(self, metrics: Mapping[str, float], *, step: int) -> None:
        if metrics["reward_spread"] < _LEAST_SPREAD:
            log.warning(
                "step %d: every choice has the same reward (%.6f), from which no policy learns.",
                step,
                metrics["reward"],
            )
