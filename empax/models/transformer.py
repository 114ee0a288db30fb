"""The encoder-decoder: one module covers the Transformer from scratch, T5, BART and related models, by settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.models.arithmetic import contract, rows_of
from empax.models.layers import Dropout, causal, normal, sinusoidal_positions
from empax.models.memory_attention import Memories, Memory
from empax.models.scanned import DecodeCache
from empax.models.stack import Stack, empty_past
from empax.models.transformer_config import TransformerConfig

__all__ = ["DecodeCache", "EncoderDecoder", "Memory", "TransformerConfig", "scratch"]


def scratch(vocab_size: int, **changes: Any) -> TransformerConfig:
    """Returns the paper's first backbone, trained from scratch: pre-LN, biases, tied embeddings, relative positions.

    The vocabulary includes the special ids; `changes` are any fields of TransformerConfig.
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
        relative_slopes=True,
        alternating_norm=True,
    )
    return dataclasses.replace(defaults, **changes)


def word_level(vocab_size: int, **changes: Any) -> TransformerConfig:
    """Returns the settings of MoEL's lineage: pre-norm, attention without biases, sinusoids, projected embeddings.

    An output layer that is not tied begins with Xavier's variance, 2 / (V + D): a larger one would give each rare word
    a logit of its own before the word is seen. `changes` are the sizes, and any other fields of TransformerConfig.
    Source: the released code of MoEL (Lin et al. 2019), which MIME, EmpDG, CEM and ReflectDiffu follow.
    """
    lineage: dict[str, Any] = {
        "attention_bias": False,
        "position": "sinusoidal",
        "embed_scale": True,
        "embedding_projection": True,
        "output_stddev": (2 / (vocab_size + changes["d_model"])) ** 0.5,
    }
    return TransformerConfig(vocab_size, **{**lineage, **changes})


class EncoderDecoder(nn.Module):
    """Transformer encoder-decoder; call its methods with `model.apply({"params": p}, ..., method="encode")`."""

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        init = normal(c.initial_embedding_stddev())
        self.token_embedding = self.param("token_embedding", init, (c.vocab_size, c.d_model))
        if not c.tie_embeddings:
            outward = normal(c.initial_output_stddev())
            self.output_embedding = self.param("output_embedding", outward, (c.vocab_size, c.d_model))
        if c.position == "learned" and c.shared_positions:
            self.position_embedding = self.param("position_embedding", init, (c.position_rows(), c.d_model))
        if c.output_bias != "none":
            self.output_bias = self.param("output_bias", nn.initializers.zeros, (c.vocab_size,))
        self.encoder = Stack(c, c.num_encoder_layers, decoder=False)
        self.decoder = Stack(c, c.num_decoder_layers, decoder=True)
        self.dropout = Dropout(c.dropout)

    def enter(
        self,
        stack: Stack,
        embedded: Float[Array, "B T D"],
        positions: Int[Array, " #T"],
        *,
        deterministic: bool,
        start: Float[Array, "B D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the input of a stack; `start` replaces the scaled embedding at position 0."""
        c = self.config
        states = embedded * c.d_model**0.5 if c.embed_scale else embedded
        if start is not None:
            states = jnp.where((positions == 0)[None, :, None], start[:, None].astype(states.dtype), states)
        states = stack.project(states)
        if c.position == "sinusoidal":
            states = states + sinusoidal_positions(positions, c.d_model, c.sinusoids)[None]
        if c.position == "learned" and c.shared_positions:
            states = states + self.position_embedding[positions + c.position_offset][None]
        return self.dropout(stack.enter(states, positions).astype(c.dtype), deterministic=deterministic)

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
        """Returns the mask of encoder states of real tokens."""
        return source_mask

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns the unscaled token embeddings, which `encode` accepts as `embedded`."""
        return rows_of(self.token_embedding, tokens)

    def encode(
        self,
        source: Int[Array, "B S"] | None,
        source_mask: Bool[Array, "B S"],
        *,
        embedded: Float[Array, "B S D"] | None = None,
        added: Float[Array, "B S D"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B S D"]:
        """Returns the encoder states; states of padding are meaningless.

        `embedded` replaces the embeddings of `source`, which is then None; `added` are vectors to add to them
        (speakers, segments). Both apply before the embedding's scale and positions.
        """
        self._check_length(source_mask.shape[1])
        if embedded is None:
            assert source is not None
            embedded = self.embed(source)
        if added is not None:
            embedded = embedded + added
        positions = jnp.arange(source_mask.shape[1])
        states = self.enter(self.encoder, embedded, positions, deterministic=deterministic)
        return self.encoder(states, source_mask[:, None, :], deterministic=deterministic)[0]

    def decode_hidden(
        self, target: Int[Array, "B T"], states: Float[Array, "B S D"], states_mask: Bool[Array, "B S"], **options: Any
    ) -> Float[Array, "B T D"]:
        """Returns teacher-forced decoder states: state t has read the tokens before t and predicts `target[:, t]`.

        Options are `memories`, with the names in `config.memories`; `start`, which replaces the scaled embedding of
        `start_id` (EmpDG, KEMP: the projected logits of the emotion); and `deterministic`.
        """
        return self._decoded(target, states, states_mask, **options, with_weights=False)[0]

    def decode_with_weights(
        self, target: Int[Array, "B T"], states: Float[Array, "B S D"], states_mask: Bool[Array, "B S"], **options: Any
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T S"]]:
        """Returns `decode_hidden` and, for copying, the last layer's attention to the source, averaged over heads."""
        hidden, weights = self._decoded(target, states, states_mask, **options, with_weights=True)
        assert weights is not None
        return hidden, weights

    def _decoded(
        self,
        target: Int[Array, "B T"],
        states: Float[Array, "B S D"],
        states_mask: Bool[Array, "B S"],
        *,
        memories: Memories | None = None,
        start: Float[Array, "B D"] | None = None,
        deterministic: bool = True,
        with_weights: bool,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T S"] | None]:
        inputs = self.decoder_inputs(target, start=start, deterministic=deterministic)
        read = self._checked(memories)
        return self.decoder(
            inputs, causal(target.shape[1]), states, states_mask, read,
            deterministic=deterministic, with_weights=with_weights,
        )  # fmt: skip

    def decoder_inputs(
        self, target: Int[Array, "B T"], *, start: Float[Array, "B D"] | None = None, deterministic: bool
    ) -> Float[Array, "B T D"]:
        """Returns the input of the decoder's first layer: `target` shifted right; arguments as for `decode_hidden`."""
        length = target.shape[1]
        self._check_length(length)
        first = jnp.full((target.shape[0], 1), self.config.start_id, target.dtype)
        embedded = self.embed(jnp.concatenate([first, target[:, :-1]], axis=1))
        return self.enter(self.decoder, embedded, jnp.arange(length), deterministic=deterministic, start=start)

    def step_inputs(self, tokens: Int[Array, "B K"], cache: DecodeCache) -> Float[Array, "B K D"]:
        """Returns the input of the decoder's first layer for one token of every hypothesis."""
        position = cache.position[None]
        return self.enter(self.decoder, self.embed(tokens), position, deterministic=True, start=cache.start)

    def _checked(self, memories: Memories | None) -> Memories:
        memories = memories or {}
        if set(memories) != set(self.config.memories):
            raise ConfigError(
                f"the decoder's memories are {', '.join(self.config.memories) or 'none'} (config.memories), "
                f"but it was given {', '.join(memories) or 'none'}."
            )
        return memories

    def _table(self) -> Float[Array, "V D"]:
        return self.token_embedding if self.config.tie_embeddings else self.output_embedding

    def logits_from(
        self, hidden: Float[Array, "B T D"], table: Float[Array, "V D"] | None = None
    ) -> Float[Array, "B T V"]:
        """Returns logits in float32; `table` is that of a `DecodeCache`."""
        c = self.config
        # Scales the hidden states, not the weights: a decoding step must not copy the whole matrix.
        scaled = hidden * c.d_model**-0.5 if c.output_scale else hidden
        logits = contract("BTD,VD->BTV", scaled, self._table() if table is None else table, result=jnp.float32)
        if c.output_bias == "none":
            return logits
        bias = self.output_bias if c.output_bias == "trained" else jax.lax.stop_gradient(self.output_bias)
        return logits + bias[None, None]

    def decode(
        self, target: Int[Array, "B T"], states: Float[Array, "B S D"], states_mask: Bool[Array, "B S"], **options: Any
    ) -> Float[Array, "B T V"]:
        """Returns teacher-forced logits: logits[:, t] predict target[:, t]. `options` are those of `decode_hidden`."""
        return self.logits_from(self.decode_hidden(target, states, states_mask, **options))

    def __call__(
        self,
        source: Int[Array, "B S"],
        source_mask: Bool[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        memories: Memories | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B T V"]:
        """Returns the logits of `target` given `source` and `memories`, which has the names in `config.memories`."""
        states = self.encode(source, source_mask, deterministic=deterministic)
        return self.decode(target, states, source_mask, memories=memories, deterministic=deterministic)

    def start_cache(
        self,
        states: Float[Array, "B S D"],
        states_mask: Bool[Array, "B S"],
        *,
        num_hypotheses: int,
        max_length: int,
        memories: Memories | None = None,
        start: Float[Array, "B D"] | None = None,
    ) -> DecodeCache:
        """Returns an empty cache for `num_hypotheses` continuations of at most `max_length` tokens each.

        `memories` and `start` are as for `decode_hidden`.
        """
        c = self.config
        self._check_length(max_length)
        cache = DecodeCache(
            empty_past(c, (c.num_decoder_layers, states.shape[0], num_hypotheses), max_length),
            self.decoder.keys_values(states),
            states_mask,
            jnp.zeros((), jnp.int32),
            memories=self.decoder.remember(self._checked(memories)),
            start=start,
        )
        layers, apart = self.decoder.variables["params"]["layers"], c.unroll >= c.num_decoder_layers
        return cache.with_weights(layers, self._table(), dtype=c.dtype, apart=apart)

    def step(self, tokens: Int[Array, "B K"], cache: DecodeCache) -> tuple[Float[Array, "B K V"], DecodeCache]:
        """Reads one token of every hypothesis (the first is `start_id`) and returns the logits of the next."""
        hidden, cache, _ = self.decoder.step(self.step_inputs(tokens, cache), cache, with_weights=False)
        return self.logits_from(hidden, cache.table), cache

    def step_with_weights(
        self, tokens: Int[Array, "B K"], cache: DecodeCache
    ) -> tuple[Float[Array, "B K D"], DecodeCache, Float[Array, "B K S"]]:
        """Works like `step`, but returns the states and weights of `decode_with_weights` instead of logits."""
        hidden, cache, weights = self.decoder.step(self.step_inputs(tokens, cache), cache, with_weights=True)
        assert weights is not None
        return hidden, cache, weights

    def _check_length(self, length: int) -> None:
        c = self.config
        if c.position == "learned" and length > c.max_positions:
            raise ConfigError(f"{length} tokens, but max_positions = {c.max_positions}; shorten them or raise it.")
