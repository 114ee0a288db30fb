"""A decoder-only model with the interface of an encoder-decoder: the prompt is the source, the response the target.

`encode` reads the prompt once and keeps every layer's keys and values; `decode` and `step` continue from there. So the
tasks of a system accept either kind of generator, and the loss covers the response alone.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.models.decoder_only import DecoderOnly, PromptCache, before_last, last_tokens
from empax.models.fusion_in_decoder import Around


@flax.struct.dataclass
class PromptStates:
    """An encoded prompt: F tokens of prefix, then S tokens of source.

    The fields are arrays, annotated Any since JAX also builds pytrees of specs, axes and placeholders.
    """

    hidden: Any  # [B, S, D], final states of the source tokens
    key: Any  # [L, B, G, F + S, N]
    value: Any  # [L, B, G, F + S, N]
    start: Any  # [B], the prompt's last token, which predicts the first of the response


class PromptedDecoder(Around):
    """`model` with the methods of `EncoderDecoder`.

    To answer, run `encode` and `start_cache`, and pass the states' `start` to `decoding.search.generate`: the first
    step reads it and returns the logits of the first token of the response.

    Attributes:
      prefix: F ids before every source: the beginning of a chat and its instruction.
      start_id: the prompt's last token, the same for all examples; it predicts the first token of the response. None:
        the last token of each source, which then needs at least one.
    """

    model: DecoderOnly
    prefix: tuple[int, ...] = ()
    start_id: int | None = None

    @nn.nowrap
    def _with_prefix(self, mask: Bool[Array, "B S"]) -> Bool[Array, "B R"]:
        return jnp.concatenate([jnp.ones((mask.shape[0], len(self.prefix)), bool), mask], axis=1)

    @nn.nowrap
    def _cached(self, mask: Bool[Array, "B S"]) -> Bool[Array, "B R"]:
        """Returns the mask of the cached tokens: the prefix and the source, without the start token."""
        return self._with_prefix(before_last(mask) if self.start_id is None else mask)

    def encode(
        self, source: Int[Array, "B S"], source_mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> PromptStates:
        """Reads prefix and source. Padding may be anywhere: positions count real tokens."""
        prefix = jnp.broadcast_to(jnp.array(self.prefix, jnp.int32)[None], (source.shape[0], len(self.prefix)))
        tokens = jnp.concatenate([prefix, source], axis=1)
        hidden, key, value = self.model.read(tokens, self._with_prefix(source_mask), deterministic=deterministic)
        if self.start_id is None:
            start = last_tokens(source, source_mask)
        else:
            start = jnp.full(source.shape[:1], self.start_id, source.dtype)
        return PromptStates(hidden[:, len(self.prefix) :], key, value, start)

    def decode_hidden(
        self,
        target: Int[Array, "B T"],
        states: PromptStates,
        states_mask: Bool[Array, "B ..."],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T D"]:
        """Returns teacher-forced states: state t predicts `target[:, t]`."""
        shifted = jnp.concatenate([states.start[:, None], target[:, :-1]], axis=1)
        prompt = (states.key, states.value, self._cached(states_mask))
        return self.model.read_on(shifted, *prompt, deterministic=deterministic)

    def start_cache(
        self, states: PromptStates, states_mask: Bool[Array, "B ..."], *, num_hypotheses: int, max_length: int
    ) -> PromptCache:
        """Returns a cache that continues the prompt, stored once per example; the first step reads `states.start`."""
        mask = self._cached(states_mask)
        return self.model.cache_behind(
            states.key, states.value, mask, num_hypotheses=num_hypotheses, max_length=max_length
        )


class FusionInPrompt(PromptedDecoder):
    """A prompted model with K exemplars per example: it reads the exemplars in order, then the context.

    Sources are [B, K, S]: an exemplar in the first `split` columns, followed by the context, the same in each row.
    """

    split: int = 0

    @nn.nowrap
    def _cached(self, mask: Bool[Array, "B ..."]) -> Bool[Array, "B R"]:
        return super()._cached(self.states_mask(mask))

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B ..."]) -> Bool[Array, "B R"]:
        """Returns the mask of the prompt's real tokens; a flat mask is returned unchanged."""
        return source_mask if source_mask.ndim == 2 else self._joined(source_mask, source_mask)

    @nn.nowrap
    def _joined(self, source: Array, mask: Bool[Array, "B K S"]) -> Array:
        """Returns [B, K * split + (S - split)]: all exemplars, then the context of the first row that has one."""
        batch, passages, _ = source.shape
        row = jnp.argmax(mask[:, :, self.split :].any(axis=2), axis=1)
        context = jnp.take_along_axis(source, row[:, None, None], axis=1)[:, 0, self.split :]
        return jnp.concatenate([source[:, :, : self.split].reshape(batch, passages * self.split), context], axis=1)

    def encode(
        self, source: Int[Array, "B K S"], source_mask: Bool[Array, "B K S"], *, deterministic: bool = True
    ) -> PromptStates:
        """Reads all exemplars and the context as one prompt."""
        mask = self.states_mask(source_mask)
        return super().encode(self._joined(source, source_mask), mask, deterministic=deterministic)


def pooled_states(states: Any) -> jax.Array:
    """Returns the states that heads pool over: `states` itself, or the final states of a prompt."""
    return states.hidden if isinstance(states, PromptStates) else states
