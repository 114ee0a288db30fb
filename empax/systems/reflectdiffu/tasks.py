"""Task "generator": contagion, intents thought about twice, mimicry by diffusion, and the reply, trained jointly.

Source: ReflectDiffu (Yuan et al. 2025), Sec. 3. PAPERS.md lists every equation and every departure.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from empax.core.types import IS_POSITIVE, Mean, Metrics, Params
from empax.losses.contrastive import supervised_contrastive
from empax.losses.cross_entropy import cross_entropy
from empax.models.heads import EMOTION_HEAD, masked_mean
from empax.models.latent import gaussian_kl
from empax.models.layers import apply
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.task import Keys, Losses, ResponseTask, combine, emotion_loss, target_weights
from empax.systems.reflectdiffu.contagion_encoder import Contagion, EmotionExperts
from empax.systems.reflectdiffu.diffusion import ddim, ddpm, noise_loss, q_sample
from empax.systems.reflectdiffu.examples import ReflectBatch
from empax.systems.reflectdiffu.intent_twice import IntentTwice, Mimicry
from empax.systems.reflectdiffu.intents import intent_losses
from empax.systems.reflectdiffu.labels import INTENTS
from empax.systems.reflectdiffu.pointer_generator import PointerGenerator
from empax.systems.reflectdiffu.reason_annotator import ReasonAnnotator
from empax.systems.reflectdiffu.settings import GeneratorTaskSettings
from empax.systems.reflectdiffu.thought import (
    Considered,
    Thought,
    log_shares,
    policy_loss,
    shown_tags,
    standardized,
    tags_of_words,
)

log = logging.getLogger("empax")


@dataclasses.dataclass(frozen=True)
class ReflectDiffu(ResponseTask):
    """Context in, response out, by way of reasons, emotion and intents; without rewards.

    The annotator's parameters, where there is one, are "reasons": frozen, and but for `init`, `loss` and `rollout`
    among the others.

    Attributes:
      model: plain, or with a pointer.
      stage: which parts there are.
      annotator: None = w/o ERA.
      references: [emotions][n], numbers of the reference intents.
    """

    model: EncoderDecoder | PointerGenerator
    stage: GeneratorTaskSettings
    annotator: ReasonAnnotator | None
    references: tuple[tuple[int, ...], ...]

    @property
    def splits_batches(self) -> bool:
        return self.stage.splits_batches

    @functools.cached_property
    def intents(self) -> IntentTwice:
        return IntentTwice(len(INTENTS), self.model.config.d_model)

    @functools.cached_property
    def mimicry(self) -> Mimicry:
        c, s = self.model.config, self.stage
        return Mimicry(c.d_model, c.num_heads, c.head_dim, s.latent, s.hidden, s.recognition)

    @functools.cached_property
    def contagion(self) -> Contagion:
        c = self.model.config
        return Contagion(c.d_model, c.num_heads, c.head_dim)

    @property
    def experts(self) -> EmotionExperts | None:
        return None if self.stage.experts == "none" else EmotionExperts()

    def init(self, rng: jax.Array, batch: ReflectBatch) -> Params:
        rngs = jax.random.split(rng, 5)
        rows, size = batch.source.shape[0], self.model.config.d_model
        states, summary = jnp.zeros((*batch.source.shape, size)), jnp.zeros((rows, size))
        params = super().init(rngs[0], batch)
        if self.experts is None:
            params["emotion"] = EMOTION_HEAD.init(rngs[1], summary)["params"]
        else:
            params["emotion"] = self.experts.init(rngs[1], summary, batch.polarity, batch.valid)["params"]
        actions = jnp.zeros((rows, self.stage.num_actions), jnp.int32)
        params["intents"] = self.intents.init(rngs[2], summary, batch.prior, batch.turns, actions)["params"]
        if self.annotator is not None:
            width = self.annotator.encoder.config.d_model  # pyright: ignore[reportAttributeAccessIssue]
            assert batch.piece is not None
            reasoning = jnp.zeros((*batch.piece.shape, width))
            read = batch.source, states, batch.source_mask, reasoning, batch.piece_mask
            params["contagion"] = self.contagion.init(rngs[3], jnp.zeros_like(read[0]), *read[1:])["params"]
        if self.stage.mimicry:
            params["mimicry"] = self.mimicry.init(rngs[4], states, batch.source_mask, summary)["params"]
        return params

    def annotated(self, params: Params, batch: ReflectBatch) -> tuple[Float[Array, "B P R"], Int[Array, "B S"]]:
        """The annotator's representations of the pieces, and which words are reasons, as it finds them itself."""
        if batch.reasoning is not None and batch.reasons is not None:
            return batch.reasoning, batch.reasons
        assert self.annotator is not None
        assert batch.told is not None
        assert batch.piece_mask is not None
        bound = {"params": params["reasons"]}
        reasoning, emissions = self.annotator.apply(bound, batch.piece, batch.piece_mask)  # type: ignore[misc]
        tags: Any = self.annotator.apply(bound, emissions, batch.told & batch.piece_mask, method="tags")
        return reasoning, tags_of_words(tags, batch.place)

    def think(
        self,
        params: Params,
        batch: ReflectBatch,
        *,
        noise: Float[Array, "B 2 D"] | None = None,
        rng: jax.Array | None = None,
        erased: bool = False,
    ) -> Thought:
        """Everything before the reply; dropout where there is an `rng`.

        Args:
          params: see the class.
          batch: an `action` in it is taken; without one, the policy takes its likeliest.
          noise: from which emotions are restored; None = none.
          rng: for dropout.
          erased: zeros stand for what the denoisers restore, to see what that is worth.
        """
        mask, added, reasoning = batch.source_mask, None, None
        own = {"params": params.get("contagion")}
        if self.annotator is not None:
            reasoning, reasons = self.annotated(params, batch)
            reasons = shown_tags(reasons, mask, batch.number, self.stage.reason_tags)
            added = self.contagion.apply(own, reasons, method="added")
        read = batch.source, mask
        states = apply(self.model, params["model"], *read, added=added, method="encode", rng=rng)
        if reasoning is None:
            summary: Any = masked_mean(states, mask)
        else:
            pieces = reasoning, batch.piece_mask
            summary = self.contagion.apply(own, states, mask, *pieces, method="summed_up")
        emotion, embedding = self.judged(params, batch, summary)
        bound, stage = {"params": params["intents"]}, self.stage
        mixed = {"share": stage.classifier_share, "form": stage.first_intent}
        first: Any = self.intents.apply(bound, summary, batch.prior, **mixed, method="first")
        if stage.mimicry:
            states = self.mimicked(params, states, mask, summary, first, noise, erased=erased)
        thought = Thought(states, summary, emotion, embedding, first, log_shares(first), None)
        if stage.second_intent:
            thought = self.reconsidered(params, batch, thought)
        if stage.intent_start:
            thought = thought.replace(start=self.start_of(params, thought.final))  # type: ignore[attr-defined]
        return thought

    def judged(
        self, params: Params, batch: ReflectBatch, summary: Float[Array, "B D"]
    ) -> tuple[Float[Array, "B E"], Float[Array, "2 E D"]]:
        """Log-probabilities of the emotions, and how either polarity's expert embeds them."""
        if self.experts is not None:
            bound = {"params": params["emotion"]}
            return self.experts.apply(bound, summary, batch.polarity, batch.valid, self.stage.experts)  # type: ignore[return-value]
        logits = apply(EMOTION_HEAD, params["emotion"], summary, rng=None)
        return jax.nn.log_softmax(logits), jnp.stack([params["emotion"]["out"].T] * 2)

    def mimicked(
        self,
        params: Params,
        states: Float[Array, "B S D"],
        mask: Any,
        summary: Float[Array, "B D"],
        first: Float[Array, "B I"],
        noise: Float[Array, "B 2 D"] | None,
        *,
        erased: bool,
    ) -> Float[Array, "B S D"]:
        """Emo_fused: the states in the light of the summary as restored by either polarity's denoiser."""
        stage, clean = self.stage, standardized(summary)
        schedule, start = stage.diffusion, stage.state_time
        time = jnp.full(clean.shape[0], start)
        intent: Any = self.intents.apply({"params": params["intents"]}, first, method="embed")
        bound, restored = {"params": params["mimicry"]}, [jnp.zeros_like(clean)] * 2 if erased else []
        for side in range(2 - len(restored)):
            added = jnp.zeros_like(clean) if noise is None else noise[:, side]

            def predict(noisy: Any, time: Any, side: int = side) -> Any:
                return self.mimicry.apply(bound, side, noisy, time, intent, method="noise")[0]

            noisy = q_sample(schedule, clean, time, added)
            if stage.restore == "printed":
                restored.append(ddpm(predict, schedule, noisy, start=start, form="printed"))
            else:
                restored.append(ddim(predict, schedule, noisy, start=start, steps=stage.restore_steps))
        return self.mimicry.apply(bound, states, mask, *restored, method="fused")  # type: ignore[return-value]

    def reconsidered(self, params: Params, batch: ReflectBatch, thought: Thought) -> Thought:
        """With the second intent, among the references of the likeliest emotion, and the final one."""
        bound = {"params": params["intents"]}
        state = masked_mean(thought.states, batch.source_mask)
        known = batch.prior if self.stage.final_prior else None
        if self.stage.constant_second:
            even = jnp.full_like(thought.first, 1.0 / len(INTENTS))
            found: Any = self.intents.apply(bound, thought.first, even, state, known, method="corrected")
            return thought.replace(final=jax.nn.log_softmax(found))  # type: ignore[attr-defined]
        actions = jnp.asarray(self.references, jnp.int32)[thought.emotion.argmax(axis=1)]
        policy: Any = self.intents.apply(bound, state, batch.turns, actions, method="policy")
        choice = policy.argmax(axis=1) if batch.action is None else batch.action
        second = jnp.take_along_axis(actions, choice[:, None], axis=1)[:, 0]
        one_hot = jax.nn.one_hot(second, len(INTENTS))
        logits: Any = self.intents.apply(bound, thought.first, one_hot, state, known, method="corrected")
        return thought.replace(  # type: ignore[attr-defined]
            policy=policy, actions=actions, second=second, final=jax.nn.log_softmax(logits)
        )

    def start_of(self, params: Params, final: Float[Array, "B I"]) -> Float[Array, "B D"]:
        """The decoder's start token and the final intent, as expected, in one vector."""
        config = self.model.config
        intent: Any = self.intents.apply({"params": params["intents"]}, jnp.exp(final), method="embed")
        ids = jnp.full((final.shape[0], 1), config.start_id, jnp.int32)
        word: Any = self.model.apply({"params": params["model"]}, ids, method="embed")
        return config.d_model**0.5 * (word[:, 0] + intent)

    def encode(self, params: Params, batch: ReflectBatch, rng: jax.Array | None) -> Considered:
        """What is thought, with the noise of `noise_of`."""
        return self.considered(batch, self.think(params, batch, noise=self.noise_of(batch, None), rng=rng))

    def considered(self, batch: ReflectBatch, thought: Thought) -> Considered:
        """As the decoder takes it."""
        beside: dict[str, Any] = {"start": thought.start}
        if isinstance(self.model, PointerGenerator):
            beside["source"] = batch.source
        return Considered(thought.states, batch.source_mask, beside, thought=thought)

    def loss(
        self, params: Params, frozen: Params, batch: ReflectBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        encode, decode, diffuse, draw = jax.random.split(rng, 4)
        params, dropout = {**params, **frozen}, (encode, decode) if train else (None, None)
        batch = batch.replace(noise=self.noise_of(batch, draw if train else None))  # type: ignore[attr-defined]
        read = self.encode(params, batch, dropout[0])
        parts, metrics = self.losses(params, frozen, batch, read, (dropout[1], diffuse))
        return combine(parts, target_weights(batch), batch.valid), metrics

    def losses(self, params: Params, frozen: Params, batch: ReflectBatch, read: Considered, rngs: Keys) -> Losses:
        """The second of `rngs` is there in evaluations too: the denoisers' errors are drawn."""
        stage, weights, thought = self.stage, target_weights(batch), read.thought
        logits = self.logits(params, batch, read, rngs[0])
        nll, smoothed = self.likelihood(functools.partial(cross_entropy, logits), batch)
        emotion, metrics = emotion_loss(thought.emotion, batch.emotion, weights)
        parts = [(stage.response_weight, smoothed), (stage.emotion_weight, emotion)]
        if self.experts is not None:
            known = batch.valid & (batch.emotion >= 0)
            alike = supervised_contrastive(thought.summary, batch.emotion, known, temperature=stage.temperature)
            metrics["contrastive_loss"] = alike
            # Of the batch as a whole: it has no rows that could be weighed by their tokens.
            whole = Mean(alike.value() * weights.sum(), weights.sum())
            parts.append((stage.emotion_weight * stage.contrastive_weight, whole))
        for found, more in (
            self.intent_parts(batch, thought, weights),
            self.diffusion_parts(params, batch, thought, weights, rngs[1]) if stage.mimicry else ([], {}),
        ):
            parts += [(stage.twice_weight * factor, part) for factor, part in found]
            metrics |= more
        if stage.mimicry and rngs[0] is None:
            bare = self.think(params, batch, noise=self.noise_of(batch, None), erased=True)
            without = self.logits(params, batch, self.considered(batch, bare), None)
            metrics["nll_without_mimicry"], _ = self.likelihood(functools.partial(cross_entropy, without), batch)
        return parts, {"nll": nll, **metrics}

    def summarize(self, averages: dict[str, float]) -> dict[str, float]:
        """With `mimicry_gain`, by how much the likelihood of a token rises with what the denoisers restore, in nats.

        Warns where that is nothing: diffusion that no decoder listens to is no diffusion.
        """
        if "nll_without_mimicry" not in averages:
            return averages
        gain = averages["nll_without_mimicry"] - averages["nll"]
        if gain <= 0:
            log.warning("EMU unused: with zeros for what it restores, the likelihood is as high (%.4f nats).", gain)
        return {**averages, "mimicry_gain": gain}

    def intent_parts(self, batch: ReflectBatch, thought: Thought, weights: Float[Array, " B"]) -> Losses:
        """Cross-entropy of the gold intent, the policy's loss, and how often each thought is right.

        The label is the listener's own intent; what the policy has drawn never is.
        """
        known = batch.valid & (batch.intent >= 0)
        nll, hit = intent_losses(thought.final, batch.intent)
        first_nll, first_hit = intent_losses(log_shares(thought.first), batch.intent)
        parts = [(1.0, Mean.of(nll, known, weights))]
        if self.stage.first_weight and self.stage.second_intent:  # else the first is the final one
            parts.append((self.stage.first_weight, Mean.of(first_nll, known, weights)))
        astray = known & (batch.emotion >= 0) & (thought.emotion.argmax(axis=1) != batch.emotion)
        metrics = {
            "intent_loss": Mean.of(nll, known),
            "intent_accuracy": Mean.of(hit, known),
            "first_intent_accuracy": Mean.of(first_hit, known),
            "intent_accuracy_emotion_wrong": Mean.of(hit, astray),
            "first_intent_accuracy_emotion_wrong": Mean.of(first_hit, astray),
        }
        if thought.policy is None or thought.second is None:
            return parts, metrics
        second_hit = (thought.second == batch.intent).astype(jnp.float32)
        entropy = -jnp.sum(jnp.exp(thought.policy) * thought.policy, axis=1)
        metrics |= {
            "second_intent_accuracy": Mean.of(second_hit, known),
            "corrected": Mean.of((1.0 - first_hit) * hit, known),
            "spoiled": Mean.of(first_hit * (1.0 - hit), known),
            "policy_entropy": Mean.of(entropy, batch.valid),
        }
        if batch.action is None or batch.log_prob is None:
            return parts, metrics
        log_prob = jnp.take_along_axis(thought.policy, batch.action[:, None], axis=1)[:, 0]
        counted = self.rewarded(batch)
        parts.append((self.stage.policy_weight, policy_loss(log_prob, batch, counted, weights)))
        metrics["ratio_error"] = Mean.of(jnp.abs(jnp.exp(log_prob - batch.log_prob) - 1.0), batch.valid)
        return parts, metrics

    def rewarded(self, batch: ReflectBatch) -> Array:
        """The rows whose choice has a reward."""
        return batch.valid & (batch.intent >= 0) if self.stage.reward == "label" else batch.valid

    def diffusion_parts(
        self, params: Params, batch: ReflectBatch, thought: Thought, weights: Float[Array, " B"], rng: Any
    ) -> Losses:
        """The error of the predicted noise and the KL, each polarity's denoiser on the rows of its emotions.

        The summary is what is denoised, not what learns from it: no gradient flows to it.
        """
        stage, clean = self.stage, jax.lax.stop_gradient(standardized(thought.summary))
        intent: Any = self.intents.apply({"params": params["intents"]}, thought.first, method="embed")
        positive = jnp.asarray(IS_POSITIVE)[jnp.maximum(batch.emotion, 0)]
        errors, divergences = [], []
        for side, own in enumerate((positive, ~positive)):
            counted = batch.valid & (batch.emotion >= 0) & own
            when, what, latent = jax.random.split(jax.random.fold_in(rng, side), 3)
            time = jax.random.randint(when, (clean.shape[0],), 1, stage.diffusion.steps + 1)
            noise = jax.random.normal(what, clean.shape)
            given = side, q_sample(stage.diffusion, clean, time, noise), time, intent, latent, clean
            made: Any = self.mimicry.apply({"params": params["mimicry"]}, *given, method="noise")
            found, posterior, prior = made
            errors.append(noise_loss(found, noise, counted, weights))
            divergences.append(Mean.of(gaussian_kl(posterior, prior), counted, weights))
        error, divergence = errors[0] + errors[1], divergences[0] + divergences[1]
        parts = [(stage.kl_weight, divergence)]
        if stage.noise_error:
            parts.append((1.0, error))
        return parts, {"noise_error": error, "latent_kl": divergence}

    def noise_of(self, batch: ReflectBatch, rng: jax.Array | None) -> Float[Array, "B 2 D"] | None:
        """What is added to the summary: the rollout's, new one in training, else the settings' by the row's number."""
        if not self.stage.mimicry or batch.noise is not None:
            return batch.noise
        shape = (2, self.model.config.d_model)
        if rng is not None:
            return jax.random.normal(rng, (batch.valid.shape[0], *shape))
        if not self.stage.noise:
            return None
        draw = lambda number: jax.random.normal(jax.random.fold_in(jax.random.key(0), number), shape)  # noqa: E731
        return self.stage.noise * jax.vmap(draw)(batch.number)

    def labels(self, params: Params, batch: ReflectBatch, read: Considered) -> dict[str, Array]:
        """The emotion, and every intent that was thought of.

        With slots, `num_unknown` too: the words of the response that the vocabulary and the context lack.
        """
        thought = read.thought
        found = {
            "generator": thought.emotion.argmax(axis=1),
            "intent_classifier": batch.prior.argmax(axis=1),
            "intent_first": thought.first.argmax(axis=1),
            "intent_prediction": thought.final.argmax(axis=1),
        }
        if isinstance(self.model, PointerGenerator) and self.model.slots:
            found["num_unknown"] = jnp.sum(batch.target_mask & (batch.target == self.model.unknown_id), axis=1)
        return found if thought.second is None else {**found, "intent_second": thought.second}
