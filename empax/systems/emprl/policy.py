"""EmpRL's policy: its rollouts, their rewards, and the code shared by all algorithms."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from empax.core.types import Mean, Metrics, Params
from empax.losses.cross_entropy import token_log_probs
from empax.models.heads import ClassificationHead
from empax.models.layers import apply
from empax.parts.generator.contrast import Read
from empax.parts.generator.task import Generator
from empax.systems.emprl import ppo
from empax.systems.emprl.advantages import mask_first_token, response_mask
from empax.systems.emprl.kl import Mask, Tokens, kl_penalty, sequence_kl
from empax.systems.emprl.rewards import Reward
from empax.systems.emprl.rollouts import PolicyBatch, Rollout, repeat_rows
from empax.systems.emprl.settings import PpoTaskSettings
from empax.training.accumulation import TrainingError

log = logging.getLogger("empax")

LEAST = {"distinct_responses": 0.2, "entropy": 0.1, "response_tokens": 3.0}
"""Below any of these a policy may have collapsed; `response_tokens` must also be above `min_tokens` and an end."""


class Found(NamedTuple):
    """What a policy computes of responses."""

    log_probs: Tokens
    values: Tokens | None  # before each token
    logits: Float[Array, "B T V"]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of a `ReinforcedTask`, without credit assignment and objective.

    Parameters are {"model"}, with PPO also {"value"}. `frozen` has "reference", the initial {"model"} of training, and
    "reward", the parameters of `reward`.
    """

    generator: Generator  # the model and its sampling of responses
    reward: Reward
    settings: Any

    tie: ClassVar[str] = "kl.coefficient"
    """The setting that ties the policy to its initial parameters."""

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second = jax.random.split(rng)
        contexts: PolicyBatch = getattr(batch, "batch", batch)  # of a rollout, or themselves
        params = {"model": self.generator.init(first, contexts.inputs)["model"]}
        if self.has_values:
            width = self.generator.model.config.d_model
            if self.settings.value_sees_levels:
                width += int(np.prod(contexts.wanted.shape[1:]))
            params["value"] = value_head(self.settings).init(second, jnp.zeros((1, width)))["params"]
        return params

    has_values: ClassVar[bool] = False
    whole: ClassVar[str] = "^value/"

    def learns_from(self, name: str) -> int:
        return 0

    @property
    def rates_on_host(self) -> bool:
        return self.reward.on_host

    def init_memory(self) -> Any:
        return {}

    def rollout(self, params: Params, frozen: Params, batch: PolicyBatch, rng: jax.Array) -> Rollout:
        """Samples responses, if none are given; `loss` computes their log-probabilities in the same way."""
        generator, inputs, drawn = self.generator, batch.inputs, batch.answers
        if drawn is None:
            drawn = generator.decoder(generator.model, params["model"], inputs.source, inputs.source_mask, rng).tokens
        batch = repeat_rows(dataclasses.replace(batch, answers=None), drawn.shape[1])
        tokens = drawn.reshape(-1, drawn.shape[2])
        mask = response_mask(tokens, batch.valid, eos_id=generator.decoder.eos_id)
        found, old = self.read(params, batch, tokens, self.encoded(params, batch)), frozen["reference"]
        reference = self.read(old, batch, tokens, self.encoded(old, batch)).log_probs
        return Rollout(batch, tokens, mask, found.log_probs, reference, values=found.values)

    def encoded(self, params: Params, batch: PolicyBatch) -> Read:
        """Encodes the contexts, without dropout."""
        return self.generator.encode(params, batch.inputs, None)

    def read(
        self,
        params: Params,
        batch: PolicyBatch,
        tokens: Int[Array, "B T"],
        encoded: Read,
    ) -> Found:
        """Reads the responses `tokens`, teacher-forced, without dropout."""
        model, own = self.generator.model, params["model"]
        hidden = apply(model, own, tokens, encoded.states, encoded.mask, method="decode_hidden", rng=None)
        logits: Any = model.apply({"params": own}, hidden, method="logits_from")
        log_probs = token_log_probs(logits, tokens).astype(jnp.float32)
        if "value" not in params:
            return Found(log_probs, None, logits)
        seen = hidden.astype(jnp.float32)
        if self.settings.value_sees_levels:
            levels = batch.wanted.reshape(len(tokens), 1, -1)
            # Scaled to about the norm of the states: a small vector needs ten times the rollouts to have an effect.
            levels = levels * (seen.shape[-1] / batch.wanted.shape[1]) ** 0.5
            seen = jnp.concatenate([seen, jnp.broadcast_to(levels, (*tokens.shape, levels.shape[-1]))], axis=2)
        flat = seen.reshape(-1, seen.shape[-1])
        values = apply(value_head(self.settings), params["value"], flat, rng=None).reshape(tokens.shape)
        return Found(log_probs, values.astype(jnp.float32), logits)

    def rate(self, frozen: Params, batch: Any) -> Rollout:
        parts = self.reward.rate(frozen["reward"], batch)
        return batch.replace(parts=parts, scores=self.reward.total(parts))

    def counted(self, rollout: Rollout) -> Mask:
        """Returns the mask of the tokens that are trained on."""
        return mask_first_token(rollout.mask) if self.settings.mask_first_token else rollout.mask

    def token_kl(self, rollout: Any) -> Tokens:
        """Returns the KL to the reference, in nats per token."""
        return kl_penalty(rollout.log_probs, rollout.reference_log_probs, self.counted(rollout))

    def watched(self, rollout: Any) -> Metrics:
        """Returns the metrics of rated responses."""
        valid = rollout.mask.any(axis=1)
        ended = jnp.any(rollout.mask & (rollout.tokens == self.generator.decoder.eos_id), axis=1)
        rated = () if rollout.parts is None else zip(self.reward.parts, rollout.parts.T, strict=True)
        return {
            "reward": Mean.of(rollout.scores, valid),
            **{f"reward_{part.name}": Mean.of(scores, valid) for part, scores in rated},
            # To the reference, in nats per response: the penalty and its controller use it.
            "kl": sequence_kl(self.token_kl(rollout), self.counted(rollout)),
            "response_tokens": Mean.of(rollout.mask.sum(axis=1).astype(jnp.float32), valid),
            "distinct_responses": ppo.distinct_share(rollout.tokens, rollout.mask),
            "ended": Mean.of(ended.astype(jnp.float32), valid),
        }

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        """Returns the objective on credited rollouts; on contexts alone, the likelihood of their gold responses."""
        del rng, train  # no dropout: it would make the ratio noise
        if isinstance(batch, PolicyBatch):
            return self.on_gold(params, batch, self.encoded(params, batch))
        rollout = self.learnt(batch)
        mask, encoded = self.counted(rollout), self.encoded(params, rollout.batch)
        found = self.read(params, rollout.batch, rollout.tokens, encoded)
        loss, metrics = self.objective(found, batch, mask)
        loss, gold = self.with_likelihood(loss, params, rollout, encoded)
        return loss, {
            **metrics,
            **gold,
            "entropy": ppo.entropy(jax.lax.stop_gradient(found.logits), mask),
            **self.guarded(found.log_probs, rollout, mask),
        }

    def learnt(self, batch: Any) -> Rollout:
        """Returns the responses in the result of `credit`."""
        return batch

    def objective(self, found: Found, batch: Any, mask: Mask) -> tuple[Mean, Metrics]:
        """Returns the loss, of weight 0 if the responses do not count, and its metrics.

        `found` is the result of `read` on the responses, `batch` that of `credit`; the mask is `counted`.
        """
        raise NotImplementedError

    def with_likelihood(self, loss: Mean, params: Params, rollout: Rollout, encoded: Read) -> tuple[Mean, Metrics]:
        r"""Adds the weighted mean negative log-likelihood of a gold token to the loss; returns it as a metric too.

        .. math:: L = L_{policy} + w \frac{\sum_n e^{f m_n} \, NLL_n}{\sum_n e^{f m_n} \, T_n}

        Source: Ouyang et al. 2022, Eq. 2 (w); Peng et al. 2019, Eq. 9 (f), with the merit m in place of the advantage.
        Departure: with `accumulate`, the second mean is taken per part, weighted by the part's sampled tokens.
        """
        weight = self.settings.likelihood_weight
        if not weight:
            return loss, {}
        nll, metrics = self.on_gold(params, rollout.batch, encoded, focus=self.settings.likelihood_focus)
        return ppo.weighted_sum((1.0, loss), (weight, Mean(nll.value() * loss.weight, loss.weight))), metrics

    def on_gold(self, params: Params, batch: PolicyBatch, encoded: Read, *, focus: float = 0.0) -> tuple[Mean, Metrics]:
        """Returns the mean negative log-likelihood of a gold token, weighted by its response's merit and unweighted.

        `focus` is PolicyTaskSettings.likelihood_focus.
        """
        found = self.generator.nll(params, batch.inputs, encoded)
        nll, tokens = (jnp.where(batch.valid, found[name], 0.0) for name in ("nll", "num_tokens"))
        weights = jnp.exp(focus * batch.merit)
        weighted = Mean((weights * nll).sum(), (weights * tokens).sum())
        return weighted, {"nll": Mean(nll.sum(), tokens.sum())}

    def guarded(self, log_probs: Tokens, rollout: Rollout, mask: Mask) -> dict[str, Mean]:
        """Returns means over tokens of the deviations that must be 0 before the first update."""
        ratio = jnp.abs(jnp.expm1(jnp.where(mask, log_probs - rollout.log_probs, 0.0)))
        moved = jnp.abs(kl_penalty(log_probs, rollout.reference_log_probs, mask))
        return {"ratio_error": Mean.of(ratio, mask), "reference_error": Mean.of(moved, mask)}

    def check_start(self, metrics: Mapping[str, float], *, step: int) -> None:
        limit, after = self.settings.guard_tolerance, f" of this process (step {step})" if step else ""
        causes = {
            "ratio_error": "the loss computes other log-probabilities than the rollout: dropout, another dtype, or "
            "another mask"
        }
        if step == 0:
            causes["reference_error"] = "the reference is not the model that training begins with: check start_from"
        for name, cause in causes.items():
            if not (value := metrics[name]) <= limit:  # NaN is not
                raise TrainingError(
                    f"before the first update{after} {name} = {value:.3g} must be at most guard_tolerance = {limit:g}: "
                    f"{cause}. In bfloat16 the two computations round differently: set dtype = 'float32', or raise "
                    "guard_tolerance if that is all."
                )

    def check_progress(self, metrics: Mapping[str, float], *, step: int) -> None:
        tokens = max(LEAST["response_tokens"], self.settings.rollout.min_tokens + 2.0)
        least_of = {**LEAST, "response_tokens": tokens}
        signs = [(name, metrics[name], least) for name, least in least_of.items() if metrics[name] < least]
        if signs:
            low = ", ".join(f"{name} = {value:.3g} (below {least:g})" for name, value, least in signs)
            advice = "the policy may have collapsed at step %d: %s; raise %s or lower the learning rate."
            log.warning(advice, step, low, self.tie)


def value_head(settings: PpoTaskSettings) -> ClassificationHead:
    """Returns a value head that is linear, or has a hidden layer of tanh."""
    return ClassificationHead(num_classes=1, hidden=settings.value_hidden or None)


def once(value: Float[Array, ""]) -> Mean:
    return Mean(total=jnp.asarray(value, jnp.float32), weight=jnp.ones((), jnp.float32))
