"""The encoder-decoder: one module covers the Transformer from scratch, T5, BART and BlenderBot, by settings alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.models.arithmetic import contract
from empax.models.layers import Dropout, normal, sinusoidal_positions
from empax.models.stack import DecodeCache, Stack, TransformerConfig, cache_dtype

__all__ = ["DecodeCache", "EncoderDecoder", "TransformerConfig", "scratch"]


def scratch(vocab_size: int, **changes: Any) -> TransformerConfig:
    """The paper's first backbone, trained from nothing: pre-LN, biases, tied embeddings, relative positions.

    Args:
      vocab_size: of the tokenizer, special ids included.
      changes: any field of TransformerConfig.
    """
    defaults = TransformerConfig(
        vocab_size=vocab_size,
        d_model=256,
        num_heads=4,
        head_dim=64,
        d_ff=1024,
        num_encoder_layers=4,
        num_decoder_layers=4,
        inner_dropout=False,
        embed_scale=True,
    )
    return dataclasses.replace(defaults, **changes)


class EncoderDecoder(nn.Module):
    """Transformer encoder-decoder; call its methods with `model.apply({"params": p}, ..., method="encode")`."""

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        init = normal(c.initial_embedding_stddev())
        self.token_embedding = self.param("token_embedding", init, (c.vocab_size, c.d_model))
        if not c.tie_embeddings:
            outward = normal(c.d_model**-0.5)
            self.output_embedding = self.param("output_embedding", outward, (c.vocab_size, c.d_model))
        if c.position == "learned" and c.shared_positions:
            self.position_embedding = self.param("position_embedding", init, (c.position_rows(), c.d_model))
        if c.output_bias:
            self.output_bias = self.param("output_bias", nn.initializers.zeros, (c.vocab_size,))
        self.encoder = Stack(c, c.num_encoder_layers, decoder=False)
        self.decoder = Stack(c, c.num_decoder_layers, decoder=True)
        self.dropout = Dropout(c.dropout)

    def _embed(
        self, stack: Stack, tokens: Int[Array, "B T"], positions: Int[Array, " #T"], deterministic: bool
    ) -> Float[Array, "B T D"]:
        c = self.config
        states = self.token_embedding[tokens]
        if c.embed_scale:
            states = states * c.d_model**0.5
        if c.position == "sinusoidal":
            states = states + sinusoidal_positions(positions, c.d_model)[None]
        if c.position == "learned" and c.shared_positions:
            states = states + self.position_embedding[positions + c.position_offset][None]
        return self.dropout(stack.enter(states, positions).astype(c.dtype), deterministic=deterministic)

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
        """Which encoder states are of real tokens."""
        return source_mask

    def encode(
        self, source: Int[Array, "B S"], source_mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> Float[Array, "B S D"]:
        """Encoder states; those of padding are numbers without meaning."""
        self._check_length(source.shape[1])
        states = self._embed(self.encoder, source, jnp.arange(source.shape[1]), deterministic)
        return self.encoder(states, source_mask[:, None, :], deterministic=deterministic)

    def decode_hidden(
        self,
        target: Int[Array, "B T"],
        states: Float[Array, "B S D"],
        states_mask: Bool[Array, "B S"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T D"]:
        """Decoder states, teacher-forced: state t predicts `target[:, t]`, having read the tokens before it."""
        length = target.shape[1]
        self._check_length(length)
        start = jnp.full((target.shape[0], 1), self.config.start_id, target.dtype)
        shifted = jnp.concatenate([start, target[:, :-1]], axis=1)
        inputs = self._embed(self.decoder, shifted, jnp.arange(length), deterministic)
        causal = jnp.tril(jnp.ones((1, length, length), bool))
        return self.decoder(inputs, causal, states, states_mask, deterministic=deterministic)

    def output_weights(self) -> Float[Array, "V D"]:
        """The matrix E of logits = hidden E^T, with every factor in it: what a fused loss needs.

        Raises:
          ConfigError: the logits have a constant added, which no matrix holds.
        """
        c = self.config
        if c.output_bias:
            raise ConfigError("output_bias = True adds a constant to the logits: set it to False, or use logits_from.")
        weights = self.token_embedding if c.tie_embeddings else self.output_embedding
        return weights * c.d_model**-0.5 if c.output_scale else weights

    def logits_from(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32."""
        c = self.config
        # On the hidden states, not on the weights: a step of decoding must not copy the whole matrix.
        scaled = hidden * c.d_model**-0.5 if c.output_scale else hidden
        weights = self.token_embedding if c.tie_embeddings else self.output_embedding
        logits = contract("BTD,VD->BTV", scaled, weights, result=jnp.float32)
        if not c.output_bias:
            return logits
        return logits + jax.lax.stop_gradient(self.output_bias)[None, None]

    def decode(
        self,
        target: Int[Array, "B T"],
        states: Float[Array, "B S D"],
        states_mask: Bool[Array, "B S"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T V"]:
        """Teacher-forced logits; shifts `target` right itself, so logits[:, t] predict target[:, t]."""
        return self.logits_from(self.decode_hidden(target, states, states_mask, deterministic=deterministic))

    def __call__(
        self,
        source: Int[Array, "B S"],
        source_mask: Bool[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T V"]:
        """Logits of `target` given `source`."""
        states = self.encode(source, source_mask, deterministic=deterministic)
        return self.decode(target, states, source_mask, deterministic=deterministic)

    def start_cache(
        self, states: Float[Array, "B S D"], states_mask: Bool[Array, "B S"], *, num_hypotheses: int, max_length: int
    ) -> DecodeCache:
        """An empty cache for `num_hypotheses` continuations of at most `max_length` tokens each."""
        c = self.config
        self._check_length(max_length)
        cross_key, cross_value = self.decoder.keys_values(states)
        shape = (c.num_decoder_layers, states.shape[0], num_hypotheses, c.num_heads, max_length, c.head_dim)
        empty = jnp.zeros(shape, cache_dtype(c.dtype))
        cache = DecodeCache(empty, empty, cross_key, cross_value, states_mask, jnp.zeros((), jnp.int32))
        return cache.cut(self.decoder.variables["params"]["layers"]) if c.unroll >= c.num_decoder_layers else cache

    def step(self, tokens: Int[Array, "B K"], cache: DecodeCache) -> tuple[Float[Array, "B K V"], DecodeCache]:
        """Reads one token of every hypothesis (the first is `start_id`) and gives the next one's logits."""
        states = self._embed(self.decoder, tokens, cache.position[None], deterministic=True)
        hidden, cache = self.decoder.step(states, cache)
        return self.logits_from(hidden), cache

    def _check_length(self, length: int) -> None:
        c = self.config
        if c.position == "learned" and length > c.max_positions:
            raise ConfigError(f"{length} tokens, but max_positions = {c.max_positions}; shorten them or raise it.")
