"""ReflectDiffu's emotion contagion: reasons in the encoder's inputs and in its summary, two experts of emotion."""

from __future__ import annotations

from typing import Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import EMOTIONS
from empax.models.heads import masked_mean
from empax.models.layers import Attention, normal

Gate: TypeAlias = Literal["row", "batch_majority", "vote"]
"""Which expert judges: by the polarity of each row, by that of most rows of the batch (the paper's Eq. 4), or both."""


class Contagion(nn.Module):
    """What the context encoder reads of the reasons, and how its states are summed up in their light.

    Source: ReflectDiffu, Eq. 1 to 3.

    Attributes:
      d_model: of the encoder's states.
      num_heads, head_dim: of the attention to the reasoning representations.
    """

    d_model: int
    num_heads: int
    head_dim: int

    def setup(self) -> None:
        self.reason_embedding = self.param("reason_embedding", normal(self.d_model**-0.5), (2, self.d_model))
        self.project = nn.Dense(self.d_model)
        self.attention = Attention(self.d_model, self.num_heads, self.head_dim, False, True, 0.0)

    def added(self, reasons: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """What each word's embedding gets beside its position: whether it is a reason (1) or not (0). Eq. 1."""
        return self.reason_embedding[reasons]

    def summed_up(
        self,
        states: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        reasoning: Float[Array, "B P R"],
        reasoning_mask: Bool[Array, "B P"],
    ) -> Float[Array, "B D"]:
        """Q: the mean over words of what they read in the reasoning representations. Eq. 3."""
        source = self.project(reasoning)
        read = self.attention(states, source, mask=reasoning_mask[:, None, :], bias=None, deterministic=True)
        return masked_mean(read, mask)

    def __call__(
        self,
        reasons: Int[Array, "B S"],
        states: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        reasoning: Float[Array, "B P R"],
        reasoning_mask: Bool[Array, "B P"],
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B D"]]:
        """Both."""
        return self.added(reasons), self.summed_up(states, mask, reasoning, reasoning_mask)


class EmotionExperts(nn.Module):
    r"""Two experts over one emotion embedding, and a gate by the polarity of the text.

    .. math:: p = \mathrm{softmax}(W_s E Q),\ s \in \{pos, neg\}

    and the mean of both distributions for a neutral text. Source: ReflectDiffu, Eq. 4.

    Departure: the gate is each row's ("row"). The paper's is that of most rows of a batch ("batch_majority"), so that
    what a text is judged to be depends on the other texts.
    """

    @nn.compact
    def __call__(
        self, summary: Float[Array, "B D"], polarity: Int[Array, " B"], valid: Bool[Array, " B"], gate: Gate = "row"
    ) -> tuple[Float[Array, "B E"], Float[Array, "2 E D"]]:
        """Log-probabilities of the emotions, and each expert's embedding of them: positive, negative.

        Args:
          summary: Q.
          polarity: 1 positive, -1 negative, 0 neutral.
          valid: False on filler rows, which have no vote in a batch.
          gate: see `Gate`.
        """
        size, emotions = summary.shape[-1], len(EMOTIONS)
        embedding = self.param("emotion_embedding", normal(size**-0.5), (emotions, size))

        def near_identity(rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jnp.eye(emotions) + 0.1 * emotions**-0.5 * jax.random.normal(rng, shape)

        weights = jnp.stack(
            [self.param(name, near_identity, (emotions, emotions)) for name in ("positive", "negative")]
        )
        experts = jnp.einsum("XEF,FD->XED", weights, embedding)
        positive, negative = jax.nn.log_softmax(jnp.einsum("XED,BD->XBE", experts, summary.astype(jnp.float32)))
        both = jnp.logaddexp(positive, negative) - jnp.log(2.0)
        if gate == "vote":
            return both, experts
        if gate == "batch_majority":
            counts = jnp.stack([jnp.sum((polarity == sign) & valid) for sign in (0, 1, -1)])
            polarity = jnp.broadcast_to(jnp.asarray([0, 1, -1])[jnp.argmax(counts)], polarity.shape)
        sign = polarity[:, None]
        return jnp.where(sign > 0, positive, jnp.where(sign < 0, negative, both)), experts
