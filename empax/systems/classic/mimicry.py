"""Readers that refine the context: with a mimicked and a non-mimicked emotion (MIME), or with inferred facts (CEM)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from empax.core.config import check_numbers
from empax.core.types import EMOTIONS, IS_POSITIVE, POSITIVE_EMOTIONS
from empax.models.arithmetic import contract
from empax.models.heads import masked_mean
from empax.models.latent import Gaussian, draw, gaussian_kl
from empax.models.layers import normal, sinusoidal_positions
from empax.models.stack import Stack
from empax.models.transformer import EncoderDecoder
from empax.models.transformer_config import TransformerConfig
from empax.systems.classic.readers import COGNITION, ClassicBatch, Linear, Read, Reader, encode_texts

_HIDDEN = 3  # width of the hidden layer, in multiples of d_model


@dataclasses.dataclass(frozen=True)
class MimicrySettings:
    """Settings of the reader "mimicry".

    Attributes:
      latent: dimensions of each polarity's latent.
      published: follows the released code: both polarities share the variance of the positive one, in the prior and in
        the posterior, the posterior is used for the KL alone, and emotions are not scaled.
    """

    latent: int = 300
    published: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "latent", least=1)


class TwoGaussians(nn.Module):
    """One Gaussian for the positive and one for the negative emotions, each from its own hidden layer."""

    latent: int
    published: bool

    @nn.compact
    def __call__(self, positive: Float[Array, "B D"], negative: Float[Array, "B D"]) -> tuple[Gaussian, Gaussian]:
        means = [Linear(self.latent, name=f"mean_{n}")(h) for n, h in (("pos", positive), ("neg", negative))]
        variances = [Linear(self.latent, name="log_variance_pos")(positive)]
        if not self.published:
            variances.append(Linear(self.latent, name="log_variance_neg")(negative))
        return (means[0], variances[0]), (means[1], variances[-1])


class RefinedContext(nn.Module):
    """Encodes the context again, with an emotion concatenated to each state. Source: MIME's released code."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self, emotion: Float[Array, "B D"], states: Float[Array, "B S D"], mask: Bool[Array, "B S"], *, train: bool
    ) -> Float[Array, "B S D"]:
        c = self.config
        beside = jnp.broadcast_to(emotion[:, None].astype(states.dtype), states.shape)
        weights = self.param("join", normal((2 * c.d_model) ** -0.5), (2 * c.d_model, c.d_model))
        joined = contract("BSE,ED->BSD", jnp.concatenate([states, beside], axis=-1), weights)
        positions = sinusoidal_positions(jnp.arange(mask.shape[1]), c.d_model, c.sinusoids)[None]
        plain = dataclasses.replace(c, embedding_projection=False)
        stack = Stack(plain, c.num_encoder_layers, decoder=False, name="encoder")
        return stack((joined + positions).astype(c.dtype), mask[:, None, :], deterministic=not train)[0]


class GatedPair(nn.Module):
    r"""Gated fusion of two contexts.

    .. math:: W_2 (\sigma(W_1 [m; n]) \odot [m; n])

    Source: Majumder et al. 2020 (MIME), released code ("gate").
    """

    @nn.compact
    def __call__(self, first: Float[Array, "B S D"], second: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        both = jnp.concatenate([first, second], axis=-1).astype(jnp.float32)
        gate = jax.nn.sigmoid(Linear(both.shape[-1], name="gate")(both))
        return Linear(first.shape[-1], name="out")(gate * both).astype(first.dtype)


class Mimicry(Reader):
    """A mixture of emotions for each polarity, from a latent; the mixture of the context's polarity is mimicked.

    The polarity is that of the gold emotion in training, else of the likeliest one. Source: Majumder et al. 2020
    (MIME). Departure: training samples the posterior, which is for the KL alone there; answers take the prior's mean.
    """

    settings: MimicrySettings
    losses: ClassVar[tuple[str, ...]] = ("emotion", "kl")

    def setup(self) -> None:
        c, s = self.config, self.settings
        self.emotions = self.param("emotions", normal(c.d_model**-0.5), (len(EMOTIONS), c.d_model))
        self.to_emotion = Linear(c.d_model, use_bias=False)
        self.hidden = Linear(c.d_model)
        self.hidden_pos, self.hidden_neg = Linear(c.d_model), Linear(c.d_model)
        self.prior = TwoGaussians(s.latent, s.published)
        self.posterior = TwoGaussians(s.latent, s.published)
        self.mixture_pos = Linear(len(POSITIVE_EMOTIONS))
        self.mixture_neg = Linear(len(EMOTIONS) - len(POSITIVE_EMOTIONS))
        self.mimicking, self.other = RefinedContext(c), RefinedContext(c)
        self.combine = GatedPair()

    def __call__(self, batch: ClassicBatch, words: EncoderDecoder, read: Read, *, train: bool) -> Read:
        logits = self.to_emotion(read.context) @ self.emotions.T
        label = logits.argmax(axis=-1)
        if train:
            label = jnp.where(batch.emotion >= 0, batch.emotion, label)
        positive = jnp.asarray(IS_POSITIVE)[label][:, None]
        hidden = jax.nn.relu(self.hidden(read.context))
        prior = self.prior(hidden, hidden)
        contexts = self._refined(self._drawn(prior, train), positive, read, train)
        posterior = self._posterior(read, contexts, positive)
        if train and not self.settings.published:
            contexts = self._refined(self._drawn(posterior, train), positive, read, train)
        kl = sum((gaussian_kl(q, p) for q, p in zip(posterior, prior, strict=True)), start=jnp.zeros(()))
        losses = {**read.losses, "kl": (kl, jnp.ones(label.shape, bool))}
        return read.replace(states=self.combine(*contexts), emotion=logits, losses=losses)  # type: ignore[attr-defined]

    def _drawn(self, gaussians: tuple[Gaussian, Gaussian], train: bool) -> tuple[jax.Array, jax.Array]:
        """Returns a positive and a negative emotion, [B, D] each, scaled as the embeddings of words are.

        Beside the context's normalised states, unscaled ones (`published`) have hardly any weight.
        """
        scale = 1.0 if self.settings.published else self.config.d_model**0.5
        found, emotions = [], scale * self.emotions
        for gaussian, mixture, rows in zip(
            gaussians, (self.mixture_pos, self.mixture_neg), (IS_POSITIVE, ~IS_POSITIVE), strict=True
        ):
            shares = jax.nn.softmax(mixture(draw(gaussian, self.make_rng("draws") if train else None)))
            found.append(shares @ emotions[np.flatnonzero(rows)])
        return found[0], found[1]

    def _refined(
        self, emotions: tuple[jax.Array, jax.Array], positive: Bool[Array, "B 1"], read: Read, train: bool
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B S D"]]:
        """Returns the mimicking and the non-mimicking context."""
        mimicked, other = _turned(positive, *emotions)
        one = self.mimicking(mimicked, read.states, read.mask, train=train)
        return one, self.other(other, read.states, read.mask, train=train)

    def _posterior(
        self, read: Read, contexts: tuple[jax.Array, jax.Array], positive: Bool[Array, "B 1"]
    ) -> tuple[Gaussian, Gaussian]:
        means = _turned(positive, *(masked_mean(states, read.mask) for states in contexts))
        hidden = [
            jax.nn.relu(layer(jnp.concatenate([read.context, mean], axis=-1)))
            for layer, mean in zip((self.hidden_pos, self.hidden_neg), means, strict=True)
        ]
        return self.posterior(*hidden)


def _turned(
    positive: Bool[Array, "B 1"], first: Float[Array, "B D"], second: Float[Array, "B D"]
) -> tuple[Float[Array, "B D"], Float[Array, "B D"]]:
    """Swaps the two in rows that are not `positive`."""
    return jnp.where(positive, first, second), jnp.where(positive, second, first)


class Refinement(Reader):
    r"""Feelings refine the context that the emotion is read from; all five relations refine the decoder's.

    .. math:: u = [\tilde c_1; ...; \tilde c_5], \quad \tilde c_r = Enc_r([c; k_r]), \quad
              W_2 \, ReLU(W_1 (\sigma(u) \odot u))

    with k the first state of a relation's facts, or for feelings the mean of the states. A relation without facts is a
    vector of zeros. Source: Sabour et al. 2022 (CEM). Departure: the mean of the feelings excludes padding; the hidden
    layer is three times as wide as the context.
    """

    def setup(self) -> None:
        c = self.config
        self.affection, self.cognition = (Stack(c, c.num_encoder_layers, decoder=False) for _ in range(2))
        self.refined_affection, self.refined_cognition = RefinedContext(c), RefinedContext(c)
        self.hidden = Linear(_HIDDEN * c.d_model, use_bias=False)
        self.out = Linear(c.d_model, use_bias=False)

    def __call__(self, batch: ClassicBatch, words: EncoderDecoder, read: Read, *, train: bool) -> Read:
        rows, width, size = read.states.shape
        feelings = self._vectors(self.affection, slice(1), masked_mean, batch, words, train)
        affection = self.refined_affection(feelings, read.states, read.mask, train=train)
        # The other four relations share their layers, so they form one batch.
        others = self._vectors(self.cognition, slice(1, None), lambda states, _: states[:, 0], batch, words, train)
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
        relations: slice,
        pool: Callable[[Float[Array, "N F D"], Bool[Array, "N F"]], Float[Array, "N D"]],
        batch: ClassicBatch,
        words: EncoderDecoder,
        train: bool,
    ) -> Float[Array, "N D"]:
        """Returns a vector of the facts of each of these SOCIAL_RELATIONS and row, relation by relation."""
        assert batch.facts is not None
        assert batch.facts_mask is not None
        facts = (x[:, relations] for x in (batch.facts, batch.facts_mask))
        ids, mask = (jnp.swapaxes(x, 0, 1).reshape(-1, x.shape[2]) for x in facts)
        states = encode_texts(stack, words, ids, mask, train=train)
        return jnp.where(mask.any(axis=1, keepdims=True), pool(states, mask).astype(jnp.float32), 0.0)
