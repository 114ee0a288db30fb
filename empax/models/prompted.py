"""A decoder-only model in the role of an encoder-decoder: the prompt is its source, the response its target.

`encode` reads the prompt once and keeps every layer's keys and values; `decode` and `step` read on from there. So the
tasks of a system take either kind of generator, and the loss is on the response alone.
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
    """A prompt that has been read; F tokens of prefix stand before its S own.

    The fields are arrays, but annotated Any: JAX also builds pytrees of specs, axes and placeholders.
    """

    hidden: Any  # [B, S, D], final states of the prompt's own tokens
    key: Any  # [L, B, G, F + S, N]
    value: Any  # [L, B, G, F + S, N]
    start: Any  # [B], the prompt's last token, which predicts the first of the response


class PromptedDecoder(Around):
    """`model` with the methods of `EncoderDecoder`.

    Attributes:
      prefix: F ids in front of every source, the beginning of a chat and its instruction.
      start_id: the prompt's last token, the same for all; it predicts the first token of the response. None: the last
        token of each source, which then has at least one.
    """

    model: DecoderOnly
    prefix: tuple[int, ...] = ()
    start_id: int | None = None

    @nn.nowrap
    def _with_prefix(self, mask: Bool[Array, "B S"]) -> Bool[Array, "B R"]:
        """Which tokens the cache holds: the prefix and the source, but not the start."""
        if self.start_id is None:
            mask = before_last(mask)
        return jnp.concatenate([jnp.ones((mask.shape[0], len(self.prefix)), bool), mask], axis=1)

    def encode(
        self, source: Int[Array, "B S"], source_mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> PromptStates:
        """Reads prefix and source. Padding may stand anywhere: positions count real tokens."""
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
        """Teacher-forced states: state t predicts `target[:, t]`."""
        shifted = jnp.concatenate([states.start[:, None], target[:, :-1]], axis=1)
        prompt = (states.key, states.value, self._with_prefix(states_mask))
        return self.model.read_on(shifted, *prompt, deterministic=deterministic)

    def start_cache(
        self, states: PromptStates, states_mask: Bool[Array, "B ..."], *, num_hypotheses: int, max_length: int
    ) -> PromptCache:
        """A cache behind the prompt, whose keys and values stand once per example; the first step reads `start_id`."""
        mask = self._with_prefix(states_mask)
        return self.model.cache_behind(
            states.key, states.value, mask, num_hypotheses=num_hypotheses, max_length=max_length
        )


class FusionInPrompt(PromptedDecoder):
    """A prompted model with K exemplars per example, read one after the other and then the context.

    Sources are [B, K, S], each an exemplar in its first `split` columns and the context, the same in each, behind.
    """

    split: int = 0

    @nn.nowrap
    def _with_prefix(self, mask: Bool[Array, "B ..."]) -> Bool[Array, "B R"]:
        return super()._with_prefix(self.states_mask(mask))

    @nn.nowrap
    def states_mask(self, source_mask: Bool[Array, "B ..."]) -> Bool[Array, "B R"]:
        """Which states are of real tokens; a flat mask stays as it is."""
        return source_mask if source_mask.ndim == 2 else self._joined(source_mask, source_mask)

    @nn.nowrap
    def _joined(self, source: Array, mask: Bool[Array, "B K S"]) -> Array:
        """[B, K * split + (S - split)]: all exemplars, then the context of the first row that has one."""
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
    """What heads pool over: the states themselves, or a prompt's final ones."""
    return states.hidden if isinstance(states, PromptStates) else states
