"""ReflectDiffu's intents, thought about twice, and the Emotion Mimicry Unit between the two thoughts."""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.models.latent import Gaussian
from empax.models.layers import Attention, normal
from empax.systems.reflectdiffu.intent_diffusion import IntentDenoiser, Recognition

_TEMPERATURE = 0.1  # of cosines, before they become a distribution


class IntentTwice(nn.Module):
    """A first intent, a second one that suits the emotion, and the final one made of both.

    Source: ReflectDiffu, Sec. 3.3.1. What the paper leaves open is ours: the temperature of the similarities, what the
    policy reads beside the state (how many turns there are), and how two intents become one.

    Attributes:
      num_intents: I.
      d_model: of intent embeddings and states.
    """

    num_intents: int
    d_model: int

    def setup(self) -> None:
        self.intent_embedding = self.param(
            "intent_embedding", normal(self.d_model**-0.5), (self.num_intents, self.d_model)
        )
        self.policy_hidden, self.policy_out = nn.Dense(self.d_model), nn.Dense(self.num_intents)
        self.shared, self.seen = nn.Dense(self.d_model), nn.Dense(self.d_model)

    def embed(self, shares: Float[Array, "B I"]) -> Float[Array, "B D"]:
        """The expected embedding of an intent with that distribution."""
        return shares @ self.intent_embedding

    def first(
        self,
        summary: Float[Array, "B D"],
        prior: Float[Array, "B I"],
        *,
        share: float,
        form: Literal["mixed", "printed"] = "mixed",
    ) -> Float[Array, "B I"]:
        r"""Exploring: the classifier's distribution and the similarity of the summary to each intent, mixed.

        .. math:: p = (1 - \alpha) p_{semantic} + \alpha p_{intent}

        Source: ReflectDiffu, Eq. 5. Departure: Eq. 5 ("printed") is p_semantic + alpha p_intent, which sums to more
        than 1.

        Args:
          summary: Q.
          prior: of the classifier.
          share: alpha.
          form: see above.
        """
        unit = summary * jax.lax.rsqrt(jnp.sum(jnp.square(summary), axis=1, keepdims=True) + 1e-12)
        own = self.intent_embedding
        own = own * jax.lax.rsqrt(jnp.sum(jnp.square(own), axis=1, keepdims=True) + 1e-12)
        semantic = jax.nn.softmax(unit @ own.T / _TEMPERATURE, axis=-1)
        return (semantic if form == "printed" else (1.0 - share) * semantic) + share * prior

    def policy(
        self, state: Float[Array, "B D"], turns: Int[Array, " B"], actions: Int[Array, "B N"]
    ) -> Float[Array, "B N"]:
        """Sampling: log-probabilities of the reference intents `actions`, by two linear layers."""
        read = jnp.concatenate([state, jnp.log1p(turns.astype(jnp.float32))[:, None]], axis=1)
        scores = self.policy_out(jnp.tanh(self.policy_hidden(read)))
        return jax.nn.log_softmax(jnp.take_along_axis(scores, actions, axis=1), axis=-1)

    def corrected(
        self,
        first: Float[Array, "B I"],
        second: Float[Array, "B I"],
        state: Float[Array, "B D"],
        prior: Float[Array, "B I"] | None = None,
    ) -> Float[Array, "B I"]:
        """Correcting: logits of the final intent. Both intents go through one layer, that the state joins.

        Departure: with a `prior`, its logarithm is added. A mixture of embeddings blurs what the classifier knows.
        """
        joined = self.shared(self.embed(first)) + self.shared(self.embed(second)) + self.seen(state)
        logits = joined @ self.intent_embedding.T
        return logits if prior is None else logits + jnp.log(prior + 1e-9)

    def __call__(
        self,
        summary: Float[Array, "B D"],
        prior: Float[Array, "B I"],
        turns: Int[Array, " B"],
        actions: Int[Array, "B N"],
    ) -> Float[Array, "B I"]:
        """Everything once, to make the parameters."""
        first = self.first(summary, prior, share=0.5)
        self.policy(summary, turns, actions)
        return self.corrected(first, first, summary)


class Mimicry(nn.Module):
    r"""Two diffusions of the summary, one for each polarity of emotion, and the context's states in their light.

    .. math:: H' = H + g A(H, [e_{pos}; H]) + (1 - g) A(H, [e_{neg}; H])

    with an attention A of its own for each, and a gate g for each word. Source: ReflectDiffu, Eq. 7 and 8. Departure:
    Eq. 8 leaves shapes and fusion open; here the result is as long as the context, so that a decoder attends to words
    and can copy them.

    Attributes:
      d_model: of the states.
      num_heads, head_dim: of the attentions.
      latent, hidden, recognition: of the denoisers.
    """

    d_model: int
    num_heads: int
    head_dim: int
    latent: int
    hidden: int
    recognition: Recognition = "clean"

    def setup(self) -> None:
        # Positive and negative.
        self.denoisers = [IntentDenoiser(self.latent, self.hidden, self.recognition) for _ in range(2)]
        self.attentions = [Attention(self.d_model, self.num_heads, self.head_dim, False, True, 0.0) for _ in range(2)]
        self.gate = nn.Dense(1)

    def noise(
        self,
        polarity: int,
        noisy: Float[Array, "B D"],
        time: Int[Array, " B"],
        intent: Float[Array, "B D"],
        rng: jax.Array | None = None,
        clean: Float[Array, "B D"] | None = None,
    ) -> tuple[Float[Array, "B D"], Gaussian, Gaussian]:
        """The noise in a vector by the denoiser of a polarity, 0 positive, 1 negative; see `IntentDenoiser`."""
        return self.denoisers[polarity](noisy, time, intent, rng, clean)

    def fused(
        self,
        states: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        positive: Float[Array, "B D"],
        negative: Float[Array, "B D"],
    ) -> Float[Array, "B S D"]:
        """Emo_fused, one state for each of the context's."""
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
        """Everything once, to make the parameters."""
        time = jnp.ones(summary.shape[0], jnp.int32)
        for polarity in range(2):
            self.noise(polarity, summary, time, summary, clean=summary)
        return self.fused(states, mask, summary, summary)
