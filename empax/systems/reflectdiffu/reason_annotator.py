"""ReflectDiffu's Emotion Reason Annotator: which words of a conversation say why somebody feels as they do."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.models.arithmetic import contract
from empax.models.layers import MASKED, normal
from empax.systems.reflectdiffu.crf import log_likelihood, viterbi

NUM_TAGS = 2
"""Tag 1 marks a reason (the paper's <em>), 0 any other word (<noem>)."""


class ReasonAnnotator(nn.Module):
    r"""An encoder, attention-based composition over all tokens of the conversation, and a CRF over the speaker's.

    .. math:: \alpha_{ij} = \mathrm{softmax}_j(q_i \cdot k_j / \sqrt D), \quad \tilde h_i = h_i + \sum_j \alpha_{ij} h_j

    Source: ReflectDiffu, Eq. 13 to 16. Departure: Eq. 15 leaves out h_i itself, so that words which attend alike would
    be one; the paper does not say how it scores a pair.

    Parameters are the encoder's under "encoder", and those of composition and CRF.

    Attributes:
      encoder: `(ids[B,S], mask[B,S], deterministic=) -> states[B,S,D]`, a BertEncoder.
    """

    encoder: nn.Module

    def setup(self) -> None:
        size = self.encoder.config.d_model  # pyright: ignore[reportAttributeAccessIssue]
        for name in ("query", "key"):
            setattr(self, f"{name}_weight", self.param(name, normal(size**-0.5), (size, size)))
        self.emission_weight = self.param("emission", normal(size**-0.5), (size, NUM_TAGS))
        self.emission_offset = self.param("emission_bias", nn.initializers.zeros, (NUM_TAGS,))
        self.transitions = self.param("transitions", nn.initializers.zeros, (NUM_TAGS, NUM_TAGS))

    def __call__(
        self, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B S C"]]:
        """Reasoning representations and the emissions of the CRF, float32."""
        states = self.encoder(ids, mask, deterministic=deterministic).astype(jnp.float32)  # type: ignore[operator]
        query = contract("BSD,DE->BSE", states, self.query_weight) * states.shape[-1] ** -0.5
        scores = jnp.einsum("BSE,BTE->BST", query, contract("BSD,DE->BSE", states, self.key_weight))
        weights = jax.nn.softmax(jnp.where(mask[:, None, :], scores, MASKED), axis=-1)
        composed = states + jnp.einsum("BST,BTD->BSD", weights, states)
        emissions = contract("BSD,DC->BSC", composed, self.emission_weight) + self.emission_offset[None, None]
        return composed, emissions

    def log_likelihood(
        self, emissions: Float[Array, "B S C"], tags: Int[Array, "B S"], told: Bool[Array, "B S"]
    ) -> Float[Array, " B"]:
        """log p of the tags of the speaker's tokens, which `told` marks."""
        return log_likelihood(emissions, self.transitions, tags, told)

    def tags(self, emissions: Float[Array, "B S C"], told: Bool[Array, "B S"]) -> Int[Array, "B S"]:
        """The likeliest tags of the speaker's tokens; 0 for all others."""
        return viterbi(emissions, self.transitions, told)
