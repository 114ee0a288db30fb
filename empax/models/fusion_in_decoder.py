"""Wrappers that change how a generator encodes its sources, among them Fusion-in-Decoder."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from empax.models.transformer import EncoderDecoder


class Around(nn.Module):
    """A wrapper of `model`: every method calls that of `model` unless a subclass overrides it.

    Parameters are those of `model`, without another level, so a plain checkpoint loads. A mask of the states may be
    the mask of the sources, or the result of `states_mask`. Letters: R states, W hypotheses.
    """

    model: Any

    def setup(self) -> None:
        nn.share_scope(self, self.model)

    @property
    def config(self) -> Any:
        return self.model.config

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B ..."]) -> Bool[Array, "B R"]:
        """Returns the mask of states of real tokens."""
        return source_mask

    def encode(
        self, source: Int[Array, "B ..."], source_mask: Bool[Array, "B ..."], *, deterministic: bool = True
    ) -> Any:
        """Encodes the sources."""
        raise NotImplementedError

    def decode_hidden(
        self, target: Int[Array, "B T"], states: Any, states_mask: Bool[Array, "B ..."], *, deterministic: bool = True
    ) -> Float[Array, "B T D"]:
        """Returns decoder states, as `EncoderDecoder.decode_hidden`."""
        return self.model.decode_hidden(target, states, self.states_mask(states_mask), deterministic=deterministic)

    def decode(
        self, target: Int[Array, "B T"], states: Any, states_mask: Bool[Array, "B ..."], *, deterministic: bool = True
    ) -> Float[Array, "B T V"]:
        """Returns teacher-forced logits, as `EncoderDecoder.decode`."""
        return self.logits_from(self.decode_hidden(target, states, states_mask, deterministic=deterministic))

    def __call__(
        self,
        source: Int[Array, "B ..."],
        source_mask: Bool[Array, "B ..."],
        target: Int[Array, "B T"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T V"]:
        """Returns the logits of `target` given `source`."""
        states = self.encode(source, source_mask, deterministic=deterministic)
        return self.decode(target, states, source_mask, deterministic=deterministic)

    def logits_from(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """See `EncoderDecoder.logits_from`."""
        return self.model.logits_from(hidden)

    def start_cache(
        self, states: Any, states_mask: Bool[Array, "B ..."], *, num_hypotheses: int, max_length: int
    ) -> Any:
        """See `EncoderDecoder.start_cache`."""
        mask = self.states_mask(states_mask)
        return self.model.start_cache(states, mask, num_hypotheses=num_hypotheses, max_length=max_length)

    def step(self, tokens: Int[Array, "B W"], cache: Any) -> tuple[Float[Array, "B W V"], Any]:
        """See `EncoderDecoder.step`."""
        return self.model.step(tokens, cache)


class FusionInDecoder(Around):
    """An encoder-decoder with K passages per example, `source[B, K, S]`, encoded separately and decoded jointly.

    Source: Izacard and Grave 2021, Sec. 3.
    """

    model: EncoderDecoder

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B ..."]) -> Bool[Array, "B R"]:
        """Returns the mask of the concatenated states; a flat mask is returned unchanged."""
        return source_mask.reshape(source_mask.shape[0], -1)

    def encode(
        self, source: Int[Array, "B K S"], source_mask: Bool[Array, "B K S"], *, deterministic: bool = True
    ) -> Float[Array, "B K*S D"]:
        """Returns the states of all passages, concatenated; passages do not attend to each other."""
        batch, passages, length = source.shape
        flat = (batch * passages, length)
        states = self.model.encode(source.reshape(flat), source_mask.reshape(flat), deterministic=deterministic)
        return states.reshape(batch, passages * length, states.shape[-1])
