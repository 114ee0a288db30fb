"""CEM's reader: what follows from the last turn, by five relations, refines the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.data.knowledge import SOCIAL_RELATIONS
from empax.models.heads import masked_mean
from empax.models.stack import Stack
from empax.models.transformer_config import TransformerConfig
from empax.systems.classic.mimicry import RefinedContext
from empax.systems.classic.readers import ClassicBatch, Linear, Read, Words

AFFECTION = SOCIAL_RELATIONS.index("xReact")
"""The relation that tells feelings."""
COGNITION = [relation for relation in range(len(SOCIAL_RELATIONS)) if relation != AFFECTION]
_HIDDEN = 3  # of the last layers, times d_model


class Refinement(nn.Module):
    r"""Feelings refine the context that the emotion is read from; these and four more kinds, the decoder's.

    .. math:: u = [\tilde c_1; ...; \tilde c_5], \quad \tilde c_r = Enc_r([c; k_r]), \quad
              W_2 \, ReLU(W_1 (\sigma(u) \odot u))

    with k the first state of the facts of a relation, and of feelings the mean of the states. A relation without a fact
    is a vector of zeros.

    Departure: the mean of feelings leaves padding out, which the released code counts in; the hidden layer is three
    times as wide as the context.
    Source: Sabour et al. 2022 (CEM).
    """

    config: TransformerConfig
    settings: None = None
    losses: ClassVar[tuple[str, ...]] = ()

    def setup(self) -> None:
        c = self.config
        self.affection, self.cognition = (Stack(c, c.num_encoder_layers, decoder=False) for _ in range(2))
        self.refined_affection, self.refined_cognition = RefinedContext(c), RefinedContext(c)
        self.hidden = Linear(_HIDDEN * c.d_model, use_bias=False)
        self.out = Linear(c.d_model, use_bias=False)

    def __call__(self, batch: ClassicBatch, words: Words, read: Read, *, train: bool) -> Read:
        rows, width, size = read.states.shape
        feelings = self._vectors(self.affection, [AFFECTION], masked_mean, batch, words, train)
        affection = self.refined_affection(feelings, read.states, read.mask, train=train)
        # The four others are one batch: they share their layers.
        others = self._vectors(self.cognition, COGNITION, lambda states, _: states[:, 0], batch, words, train)
        states, mask = (jnp.concatenate([x] * len(COGNITION)) for x in (read.states, read.mask))
        cognition = self.refined_cognition(others, states, mask, train=train).reshape(-1, rows, width, size)
        joined = jnp.concatenate([*cognition, affection], axis=-1).astype(jnp.float32)
        refined = self.out(jax.nn.relu(self.hidden(jax.nn.sigmoid(joined) * joined))).astype(read.states.dtype)
        return read.replace(  # type: ignore[attr-defined]
            states=refined, context=affection[:, 0].astype(jnp.float32)
        )

    def _vectors(
        self,
        stack: Stack,
        relations: Sequence[int],
        pool: Callable[[Float[Array, "N F D"], Bool[Array, "N F"]], Float[Array, "N D"]],
        batch: ClassicBatch,
        words: Words,
        train: bool,
    ) -> Float[Array, "N D"]:
        """Of the facts of each relation of every row, the first relation's in front."""
        assert batch.facts is not None
        assert batch.facts_mask is not None
        ids, mask = (jnp.concatenate([x[:, r] for r in relations]) for x in (batch.facts, batch.facts_mask))
        inputs = words.enter(stack, words.embed(ids), jnp.arange(ids.shape[1]), deterministic=not train)
        states, _ = stack(inputs, mask[:, None, :], deterministic=not train)
        return jnp.where(mask.any(axis=1, keepdims=True), pool(states, mask).astype(jnp.float32), 0.0)
