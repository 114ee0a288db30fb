"""The modules that ReflectDiffu trains jointly: contagion, intent twice, mimicry by diffusion."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import EMOTIONS
from empax.models.arithmetic import rows_of
from empax.models.heads import masked_mean
from empax.models.latent import Gaussian, draw
from empax.models.layers import Attention, gelu, normal, sinusoidal_positions

_TEMPERATURE = 0.1  # of the softmax over cosines

Gate: TypeAlias = Literal["row", "batch_majority"]
"""The expert: by the polarity of each row, or by the majority polarity of the batch (the paper's Eq. 4)."""
Recognition: TypeAlias = Literal["clean", "noisy"]
"""Inputs of the latent's posterior: those of the denoiser with the clean vector, or without it."""


class Contagion(nn.Module):
    """Embeds reasons for the context encoder, and pools its states by attention to the reasoning representations.

    Source: ReflectDiffu, Eq. 1 to 3.
    """

    d_model: int
    num_heads: int
    head_dim: int

    def setup(self) -> None:
        self.reason_embedding = self.param("reason_embedding", normal(self.d_model**-0.5), (2, self.d_model))
        self.project = nn.Dense(self.d_model)
        self.attention = Attention(self.d_model, self.num_heads, self.head_dim, False, True, 0.0)

    def added(self, reasons: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Returns the embeddings of reasons (1) and other words (0), to be added to those of the words. Eq. 1."""
        return rows_of(self.reason_embedding, reasons)

    def summed_up(
        self,
        states: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        reasoning: Float[Array, "B P R"],
        reasoning_mask: Bool[Array, "B P"],
    ) -> Float[Array, "B D"]:
        """Returns Q, the mean over words of their attention to the reasoning representations. Eq. 3."""
        source = self.project(reasoning)
        read = self.attention(states, source, mask=reasoning_mask[:, None, :], bias=None, deterministic=True)
        return masked_mean(read, mask)

    def __call__(self, reasons: Int[Array, "B S"], *read: Array) -> tuple[Float[Array, "B S D"], Float[Array, "B D"]]:
        """Returns both, `added` and `summed_up`."""
        return self.added(reasons), self.summed_up(*read)


class EmotionExperts(nn.Module):
    r"""Two experts over one emotion embedding, and a gate by the polarity of the text.

    .. math:: p = \mathrm{softmax}(W_s E Q),\ s \in \{pos, neg\}

    and the mean of both distributions for a neutral text. Source: ReflectDiffu, Eq. 4. Departure: each row has its own
    gate ("row"), not that of the batch's majority, by which an emotion depends on other texts.
    """

    @nn.compact
    def __call__(
        self, summary: Float[Array, "B D"], polarity: Int[Array, " B"], valid: Bool[Array, " B"], gate: Gate = "row"
    ) -> tuple[Float[Array, "B E"], Float[Array, "2 E D"]]:
        """Returns log-probabilities of the emotions, and each expert's embeddings of them: positive, negative.

        Polarity is 1, -1, or 0 for a neutral text; filler rows, not `valid`, do not count in the majority.
        """
        size, emotions = summary.shape[-1], len(EMOTIONS)
        embedding = self.param("emotion_embedding", normal(size**-0.5), (emotions, size))

        def near_identity(rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jnp.eye(emotions) + 0.1 * emotions**-0.5 * jax.random.normal(rng, shape)

        weights = jnp.stack([self.param(side, near_identity, (emotions,) * 2) for side in ("positive", "negative")])
        experts = jnp.einsum("XEF,FD->XED", weights, embedding)
        positive, negative = jax.nn.log_softmax(jnp.einsum("XED,BD->XBE", experts, summary.astype(jnp.float32)))
        both = jnp.logaddexp(positive, negative) - jnp.log(2.0)
        if gate == "batch_majority":
            counts = jnp.stack([jnp.sum((polarity == sign) & valid) for sign in (0, 1, -1)])
            polarity = jnp.broadcast_to(jnp.asarray([0, 1, -1])[jnp.argmax(counts)], polarity.shape)
        sign = polarity[:, None]
        return jnp.where(sign > 0, positive, jnp.where(sign < 0, negative, both)), experts


class IntentTwice(nn.Module):
    """A first intent, a second one that suits the emotion, and a final one from both.

    Source: ReflectDiffu, Sec. 3.3.1. Ours: the temperature, the policy's second input, and how intents are combined.
    """

    num_intents: int
    d_model: int

    def setup(self) -> None:
        shape = self.num_intents, self.d_model
        self.intent_embedding = self.param("intent_embedding", normal(self.d_model**-0.5), shape)
        self.policy_hidden, self.policy_out = nn.Dense(self.d_model), nn.Dense(self.num_intents)
        self.shared = nn.Dense(self.d_model)

    def embed(self, shares: Float[Array, "B I"]) -> Float[Array, "B D"]:
        """Returns the expected embedding of an intent with the distribution `shares`."""
        return shares @ self.intent_embedding

    def first(
        self,
        summary: Float[Array, "B D"],
        prior: Float[Array, "B I"],
        *,
        share: float,
        form: Literal["mixed", "printed"] = "mixed",
    ) -> Float[Array, "B I"]:
        r"""Exploring: mixes the classifier's distribution with the similarity of the summary to each intent.

        .. math:: p = (1 - \alpha) p_{semantic} + \alpha p_{intent}

        with alpha the `share`. Source: ReflectDiffu, Eq. 5. Departure: as "printed" it sums to more than 1.
        """
        cosines = _unit(summary) @ _unit(self.intent_embedding).T
        semantic = jax.nn.softmax(cosines / _TEMPERATURE, axis=-1)
        return (semantic if form == "printed" else (1.0 - share) * semantic) + share * prior

    def policy(
        self, state: Float[Array, "B D"], turns: Int[Array, " B"], actions: Int[Array, "B N"]
    ) -> Float[Array, "B N"]:
        """Sampling: returns log-probabilities of the reference intents `actions`, by two linear layers."""
        read = jnp.concatenate([state, jnp.log1p(turns.astype(jnp.float32))[:, None]], axis=1)
        scores = self.policy_out(jnp.tanh(self.policy_hidden(read)))
        return jax.nn.log_softmax(jnp.take_along_axis(scores, actions, axis=1), axis=-1)

    def corrected(
        self,
        first: Float[Array, "B I"],
        second: Float[Array, "B I"],
        prior: Float[Array, "B I"] | None = None,
    ) -> Float[Array, "B I"]:
        """Correcting: returns logits of the final intent, from both intents through a shared layer.

        From the context's state too, the final intent would learn the training contexts by heart.

        Departure: with a `prior`, its logarithm is added. A mixture of embeddings blurs the classifier's distribution.
        """
        joined = self.shared(self.embed(first)) + self.shared(self.embed(second))
        logits = joined @ self.intent_embedding.T
        return logits if prior is None else logits + jnp.log(prior + 1e-9)

    def __call__(
        self,
        summary: Float[Array, "B D"],
        prior: Float[Array, "B I"],
        turns: Int[Array, " B"],
        actions: Int[Array, "B N"],
    ) -> Float[Array, "B I"]:
        """Calls all methods once, to create the parameters."""
        first = self.first(summary, prior, share=0.5)
        self.policy(summary, turns, actions)
        return self.corrected(first, first)


class IntentDenoiser(nn.Module):
    """Predicts the noise in a vector from the noisy vector, its time, the intent and a latent variable.

    Source: ReflectDiffu, Eq. 7, after Park et al. 2018; the layers are ours. The prior learns from the denoiser's
    inputs, and the posterior also reads the clean vector (Sohn et al. 2015). With recognition = "noisy" the posterior
    reads the denoiser's inputs alone, so that it adds nothing, and the prior is the standard Gaussian.
    """

    latent: int  # its dimensions
    hidden: int  # width of the hidden layers
    recognition: Recognition = "clean"

    @nn.compact
    def __call__(
        self,
        noisy: Float[Array, "B D"],
        time: Int[Array, " B"],
        intent: Float[Array, "B E"],
        rng: jax.Array | None = None,
        clean: Float[Array, "B D"] | None = None,
    ) -> tuple[Float[Array, "B D"], Gaussian, Gaussian]:
        """Returns the noise, the posterior and the prior.

        Without the `clean` vector the latent is from the prior; without an `rng` it is the mean.
        """
        given = jnp.concatenate([noisy, sinusoidal_positions(time, self.hidden), intent], axis=1)
        if self.recognition == "noisy":
            posterior = self._gaussian("recognise", given)
            prior = jnp.zeros_like(posterior[0]), jnp.zeros_like(posterior[1])
        else:
            posterior = prior = self._gaussian("prior", given)
        if self.recognition == "clean" and clean is not None:
            posterior = self._gaussian("recognise", jnp.concatenate([given, clean], axis=1))
        read = jnp.concatenate([given, draw(posterior, rng)], axis=1)
        hidden = gelu(nn.Dense(self.hidden, name="first")(read))
        hidden = gelu(nn.Dense(self.hidden, name="second")(hidden))
        return nn.Dense(noisy.shape[1], name="out")(hidden), posterior, prior

    def _gaussian(self, name: str, given: Float[Array, "B F"]) -> Gaussian:
        seen = gelu(nn.Dense(self.hidden, name=name)(given))
        mean, log_variance = (nn.Dense(self.latent, name=f"{name}_{part}")(seen) for part in ("mean", "log_variance"))
        return mean, log_variance


class Mimicry(nn.Module):
    r"""Two diffusions of the summary, one for each polarity of emotion, and their fusion into the context's states.

    .. math:: H' = H + g A(H, [e_{pos}; H]) + (1 - g) A(H, [e_{neg}; H])

    with a separate attention A for each, and a gate g for each word. Source: ReflectDiffu, Eq. 7 and 8, which leaves
    shapes and fusion open: ours keeps one state for each word, so that the decoder can copy it.
    """

    d_model: int
    num_heads: int
    head_dim: int
    latent: int  # of the denoisers
    hidden: int
    recognition: Recognition = "clean"

    def setup(self) -> None:
        # Positive and negative.
        self.denoisers = [IntentDenoiser(self.latent, self.hidden, self.recognition) for _ in range(2)]
        self.attentions = [Attention(self.d_model, self.num_heads, self.head_dim, False, True, 0.0) for _ in range(2)]
        self.gate = nn.Dense(1)

    def noise(self, polarity: int, *given: Any) -> tuple[Float[Array, "B D"], Gaussian, Gaussian]:
        """Calls the denoiser of a polarity, 0 positive, 1 negative, with its arguments `given`."""
        return self.denoisers[polarity](*given)

    def fused(
        self,
        states: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        positive: Float[Array, "B D"],
        negative: Float[Array, "B D"],
    ) -> Float[Array, "B S D"]:
        """Returns Emo_fused, one state for each state of the context."""
        seen = jnp.concatenate([jnp.ones((mask.shape[0], 1), bool), mask], axis=1)[:, None, :]
        read = []
        for attention, emotion in zip(self.attentions, (positive, negative), strict=True):
            source = jnp.concatenate([emotion[:, None].astype(states.dtype), states], axis=1)
            read.append(attention(states, source, mask=seen, bias=None, deterministic=True))
        gate = jax.nn.sigmoid(self.gate(jnp.concatenate(read, axis=-1)))
        return states + gate * read[0] + (1.0 - gate) * read[1]

    def __call__(
        self, states: Float[Array, "B S D"], mask: Bool[Array, "B S"], summary: Float[Array, "B D"]
    ) -> Float[Array, "B S D"]:
        """Calls all methods once, to create the parameters."""
        time = jnp.ones(summary.shape[0], jnp.int32)
        for polarity in range(2):
            self.noise(polarity, summary, time, summary, None, summary)
        return self.fused(states, mask, summary, summary)


def _unit(vectors: Float[Array, "N D"]) -> Float[Array, "N D"]:
    return vectors * jax.lax.rsqrt(jnp.sum(jnp.square(vectors), axis=1, keepdims=True) + 1e-12)
