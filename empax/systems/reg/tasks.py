"""REG: retrieval via emotion similarity for guiding empathetic dialogue generation (Wang et al.).

Four emotion attributes are prepended to every text. G1 learns to answer (Eq. 2); the retriever learns to rank the
exemplars by their use for G1 (Eq. 3 to 5); then the retriever and G2 train jointly, and G2 reads all exemplars at once
with Fusion-in-Decoder (Eq. 6 and 7). PAPERS.md lists every equation and every departure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from empax.core.types import Batch, Mean, Metrics, Params
from empax.evaluation.device_metrics import utility
from empax.losses.cross_entropy import token_log_probs
from empax.models.layers import apply
from empax.parts.exemplars.dense import DenseRetriever
from empax.parts.exemplars.dense_retrieval import RetrievalBatch
from empax.parts.generator.contrast import Read
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.task import Fusion, Generator, combine, emotion_loss, target_weights
from empax.systems.reg.distillation import emdr2, retriever_kl, target_distribution
from empax.systems.reg.encoder import EmotionEncoder
from empax.systems.reg.settings import DistillationSettings


@dataclasses.dataclass(frozen=True)
class EmotionTask:
    """The retriever's emotion encoder with its 32-way head; a batch's only target is the emotion.

    Departure: the paper trains no emotions. Stage 2, which tries candidates, can afford few dialogues; this one all.
    """

    encoder: EmotionEncoder

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        return self.trained(self.encoder.init(rng, batch.source, batch.source_mask))

    def trained(self, params: Params) -> Params:
        """Returns a retriever's parameters without the parts that do not read emotions."""
        return {name: leaf for name, leaf in params.items() if name != "encoder" or not self.encoder.share}

    def loss(
        self, params: Params, frozen: Params, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        logits = self.encoder.emotions(params, batch.source, batch.source_mask, rng=rng if train else None)
        return emotion_loss(logits, jnp.where(batch.valid, batch.target[:, 0], -1))


@dataclasses.dataclass(frozen=True)
class DenseTask(DenseRetriever):
    """The retriever learns by its encoder's vectors alone; it keeps the parameters that read emotions as they are."""

    encoder: EmotionEncoder
    untrained: ClassVar[str] = "emotion"

    def init(self, rng: jax.Array, batch: RetrievalBatch) -> Params:
        return self.encoder.init(rng, batch.source, batch.source_mask)


@dataclasses.dataclass(frozen=True)
class RetrieverTask:
    """Stage 2: the retriever learns from the utility of its candidates for G1 (Eq. 3 to 5).

    `frozen` holds G1's parameters under "generator". Each candidate is tried alone with the context.
    """

    encoder: EmotionEncoder
    model: Fusion
    decoder: Decoder
    settings: DistillationSettings
    passages: int

    @property
    def untrained(self) -> str:
        return "" if self.settings.emotion_weight or self.encoder.share else "emotion/"

    def init(self, rng: jax.Array, batch: Any) -> Params:
        return self.encoder.init(rng, batch.query, batch.query_mask)

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        weights = batch.valid.astype(jnp.float32)
        parts, metrics = self.losses(params, batch, rng if train else None, weights)
        return combine(parts, weights, batch.valid), metrics

    def losses(
        self, params: Params, batch: Any, rng: jax.Array | None, weights: Float[Array, " B"]
    ) -> tuple[list[tuple[float, Mean]], Metrics]:
        """Returns L_R over the batch's candidates with weight 1, the weighted emotion loss, and metrics."""
        first, second = (None,) * 2 if rng is None else jax.random.split(rng)
        query, logits = self.encoder.read(params, batch.query, batch.query_mask, rng=first)
        key = self.embed_keys(params, batch, second)
        emotion, metrics = emotion_loss(logits, batch.emotion, weights)
        parts = [(self.settings.emotion_weight, emotion)]
        if batch.utilities is None:  # evaluation tries no candidates: only the emotions are known
            return parts, metrics
        scores = jnp.einsum("BD,BKD->BK", query, key)
        loss = self.distil(scores, batch, weights)
        mean, gain, shown = first_choice(scores, batch)
        metrics["retriever_loss"] = loss
        metrics["utility"] = Mean.of(mean, shown)
        # Distillation should raise it. `systems.reg.utility` measures it on validation.
        metrics["utility_gain"] = Mean.of(gain, shown)
        return [(1.0, loss), *parts], metrics

    def gains(self, params: Params, batch: Any) -> tuple[Float[Array, " B"], Float[Array, " B"], Bool[Array, " B"]]:
        """Returns `first_choice` by the retriever, without dropout; the batch has utilities."""
        query, _ = self.encoder.read(params, batch.query, batch.query_mask)
        return first_choice(jnp.einsum("BD,BKD->BK", query, self.embed_keys(params, batch, None)), batch)

    def distil(self, scores: Float[Array, "B K"], batch: Any, weights: Float[Array, " B"]) -> Mean:
        """Returns L_R, by the signal of the settings."""
        settings, mask = self.settings, batch.candidate_mask
        options: dict[str, Any] = {"temperature": settings.score_temperature, "weights": weights}
        if settings.signal == "emdr2":
            return emdr2(scores, batch.utilities, mask, batch.valid, **options)
        targets = target_distribution(batch.utilities, mask, temperature=settings.target_temperature)
        return retriever_kl(scores, targets, mask, batch.valid, form=settings.loss, **options)

    def embed_keys(self, params: Params, batch: Any, rng: jax.Array | None) -> Float[Array, "B K D"]:
        if batch.key_embedding is not None:
            return batch.key_embedding
        flat = (-1, batch.key.shape[-1])
        vectors = self.encoder.embed(params, batch.key.reshape(flat), batch.key_mask.reshape(flat), rng=rng)
        return self.encoder.keys(vectors, batch.key_emotion.ravel()).reshape(*batch.key.shape[:2], -1)

    def explore(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Any:
        """Picks K candidates with the current encoder, swaps some for random ones, and tries each of them."""
        first, second = jax.random.split(rng)
        chosen = take_candidates(batch, self.replace(batch, self.choose(params, batch), first))
        return chosen.replace(utilities=self.utilities(frozen["generator"], chosen, second))

    def choose(self, params: Params, batch: Any) -> Int[Array, "B K"]:
        """Returns the columns of the best K of M retrieved candidates by the current encoders, best first."""
        k, rows = self.passages, len(batch.valid)
        retrieved = batch.candidate_mask.shape[1] - k  # the K random ones follow
        if retrieved == k:
            return jnp.broadcast_to(jnp.arange(k)[None], (rows, k))
        first = take_candidates(batch, jnp.broadcast_to(jnp.arange(retrieved)[None], (rows, retrieved)))
        query, _ = self.encoder.read(params, batch.query, batch.query_mask)
        scores = jnp.einsum("BD,BKD->BK", query, self.embed_keys(params, first, None))
        return jax.lax.top_k(jnp.where(first.candidate_mask, scores, -jnp.inf), k)[1]

    def replace(self, batch: Any, columns: Int[Array, "B K"], rng: jax.Array) -> Int[Array, "B K"]:
        """Replaces each column with probability k by a random candidate's (Eq. 5)."""
        swap = jax.random.bernoulli(rng, self.settings.replace_probability, columns.shape)
        retrieved = batch.candidate_mask.shape[1] - self.passages
        return jnp.where(swap, retrieved + jnp.arange(self.passages)[None], columns)

    def utilities(self, generator: Params, batch: Any, rng: jax.Array) -> Float[Array, "B K"]:
        """Returns each candidate's utility for G1: F of its greedy answer, or the gold response's log-likelihood."""
        rows, k = batch.candidate_mask.shape
        source, mask = one_by_one(batch.source, batch.lead), one_by_one(batch.source_mask, batch.lead)
        target, target_mask = jnp.repeat(batch.target, k, axis=0), jnp.repeat(batch.target_mask, k, axis=0)
        if self.settings.signal == "metrics":
            tokens = self.decoder(self.model, generator["model"], source, mask, rng).tokens[:, 0]
            made = self.decoder.made(tokens)
            gold = target_mask & (target != self.decoder.eos_id)
            return utility(tokens, made, target, gold, weights=self.settings.utility).reshape(rows, k)
        logits = apply(self.model, generator["model"], source, mask, target, rng=None)
        log_probs = jnp.where(target_mask, token_log_probs(logits, target), 0.0).sum(axis=1)
        if self.settings.signal == "likelihood":
            log_probs = log_probs / jnp.maximum(target_mask.sum(axis=1), 1)
        return log_probs.reshape(rows, k)


def first_choice(
    scores: Float[Array, "B K"], batch: Any
) -> tuple[Float[Array, " B"], Float[Array, " B"], Bool[Array, " B"]]:
    """Returns the mean utility of the candidates, by how much the one of highest score exceeds it, and whether there
    are any."""
    mask = batch.candidate_mask
    chosen = jnp.where(mask, scores, -jnp.inf).argmax(axis=1)
    best = jnp.take_along_axis(batch.utilities, chosen[:, None], axis=1)[:, 0]
    mean = jnp.sum(jnp.where(mask, batch.utilities, 0.0), axis=1) / jnp.maximum(mask.sum(axis=1), 1)
    return mean, best - mean, batch.valid & mask.any(axis=1)


def one_by_one(passages: Shaped[Array, "B F S"], lead: int) -> Shaped[Array, "N P S"]:
    """Splits rows into sources of one exemplar each, N = B K of them: the `lead` passages and that exemplar."""
    batch, _, width = passages.shape
    exemplars = passages[:, lead:, None]
    context = jnp.broadcast_to(passages[:, None, :lead], (batch, exemplars.shape[1], lead, width))
    return jnp.concatenate([context, exemplars], axis=2).reshape(-1, lead + 1, width)


def take_candidates(batch: Any, picked: Int[Array, "B K"]) -> Any:
    """Returns the batch with only the candidates `picked` (columns) of each row."""

    def take(leaf: Array | None, lead: int) -> Array | None:
        if leaf is None:
            return None
        index = picked.reshape(picked.shape + (1,) * (leaf.ndim - 2))
        return jnp.concatenate([leaf[:, :lead], jnp.take_along_axis(leaf[:, lead:], index, axis=1)], axis=1)

    leads = {"source": batch.lead, "source_mask": batch.lead}
    names = (*leads, "key", "key_mask", "key_embedding", "candidate_mask", "key_emotion")
    return batch.replace(**{name: take(getattr(batch, name), leads.get(name, 0)) for name in names})


@dataclasses.dataclass(frozen=True)
class Joint:
    """Stage 3: joint training of retriever and FiD generator G2 (Eq. 6 and 7). `frozen` holds G1 under "generator".

    With `retriever_weight` 0, G2 trains alone: the retriever is not run, and its emotions are unknown.
    """

    retriever: RetrieverTask
    generator: Generator
    retriever_weight: float
    whole: ClassVar[str] = "^generator/emotion/|^retriever/"

    @property
    def splits_batches(self) -> bool:
        return self.generator.splits_batches

    @property
    def untrained(self) -> str:
        own = {"retriever": self.retriever.untrained, "generator": self.generator.untrained}
        if self.retriever_weight == 0.0:
            own["retriever"] = "."
        if self.retriever_weight == 1.0:
            own["generator"] = "."
        return "|".join(f"{part}/({pattern})" for part, pattern in own.items() if pattern)

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second, *others = jax.random.split(rng, 4)
        return {
            "retriever": self.retriever.init(second, batch),
            "generator": self.generator.drawn((first, *others), batch),
        }

    def explore(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Any:
        """Picks the K best candidates for G2, and the same with some random ones swapped in for the retriever."""
        if self.retriever_weight == 0.0:
            return batch  # the candidates are not re-ranked
        first, second = jax.random.split(rng)
        columns = self.retriever.choose(params["retriever"], batch)
        read = take_candidates(batch, columns)
        ranked = take_candidates(batch, self.retriever.replace(batch, columns, first))
        utilities = self.retriever.utilities(frozen["generator"], ranked, second)
        return ranked.replace(source=read.source, source_mask=read.source_mask, utilities=utilities)

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        first, second, third, fourth = jax.random.split(rng, 4) if train else (None,) * 4
        generator, weights, alpha = params["generator"], target_weights(batch), self.retriever_weight
        read = self.generator.encode(generator, batch, first)
        own, metrics = self.generator.losses(generator, frozen, batch, read, (second, third))
        if not alpha:
            return combine(own, weights, batch.valid), _renamed(metrics)
        ranked, logged = self.retriever.losses(params["retriever"], batch, fourth, weights)
        parts = [*((1.0 - alpha, part) for part in _flat(own)), *((alpha, part) for part in _flat(ranked))]
        return combine(parts, weights, batch.valid), {**logged, **_renamed(metrics)}


@dataclasses.dataclass(frozen=True)
class GuidedGenerator(Generator):
    """G2 as it answers: its parameters, and those of the retriever under "retriever"."""

    retriever: EmotionEncoder = dataclasses.field(kw_only=True)

    def labels(self, params: Params, batch: Any, read: Read) -> dict[str, Array]:
        """Returns the emotion of each row by each head and by both (index into EMOTIONS)."""
        heads: dict[str, Any] = {"generator": self.emotions(params, batch, read, None)}
        if "retriever" in self.heads:
            heads["retriever"] = self.retriever.emotions(params["retriever"], batch.query, batch.query_mask)
        heads["both"] = sum(jax.nn.log_softmax(logits.astype(jnp.float32)) for logits in heads.values())
        return {name: heads[name].argmax(axis=-1) for name in self.heads}


def _flat(parts: Sequence[tuple[float, Mean]]) -> list[Mean]:
    return [part.scale(factor) for factor, part in parts]


def _renamed(metrics: Metrics) -> Metrics:
    """Renames the generator's emotion metrics, to tell them from the retriever's."""
    return {f"generator_{name}" if name.startswith("emotion") else name: value for name, value in metrics.items()}
