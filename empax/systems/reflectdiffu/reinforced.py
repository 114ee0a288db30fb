"""ReflectDiffu with rewards for the second intent; one is EmpRL's, the empathy of the reply with that intent."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from empax.core import distributed
from empax.core.protocols import Tokenizer
from empax.core.types import IS_POSITIVE, Instance, Mean, Metrics, Params
from empax.parts.attributes.identifier import Identifiers, empathy_reward
from empax.parts.generator.task import Losses
from empax.systems.reflectdiffu.examples import ReflectBatch
from empax.systems.reflectdiffu.tasks import ReflectDiffu, Thought, entropy
from empax.training.accumulation import TrainingError

log = logging.getLogger("empax")

_BASELINE_DECAY = 0.99
_MOST_RATIO_ERROR = 1e-3
_LEAST_SPREAD = 1e-6


@dataclasses.dataclass(frozen=True)
class ReplyEmpathy:
    """The likelihood that a reply has the `levels` of the gold response by the `judges`, in (0, 1]: `empathy_reward`.

    Batches number the rows of `instances`, and `words` are those of their slots.
    """

    judges: Identifiers
    tokenizer: Tokenizer
    instances: Sequence[Instance]
    words: Sequence[Sequence[str]]
    levels: Int[np.ndarray, "N M"]

    def __call__(self, rows: Int[np.ndarray, " B"], replies: Int[np.ndarray, "B T"]) -> Float[np.ndarray, " B"]:
        """Returns the rewards of replies to the instances `rows`; 0 for row -1."""
        there, real = rows >= 0, [int(i) for i in rows if i >= 0]
        ids = replies[there].tolist()
        texts = [self.tokenizer.decode(reply, self.words[i]).strip() for i, reply in zip(real, ids, strict=True)]
        said = self.judges([self.instances[i].context for i in real], texts, progress=False)
        rewards = np.zeros(len(rows), np.float32)
        rewards[there] = empathy_reward(said, self.levels[real])
        return rewards


@dataclasses.dataclass(frozen=True)
class ReinforcedReflectDiffu(ReflectDiffu):
    """`ReflectDiffu` with rewards for the second intent: a `core.protocols.ReinforcedTask`.

    Attributes:
      empathy: the reward of replies if reward = "empathy"; None outside of training.
    """

    empathy: ReplyEmpathy | None = None

    @property
    def rates_on_host(self) -> bool:
        return self.stage.reward == "empathy"

    def learns_from(self, name: str) -> int:
        del name
        return 0

    def init_memory(self) -> Mean:
        """Returns the running mean of rewards."""
        return Mean.zero()

    def rollout(self, params: Params, frozen: Params, batch: ReflectBatch, rng: jax.Array) -> ReflectBatch:
        """Samples a second intent for each row, and adds results that the update need not recompute."""
        draw, choose = jax.random.split(rng)
        known: dict[str, Any] = {"noise": self.noise_of(batch, draw)}
        if self.annotator is not None:
            known["reasoning"], known["reasons"] = self.annotated(frozen, batch)
        batch = batch.replace(**known)  # type: ignore[attr-defined]
        thought = self.encode(params, batch, None)
        assert thought.policy is not None
        action = jax.random.categorical(choose, thought.policy)
        log_prob = jnp.take_along_axis(thought.policy, action[:, None], axis=1)[:, 0]
        batch = batch.replace(actions=thought.actions, action=action, log_prob=log_prob)  # type: ignore[attr-defined]
        if self.stage.reward == "empathy":
            reply = self.generate(params, frozen, batch, jax.random.fold_in(rng, 2)).tokens[:, 0]
            return batch.replace(reply=reply)  # type: ignore[attr-defined]
        return batch.replace(reward=self.reward(params, batch, thought, action))  # type: ignore[attr-defined]

    def reward(
        self, params: Params, batch: ReflectBatch, thought: Thought, action: Int[Array, " B"]
    ) -> Float[Array, " B"]:
        r"""Returns 1 for the listener's own intent and 0 for others; with reward = "alignment", the paper's reward.

        .. math:: R = \mathrm{sigmoid}(E_s[e] \cdot I[a])

        with the predicted emotion's embedding by the expert of its polarity, and the chosen intent's. Source:
        ReflectDiffu, Eq. 9. Departure: no loss aligns these embeddings, so that by default labels reward.
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
        """Adds the rewards of replies; other rewards are already set, by the parameters that sampled."""
        del frozen
        if self.stage.reward != "empathy":
            return batch
        assert self.empathy is not None
        rows, replies = (np.asarray(part) for part in distributed.whole((batch.row, batch.reply)))
        return batch.replace(reward=jnp.asarray(self.empathy(rows, replies)), reply=None)  # type: ignore[attr-defined]

    def intent_parts(self, batch: ReflectBatch, thought: Thought, weights: Float[Array, " B"]) -> Losses:
        """Adds the loss of the policy and the bonus for its entropy, if the batch has sampled choices."""
        parts, metrics = super().intent_parts(batch, thought, weights)
        if thought.policy is None or batch.action is None or batch.log_prob is None:
            return parts, metrics
        log_prob = jnp.take_along_axis(thought.policy, batch.action[:, None], axis=1)[:, 0]
        counted = self.rewarded(batch)
        parts.append((self.stage.policy_weight, policy_loss(log_prob, batch, counted, weights)))
        bonus = Mean.of(entropy(thought.policy), counted, weights)
        parts.append((-self.stage.policy_weight * self.stage.entropy_weight, bonus))
        metrics["ratio_error"] = Mean.of(jnp.abs(jnp.exp(log_prob - batch.log_prob) - 1.0), batch.valid)
        return parts, metrics

    def rewarded(self, batch: ReflectBatch) -> Array:
        """Returns the mask of rows whose choice has a reward."""
        return batch.valid & (batch.intent >= 0) if self.stage.reward == "label" else batch.valid

    def credit(self, frozen: Params, batch: ReflectBatch, memory: Mean) -> tuple[ReflectBatch, Mean, Metrics]:
        """Computes advantages over the running mean of earlier rewards; at first, over the batch's mean."""
        del frozen
        assert batch.reward is not None
        counted = self.rewarded(batch)
        reward = Mean.of(batch.reward, counted)
        before = jnp.where(memory.weight > 0, memory.value(), reward.value())
        keep, new = _BASELINE_DECAY, jnp.where(reward.weight > 0, 1.0 - _BASELINE_DECAY, 0.0)
        after = Mean(keep * memory.total + new * reward.value(), keep * memory.weight + new)
        positive = jnp.asarray(IS_POSITIVE)[jnp.maximum(batch.emotion, 0)] & (batch.emotion >= 0)
        metrics = {
            "reward": reward,
            "reward_positive": Mean.of(batch.reward, counted & positive),
            "reward_negative": Mean.of(batch.reward, counted & ~positive),
            "reward_spread": Mean.of(jnp.abs(batch.reward - reward.value()), counted),
            "baseline": Mean(before, jnp.ones(())),
        }
        return batch.replace(advantage=batch.reward - before), after, metrics  # type: ignore[attr-defined]

    def check_start(self, metrics: Mapping[str, float], *, step: int) -> None:
        error = metrics["ratio_error"]
        if not error <= _MOST_RATIO_ERROR:  # NaN is not
            raise TrainingError(
                f"before the first update (step {step}) ratio_error = {error:.3g} must be at most "
                f"{_MOST_RATIO_ERROR:g}: the update reads a context differently from the rollout. In bfloat16 the two "
                "round differently: set model.dtype = 'float32'."
            )

    def check_progress(self, metrics: Mapping[str, float], *, step: int) -> None:
        if metrics["reward_spread"] < _LEAST_SPREAD:
            same = "step %d: every choice has the same reward (%.6f), so the policy learns nothing."
            log.warning(same, step, metrics["reward"])


def policy_loss(log_prob: Float[Array, " B"], batch: Any, counted: Array, weights: Float[Array, " B"]) -> Mean:
    r"""Returns the loss of REINFORCE with a baseline, by the ratio to the sampling policy.

    .. math:: L = -\frac{\pi(a)}{\mu(a)} (R - b)

    Source: Williams 1992; the ratio: ReflectDiffu, Sec. 3.3.1, which does not define mu. R - b has no gradient.
    """
    ratio = jnp.exp(log_prob - jax.lax.stop_gradient(batch.log_prob))
    return Mean.of(-ratio * jax.lax.stop_gradient(batch.advantage), counted, weights)
