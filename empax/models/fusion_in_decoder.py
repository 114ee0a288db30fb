"""Fusion-in-Decoder: passages are encoded apart and read together.

Source: Izacard and Grave 2021, Sec. 3.
"""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from empax.models.scanned import DecodeCache
from empax.models.transformer import EncoderDecoder
from empax.models.transformer_config import TransformerConfig


class FusionInDecoder(nn.Module):
    """`model` with K passages per example; every method is the wrapped one's, with `source[B, K, S]`.

    Parameters are the wrapped model's own, with no level above: a plain checkpoint loads as this.
    Masks of the encoded passages may be given as [B, K, S] or flattened, [B, K*S].
    """

    model: EncoderDecoder

    def setup(self) -> None:
        nn.share_scope(self, self.model)

    @property
    def config(self) -> TransformerConfig:
        return self.model.config

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B R"] | Bool[Array, "B K S"]) -> Bool[Array, "B R"]:
        """The passages' mask as that of their concatenated states; a flat one stays as it is."""
        return source_mask.reshape(source_mask.shape[0], -1)

    def encode(
        self, source: Int[Array, "B K S"], source_mask: Bool[Array, "B K S"], *, deterministic: bool = True
    ) -> Float[Array, "B K*S D"]:
        """States of all passages, one after the other; no passage sees another."""
        batch, passages, length = source.shape
        flat = (batch * passages, length)
        states = self.model.encode(source.reshape(flat), source_mask.reshape(flat), deterministic=deterministic)
        return states.reshape(batch, passages * length, states.shape[-1])

    def decode_hidden(
        self,
        target: Int[Array, "B T"],
        states: Float[Array, "B R D"],
        states_mask: Bool[Array, "B R"] | Bool[Array, "B K S"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T D"]:
        """Decoder states, as `EncoderDecoder.decode_hidden`; R = K*S."""
        return self.model.decode_hidden(target, states, self.states_mask(states_mask), deterministic=deterministic)

    def decode(
        self,
        target: Int[Array, "B T"],
        states: Float[Array, "B R D"],
        states_mask: Bool[Array, "B R"] | Bool[Array, "B K S"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T V"]:
        """Teacher-forced logits, as `EncoderDecoder.decode`; R = K*S."""
        return self.model.decode(target, states, self.states_mask(states_mask), deterministic=deterministic)

    def __call__(
        self,
        source: Int[Array, "B K S"],
        source_mask: Bool[Array, "B K S"],
        target: Int[Array, "B T"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T V"]:
        """Logits of `target` given all passages."""
        states = self.encode(source, source_mask, deterministic=deterministic)
        return self.decode(target, states, source_mask, deterministic=deterministic)

    def output_weights(self) -> Float[Array, "V D"]:
        """As `EncoderDecoder.output_weights`."""
        return self.model.output_weights()

    def logits_from(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """As `EncoderDecoder.logits_from`."""
        return self.model.logits_from(hidden)

    def start_cache(
        self,
        states: Float[Array, "B R D"],
        states_mask: Bool[Array, "B R"] | Bool[Array, "B K S"],
        *,
        num_hypotheses: int,
        max_length: int,
    ) -> DecodeCache:
        """As `EncoderDecoder.start_cache`; R = K*S."""
        mask = self.states_mask(states_mask)
        return self.model.start_cache(states, mask, num_hypotheses=num_hypotheses, max_length=max_length)

    def step(self, tokens: Int[Array, "B W"], cache: DecodeCache) -> tuple[Float[Array, "B W V"], DecodeCache]:
        """As `EncoderDecoder.step`; W hypotheses."""
        return self.model.step(tokens, cache)
