"""A decoder that can copy words of its source (pointer-generator)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.models.arithmetic import contract
from empax.models.copying import mixed_with_copies
from empax.models.layers import normal
from empax.models.scanned import DecodeCache
from empax.models.transformer import EncoderDecoder


@flax.struct.dataclass
class CopyCache:
    """Decoding state: the decoder's cache, and once per example the states and ids that it copies from."""

    decoder: Any  # a DecodeCache
    states: Any  # [B, S, D]
    source: Any  # [B, S], ids below V + slots

    def reorder(self, parents: Int[Array, "B K"]) -> CopyCache:
        return self.replace(decoder=self.decoder.reorder(parents))  # type: ignore[attr-defined]


class PointerGenerator(nn.Module):
    r"""A mixture of generating from the vocabulary and copying words of the source.

    .. math:: p(w) = g P_{vocab}(w) + (1 - g) \sum_{s: w_s = w} a_s, \quad
              g = \mathrm{sigmoid}(u [h; c; x] + b)

    with h the decoder's state, c the mean of the source's states under the last layer's attention a, x the last word's
    embedding. Its logits are log-probabilities. Source: See et al. 2017, Eq. 8 and 9; ReflectDiffu, Eq. 11.

    Parameters are the model's under "model", and the gate's.

    Attributes:
      slots: ids after the vocabulary for unknown words of a source, numbered per source from V. The decoder reads
        `unknown_id` in their place.
    """

    model: EncoderDecoder
    slots: int = 0
    unknown_id: int = 0

    def setup(self) -> None:
        size = 3 * self.model.config.d_model
        self.gate = self.param("gate", normal(size**-0.5), (size,))
        self.gate_bias = self.param("gate_bias", nn.initializers.zeros, ())

    @property
    def config(self) -> Any:
        return self.model.config

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
        """Returns the mask of the encoder's states, as the model does."""
        return source_mask

    def encode(self, source: Int[Array, "B S"], source_mask: Bool[Array, "B S"], **options: Any) -> Any:
        """Encodes as the model does, with unknown words for slots."""
        return self.model.encode(self.known(source), source_mask, **options)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeds as the model does, with unknown words for slots."""
        return self.model.embed(self.known(tokens))

    def __call__(
        self, source: Int[Array, "B S"], source_mask: Bool[Array, "B S"], target: Int[Array, "B T"]
    ) -> Float[Array, "B T W"]:
        """Encodes the source, then decodes; see `decode`."""
        return self.decode(target, self.encode(source, source_mask), source_mask, source)

    def known(self, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Replaces slots by `unknown_id`."""
        return jnp.where(tokens < self.model.config.vocab_size, tokens, self.unknown_id)

    def _gate(
        self,
        hidden: Float[Array, "B T D"],
        weights: Float[Array, "B T S"],
        inputs: Float[Array, "B T D"],
        states: Float[Array, "B S D"],
    ) -> Float[Array, "B T"]:
        read = contract("BTS,BSD->BTD", weights, states)
        seen = jnp.concatenate([hidden, read, inputs], axis=-1).astype(jnp.float32)
        return jax.nn.sigmoid(contract("BTD,D->BT", seen, self.gate) + self.gate_bias)

    def logits_from(
        self,
        hidden: Float[Array, "B T D"],
        gate: Float[Array, "B T"],
        weights: Float[Array, "B T S"],
        source: Int[Array, "B S"],
        table: Float[Array, "V D"] | None = None,
    ) -> Float[Array, "B T W"]:
        """Returns the log-probabilities of `decode` from the results of `decode_with_gate`; `table` is a cache's."""
        return mixed_with_copies(self.model.logits_from(hidden, table), gate, weights, source, slots=self.slots)

    def decode(
        self,
        target: Int[Array, "B T"],
        states: Float[Array, "B S D"],
        states_mask: Bool[Array, "B S"],
        source: Int[Array, "B S"],
        *,
        start: Float[Array, "B D"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B T W"]:
        """Returns teacher-forced log-probabilities of the V words and the slots after them.

        `source` is the word of each state; its ids and those of `target` may be slots. Padding is never copied. `start`
        replaces the scaled embedding of the start token.
        """
        given = self.decode_with_gate(target, states, states_mask, start=start, deterministic=deterministic)
        return self.logits_from(*given, source)

    def decode_with_gate(
        self,
        target: Int[Array, "B T"],
        states: Float[Array, "B S D"],
        states_mask: Bool[Array, "B S"],
        *,
        start: Float[Array, "B D"] | None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T"], Float[Array, "B T S"]]:
        """Returns the decoder's states, g and a; for the arguments see `decode`."""
        known = self.known(target)
        hidden, weights = self.model.decode_with_weights(
            known, states, states_mask, start=start, deterministic=deterministic
        )
        first = jnp.full((target.shape[0], 1), self.model.config.start_id, known.dtype)
        inputs = self.embed(jnp.concatenate([first, known[:, :-1]], axis=1))
        return hidden, self._gate(hidden, weights, inputs, states), weights

    def start_cache(
        self,
        states: Float[Array, "B S D"],
        states_mask: Bool[Array, "B S"],
        *,
        num_hypotheses: int,
        max_length: int,
        source: Int[Array, "B S"],
        start: Float[Array, "B D"] | None = None,
    ) -> CopyCache:
        """Starts the model's cache; for `source` see `decode`."""
        cache = self.model.start_cache(
            states, states_mask, num_hypotheses=num_hypotheses, max_length=max_length, start=start
        )
        return CopyCache(cache, states, source)

    def step(self, tokens: Int[Array, "B K"], cache: CopyCache) -> tuple[Float[Array, "B K W"], CopyCache]:
        """Reads one token of every hypothesis and returns the log-probabilities of the next."""
        known = self.known(tokens)
        before: DecodeCache = cache.decoder
        hidden, after, weights = self.model.step_with_weights(known, before)
        gate = self._gate(hidden, weights, self.embed(known), cache.states)
        logits = self.logits_from(hidden, gate, weights, cache.source, before.table)
        return logits, cache.replace(decoder=after)  # type: ignore[attr-defined]
