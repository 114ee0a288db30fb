"""The decoder-only Transformer: one module covers Llama, Qwen, Mistral, GPT-2 and OPT, by settings.

Parameters are named and stacked as in an encoder-decoder: "token_embedding", "layers/attention/query", ...
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.sharding import keep_rows_split
from empax.models.arithmetic import contract, rows_of
from empax.models.decoder_families import gpt2_config, llama_config
from empax.models.decoder_only_config import DecoderOnlyConfig
from empax.models.feed_forward import FeedForward
from empax.models.layers import Attention, Dropout, Norm, causal, normal
from empax.models.rotary import Rotary, rotary, rotation_rates, rotation_size
from empax.models.scanned import DecodeCache, Past, cache_dtype, extend_cache, rematerialized, scan_layers, step_layers

__all__ = ["DecoderOnly", "DecoderOnlyConfig", "PromptCache", "gpt2_config", "last_tokens", "llama_config"]


@flax.struct.dataclass
class PromptCache(DecodeCache):
    """Cache of decoding after a prompt, which is stored where an encoder-decoder stores its source.

    `cross` and `source_mask` are the prompt's, once per example, without its last token; `past` is of the tokens that
    each hypothesis has read since, [L, B, K, G, T, N].
    """

    prompt_length: Any  # [B] int32: real tokens of the prompt before its last

    def take(self, rows: Int[Array, " R"]) -> Any:
        return super().take(rows).replace(prompt_length=self.prompt_length[rows])


def last_tokens(tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """Returns the last real token of each prompt, the start token for `decoding.search.generate`."""
    return jnp.take_along_axis(tokens, _last_places(mask)[:, None], axis=1)[:, 0]


def before_last(mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Returns `mask` without the last real token of each prompt."""
    return mask & (jnp.arange(mask.shape[1])[None] != _last_places(mask)[:, None])


def _last_places(mask: Bool[Array, "B T"]) -> Int[Array, " B"]:
    return mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)


def _positions(mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the number of real tokens before each token."""
    return jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=1) - 1, 0)


def _within(
    mask: Bool[Array, "B T S"], reading: Int[Array, "B T"], read: Int[Array, "B S"], window: Int[Array, ""] | None
) -> Bool[Array, "B T S"]:
    """Masks tokens `window` or more positions back; `reading` and `read` are the positions of queries and keys."""
    return mask if window is None else mask & (reading[:, :, None] - read[:, None, :] < window)


class DecoderLayer(nn.Module):
    """Self-attention and feed-forward, each with a residual and a norm; pre-norm or post-norm."""

    config: DecoderOnlyConfig

    def setup(self) -> None:
        c = self.config
        dtype = jnp.dtype(c.dtype)
        self.attention = Attention(
            c.d_model,
            c.num_heads,
            c.head_dim,
            use_bias=c.attention_bias,
            scale=True,
            dropout=c.dropout if c.attention_dropout is None else c.attention_dropout,
            dtype=dtype,
            num_kv_heads=c.num_kv_heads,
            out_bias=c.attention_out_bias,
            head_norm_eps=c.layer_norm_eps if c.head_norm else None,
            kernel=c.attention,
        )
        self.attention_norm = Norm(c.norm, c.layer_norm_eps, dtype)
        self.feed_forward = FeedForward(c.d_ff, c.activation, c.feed_forward_bias, dropout=0.0, dtype=dtype)
        self.feed_forward_norm = Norm(c.norm, c.layer_norm_eps, dtype)
        self.dropout = Dropout(c.dropout)

    def _inputs(self, states: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.attention_norm(states) if self.config.pre_norm else states

    def _add(
        self, states: Float[Array, "B T D"], attended: Float[Array, "B T D"], deterministic: bool
    ) -> Float[Array, "B T D"]:
        before = self.config.pre_norm
        states = states + self.dropout(attended, deterministic=deterministic)
        states = states if before else self.attention_norm(states)
        changed = self.feed_forward(self.feed_forward_norm(states) if before else states, deterministic=deterministic)
        states = states + self.dropout(changed, deterministic=deterministic)
        return states if before else self.feed_forward_norm(states)

    def __call__(
        self, states: Float[Array, "B T D"], mask: Bool[Array, "B T T"], angles: Rotary | None, *, deterministic: bool
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B G T N"], Float[Array, "B G T N"]]]:
        """Returns the next states, and the layer's keys and values."""
        inputs = self._inputs(states)
        query, key, value = self.attention.queries_keys_values(inputs, angles)
        attended = self.attention.attend(
            query, key, value, mask=mask, bias=None, deterministic=deterministic, causal=not self.config.windows
        )
        return self._add(states, attended, deterministic), (key, value)

    def read_on(
        self,
        states: Float[Array, "B T D"],
        prompt: tuple[Float[Array, "B G S N"], Float[Array, "B G S N"]],
        mask: Bool[Array, "B T R"],
        angles: Rotary | None,
        *,
        deterministic: bool,
    ) -> Float[Array, "B T D"]:
        """Returns the next states of tokens that follow a prompt of S tokens; R = S + T."""
        inputs = self._inputs(states)
        own = self.attention.keys_values(inputs, angles)
        key, value = (jnp.concatenate(pair, axis=2) for pair in zip(prompt, own, strict=True))
        query = self.attention.queries(inputs, angles)
        attended = self.attention.attend(query, key, value, mask=mask, bias=None, deterministic=deterministic)
        return self._add(states, attended, deterministic)

    def step(
        self,
        states: Float[Array, "B K D"],
        past: Past,
        layer: Int[Array, ""],
        prompt: tuple[Float[Array, "B G N S"], Float[Array, "B G S N"]],
        prompt_mask: Bool[Array, "B S"],
        angles: Rotary | None,
        position: Int[Array, ""],
        window: Int[Array, ""] | None,
    ) -> tuple[Float[Array, "B K D"], Past]:
        """Processes one token of every hypothesis; reads and extends the caches of all layers at `layer`."""
        inputs = self._inputs(states)
        # Hypotheses take the axis of positions: [B, G, K, N] becomes one position of each, [B, K, G, 1, N].
        key, value = (jnp.swapaxes(item, 1, 2)[..., None, :] for item in self.attention.keys_values(inputs, angles))
        all_keys, own_key = extend_cache(past.key, key, layer, position)
        all_values, own_value = extend_cache(past.value, value, layer, position)
        query = self.attention.queries(inputs, angles)
        places = jnp.arange(past.key.shape[4])
        read = places <= position if window is None else (places <= position) & (position - places < window)
        attended = self.attention.attend_shared_and_own(query, prompt, prompt_mask, (own_key, own_value), read)
        return self._add(states, attended, True), Past(all_keys, all_values)


class DecoderOnly(nn.Module):
    """Decoder-only language model; call its methods with `model.apply({"params": p}, ..., method="hidden")`.

    Padding may be on either side, or in between: positions count real tokens only.

    To answer prompts, wrap it in a `models.prompted.PromptedDecoder`.

    Attributes:
      config: sizes and options of the family.
      rows_fit: whether the caller guarantees that each row, without padding, fits the table of learned positions; if
        False, the padded length must fit.
    """

    config: DecoderOnlyConfig
    rows_fit: bool = False

    def setup(self) -> None:
        c = self.config
        init, size = normal(0.02), c.embedding_size or c.d_model
        self.token_embedding = self.param("token_embedding", init, (c.vocab_size, size))
        if not c.tie_embeddings:
            self.output_embedding = self.param("output_embedding", init, (c.vocab_size, size))
        if c.embedding_size:
            self.embedding_in = self.param("embedding_in", normal(size**-0.5), (size, c.d_model))
            self.embedding_out = self.param("embedding_out", normal(c.d_model**-0.5), (c.d_model, size))
        if c.position == "learned":
            rows = c.max_positions + c.position_offset
            self.position_embedding = self.param("position_embedding", init, (rows, c.d_model))
        self.layers = DecoderLayer(c)
        if c.final_norm:
            self.final_norm = Norm(c.norm, c.layer_norm_eps, jnp.dtype(c.dtype))
        self.dropout = Dropout(c.dropout if c.embedding_dropout is None else c.embedding_dropout)

    def _embed(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "#B #T"], deterministic: bool
    ) -> Float[Array, "B T D"]:
        c = self.config
        states = rows_of(self.token_embedding, tokens)
        if c.embedding_size:
            states = contract("BTE,ED->BTD", states.astype(c.dtype), self.embedding_in)
        if c.position == "learned":
            states = states + rows_of(self.position_embedding, positions + c.position_offset)
        return self.dropout(states.astype(c.dtype), deterministic=deterministic)

    def _finished(self, states: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Applies the final norm and output projection, before the logits: E is D without `embedding_size`."""
        states = self.final_norm(states) if self.config.final_norm else states
        return contract("BTD,DE->BTE", states, self.embedding_out) if self.config.embedding_size else states

    def _angles(self, positions: Int[Array, "B T"]) -> Rotary | None:
        c = self.config
        if c.position != "rope":
            return None
        rates = rotation_rates(c.head_dim, c.rope_theta, c.rope_scaling)
        return rotary(positions, rates, rotation_size(c.rope_scaling))

    def _windows(self) -> Int[Array, " L"] | None:
        """Returns each layer's attention window; None if all are unlimited."""
        sizes = self.config.windows
        return jnp.array([size or jnp.iinfo(jnp.int32).max for size in sizes], jnp.int32) if sizes else None

    def _scan(self, body: Any, carry: Any, per_layer: Any, *shared: Any) -> Any:
        length, unroll = self.config.num_layers, self.config.unroll
        return scan_layers(body, self.layers, carry, per_layer, *shared, length=length, unroll=unroll)

    def _read(
        self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], *, keep: bool, deterministic: bool
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "L B G T N"], Float[Array, "L B G T N"]] | None]:
        """Returns states before the final norm and, if `keep`, the keys and values of every layer."""
        length = tokens.shape[1]
        self._check_length(length)
        positions = _positions(mask)

        def body(layer: DecoderLayer, states: jax.Array, window: Any, mask: Any, *shared: Any) -> tuple[jax.Array, Any]:
            mask = _within(mask, positions, positions, window)
            states, keys_values = layer(states, mask, *shared, deterministic=deterministic)
            return keep_rows_split(states), keys_values if keep else None

        body = rematerialized(body, self.config.remat)
        states = keep_rows_split(self._embed(tokens, positions, deterministic))
        return self._scan(body, states, self._windows(), causal(length) & mask[:, None, :], self._angles(positions))

    def hidden(
        self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], *, deterministic: bool = True
    ) -> Float[Array, "B T D"]:
        """Returns final states: state t predicts token t + 1 from `tokens[:, : t + 1]`; meaningless at padding."""
        states, _ = self._read(tokens, mask, keep=False, deterministic=deterministic)
        return self._finished(states)

    def read(
        self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], *, deterministic: bool = True
    ) -> tuple[Float[Array, "B T D"], Float[Array, "L B G T N"], Float[Array, "L B G T N"]]:
        """Returns `hidden`, and the keys and values of every layer, for `read_on` and `cache_behind`."""
        states, kept = self._read(tokens, mask, keep=True, deterministic=deterministic)
        assert kept is not None
        return self._finished(states), *kept

    def read_on(
        self,
        tokens: Int[Array, "B T"],
        key: Float[Array, "L B G S N"],
        value: Float[Array, "L B G S N"],
        mask: Bool[Array, "B S"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T D"]:
        """Returns final states of `tokens` that follow a prompt; `key` and `value` are from `read` with `mask`."""
        batch, length = tokens.shape
        self._check_length(mask.shape[1] + length)
        positions = jnp.sum(mask.astype(jnp.int32), axis=1)[:, None] + jnp.arange(length)[None]
        before = jnp.broadcast_to(mask[:, None, :], (batch, length, mask.shape[1]))
        both = jnp.concatenate([before, jnp.broadcast_to(causal(length), (batch, length, length))], axis=2)
        every = jnp.concatenate([_positions(mask), positions], axis=1)

        def body(layer: DecoderLayer, states: jax.Array, own: Any, mask: Any, angles: Any) -> tuple[jax.Array, None]:
            *prompt, window = own
            mask = _within(mask, positions, every, window)
            states = layer.read_on(states, tuple(prompt), mask, angles, deterministic=deterministic)
            return keep_rows_split(states), None

        body = rematerialized(body, self.config.remat)
        states = keep_rows_split(self._embed(tokens, positions, deterministic))
        per_layer = (key, value, self._windows())
        return self._finished(self._scan(body, states, per_layer, both, self._angles(positions))[0])

    def _table(self) -> Float[Array, "V D"]:
        return self.token_embedding if self.config.tie_embeddings else self.output_embedding

    def logits_from(
        self, hidden: Float[Array, "B T D"], table: Float[Array, "V D"] | None = None
    ) -> Float[Array, "B T V"]:
        """Returns logits in float32; `table` is that of a `DecodeCache`."""
        return contract("BTD,VD->BTV", hidden, self._table() if table is None else table, result=jnp.float32)

    def __call__(
        self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], *, deterministic: bool = True
    ) -> Float[Array, "B T V"]:
        """Returns next-token logits: logits[:, t] predict tokens[:, t + 1]."""
        return self.logits_from(self.hidden(tokens, mask, deterministic=deterministic))

    def cache_behind(
        self,
        key: Float[Array, "L B G S N"],
        value: Float[Array, "L B G S N"],
        mask: Bool[Array, "B S"],
        *,
        num_hypotheses: int,
        max_length: int,
    ) -> PromptCache:
        """Returns a cache for continuations, of at most `max_length` tokens, of a prompt from `read` with `mask`.

        Raises:
          ConfigError: if prompt and continuation together are longer than the table of learned positions.
        """
        self._check_length(mask.shape[1] + max_length)
        c = self.config
        shape = (c.num_layers, mask.shape[0], num_hypotheses, c.num_kv_heads, max_length, c.head_dim)
        empty, key = jnp.zeros(shape, cache_dtype(c.dtype)), jnp.swapaxes(key, -2, -1)
        length = jnp.sum(mask.astype(jnp.int32), axis=1)
        cache = PromptCache(Past(empty, empty), (key, value), mask, jnp.zeros((), jnp.int32), length)
        layers, apart = self.variables["params"]["layers"], c.unroll >= c.num_layers
        return cache.with_weights(layers, self._table(), dtype=c.dtype, apart=apart)

    def step(self, tokens: Int[Array, "B K"], cache: PromptCache) -> tuple[Float[Array, "B K V"], PromptCache]:
        """Reads one token of every hypothesis (first the prompt's last) and returns the logits of the next."""
        positions = (cache.prompt_length + cache.position)[:, None]

        windows, behind = self._windows(), _positions(cache.source_mask)

        def body(layer: DecoderLayer, carry: Any, per_layer: Any, mask: Any, *shared: Any) -> tuple[Any, None]:
            index, prompt, _ = per_layer  # no memories
            window = None if windows is None else windows[index]
            mask = _within(mask[:, None], positions, behind, window)[:, 0]
            return layer.step(*carry, index, prompt, mask, *shared, window), None  # type: ignore[call-arg]

        states = self._embed(tokens, positions, deterministic=True)
        angles = self._angles(jnp.broadcast_to(positions, tokens.shape))
        shared = (cache.source_mask, angles, cache.position)
        length, unroll = self.config.num_layers, self.config.unroll
        carry = (states, cache.past)
        states, past = step_layers(body, self.layers, carry, cache, *shared, length=length, unroll=unroll)
        changed = cache.replace(past=past, position=cache.position + 1)  # type: ignore[attr-defined]
        return self.logits_from(self._finished(states), cache.table), changed

    def _check_length(self, length: int) -> None:
        c = self.config
        if c.position == "learned" and length > c.max_positions and not self.rows_fit:
            raise ConfigError(f"{length} tokens, but max_positions = {c.max_positions}; shorten them or raise it.")
