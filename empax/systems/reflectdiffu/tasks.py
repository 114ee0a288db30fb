"""Task "generator": joint training of contagion, intent twice, mimicry by diffusion, and the reply.

Source: ReflectDiffu (Yuan et al. 2025), Sec. 3. PAPERS.md lists every equation and every departure.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import IS_POSITIVE, Mean, Metrics, Params
from empax.losses.contrastive import supervised_contrastive
from empax.losses.cross_entropy import label_losses
from empax.models.heads import EMOTION_HEAD, masked_mean
from empax.models.latent import gaussian_kl
from empax.models.layers import apply
from empax.models.transformer import EncoderDecoder
from empax.parts.attributes.reasons import ReasonAnnotator, read_reasons
from empax.parts.generator.contrast import Read
from empax.parts.generator.gains import with_gains
from empax.parts.generator.task import Keys, Losses, ResponseTask, combine, emotion_loss, target_weights
from empax.systems.reflectdiffu.diffusion import estimate, printed_steps, q_sample
from empax.systems.reflectdiffu.examples import ReflectBatch
from empax.systems.reflectdiffu.labels import INTENTS
from empax.systems.reflectdiffu.model import Contagion, EmotionExperts, IntentTwice, Mimicry
from empax.systems.reflectdiffu.pointer_generator import PointerGenerator
from empax.systems.reflectdiffu.settings import GeneratorTaskSettings


@flax.struct.dataclass(frozen=True, kw_only=True)
class Thought(Read):
    """A context as the decoder reads it, and what the model makes of it; `states` are Emo_fused, or the encoder's."""

    summary: Float[Array, "B D"]  # Q
    emotion: Float[Array, "B E"]  # log-probabilities
    emotion_embedding: Float[Array, "2 E D"]  # by the positive and the negative expert
    first: Float[Array, "B I"]
    final: Float[Array, "B I"]  # log-probabilities
    policy: Float[Array, "B N"] | None = None  # log-probabilities of the reference intents
    actions: Int[Array, "B N"] | None = None  # the reference intents
    second: Int[Array, " B"] | None = None  # the chosen intent


@dataclasses.dataclass(frozen=True)
class ReflectDiffu(ResponseTask):
    """Generates a response to a context by way of reasons, emotion and intents; without rewards.

    The annotator's parameters, if there is one, are "reasons". They are frozen; methods other than `init`, `loss` and
    `rollout` expect them in `params`.

    Attributes:
      model: plain, or with a pointer.
      stage: the settings, which select the parts.
      annotator: the annotator of reasons; None = w/o ERA.
      references: [emotions][n], numbers of the reference intents.
    """

    model: EncoderDecoder | PointerGenerator
    stage: GeneratorTaskSettings
    annotator: ReasonAnnotator | None
    references: tuple[tuple[int, ...], ...]

    @property
    def splits_batches(self) -> bool:
        """False with experts: NT-Xent compares the rows of a batch, and their majority may choose the expert."""
        return self.experts is None

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

    def ask(self, params: Params, part: str, method: str, *given: Any, **options: Any) -> Any:
        """Calls a method of the module in the attribute `part`, with its own parameters."""
        return getattr(self, part).apply({"params": params[part]}, *given, method=method, **options)

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
        """Returns the annotator's representations of the pieces, and its tags of words that are reasons."""
        if batch.reasoning is not None and batch.reasons is not None:
            return batch.reasoning, batch.reasons
        assert self.annotator is not None
        assert batch.piece is not None
        assert batch.piece_mask is not None
        assert batch.told is not None
        assert batch.place is not None
        pieces = batch.piece, batch.piece_mask, batch.told
        reasoning, tags = read_reasons(self.annotator, params["reasons"], *pieces)
        words = jnp.take_along_axis(tags, jnp.maximum(batch.place, 0), axis=1)
        return reasoning, jnp.where(batch.place >= 0, words, 0)

    def encode(self, params: Params, batch: ReflectBatch, rng: jax.Array | None, *, erased: bool = False) -> Thought:
        """Computes everything before the reply; an `rng` turns on dropout.

        The second intent is the batch's `action`, else the policy's likeliest. With `erased`, zeros replace the
        restored vectors, to measure their value.
        """
        mask, added, reasoning, stage = batch.source_mask, None, None, self.stage
        if self.annotator is not None:
            reasoning, reasons = self.annotated(params, batch)
            words = mask if batch.place is None else batch.place >= 0
            reasons = shown_tags(reasons, words, batch.number, stage.reason_tags)
            added = self.ask(params, "contagion", "added", reasons)
        states = apply(self.model, params["model"], batch.source, mask, added=added, method="encode", rng=rng)
        if reasoning is None:
            summary = masked_mean(states, mask)
        else:
            summary = self.ask(params, "contagion", "summed_up", states, mask, reasoning, batch.piece_mask)
        emotion, embedding = self.judged(params, batch, summary)
        mixed = {"share": stage.classifier_share, "form": stage.first_intent}
        first = self.ask(params, "intents", "first", summary, batch.prior, **mixed)
        if stage.mimicry:
            states = self.mimicked(params, batch, states, summary, first, erased=erased)
        found = {"emotion": emotion, "emotion_embedding": embedding, "first": first, "final": log_shares(first)}
        thought = Thought(states=states, mask=mask, summary=summary, **found)
        if stage.second_intent:
            thought = self.reconsidered(params, batch, thought)
        beside = {"source": batch.source} if isinstance(self.model, PointerGenerator) else {}
        if stage.intent_start:
            beside["start"] = self.start_of(params, thought.final)
        return thought.replace(beside=beside)  # type: ignore[attr-defined]

    def judged(
        self, params: Params, batch: ReflectBatch, summary: Float[Array, "B D"]
    ) -> tuple[Float[Array, "B E"], Float[Array, "2 E D"]]:
        """Returns log-probabilities of the emotions, and their embeddings by each polarity's expert."""
        if self.experts is not None:
            bound = {"params": params["emotion"]}
            return self.experts.apply(bound, summary, batch.polarity, batch.valid, self.stage.experts)  # type: ignore[return-value]
        logits = apply(EMOTION_HEAD, params["emotion"], summary, rng=None)
        return jax.nn.log_softmax(logits), jnp.stack([params["emotion"]["out"].T] * 2)

    def mimicked(
        self,
        params: Params,
        batch: ReflectBatch,
        states: Float[Array, "B S D"],
        summary: Float[Array, "B D"],
        first: Float[Array, "B I"],
        *,
        erased: bool,
    ) -> Float[Array, "B S D"]:
        """Returns Emo_fused: the states fused with the summary as restored by each polarity's denoiser."""
        schedule, start, clean = self.stage.diffusion, self.stage.state_time, standardized(summary)
        time, intent = jnp.full(clean.shape[0], start), self.condition(params, first)
        noise = self.noise_of(batch, None)
        assert noise is not None

        def restored(side: int) -> Float[Array, "B D"]:
            def predict(noisy: Any, time: Any) -> Any:
                return self.ask(params, "mimicry", "noise", side, noisy, time, intent)[0]

            noisy = q_sample(schedule, clean, time, noise[:, side])
            if self.stage.restore == "printed":
                return printed_steps(predict, schedule, noisy, start=start)
            return estimate(schedule, noisy, time, predict(noisy, time))

        vectors = [jnp.zeros_like(clean) if erased else restored(side) for side in range(2)]
        return self.ask(params, "mimicry", "fused", states, batch.source_mask, *vectors)

    def reconsidered(self, params: Params, batch: ReflectBatch, thought: Thought) -> Thought:
        """Adds the second intent, one of the references of the likeliest emotion, and the final intent."""
        state = masked_mean(thought.states, batch.source_mask)
        known = batch.prior if self.stage.final_prior else None
        shares, found = jnp.full_like(thought.first, 1.0 / len(INTENTS)), {}
        if not self.stage.constant_second:
            actions = batch.actions  # of a rollout: by the emotion that it predicted
            if actions is None:
                actions = jnp.asarray(self.references, jnp.int32)[thought.emotion.argmax(axis=1)]
            policy = self.ask(params, "intents", "policy", state, batch.turns, actions)
            choice = policy.argmax(axis=1) if batch.action is None else batch.action
            second = jnp.take_along_axis(actions, choice[:, None], axis=1)[:, 0]
            shares = jax.nn.one_hot(second, len(INTENTS))
            found = {"policy": policy, "actions": actions, "second": second}
        logits = self.ask(params, "intents", "corrected", thought.first, shares, known)
        return thought.replace(final=jax.nn.log_softmax(logits), **found)  # type: ignore[attr-defined]

    def start_of(self, params: Params, final: Float[Array, "B I"]) -> Float[Array, "B D"]:
        """Returns the sum of the start token's embedding and the expected embedding of the final intent, scaled."""
        config, intent = self.model.config, self.ask(params, "intents", "embed", jnp.exp(final))
        word = self.ask(params, "model", "embed", jnp.full((final.shape[0], 1), config.start_id, jnp.int32))
        return config.d_model**0.5 * (word[:, 0] + intent)

    def loss(
        self, params: Params, frozen: Params, batch: ReflectBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        encode, decode, diffuse, draw = jax.random.split(rng, 4)
        params, dropout = {**params, **frozen}, (encode, decode) if train else (None, None)
        batch = batch.replace(noise=self.noise_of(batch, draw if train else None))  # type: ignore[attr-defined]
        read = self.encode(params, batch, dropout[0])
        parts, metrics = self.losses(params, frozen, batch, read, (dropout[1], diffuse))
        return combine(parts, target_weights(batch), batch.valid), metrics

    def losses(self, params: Params, frozen: Params, batch: ReflectBatch, read: Thought, rngs: Keys) -> Losses:
        """The second of `rngs` is given in evaluations too: the denoisers' errors need samples."""
        stage, weights = self.stage, target_weights(batch)
        nll, smoothed = self.of_response(params, batch, read, rngs[0])
        emotion, metrics = emotion_loss(read.emotion, batch.emotion, weights)
        parts = [(stage.response_weight, smoothed), (stage.emotion_weight, emotion)]
        if self.experts is not None:
            known = batch.valid & (batch.emotion >= 0)
            alike = supervised_contrastive(read.summary, batch.emotion, known, temperature=stage.temperature)
            metrics["contrastive_loss"] = alike
            # A loss of the whole batch: it has no rows to weight by their tokens.
            whole = Mean(alike.value() * weights.sum(), weights.sum())
            parts.append((stage.emotion_weight * stage.contrastive_weight, whole))
        for found, more in (
            self.intent_parts(batch, read, weights),
            self.diffusion_parts(params, batch, read, weights, rngs[1]) if stage.mimicry else ([], {}),
        ):
            parts += [(stage.twice_weight * factor, part) for factor, part in found]
            metrics |= more
        if stage.mimicry and rngs[0] is None:
            bare = self.encode(params, batch, None, erased=True)
            without = self.logits(params, batch, bare, None)
            metrics["nll_without_mimicry"], _ = self.likelihood(without, batch)
        return parts, {"nll": nll, **metrics}

    def of_response(self, params: Params, batch: ReflectBatch, read: Thought, rng: Any) -> tuple[Mean, Mean]:
        """Returns `likelihood` of the response, without logits of padding."""
        if not isinstance(self.model, PointerGenerator):
            return self.likelihood_of(params, batch, self._hidden(params, batch.target, read, rng))
        given, beside = (batch.target, read.states, read.mask), {**read.beside}
        source = beside.pop("source")
        found = apply(self.model, params["model"], *given, method="decode_with_gate", rng=rng, **beside)
        return self.likelihood_of(params, batch, *found, source=source)

    def summarize(self, averages: dict[str, float]) -> dict[str, float]:
        """Adds `mimicry_gain`: without a gain, the decoder ignores the diffusion."""
        return with_gains(averages, "nll_without_", "zeros in place of its vectors")

    def intent_parts(self, batch: ReflectBatch, thought: Thought, weights: Float[Array, " B"]) -> Losses:
        """Returns the cross-entropy of the gold intent, and the accuracy of each intent.

        The label is the listener's own intent, never the policy's sample.
        """
        known = batch.valid & (batch.intent >= 0)
        nll, hit = label_losses(thought.final, batch.intent)
        first_nll, first_hit = label_losses(log_shares(thought.first), batch.intent)
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
        metrics |= {
            "second_intent_accuracy": Mean.of(second_hit, known),
            "corrected": Mean.of((1.0 - first_hit) * hit, known),
            "spoiled": Mean.of(first_hit * (1.0 - hit), known),
            "policy_entropy": Mean.of(entropy(thought.policy), batch.valid),
        }
        return parts, metrics

    def diffusion_parts(
        self, params: Params, batch: ReflectBatch, thought: Thought, weights: Float[Array, " B"], rng: Any
    ) -> Losses:
        """Returns the error of the predicted noise (Ho et al. 2020, Eq. 14) and the KL, per denoiser on its polarity.

        No gradient flows to the summary, or to the first intent: it would become a code of the summary.
        """
        stage, clean = self.stage, jax.lax.stop_gradient(standardized(thought.summary))
        intent = jax.lax.stop_gradient(self.condition(params, thought.first))
        positive = jnp.asarray(IS_POSITIVE)[jnp.maximum(batch.emotion, 0)]
        errors, divergences = [], []
        for side, own in enumerate((positive, ~positive)):
            counted = batch.valid & (batch.emotion >= 0) & own
            when, what, latent = jax.random.split(jax.random.fold_in(rng, side), 3)
            time = jax.random.randint(when, (clean.shape[0],), 1, stage.diffusion.steps + 1)
            noise = jax.random.normal(what, clean.shape)
            given = side, q_sample(stage.diffusion, clean, time, noise), time, intent, latent, clean
            found, posterior, prior = self.ask(params, "mimicry", "noise", *given)
            errors.append(Mean.of(jnp.mean(jnp.square(found - noise), axis=1), counted, weights))
            divergences.append(Mean.of(gaussian_kl(posterior, prior), counted, weights))
        error, divergence = errors[0] + errors[1], divergences[0] + divergences[1]
        parts = [(stage.kl_weight, divergence), *([(1.0, error)] if stage.noise_error else [])]
        return parts, {"noise_error": error, "latent_kl": divergence}

    def condition(self, params: Params, first: Float[Array, "B I"]) -> Float[Array, "B D"]:
        """Returns the first intent's expected embedding, scaled as words are, like the denoisers' other inputs."""
        return self.model.config.d_model**0.5 * self.ask(params, "intents", "embed", first)

    def noise_of(self, batch: ReflectBatch, rng: jax.Array | None) -> Float[Array, "B 2 D"] | None:
        """Returns the summary's noise: the rollout's, new noise in training, else noise by the row's number."""
        if not self.stage.mimicry or batch.noise is not None:
            return batch.noise
        shape = (2, self.model.config.d_model)
        if rng is not None:
            return jax.random.normal(rng, (batch.valid.shape[0], *shape))
        draw = lambda number: jax.random.normal(jax.random.fold_in(jax.random.key(0), number), shape)  # noqa: E731
        return jax.vmap(draw)(batch.number)

    def labels(self, params: Params, batch: ReflectBatch, read: Thought) -> dict[str, Array]:
        """Returns the emotion and the intents of every step.

        With slots, also `num_unknown`: the number of words of the response that vocabulary and context lack.
        """
        found = {
            "generator": read.emotion.argmax(axis=1),
            "intent_classifier": batch.prior.argmax(axis=1),
            "intent_first": read.first.argmax(axis=1),
            "intent_prediction": read.final.argmax(axis=1),
        }
        if isinstance(self.model, PointerGenerator) and self.model.slots:
            found["num_unknown"] = jnp.sum(batch.target_mask & (batch.target == self.model.unknown_id), axis=1)
        return found if read.second is None else {**found, "intent_second": read.second}


def shown_tags(
    tags: Int[Array, "B S"],
    words: Bool[Array, "B S"],
    numbers: Int[Array, " B"],
    which: Literal["marked", "none", "shuffled"],
) -> Int[Array, "B S"]:
    """Returns the tags as "marked", "none" of them, or "shuffled" over the `words` by the instance's number."""
    if which == "none":
        return jnp.zeros_like(tags)
    if which == "marked":
        return tags
    draw = lambda number: jax.random.uniform(jax.random.fold_in(jax.random.key(1), number), tags.shape[1:])  # noqa: E731
    drawn = jnp.argsort(jnp.where(words, jax.vmap(draw)(numbers), 2.0), axis=1)
    places = jnp.argsort(~words, axis=1, stable=True)  # words first, then the rest, as in `drawn`
    return jnp.take_along_axis(tags, jnp.take_along_axis(drawn, jnp.argsort(places, axis=1), axis=1), axis=1)


def standardized(vectors: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Standardizes to mean 0 and variance 1 over features, the scale for the noise of a schedule."""
    centred = vectors - jnp.mean(vectors, axis=1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=1, keepdims=True) + 1e-6)


def entropy(log_probs: Float[Array, "B N"]) -> Float[Array, " B"]:
    """Returns the entropy of each row's distribution, in nats."""
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)


def log_shares(shares: Float[Array, "B I"]) -> Float[Array, "B I"]:
    """Returns log-probabilities of shares that need not sum to 1."""
    return jax.nn.log_softmax(jnp.log(shares + 1e-9))
