"""The policy that EmpRL trains: how it answers, how its answers are rated, what is common to PPO and GRPO."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Mean, Metrics, Params
from empax.losses.cross_entropy import token_log_probs
from empax.models.heads import ClassificationHead
from empax.models.layers import apply
from empax.parts.generator.contrast import Read
from empax.parts.generator.task import Generator
from empax.systems.emprl import ppo
from empax.systems.emprl.advantages import ScoreStatistics, mask_first_token, response_mask
from empax.systems.emprl.kl import KlController, kl_penalty, sequence_kl
from empax.systems.emprl.rewards import Reward
from empax.systems.emprl.rollouts import PolicyBatch, Rollout, repeat_rows
from empax.systems.emprl.settings import PpoTaskSettings
from empax.training.accumulation import TrainingError

log = logging.getLogger("empax")


LEAST = {"distinct_responses": 0.2, "entropy": 0.1, "response_tokens": 3.0}
"""Below any of them a policy has collapsed, or is about to: a warning, since only its user can tell."""


@flax.struct.dataclass
class Memory:
    """What goes from rollout to rollout."""

    kl: KlController
    statistics: ScoreStatistics
    rollouts: Any  # Int[Array, ""], batches so far


@dataclasses.dataclass(frozen=True)
class Policy:
    """What PPO and GRPO share: a `ReinforcedTask` but for its credit and its loss.

    Parameters are {"model"}, with PPO also {"value"}. `frozen` has "reference", {"model"} that training began with,
    and "reward", the parameters of `reward`.

    Attributes:
      generator: the model and how it draws responses.
      reward: rates them.
      settings: of the stage.
    """

    generator: Generator
    reward: Reward
    settings: Any

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second = jax.random.split(rng)
        params = {"model": self.generator.init(first, _inputs(batch))["model"]}
        if self.has_values:
            width = self.generator.model.config.d_model
            if self.settings.value_sees_levels:
                width += int(np.prod(_contexts(batch).wanted.shape[1:]))
            params["value"] = value_head(self.settings).init(second, jnp.zeros((1, width)))["params"]
        return params

    has_values: ClassVar[bool] = False
    whole: ClassVar[str] = "^value/"

    def learns_from(self, name: str) -> int:
        del name
        return 0

    @property
    def rates_on_host(self) -> bool:
        return self.reward.on_host

    def init_memory(self) -> Memory:
        kl = self.settings.kl
        target = kl.target if kl.controller == "adaptive" else None
        controller = KlController(jnp.asarray(kl.coefficient, jnp.float32), target, kl.horizon)
        return Memory(controller, ScoreStatistics.empty(), jnp.zeros((), jnp.int32))

    def rollout(self, params: Params, frozen: Params, batch: PolicyBatch, rng: jax.Array) -> Rollout:
        """Draws responses; their log-probabilities come from the very computation that the update repeats."""
        generator, inputs = self.generator, batch.inputs
        drawn = generator.decoder(generator.model, params["model"], inputs.source, inputs.source_mask, rng).tokens
        batch = repeat_rows(batch, drawn.shape[1])
        tokens = drawn.reshape(-1, drawn.shape[2])
        mask = response_mask(tokens, batch.valid, eos_id=generator.decoder.eos_id)
        log_probs, values, _ = self.read(params, batch, tokens, self.encoded(params, batch))
        old = frozen["reference"]
        reference, _, _ = self.read(old, batch, tokens, self.encoded(old, batch))
        return Rollout(batch, tokens, mask, log_probs, reference, values=values)

    def encoded(self, params: Params, batch: PolicyBatch) -> Read:
        """What the model makes of its contexts, without dropout."""
        return self.generator.encode(params, _inputs(batch), None)

    def read(
        self,
        params: Params,
        batch: PolicyBatch,
        tokens: Int[Array, "B T"],
        encoded: Read,
        frozen_trunk: Float[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"] | None, Float[Array, "B T V"]]:
        """Teacher-forced, without dropout: log-probabilities of `tokens`, the value before each, and all logits.

        `frozen_trunk` = 1 lets no gradient of the values into the model, 0 lets all of it.
        """
        model, own = self.generator.model, params["model"]
        hidden = apply(model, own, tokens, encoded.states, encoded.mask, method="decode_hidden", rng=None)
        logits: Any = model.apply({"params": own}, hidden, method="logits_from")
        log_probs = token_log_probs(logits, tokens).astype(jnp.float32)
        if "value" not in params:
            return log_probs, None, logits
        seen = hidden.astype(jnp.float32)
        if frozen_trunk is not None:
            seen = frozen_trunk * jax.lax.stop_gradient(seen) + (1.0 - frozen_trunk) * seen
        if self.settings.value_sees_levels:
            levels = batch.wanted.reshape(len(tokens), 1, -1)
            # About as long a vector as the states are: a small one would take ten times the rollouts to be noticed.
            levels = levels * (seen.shape[-1] / batch.wanted.shape[1]) ** 0.5
            seen = jnp.concatenate([seen, jnp.broadcast_to(levels, (*tokens.shape, levels.shape[-1]))], axis=2)
        flat = seen.reshape(-1, seen.shape[-1])
        values = apply(value_head(self.settings), params["value"], flat, rng=None).reshape(tokens.shape)
        return log_probs, values.astype(jnp.float32), logits

    def rate(self, frozen: Params, batch: Any) -> Rollout:
        parts = self.reward.rate_parts(frozen["reward"], batch)
        return batch.replace(parts=parts, scores=self.reward.total(parts))

    def counted(self, rollout: Rollout) -> Bool[Array, "B T"]:
        """The tokens that are learnt from."""
        return mask_first_token(rollout.mask) if self.settings.mask_first_token else rollout.mask

    def scored(self, rollout: Any, memory: Memory) -> tuple[Float[Array, " B"], ScoreStatistics]:
        """The scores that advantages are made of, and the statistics with them."""
        scores = rollout.scores.astype(jnp.float32)
        statistics = memory.statistics.update(scores, rollout.mask.any(axis=1))
        return (statistics.normalise(scores) if self.settings.normalize_scores else scores), statistics

    def token_kl(self, rollout: Any) -> Float[Array, "B T"]:
        """To the reference, in nats, by the estimator of the settings."""
        given = rollout.log_probs, rollout.reference_log_probs, self.counted(rollout)
        return kl_penalty(*given, estimator=self.settings.kl.estimator)

    @property
    def bounds(self) -> dict[str, Any]:
        """Of ratios, as the losses take them."""
        return {name: getattr(self.settings, name) for name in ("clip", "epsilon_high", "delta")}

    def rated_parts(self, rollout: Any) -> dict[str, Float[Array, " B"]]:
        """What each part of the reward says, by its name."""
        names = self.reward.names
        return {} if rollout.parts is None else {name: rollout.parts[:, i] for i, name in enumerate(names)}

    def remembered(self, rollout: Any, memory: Memory, statistics: ScoreStatistics) -> tuple[Rollout, Memory, Metrics]:
        """The rollout with its coefficient, the memory after it, and what to log of it."""
        counted, valid = self.counted(rollout), rollout.mask.any(axis=1)
        kl = sequence_kl(self.token_kl(rollout), counted)
        coefficient = memory.kl.coefficient
        rows = jnp.full(rollout.tokens.shape[:1], 1.0)
        after = Memory(memory.kl.update(kl), statistics, memory.rollouts + 1)
        ended = jnp.any(rollout.mask & (rollout.tokens == self.generator.decoder.eos_id), axis=1)
        metrics = {
            "reward": Mean.of(rollout.scores, valid),
            **{f"reward_{name}": Mean.of(part, valid) for name, part in self.rated_parts(rollout).items()},
            "kl": kl,  # to the reference, nats per response: what the penalty is made of and steers by
            "kl_coefficient": once(coefficient),
            "response_tokens": ppo.mean_length(rollout.mask),
            "distinct_responses": ppo.distinct_share(rollout.tokens, rollout.mask),
            "ended": Mean.of(ended.astype(jnp.float32), valid),
        }
        return rollout.replace(kl_coefficient=coefficient * rows, parts=None), after, metrics

    def with_entropy(
        self, loss: Mean, logits: Float[Array, "B T V"], mask: Bool[Array, "B T"], factor: Float[Array, ""]
    ) -> Mean:
        """The loss less the bonus for entropy; without a weight nothing is differentiated for it."""
        settings = self.settings
        if not settings.entropy_weight:
            return loss
        bonus = ppo.entropy(logits, mask, reduction=settings.reduction)
        return ppo.weighted_sum((1.0, loss), (-settings.entropy_weight * factor, bonus))

    def with_likelihood(
        self, loss: Mean, params: Params, rollout: Rollout, encoded: Read, factor: Float[Array, ""]
    ) -> tuple[Mean, Metrics]:
        r"""The loss and, times its weight, the mean negative log-likelihood of a gold token; and the latter, to log.

        .. math:: L = L_{policy} + w \frac{\sum_n e^{f m_n} \, NLL_n}{\sum_n e^{f m_n} \, T_n}

        Source: Ouyang et al. 2022, Eq. 2 (w); Peng et al. 2019, Eq. 9 (f), with the merit m in place of the advantage.
        """
        weight = self.settings.likelihood_weight
        if not weight:
            return loss, {}
        nll, metrics = self.on_gold(params, rollout.batch, encoded, focus=self.settings.likelihood_focus)
        return ppo.weighted_sum((1.0, loss), (weight * factor, Mean(nll.value() * loss.weight, loss.weight))), metrics

    def on_gold(self, params: Params, batch: PolicyBatch, encoded: Read, *, focus: float = 0.0) -> tuple[Mean, Metrics]:
        """The mean negative log-likelihood of a gold token, weighted by the merit of its response; and without weights.

        `focus` is PolicyTaskSettings.likelihood_focus.
        """
        found = self.generator.nll(params, _inputs(batch), encoded)
        nll, tokens = (jnp.where(batch.valid, found[name], 0.0) for name in ("nll", "num_tokens"))
        weights = jnp.exp(focus * batch.merit)
        weighted = Mean((weights * nll).sum(), (weights * tokens).sum())
        return weighted, {"nll": Mean(nll.sum(), tokens.sum())}

    def guarded(self, log_probs: Float[Array, "B T"], rollout: Rollout, mask: Bool[Array, "B T"]) -> dict[str, Mean]:
        """Means over tokens of what must be 0 before anything is learnt."""
        ratio = jnp.abs(jnp.expm1(jnp.where(mask, log_probs - rollout.log_probs, 0.0)))
        moved = jnp.abs(kl_penalty(log_probs, rollout.reference_log_probs, mask))
        return {"ratio_error": Mean.of(ratio, mask), "reference_error": Mean.of(moved, mask)}

    def check_start(self, metrics: Mapping[str, float], *, step: int) -> None:
        limit = self.settings.guard_tolerance
        found = {"ratio_error": metrics["ratio_error"]}
        if step == 0:
            found["reference_error"] = metrics["reference_error"]
        causes = {
            "ratio_error": "the update computes other log-probabilities than the rollout did: dropout, another dtype, "
            "or another mask",
            "reference_error": "the reference is not the model that training begins with: look at start_from",
        }
        for name, value in found.items():
            if not value <= limit:  # NaN is not
                after = f" of this process (step {step})" if step else ""
                raise TrainingError(
                    f"before the first update{after} {name} = {value:.3g} must be at most guard_tolerance = {limit:g}: "
                    f"{causes[name]}. In bfloat16 the two computations round differently: set dtype = 'float32', or "
                    "raise guard_tolerance if that is all."
                )

    def check_progress(self, metrics: Mapping[str, float], *, step: int) -> None:
        signs = [(name, metrics[name], least) for name, least in LEAST.items() if metrics[name] < least]
        if signs:
            low = ", ".join(f"{name} = {value:.3g} (below {least:g})" for name, value, least in signs)
            advice = "the policy may have collapsed at step %d: %s; raise kl.coefficient or lower the learning rate."
            log.warning(advice, step, low)


def value_head(settings: PpoTaskSettings) -> ClassificationHead:
    """Linear, or with a hidden layer of tanh."""
    return ClassificationHead(num_classes=1, hidden=settings.value_hidden or None)


def _inputs(batch: Any) -> Any:
    """What the generator reads, of a batch in whatever state."""
    batch = _contexts(batch)
    return batch.inputs if isinstance(batch, PolicyBatch) else batch


def _contexts(batch: Any) -> Any:
    return batch.batch if isinstance(batch, Rollout) else batch


def once(value: Float[Array, ""]) -> Mean:
    return Mean(total=jnp.asarray(value, jnp.float32), weight=jnp.ones((), jnp.float32))
