"""The readers of a context in MoEL's lineage, each a module of one model (`systems.classic.model`)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import check_numbers
from empax.core.types import EMOTIONS
from empax.data.exemplars import LabelledBatch
from empax.data.knowledge import SOCIAL_RELATIONS
from empax.models.layers import normal
from empax.models.stack import Stack
from empax.models.transformer import EncoderDecoder
from empax.models.transformer_config import TransformerConfig
from empax.parts.generator import contrast

FEELINGS, COGNITION = SOCIAL_RELATIONS[0], SOCIAL_RELATIONS[1:]
"""The relation of feelings, xReact, and those of what else follows from a turn."""


@flax.struct.dataclass
class ConceptWords:
    """Concepts of the words of a source; `place` is the position of the source word that each belongs to."""

    ids: Int[Array, "B K"]
    mask: Bool[Array, "B K"]
    place: Int[Array, "B K"]
    intensity: Float[Array, "B K"]


@flax.struct.dataclass
class FactTexts:
    """The last turn and its clauses, what follows from each (facts of COGNITION), and the feelings that each evokes.

    `of` is the row of `turns` that a fact is about, `relation` the fact's index into COGNITION.
    """

    turns: Int[Array, "B U X"]
    turns_mask: Bool[Array, "B U X"]
    feelings: Int[Array, "B U X"]
    feelings_mask: Bool[Array, "B U X"]
    tails: Int[Array, "B P Y"]
    tails_mask: Bool[Array, "B P Y"]
    of: Int[Array, "B P"]
    relation: Int[Array, "B P"]


@flax.struct.dataclass
class ClassicBatch(LabelledBatch):
    """A batch of words with their speakers; only the training step sets `step`, the number of updates made."""

    speaker: Int[Array, "B S"]  # a word id: <speaker>, <listener>, or that of the first token
    emotional: Bool[Array, "B S"]  # words of the emotion lexicon
    feedback: Int[Array, "B F"] | None = None  # the turn after the response, if critics read it
    feedback_mask: Bool[Array, "B F"] | None = None
    facts: Int[Array, "B M W"] | None = None  # a row for each of SOCIAL_RELATIONS, if a reader needs them
    facts_mask: Bool[Array, "B M W"] | None = None
    intensity: Float[Array, "B S"] | None = None  # of each word's emotion, if a reader needs it
    concepts: ConceptWords | None = None  # if a reader needs them
    cognition: FactTexts | None = None  # likewise
    step: Int[Array, ""] | None = None


@flax.struct.dataclass(frozen=True, kw_only=True)
class Read(contrast.Read):
    """An encoded context, the input of the decoder and the losses.

    The fields are arrays but are annotated Any: JAX also builds pytrees of specs, axes and placeholders.
    """

    words: Any  # [B, S], the id of each state
    context: Any  # [B, C], the vector that the emotion is read from
    emotion: Any = None  # [B, 32] logits
    start: Any = None  # [B, D], replaces the decoder's first embedding
    gate: Any = None  # [B, E], the weight of each listener
    intensity: Any = None  # [B, S], target of the decoder's attention
    memories: Any = flax.struct.field(default_factory=dict)  # further memories that decoder layers attend to, by name
    losses: Any = flax.struct.field(default_factory=dict)  # others, by name: values [B], a mask of the known ones [B]


class Reader(nn.Module):
    """Base of the modules that extend a `Read`; `words` is the model they belong to, `losses` names their losses."""

    config: TransformerConfig
    settings: Any  # the reader's own; None = it has none
    losses: ClassVar[tuple[str, ...]] = ()

    def __call__(self, batch: ClassicBatch, words: EncoderDecoder, read: Read, *, train: bool) -> Read:
        raise NotImplementedError


class Linear(nn.Module):
    """`x W + b`, in float32."""

    size: int
    use_bias: bool = True

    @nn.compact
    def __call__(self, values: Float[Array, "*B D"]) -> Float[Array, "*B F"]:
        width = values.shape[-1]
        result = values.astype(jnp.float32) @ self.param("weight", normal(width**-0.5), (width, self.size))
        if not self.use_bias:
            return result
        return result + jnp.broadcast_to(self.param("bias", nn.initializers.zeros, (self.size,)), result.shape)


def encode_texts(
    stack: Stack, words: EncoderDecoder, ids: Int[Array, "N W"], mask: Bool[Array, "N W"], *, train: bool
) -> Float[Array, "N W D"]:
    """Encodes short texts with the encoder `stack`."""
    inputs = words.enter(stack, words.embed(ids), jnp.arange(ids.shape[1]), deterministic=not train)
    return stack(inputs, mask[:, None, :], deterministic=not train)[0]


def next_rows(valid: Bool[Array, " B"]) -> Int[Array, " B"]:
    """Returns the index of the next row for each row, cyclically; filler rows, which are last, map to themselves."""
    rows, count = jnp.arange(len(valid)), jnp.sum(valid)
    return jnp.where(valid, (rows + 1) % jnp.maximum(count, 1), rows)


@dataclasses.dataclass(frozen=True)
class EmotionSettings:
    """Settings of the reader "emotion".

    Attributes:
      start: whether the decoder starts from the projected logits. Source: Li et al. 2020 (EmpDG), also KEMP.
    """

    start: bool = False


class EmotionHead(Reader):
    """A linear layer from the context's vector to the 32 emotions. Source: MoEL, emotion tracker."""

    settings: EmotionSettings
    losses: ClassVar[tuple[str, ...]] = ("emotion",)

    def setup(self) -> None:
        self.head = Linear(len(EMOTIONS), use_bias=False)
        if self.settings.start:
            self.start = Linear(self.config.d_model)

    def __call__(self, batch: ClassicBatch, words: EncoderDecoder, read: Read, *, train: bool) -> Read:
        logits = self.head(read.context)
        start = self.start(logits) if self.settings.start else read.start
        return read.replace(emotion=logits, start=start)  # type: ignore[attr-defined]


class EmotionWords(Reader):
    """A second encoder of the context's emotion words alone; the decoder attends to both encoders.

    Source: Li et al. 2020 (EmpDG), the generator.
    """

    def setup(self) -> None:
        self.encoder = Stack(self.config, self.config.num_encoder_layers, decoder=False)

    def __call__(self, batch: ClassicBatch, words: EncoderDecoder, read: Read, *, train: bool) -> Read:
        # The first token, as in the context, precedes the words.
        kept = (batch.emotional | (jnp.arange(batch.source.shape[1]) == 0)[None]) & batch.source_mask
        order = jnp.argsort(~kept, axis=1, stable=True)
        mask = jnp.take_along_axis(kept, order, axis=1)
        ids = jnp.take_along_axis(batch.source, order, axis=1)
        states = encode_texts(self.encoder, words, ids, mask, train=train)
        return read.replace(  # type: ignore[attr-defined]
            states=jnp.concatenate([read.states, states], axis=1),
            mask=jnp.concatenate([read.mask, mask], axis=1),
            words=jnp.concatenate([read.words, ids], axis=1),
            context=jnp.concatenate([states[:, 0].astype(jnp.float32), read.context], axis=-1),
        )


@dataclasses.dataclass(frozen=True)
class ListenersSettings:
    """Settings of the reader "listeners".

    Attributes:
      top: number of listeners used, those of the highest logits; 0 = all.
      teacher_decay_steps: decay, in steps, of `teacher_probability`.
    """

    top: int = 0
    teacher_decay_steps: int = 10_000

    def __post_init__(self) -> None:
        check_numbers(self, "top", least=0, most=len(EMOTIONS))
        check_numbers(self, "teacher_decay_steps", least=1)


def teacher_probability(step: Int[Array, ""], settings: ListenersSettings) -> Float[Array, ""]:
    """Returns the probability that the gold emotions gate a training batch: f + (1 - f) exp(-step / decay), f = 1e-4.

    Source: Lin et al. 2019 (MoEL), released code.
    """
    return 1e-4 + (1.0 - 1e-4) * jnp.exp(-step.astype(jnp.float32) / settings.teacher_decay_steps)


class ListenerGate(Reader):
    """The weights of the 32 listeners: the softmax of the emotion logits, or in some batches the gold emotion.

    Source: MoEL. These batches of training become ever rarer, see `teacher_probability`. In them, rows whose emotion is
    unknown keep the softmax.
    """

    settings: ListenersSettings

    def __call__(self, batch: ClassicBatch, words: EncoderDecoder, read: Read, *, train: bool) -> Read:
        logits, s = read.emotion, self.settings
        if s.top:
            least = jax.lax.top_k(logits, s.top)[0][:, -1:]
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        gate = jax.nn.softmax(logits)
        if train and batch.step is not None:
            drawn = jax.random.uniform(self.make_rng("draws")) < teacher_probability(batch.step, s)
            gold = jax.nn.one_hot(batch.emotion, len(EMOTIONS))
            gate = jnp.where((batch.emotion >= 0)[:, None] & drawn, gold, gate)
        return read.replace(gate=gate)  # type: ignore[attr-defined]
