"""What the systems of MoEL's lineage read from a context, each a part of one model (`systems.classic.model`)."""

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

FEELINGS = "xReact"
COGNITION = tuple(relation for relation in SOCIAL_RELATIONS if relation != FEELINGS)
"""The relations that tell what follows from a turn, but for feelings."""


@flax.struct.dataclass
class ConceptWords:
    """Words beside those of a source; `place` is that of the source's word which each belongs to."""

    ids: Int[Array, "B K"]
    mask: Bool[Array, "B K"]
    place: Int[Array, "B K"]
    intensity: Float[Array, "B K"]


@flax.struct.dataclass
class FactTexts:
    """The last turn and its clauses, what follows from each (facts of COGNITION), and what each makes people feel.

    `of` is the row of `turns` that a fact is about, `relation` its index into COGNITION.
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
    """A batch of words that knows who said each of them.

    `step` counts the updates made; only the training step fills it in.
    """

    speaker: Int[Array, "B S"]  # a word id: <speaker>, <listener>, or that of the first token
    emotional: Bool[Array, "B S"]  # words of the lexicon of emotions
    feedback: Int[Array, "B F"] | None = None  # the turn that follows the response, where critics want it
    feedback_mask: Bool[Array, "B F"] | None = None
    facts: Int[Array, "B M W"] | None = None  # a row for each of SOCIAL_RELATIONS, where a reader wants them
    facts_mask: Bool[Array, "B M W"] | None = None
    intensity: Float[Array, "B S"] | None = None  # of each word's emotion, where a reader wants it
    concepts: ConceptWords | None = None  # where a reader wants them
    cognition: FactTexts | None = None  # likewise
    step: Int[Array, ""] | None = None


@flax.struct.dataclass
class Read:
    """A context as the decoder and the losses get it.

    The fields are arrays, but annotated Any: JAX also builds pytrees of specs, axes and placeholders.
    """

    states: Any  # [B, S, D]
    mask: Any  # [B, S] bool
    words: Any  # [B, S], the id that each state stands for
    context: Any  # [B, C], what the emotion is read from
    emotion: Any = None  # [B, 32] logits
    start: Any = None  # [B, D], stands for the decoder's first embedding
    gate: Any = None  # [B, E], how much each listener counts
    intensity: Any = None  # [B, S], shares that the decoder's attention is to have
    memories: Any = flax.struct.field(default_factory=dict)  # what decoder layers attend to besides, by name
    losses: Any = flax.struct.field(default_factory=dict)  # by name, values [B] and where they are known [B]


class Reader(nn.Module):
    """Adds something to what has been read; `words` is the model that it is part of, `losses` names those it has."""

    config: TransformerConfig
    settings: Any  # its own; None = it has none
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
    """States of short texts, in an encoder of their own."""
    inputs = words.enter(stack, words.embed(ids), jnp.arange(ids.shape[1]), deterministic=not train)
    return stack(inputs, mask[:, None, :], deterministic=not train)[0]


def next_rows(valid: Bool[Array, " B"]) -> Int[Array, " B"]:
    """Of each row of a batch the next one, of the last the first; of filler, which stands behind, itself."""
    rows, count = jnp.arange(len(valid)), jnp.sum(valid)
    return jnp.where(valid, (rows + 1) % jnp.maximum(count, 1), rows)


def emotion_nll(logits: Float[Array, "B C"], emotion: Int[Array, " B"]) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Negative log-likelihood of each row's emotion, and where that is known."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, jnp.maximum(emotion, 0)[:, None], axis=1)[:, 0], emotion >= 0


@dataclasses.dataclass(frozen=True)
class EmotionSettings:
    """Settings of the reader "emotion".

    Attributes:
      start: whether the decoder starts from the projected logits. Source: Li et al. 2020 (EmpDG); KEMP too.
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
        losses = {**read.losses, "emotion": emotion_nll(logits, batch.emotion)}
        return read.replace(emotion=logits, start=start, losses=losses)  # type: ignore[attr-defined]


class EmotionWords(Reader):
    """A second encoder, of the context's words of emotion alone; the decoder reads both.

    Source: Li et al. 2020 (EmpDG), the generator.
    """

    def setup(self) -> None:
        self.encoder = Stack(self.config, self.config.num_encoder_layers, decoder=False)

    def __call__(self, batch: ClassicBatch, words: EncoderDecoder, read: Read, *, train: bool) -> Read:
        # The first token stands before the words, as before the context.
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
      top: how many listeners an answer takes; 0 = all.
      teacher_floor, teacher_decay_steps: of `teacher_probability`.
    """

    top: int = 0
    teacher_floor: float = 1e-4
    teacher_decay_steps: int = 10_000

    def __post_init__(self) -> None:
        check_numbers(self, "top", least=0, most=len(EMOTIONS))
        check_numbers(self, "teacher_floor", least=0, most=1)
        check_numbers(self, "teacher_decay_steps", least=1)


def teacher_probability(step: Int[Array, ""], settings: ListenersSettings) -> Float[Array, ""]:
    r"""How often a batch of training is gated by its gold emotions: f + (1 - f) exp(-step / decay).

    Source: Lin et al. 2019 (MoEL), released code.
    """
    floor = settings.teacher_floor
    return floor + (1.0 - floor) * jnp.exp(-step.astype(jnp.float32) / settings.teacher_decay_steps)


class ListenerGate(Reader):
    """How much each of the 32 listeners counts: the softmax of the emotion's logits. Source: MoEL.

    In training a whole batch is gated by the gold emotions instead, less and less often. Rows whose emotion is unknown
    never are.
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
