"""One model for all systems of MoEL's lineage: encoder, readers, decoder, output layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import EMOTIONS
from empax.models.arithmetic import contract
from empax.models.copying import mixed_with_copies
from empax.models.layers import causal, normal
from empax.models.scanned import DecodeCache
from empax.models.stack import Layer, StepInputs, empty_past
from empax.models.transformer import EncoderDecoder
from empax.models.transformer_config import TransformerConfig
from empax.systems.classic.adversary import AdversarySettings, Critic
from empax.systems.classic.alignment import Alignment
from empax.systems.classic.graphs import Concepts
from empax.systems.classic.mimicry import Mimicry, Refinement
from empax.systems.classic.readers import ClassicBatch, EmotionHead, EmotionWords, Linear, ListenerGate, Read

READERS: dict[str, Any] = {
    "concepts": Concepts,
    "refinement": Refinement,
    "emotion_words": EmotionWords,
    "emotion": EmotionHead,
    "listeners": ListenerGate,
    "mimicry": Mimicry,
    "alignment": Alignment,
}
"""Modules by name, in the order of a model: what "emotion" reads comes before it, what its logits gate behind it."""


class Listeners(nn.Module):
    r"""Parallel decoder layers, one per emotion, and a shared layer whose gate is always 1.

    .. math:: y = y_0 + \sum_e g_e y_e

    The layers are one module whose parameters and caches have a leading axis of experts; the shared layer is last.
    Source: Lin et al. 2019 (MoEL), emotion-aware listeners. The decoder's own layers are MoEL's meta listener.
    """

    config: TransformerConfig
    num: int = len(EMOTIONS)

    def setup(self) -> None:
        self.experts = Layer(dataclasses.replace(self.config, memories=()), cross=True)

    def _each(self, function: Any, *args: Any, in_axes: Any = None) -> Any:
        """Returns `function(layer, *args)` of every expert, stacked on a leading axis."""
        mapped = nn.vmap(
            function,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=in_axes,
            axis_size=self.num + 1,
        )
        return mapped(self.experts, *args)

    def _sum(self, gate: Float[Array, "B E"], each: Float[Array, "F B T D"]) -> Float[Array, "B T D"]:
        weights = jnp.pad(gate, ((0, 0), (0, 1)), constant_values=1.0).astype(each.dtype)
        return jnp.einsum("BF,FBTD->BTD", weights, each)

    def __call__(self, states: Float[Array, "B T D"], read: Read, *, deterministic: bool) -> Float[Array, "B T D"]:
        def listen(layer: Layer, *args: Any) -> jax.Array:
            states, mask, source, source_mask = args
            return layer(states, mask, None, source, source_mask, {}, deterministic=deterministic)[0]

        return self._sum(read.gate, self._each(listen, states, causal(states.shape[1]), read.states, read.mask))

    def start_cache(self, read: Read, *, num_hypotheses: int, max_length: int) -> DecodeCache:
        """Returns an empty cache whose axis of layers is the axis of experts."""
        cross = self._each(lambda layer, states: layer.cross_attention.cached_keys_values(states), read.states)
        past = empty_past(self.config, (self.num + 1, read.mask.shape[0], num_hypotheses), max_length)
        return DecodeCache(past, cross, read.mask, jnp.zeros((), jnp.int32))

    def step(
        self, states: Float[Array, "B K D"], gate: Float[Array, "B E"], cache: DecodeCache
    ) -> tuple[Float[Array, "B K D"], DecodeCache]:
        """Decodes one token of every hypothesis."""

        def listen(layer: Layer, *args: Any) -> Any:
            states, past, cross, mask, position = args
            past = jax.tree.map(lambda leaf: leaf[None], past)  # a cache of one layer
            inputs = StepInputs(jnp.zeros((), jnp.int32), cross, {}, mask, None, position)
            changed, past, _ = layer.step(states, past, inputs)
            return changed, jax.tree.map(lambda leaf: leaf[0], past)

        read = (cache.cross, cache.source_mask, cache.position)
        each, past = self._each(listen, states, cache.past, *read, in_axes=(None, 0, 0, None, None))
        changed = cache.replace(past=past, position=cache.position + 1)  # type: ignore[attr-defined]
        return self._sum(gate, each), changed


@flax.struct.dataclass
class ClassicCache:
    """Decoding state of the listeners and of the decoder's layers behind them."""

    decoder: DecodeCache
    listeners: Any = None  # a DecodeCache
    gate: Any = None  # [B, E]
    words: Any = None  # [B, S], as in `Read`

    def reorder(self, parents: Int[Array, "B K"]) -> ClassicCache:
        """Reorders the hypotheses as `DecodeCache.reorder` does."""
        listeners = None if self.listeners is None else self.listeners.reorder(parents)
        return self.replace(decoder=self.decoder.reorder(parents), listeners=listeners)  # type: ignore[attr-defined]


class Classic(nn.Module):
    """Encoder, readers in order, listeners if a reader gates them, decoder, and an untied output layer.

    Attributes:
      readers: names of READERS with their settings (None = the reader has none).
      adversary: settings of the critics; None = no critics.
      copies: whether words may be copied from the attended source (See et al. 2017, Eq. 9), as in the released code of
        EmpDG and KEMP by a gate that reads the decoder's state alone.
    """

    config: TransformerConfig
    readers: tuple[tuple[str, Any], ...] = ()
    adversary: AdversarySettings | None = None
    copies: bool = False

    def setup(self) -> None:
        c = self.config
        self.core = EncoderDecoder(c)
        for name, settings in self.readers:
            setattr(self, name, READERS[name](c, settings))
        if self.has_listeners:
            self.expert_layer = Listeners(c)
        if self.copies:
            self.copy_gate = Linear(1)
        if self.adversary is not None:
            self.critic, self.emotion_critic = (Critic(self.adversary.width) for _ in range(2))
        outward = normal(c.initial_output_stddev())
        self.output_embedding = self.param("output_embedding", outward, (c.vocab_size, c.d_model))
        self.output_bias = self.param("output_bias", nn.initializers.zeros, (c.vocab_size,))

    @property
    def has_listeners(self) -> bool:
        return "listeners" in dict(self.readers)

    def read(self, batch: ClassicBatch, *, train: bool) -> Read:
        """Reads the context for the decoder; `train` turns on dropout, sampling and the readers' gold emotions."""
        added = self.core.embed(batch.speaker)
        states = self.core.encode(batch.source, batch.source_mask, added=added, deterministic=not train)
        context = states[:, 0].astype(jnp.float32)
        found = Read(states=states, mask=batch.source_mask, words=batch.source, context=context)
        for name, _ in self.readers:
            found = getattr(self, name)(batch, self.core, found, train=train)
        return found

    def decode(self, target: Int[Array, "B T"], read: Read, *, train: bool) -> Float[Array, "B T V"]:
        """Returns teacher-forced logits; logits[:, t] predict target[:, t]."""
        return self.logits_from(*self.decode_with_weights(target, read, train=train), read.words)

    def decode_with_weights(
        self, target: Int[Array, "B T"], read: Read, *, train: bool
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T S"] | None]:
        """Returns the decoder's states, and its attention to the source if copying or a loss needs it."""
        inputs = self.core.decoder_inputs(target, start=read.start, deterministic=not train)
        if self.has_listeners:
            inputs = self.expert_layer(inputs, read, deterministic=not train)
        mask = causal(target.shape[1])
        wanted = self.copies or read.intensity is not None
        return self.core.decoder(
            inputs, mask, read.states, read.mask, read.memories, deterministic=not train, with_weights=wanted
        )

    def logits_from(
        self,
        hidden: Float[Array, "B T D"],
        weights: Float[Array, "B T S"] | None = None,
        words: Int[Array, "B S"] | None = None,
        table: Float[Array, "V D"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Returns the logits of the results of `decode_with_weights`; copying needs the word of each source state.

        `table` is a cache's.
        """
        table = self.output_embedding if table is None else table
        logits = contract("BTD,VD->BTV", hidden, table, result=jnp.float32)
        logits = logits + self.output_bias[None, None]
        if not self.copies:
            return logits
        assert weights is not None
        assert words is not None
        concepts = dict(self.readers).get("concepts")
        if concepts is not None and concepts.published:
            weights = jax.nn.softmax(weights)
        return mixed_with_copies(logits, jax.nn.sigmoid(self.copy_gate(hidden)[..., 0]), weights, words)

    def __call__(self, batch: ClassicBatch) -> Float[Array, "B T V"]:
        """Returns the logits of the batch's targets."""
        read = self.read(batch, train=False)
        if self.adversary is not None and self.is_initializing():
            words = self.core.embed(batch.target)
            for critic in (self.critic, self.emotion_critic):
                critic(words, batch.target_mask, read.context, words[:, 0])
        return self.decode(batch.target, read, train=False)

    def start_cache(
        self, read: Read, mask: Bool[Array, "B S"], *, num_hypotheses: int, max_length: int
    ) -> ClassicCache:
        """Returns an empty cache for `num_hypotheses` answers of at most `max_length` tokens each."""
        sizes: dict[str, Any] = {"num_hypotheses": num_hypotheses, "max_length": max_length}
        cache = self.core.start_cache(read.states, mask, start=read.start, memories=read.memories, **sizes)
        if cache.table is not None:  # the core's, which no logits read
            cache = cache.replace(table=self.output_embedding.astype(cache.table.dtype))  # type: ignore[attr-defined]
        if not self.has_listeners:
            return ClassicCache(cache, words=read.words)
        return ClassicCache(cache, self.expert_layer.start_cache(read, **sizes), read.gate, read.words)

    def step(self, tokens: Int[Array, "B K"], cache: ClassicCache) -> tuple[Float[Array, "B K V"], ClassicCache]:
        """Reads one token of every hypothesis and returns the logits of the next."""
        states, listeners = self.core.step_inputs(tokens, cache.decoder), cache.listeners
        if listeners is not None:
            states, listeners = self.expert_layer.step(states, cache.gate, listeners)
        hidden, decoder, weights = self.core.decoder.step(states, cache.decoder, with_weights=self.copies)
        logits = self.logits_from(hidden, weights, cache.words, decoder.table)
        return logits, cache.replace(decoder=decoder, listeners=listeners)  # type: ignore[attr-defined]
