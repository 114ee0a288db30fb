"""The encoder-decoder: one module covers the Transformer from scratch and T5, by settings alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.models.layers import Dropout, contract, normal, sinusoidal_positions
from empax.models.stack import DecodeCache, Stack, TransformerConfig

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
        stddev = c.d_model**-0.5 if c.embedding_stddev is None else c.embedding_stddev
        self.token_embedding = self.param("token_embedding", normal(stddev), (c.vocab_size, c.d_model))
        if not c.tie_embeddings:
            init = normal(c.d_model**-0.5)
            self.output_embedding = self.param("output_embedding", init, (c.vocab_size, c.d_model))
        if c.position == "learned":
            self.position_embedding = self.param("position_embedding", normal(stddev), (c.max_positions, c.d_model))
        self.encoder = Stack(c, c.num_encoder_layers, decoder=False)
        self.decoder = Stack(c, c.num_decoder_layers, decoder=True)
        self.dropout = Dropout(c.dropout)

    def _embed(
        self, tokens: Int[Array, "B T"], positions: Int[Array, " #T"], deterministic: bool
    ) -> Float[Array, "B T D"]:
        c = self.config
        states = self.token_embedding[tokens]
        if c.embed_scale:
            states = states * c.d_model**0.5
        if c.position == "sinusoidal":
            states = states + sinusoidal_positions(positions, c.d_model)[None]
        if c.position == "learned":
            states = states + self.position_embedding[positions][None]
        return self.dropout(states.astype(c.dtype), deterministic=deterministic)

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
        """Which encoder states are of real tokens."""
        return source_mask

    def encode(
        self, source: Int[Array, "B S"], source_mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> Float[Array, "B S D"]:
        """Encoder states; those of padding are numbers without meaning."""
        self._check_length(source.shape[1])
        states = self._embed(source, jnp.arange(source.shape[1]), deterministic)
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
        inputs = self._embed(shifted, jnp.arange(length), deterministic)
        causal = jnp.tril(jnp.ones((1, length, length), bool))
        return self.decoder(inputs, causal, states, states_mask, deterministic=deterministic)

    def output_weights(self) -> Float[Array, "V D"]:
        """The matrix E of logits = hidden E^T, with every factor in it: what a fused loss needs."""
        c = self.config
        weights = self.token_embedding if c.tie_embeddings else self.output_embedding
        return weights * c.d_model**-0.5 if c.output_scale else weights

    def logits_from(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32."""
        c = self.config
        # On the hidden states, not on the weights: a step of decoding must not copy the whole matrix.
        scaled = hidden * c.d_model**-0.5 if c.output_scale else hidden
        weights = self.token_embedding if c.tie_embeddings else self.output_embedding
        return contract("BTD,VD->BTV", scaled, weights, result=jnp.float32)

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
        empty = jnp.zeros(shape, c.dtype)
        return DecodeCache(empty, empty, cross_key, cross_value, states_mask, jnp.zeros((), jnp.int32))

    def step(self, tokens: Int[Array, "B K"], cache: DecodeCache) -> tuple[Float[Array, "B K V"], DecodeCache]:
        """Reads one token of every hypothesis (the first is `start_id`) and gives the next one's logits."""
        states = self._embed(tokens, cache.position[None], deterministic=True)
        hidden, cache = self.decoder.step(states, cache)
        return self.logits_from(hidden), cache

    def _check_length(self, length: int) -> None:
        c = self.config
        if c.position == "learned" and length > c.max_positions:
            raise ConfigError(f"{length} tokens, but max_positions = {c.max_positions}; shorten them or raise it.")
