"""One iteration of PPO on an encoder-decoder in eager PyTorch, in a typical form around `generate`.

The baseline of `benchmarks.ppo`. The arithmetic is that of TRL 0.9, in its fastest form here: fused cross-entropy for
the log-probabilities, fused AdamW, no gradients where they are not needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.sides import autocast
from empax.systems.emprl.ppo import MAX_RATIO
from empax.systems.emprl.settings import PpoTaskSettings
from empax.training.optimizer import OptimizerSettings

Reward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens [B, T], mask [B, T]) -> [B]."""


class Answers(NamedTuple):
    """Sampled responses and their statistics; all but the source are [B, T]."""

    source: torch.Tensor  # [B, S]
    source_mask: torch.Tensor  # [B, S]
    tokens: torch.Tensor
    mask: torch.Tensor  # True up to and including the end-of-sequence token
    log_probs: torch.Tensor
    reference_log_probs: torch.Tensor
    values: torch.Tensor


class EagerPpo:
    """Policy, value head, frozen reference and optimizer, and the state kept between rollouts.

    Attributes:
      model: a Hugging Face encoder-decoder; it is trained in place.
      head: the value head, `Linear(d_model, 1)`.
      reward: function that scores the responses.
      settings: supports only the settings of EmpRL's runs: k1, adaptive or fixed coefficient, whitening, "tokens".
      epochs, minibatches: there are `epochs * minibatches` updates per rollout.
      dtype: type of the model's arithmetic, by autocast unless float32; the weights are float32.
    """

    def __init__(
        self,
        model: Any,
        head: torch.nn.Linear,
        reward: Reward,
        settings: PpoTaskSettings,
        optimizer: OptimizerSettings,
        *,
        epochs: int,
        minibatches: int,
        dtype: torch.dtype = torch.float32,
    ):
        self.model, self.head, self.reward, self.settings = model.eval(), head, reward, settings
        self.epochs, self.minibatches, self.clip_norm = epochs, minibatches, optimizer.clip_norm
        self.reference = copy.deepcopy(model).requires_grad_(False)
        self.trained = [*model.parameters(), *head.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.trained,
            lr=optimizer.learning_rate,
            betas=(optimizer.b1, optimizer.b2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.dtype = dtype
        self.beta = settings.kl.coefficient
        self.count, self.mean, self.m2 = 0.0, 0.0, 0.0  # running moments of the scores

    @torch.no_grad()
    def rollout(self, source: torch.Tensor, source_mask: torch.Tensor) -> Answers:
        """Samples responses; log-probabilities are those of the policy, without temperature and truncation."""
        how = self.settings.rollout
        with self._autocast():
            drawn = self.model.generate(
                input_ids=source,
                attention_mask=source_mask,
                do_sample=True,
                top_k=how.top_k,
                temperature=how.temperature,
                min_new_tokens=how.min_tokens,
                max_new_tokens=how.max_tokens,
            )
        tokens = drawn[:, 1:]  # without the start token
        ends = (tokens == self.model.config.eos_token_id).long()
        mask = ends.cumsum(dim=1) - ends == 0
        log_probs, hidden, _ = self.read(self.model, source, source_mask, tokens)
        reference, _, _ = self.read(self.reference, source, source_mask, tokens)
        return Answers(source, source_mask, tokens, mask, log_probs, reference, self.value(hidden))

    def read(
        self, model: Any, source: torch.Tensor, source_mask: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the log-probabilities of `tokens`, the decoder's last states and all logits, with teacher forcing."""
        with self._autocast():
            output = model(
                input_ids=source,
                attention_mask=source_mask,
                decoder_input_ids=model.prepare_decoder_input_ids_from_labels(tokens),
                output_hidden_states=True,
                use_cache=False,
            )
        logits = output.logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        return -losses.view(tokens.shape), output.decoder_hidden_states[-1].float(), logits

    def _autocast(self) -> torch.autocast:
        return autocast(self.dtype)

    def value(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).squeeze(-1)

    @torch.no_grad()
    def credit(self, answers: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns advantages and returns; updates the score statistics and the KL coefficient."""
        settings, mask = self.settings, answers.mask
        scores = self._normalised(self.reward(answers.tokens, mask))
        kl = (answers.log_probs - answers.reference_log_probs) * mask
        rewards = -self.beta * kl
        last = mask.sum(dim=1) - 1
        rewards[torch.arange(len(rewards)), last] += scores
        if settings.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        advantages = self._advantages(rewards, answers.values * mask)
        returns = advantages + answers.values
        advantages = whiten(advantages, mask)
        if settings.kl.controller == "adaptive":
            error = kl.sum(dim=1).mean().item() / settings.kl.target - 1.0
            self.beta *= 1.0 + min(max(error, -0.2), 0.2) * len(kl) / settings.kl.horizon
        return advantages, returns

    def _normalised(self, scores: torch.Tensor) -> torch.Tensor:
        """Normalises scores by the running mean and deviation, including these scores."""
        mean, m2, added = scores.mean().item(), scores.var(correction=0).item() * len(scores), len(scores)
        count, delta = self.count + added, mean - self.mean
        self.m2 += m2 + delta**2 * self.count * added / count
        self.mean += delta * added / count
        self.count = count
        deviation = (self.m2 / max(count - 1, 1)) ** 0.5
        return (scores - self.mean) / (deviation or 1.0) if self.settings.normalize_scores else scores

    def _advantages(self, rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns generalised advantage estimates; after a response's end, rewards and values are 0."""
        settings = self.settings
        found, following, later = [], torch.zeros(len(rewards)), torch.zeros(len(rewards))
        for t in reversed(range(rewards.shape[1])):
            delta = rewards[:, t] + settings.gamma * following - values[:, t]
            later = delta + settings.gamma * settings.lam * later
            following = values[:, t]
            found.append(later)
        return torch.stack(found[::-1], dim=1)

    def learn(self, answers: Answers, advantages: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
        """Makes all updates of one rollout; returns the means of the metrics."""
        logged: dict[str, float] = {}
        for _ in range(self.epochs):
            for rows in torch.randperm(len(answers.tokens)).chunk(self.minibatches):
                picked = Answers(*(field[rows] for field in answers))
                for name, value in self._update(picked, advantages[rows], returns[rows]).items():
                    logged[name] = logged.get(name, 0.0) + value / (self.epochs * self.minibatches)
        return logged

    def _update(self, old: Answers, advantages: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
        settings, mask = self.settings, old.mask
        log_probs, hidden, logits = self.read(self.model, old.source, old.source_mask, old.tokens)
        values = self.value(hidden)
        ratio = torch.exp(log_probs - old.log_probs)
        clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
        policy = masked_mean(torch.maximum(-advantages * ratio, -advantages * clipped), mask)
        error = torch.square(values - returns)
        if settings.value_clip is not None:
            near = torch.clamp(values, old.values - settings.value_clip, old.values + settings.value_clip)
            error = torch.maximum(error, torch.square(near - returns))
        value = 0.5 * masked_mean(error, mask)
        loss = policy + settings.value_weight * value
        with torch.no_grad():
            entropy = masked_mean(entropies(logits), mask)
            keep = masked_mean(ratio, mask) <= MAX_RATIO
        (loss if keep else loss * 0.0).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.clip_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        logged = {"policy_loss": policy, "value_loss": value, "entropy": entropy, "loss": loss, "grad_norm": norm}
        return {name: number.item() for name, number in logged.items()}


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum() / mask.sum()


def whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """Scales to variance 1 (unbiased), and shifts to mean 0 if `shift_mean`; 0 where masked."""
    mean = masked_mean(values, mask)
    variance = (torch.square(values - mean) * mask).sum() / (mask.sum() - 1)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean) * mask


def entropies(logits: torch.Tensor) -> torch.Tensor:
    """Returns the entropy of each position, in nats."""
    return torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
