"""Models in the role of a generator that reads its sources in another way, and Fusion-in-Decoder, which is one."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from empax.models.transformer import EncoderDecoder


class Around(nn.Module):
    """A model around `model`: every method is the wrapped one's but for what a subclass says.

    Parameters are the wrapped model's own, with no level above: a plain checkpoint loads as this. Masks of the states
    may be given as those of the sources, or as `states_mask` makes them. Letters: R states, W hypotheses.
    """

    model: Any

    def setup(self) -> None:
        nn.share_scope(self, self.model)

    @property
    def config(self) -> Any:
        return self.model.config

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B ..."]) -> Bool[Array, "B R"]:
        """Which states are of real tokens."""
        return source_mask

    def encode(
        self, source: Int[Array, "B ..."], source_mask: Bool[Array, "B ..."], *, deterministic: bool = True
    ) -> Any:
        """States of the sources."""
        raise NotImplementedError

    def decode_hidden(
        self, target: Int[Array, "B T"], states: Any, states_mask: Bool[Array, "B ..."], *, deterministic: bool = True
    ) -> Float[Array, "B T D"]:
        """Decoder states, as `EncoderDecoder.decode_hidden`."""
        return self.model.decode_hidden(target, states, self.states_mask(states_mask), deterministic=deterministic)

    def decode(
        self, target: Int[Array, "B T"], states: Any, states_mask: Bool[Array, "B ..."], *, deterministic: bool = True
    ) -> Float[Array, "B T V"]:
        """Teacher-forced logits, as `EncoderDecoder.decode`."""
        return self.logits_from(self.decode_hidden(target, states, states_mask, deterministic=deterministic))

    def __call__(
        self,
        source: Int[Array, "B ..."],
        source_mask: Bool[Array, "B ..."],
        target: Int[Array, "B T"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T V"]:
        """Logits of `target` given `source`."""
        states = self.encode(source, source_mask, deterministic=deterministic)
        return self.decode(target, states, source_mask, deterministic=deterministic)

    def output_weights(self) -> Float[Array, "V D"]:
        """As `EncoderDecoder.output_weights`."""
        return self.model.output_weights()

    def logits_from(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """As `EncoderDecoder.logits_from`."""
        return self.model.logits_from(hidden)

    def start_cache(
        self, states: Any, states_mask: Bool[Array, "B ..."], *, num_hypotheses: int, max_length: int
    ) -> Any:
        """As `EncoderDecoder.start_cache`."""
        mask = self.states_mask(states_mask)
        return self.model.start_cache(states, mask, num_hypotheses=num_hypotheses, max_length=max_length)

    def step(self, tokens: Int[Array, "B W"], cache: Any) -> tuple[Float[Array, "B W V"], Any]:
        """As `EncoderDecoder.step`."""
        return self.model.step(tokens, cache)


class FusionInDecoder(Around):
    """An encoder-decoder with K passages per example, `source[B, K, S]`: they are encoded apart and read together.

    Source: Izacard and Grave 2021, Sec. 3.
    """

    model: EncoderDecoder

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B ..."]) -> Bool[Array, "B R"]:
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
