"""REG: retrieval via emotion similarity for guiding empathetic dialogue generation (Wang et al.).

Four emotion attributes go in front of everything that is read. G1 learns to answer (Eq. 2); the retriever learns to
rank the exemplars that help G1 (Eq. 3 to 5); both then train together, G2 reading all exemplars at once with
Fusion-in-Decoder (Eq. 6 and 7). PAPERS.md lists every equation and every departure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Batch, Generated, Mean, Metrics, Params
from empax.decoding.search import DecodeSettings, generate, num_hypotheses
from empax.evaluation.device_metrics import utility
from empax.losses.cross_entropy import cross_entropy, token_log_probs
from empax.losses.distillation import emdr2, retriever_kl, target_distribution
from empax.models.dual_encoder import DualEncoder
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.heads import ClassificationHead, masked_mean
from empax.models.prompted import FusionInPrompt, PromptedDecoder, pooled_states
from empax.models.transformer import EncoderDecoder
from empax.systems.reg.settings import DistillationSettings

Reader: TypeAlias = EncoderDecoder | PromptedDecoder
"""What answers one source."""
Fusion: TypeAlias = FusionInDecoder | FusionInPrompt
"""What answers several passages at once."""


def apply(
    module: nn.Module, params: Params, *args: Any, method: str = "__call__", rng: jax.Array | None, **kwargs: Any
) -> Any:
    """`module.apply` with dropout where there is an `rng`."""
    rngs = None if rng is None else {"dropout": rng}
    return module.apply({"params": params}, *args, method=method, rngs=rngs, deterministic=rng is None, **kwargs)


def emotion_loss(
    head: ClassificationHead,
    params: Params,
    encoding: Float[Array, "N D"],
    emotion: Int[Array, " N"],
    rng: jax.Array | None,
    weights: Float[Array, " N"] | None = None,
) -> tuple[Mean, Metrics]:
    """Cross-entropy of the 32-way head where the emotion is known (-1 = unknown), and its accuracy.

    Source: the head on the context encoding of CEM; REG prints its accuracy without saying how it is made.
    """
    logits = apply(head, params, encoding, rng=rng)
    known = emotion >= 0
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    nll = -jnp.take_along_axis(log_probs, jnp.maximum(emotion, 0)[:, None], axis=1)[:, 0]
    hit = (logits.argmax(axis=-1) == emotion).astype(jnp.float32)
    return Mean.of(nll, known, weights), {"emotion_loss": Mean.of(nll, known), "emotion_accuracy": Mean.of(hit, known)}


def combine(parts: Sequence[tuple[float, Mean]], weights: Float[Array, " B"], valid: Bool[Array, " B"]) -> Mean:
    """Sum of factor times loss over the weight of all valid rows.

    Every loss must have counted its rows with these weights: then the totals add up over micro-batches exactly.
    """
    total = sum((factor * part.total for factor, part in parts), start=jnp.zeros(()))
    return Mean(total=total, weight=jnp.sum(jnp.where(valid, weights, 0.0)))


def target_weights(batch: Any) -> Float[Array, " B"]:
    """A row's weight in the loss of a generator: its target tokens, so that the likelihood is the mean over tokens."""
    return (batch.target_mask & batch.valid[:, None]).sum(axis=1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """How a generator turns states into ids: the model, the ids it begins and ends with, the search."""

    settings: DecodeSettings
    start_id: int
    eos_id: int
    pad_id: int

    def __call__(
        self, model: Any, params: Params, source: Int[Array, "..."], mask: Bool[Array, "..."], rng: jax.Array
    ) -> Generated:
        """Decodes from `source` with `model`, a Reader ([B, S]) or a Fusion ([B, K, S])."""
        variables = {"params": params}
        states = model.apply(variables, source, mask, method="encode", deterministic=True)
        cache = model.apply(
            variables,
            states,
            mask,
            num_hypotheses=num_hypotheses(self.settings),
            max_length=self.settings.max_tokens,
            method="start_cache",
        )
        return generate(
            lambda tokens, cache: model.apply(variables, tokens, cache, method="step"),
            cache,
            batch_size=source.shape[0],
            start_id=self.start_id,
            eos_id=self.eos_id,
            pad_id=self.pad_id,
            settings=self.settings,
            rng=rng,
        )


@dataclasses.dataclass(frozen=True)
class Generator:
    """Stage 1: G1, context and attributes in, response out (Eq. 2).

    Departure: some examples show an exemplar beside the context, so that G1 knows what one is when it later judges
    them (Eq. 3 feeds it exemplars that Eq. 2 never showed it). `exemplar_probability=0` is the paper's text.
    """

    model: Reader
    head: ClassificationHead
    decoder: Decoder
    emotion_weight: float
    label_smoothing: float = 0.0

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        first, second = jax.random.split(rng)
        model = self.model.init(first, batch.source, batch.source_mask, batch.target)["params"]
        encoding = jnp.zeros((1, self.model.config.d_model))
        return {"model": model, "emotion": self.head.init(second, encoding)["params"]}

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array | None) -> tuple[Mean, Metrics]:
        first, second, third = (None,) * 3 if rng is None else jax.random.split(rng, 3)
        states = apply(self.model, params["model"], batch.source, batch.source_mask, method="encode", rng=first)
        parts, metrics = generation_losses(self, self.model, params, batch, states, batch.source_mask, (second, third))
        return combine(parts, target_weights(batch), batch.valid), metrics

    def generate(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Generated:
        return self.decoder(self.model, params["model"], batch.source, batch.source_mask, rng)

    def judge(self, params: Params, batch: Any) -> dict[str, Array]:
        """For each row: `nll`, `num_tokens`, and the emotion by each head (index into EMOTIONS)."""
        states = apply(self.model, params["model"], batch.source, batch.source_mask, method="encode", rng=None)
        nll, num_tokens = row_nll(self.model, params["model"], batch, states, batch.source_mask)
        emotion = apply(self.head, params["emotion"], masked_mean(pooled_states(states), batch.source_mask), rng=None)
        return {"nll": nll, "num_tokens": num_tokens, "generator": emotion.argmax(axis=-1)}


def generation_losses(
    task: Generator | Joint,
    model: Reader | Fusion,
    params: Params,
    batch: Any,
    states: Any,
    states_mask: Bool[Array, "B S"],
    rngs: tuple[jax.Array | None, jax.Array | None],
) -> tuple[list[tuple[float, Mean]], Metrics]:
    """Negative log-likelihood of the response (Eq. 2 and 6, per token), and the emotion head over the encoding."""
    mask = batch.target_mask & batch.valid[:, None]
    logits = apply(model, params["model"], batch.target, states, states_mask, method="decode", rng=rngs[0])
    smoothed = cross_entropy(logits, batch.target, mask, label_smoothing=task.label_smoothing)
    nll = cross_entropy(logits, batch.target, mask) if task.label_smoothing else smoothed
    pooled = masked_mean(pooled_states(states), states_mask)
    emotion, metrics = emotion_loss(task.head, params["emotion"], pooled, batch.emotion, rngs[1], target_weights(batch))
    return [(1.0, smoothed), (task.emotion_weight, emotion)], {"nll": nll, **metrics}


def row_nll(
    model: Any, params: Params, batch: Any, states: Any, mask: Bool[Array, "B S"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Each row's negative log-likelihood of its response, in nats, and its tokens (end of sequence included)."""
    logits = apply(model, params, batch.target, states, mask, method="decode", rng=None)
    log_probs = jnp.where(batch.target_mask, token_log_probs(logits, batch.target), 0.0)
    return -log_probs.sum(axis=1), batch.target_mask.sum(axis=1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class EmotionTask:
    """The retriever's encoder and its 32-way head on contexts alone; a batch's only target is the emotion.

    Departure: the paper retrieves "via emotion similarity" and prints an emotion accuracy, but trains neither. Trying
    candidates out (stage 2) is so dear that it sees few dialogues; emotions are cheap to learn from all of them first.
    """

    encoder: DualEncoder
    head: ClassificationHead

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        first, second = jax.random.split(rng)
        encoder = self.encoder.init(first, batch.source, batch.source_mask)["params"]
        encoding = jnp.zeros((1, self.encoder.encoder.config.d_model))
        return {"encoder": encoder, "emotion": self.head.init(second, encoding)["params"]}

    def loss(self, params: Params, frozen: Params, batch: Batch, rng: jax.Array | None) -> tuple[Mean, Metrics]:
        first, second = (None,) * 2 if rng is None else jax.random.split(rng)
        query = apply(self.encoder, params["encoder"], batch.source, batch.source_mask, method="embed", rng=first)
        emotion = jnp.where(batch.valid, batch.target[:, 0], -1)
        return emotion_loss(self.head, params["emotion"], _unit_variance(query), emotion, second)


@dataclasses.dataclass(frozen=True)
class Retriever:
    """Stage 2: the retriever learns from what its candidates do for G1 (Eq. 3 to 5).

    `frozen` is G1's parameters under "generator".
    """

    encoder: DualEncoder
    head: ClassificationHead
    model: Reader
    decoder: Decoder
    settings: DistillationSettings
    passages: int

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second = jax.random.split(rng)
        encoder = self.encoder.init(first, batch.query, batch.query_mask)["params"]
        encoding = jnp.zeros((1, self.encoder.encoder.config.d_model))
        return {"encoder": encoder, "emotion": self.head.init(second, encoding)["params"]}

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array | None) -> tuple[Mean, Metrics]:
        weights = batch.valid.astype(jnp.float32)
        parts, metrics = self.losses(params, batch, rng, weights)
        return combine(parts, weights, batch.valid), metrics

    def losses(
        self, params: Params, batch: Any, rng: jax.Array | None, weights: Float[Array, " B"]
    ) -> tuple[list[tuple[float, Mean]], Metrics]:
        """L_R over the batch's candidates with factor 1, the emotion loss with its own, and what to log."""
        first, second, third = (None,) * 3 if rng is None else jax.random.split(rng, 3)
        query = self.embed(params, batch.query, batch.query_mask, first)
        key = self.embed_keys(params, batch, second)
        emotion, metrics = self.emotion_losses(params, batch, query, key, third, weights)
        parts = [(self.settings.emotion_weight, emotion)]
        if batch.utilities is None:  # evaluation tries no candidate out: only the emotions are known
            return parts, metrics
        scores = jnp.einsum("BD,BKD->BK", query, key)
        loss = self.distil(scores, batch, weights)
        mask = batch.candidate_mask
        chosen = jnp.where(mask, scores, -jnp.inf).argmax(axis=1)
        best = jnp.take_along_axis(batch.utilities, chosen[:, None], axis=1)[:, 0]
        mean = jnp.sum(jnp.where(mask, batch.utilities, 0.0), axis=1) / jnp.maximum(mask.sum(axis=1), 1)
        metrics["retriever_loss"] = loss
        metrics["utility"] = Mean.of(mean, batch.valid)
        # How much better the retriever's first choice does than the average candidate: what distillation should raise.
        metrics["utility_gain"] = Mean.of(best - mean, batch.valid)
        return [(1.0, loss), *parts], metrics

    def emotion_losses(
        self,
        params: Params,
        batch: Any,
        query: Float[Array, "B D"],
        key: Float[Array, "B K D"],
        rng: jax.Array | None,
        weights: Float[Array, " B"],
    ) -> tuple[Mean, Metrics]:
        """The head over the contexts' encodings and, where those are trained, the exemplars'."""
        head, vectors = params["emotion"], _unit_variance(query)
        own, metrics = emotion_loss(self.head, head, vectors, batch.emotion, rng, weights)
        if batch.key_embedding is not None:
            return own, metrics
        k = key.shape[1]
        keys = _unit_variance(key.reshape(-1, key.shape[-1]))
        others, _ = emotion_loss(self.head, head, keys, batch.key_emotion.ravel(), rng, jnp.repeat(weights, k) / k)
        # k exemplars weigh k times what one context does, and all together what the context alone does elsewhere.
        return Mean(total=(own.total + k * others.total) / (k + 1), weight=own.weight), metrics

    def distil(self, scores: Float[Array, "B K"], batch: Any, weights: Float[Array, " B"]) -> Mean:
        """L_R by the settings' signal."""
        settings, mask = self.settings, batch.candidate_mask
        options: dict[str, Any] = {"temperature": settings.score_temperature, "weights": weights}
        if settings.signal == "emdr2":
            return emdr2(scores, batch.utilities, mask, batch.valid, **options)
        targets = target_distribution(batch.utilities, mask, temperature=settings.target_temperature)
        return retriever_kl(scores, targets, mask, batch.valid, form=settings.loss, **options)

    def embed(
        self, params: Params, ids: Int[Array, "N S"], mask: Bool[Array, "N S"], rng: jax.Array | None
    ) -> Float[Array, "N D"]:
        return apply(self.encoder, params["encoder"], ids, mask, method="embed", rng=rng)

    def embed_keys(self, params: Params, batch: Any, rng: jax.Array | None) -> Float[Array, "B K D"]:
        if batch.key_embedding is not None:
            return batch.key_embedding
        flat = (-1, batch.key.shape[-1])
        embedded = self.embed(params, batch.key.reshape(flat), batch.key_mask.reshape(flat), rng)
        return embedded.reshape(*batch.key.shape[:2], -1)

    def explore(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Any:
        """Picks K candidates with the current encoder, swaps some for random ones, and tries each of them out."""
        first, second = jax.random.split(rng)
        chosen = take_candidates(batch, self.replace(batch, self.choose(params, batch), first))
        return chosen.replace(utilities=self.utilities(frozen["generator"], chosen, second))

    def choose(self, params: Params, batch: Any) -> Int[Array, "B K"]:
        """Columns of the best K of the M retrieved candidates by the current encoders, best first."""
        k, rows = self.passages, len(batch.valid)
        retrieved = batch.candidate_mask.shape[1] - k  # behind them stand the K random ones
        if retrieved == k:
            return jnp.broadcast_to(jnp.arange(k)[None], (rows, k))
        first = take_candidates(batch, jnp.broadcast_to(jnp.arange(retrieved)[None], (rows, retrieved)))
        query = self.embed(params, batch.query, batch.query_mask, None)
        scores = jnp.einsum("BD,BKD->BK", query, self.embed_keys(params, first, None))
        return jax.lax.top_k(jnp.where(first.candidate_mask, scores, -jnp.inf), k)[1]

    def replace(self, batch: Any, columns: Int[Array, "B K"], rng: jax.Array) -> Int[Array, "B K"]:
        """Each column with probability k replaced by that of a random candidate (Eq. 5)."""
        swap = jax.random.bernoulli(rng, self.settings.replace_probability, columns.shape)
        retrieved = batch.candidate_mask.shape[1] - self.passages
        return jnp.where(swap, retrieved + jnp.arange(self.passages)[None], columns)

    def utilities(self, generator: Params, batch: Any, rng: jax.Array) -> Float[Array, "B K"]:
        """What each candidate does for G1: F of its greedy answer, or the gold response's log-likelihood."""
        rows, k, width = batch.source.shape
        source, mask = batch.source.reshape(-1, width), batch.source_mask.reshape(-1, width)
        target, target_mask = jnp.repeat(batch.target, k, axis=0), jnp.repeat(batch.target_mask, k, axis=0)
        if self.settings.signal == "metrics":
            tokens = self.decoder(self.model, generator["model"], source, mask, rng).tokens[:, 0]
            made = tokens != self.decoder.pad_id
            made &= tokens != self.decoder.eos_id
            gold = target_mask & (target != self.decoder.eos_id)
            return utility(tokens, made, target, gold, weights=self.settings.utility).reshape(rows, k)
        logits = apply(self.model, generator["model"], source, mask, target, rng=None)
        log_probs = jnp.where(target_mask, token_log_probs(logits, target), 0.0).sum(axis=1)
        if self.settings.signal == "likelihood":
            log_probs = log_probs / jnp.maximum(target_mask.sum(axis=1), 1)
        return log_probs.reshape(rows, k)


def take_candidates(batch: Any, picked: Int[Array, "B K"]) -> Any:
    """The batch with only the candidates `picked` (columns) of each row."""

    def take(leaf: Array | None) -> Array | None:
        if leaf is None:
            return None
        index = picked.reshape(picked.shape + (1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1)

    names = ("source", "source_mask", "key", "key_mask", "key_embedding", "candidate_mask", "key_emotion")
    return batch.replace(**{name: take(getattr(batch, name)) for name in names})


def _unit_variance(encoding: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """Unit vectors blown up to entries of order one, so that a fresh linear head learns at its usual rate."""
    # Not through a norm, whose gradient at zero (a filler row) is NaN.
    square = jnp.sum(encoding**2, axis=-1, keepdims=True)
    return encoding * jax.lax.rsqrt(jnp.maximum(square, 1e-12)) * encoding.shape[-1] ** 0.5


@dataclasses.dataclass(frozen=True)
class Joint:
    """Stage 3: retriever and FiD generator G2 together (Eq. 6 and 7). `frozen` is G1 under "generator"."""

    retriever: Retriever
    model: Fusion
    head: ClassificationHead
    decoder: Decoder
    retriever_weight: float
    emotion_weight: float
    label_smoothing: float = 0.0

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second, third = jax.random.split(rng, 3)
        model = self.model.init(first, batch.source, batch.source_mask, batch.target)["params"]
        encoding = jnp.zeros((1, self.retriever.model.config.d_model))
        return {
            "retriever": self.retriever.init(second, batch),
            "generator": {
                "model": model,
                "emotion": self.head.init(third, encoding)["params"],
            },
        }

    def explore(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Any:
        """The K best candidates for G2 to read; the same with random ones among them for the retriever to rank."""
        first, second = jax.random.split(rng)
        columns = self.retriever.choose(params["retriever"], batch)
        read = take_candidates(batch, columns)
        if self.retriever_weight == 0.0:
            return read
        ranked = take_candidates(batch, self.retriever.replace(batch, columns, first))
        utilities = self.retriever.utilities(frozen["generator"], ranked, second)
        return ranked.replace(source=read.source, source_mask=read.source_mask, utilities=utilities)

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array | None) -> tuple[Mean, Metrics]:
        first, second, third, fourth = (None,) * 4 if rng is None else jax.random.split(rng, 4)
        generator, weights, alpha = params["generator"], target_weights(batch), self.retriever_weight
        states = apply(self.model, generator["model"], batch.source, batch.source_mask, method="encode", rng=first)
        mask = self.model.states_mask(batch.source_mask)
        read, metrics = generation_losses(self, self.model, generator, batch, states, mask, (second, third))
        ranked, logged = self.retriever.losses(params["retriever"], batch, fourth, weights)
        parts = [*((1.0 - alpha, part) for part in _flat(read)), *((alpha, part) for part in _flat(ranked))]
        return combine(parts, weights, batch.valid), {**logged, **_renamed(metrics)}

    def generate(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Generated:
        return self.decoder(self.model, params["generator"]["model"], batch.source, batch.source_mask, rng)

    def judge(self, params: Params, batch: Any) -> dict[str, Array]:
        """For each row: `nll`, `num_tokens`, and the emotion by each head and by both (index into EMOTIONS)."""
        generator, retriever = params["generator"], params["retriever"]
        states = apply(self.model, generator["model"], batch.source, batch.source_mask, method="encode", rng=None)
        mask = self.model.states_mask(batch.source_mask)
        nll, num_tokens = row_nll(self.model, generator["model"], batch, states, mask)
        query = self.retriever.embed(retriever, batch.query, batch.query_mask, None)
        heads = {
            "generator": apply(self.head, generator["emotion"], masked_mean(pooled_states(states), mask), rng=None),
            "retriever": apply(self.retriever.head, retriever["emotion"], _unit_variance(query), rng=None),
        }
        heads["both"] = sum(jax.nn.log_softmax(logits.astype(jnp.float32)) for logits in heads.values())
        return {"nll": nll, "num_tokens": num_tokens, **{name: x.argmax(axis=-1) for name, x in heads.items()}}


def _flat(parts: Sequence[tuple[float, Mean]]) -> list[Mean]:
    return [part.scale(factor) for factor, part in parts]


def _renamed(metrics: Metrics) -> Metrics:
    """The generator's emotion metrics beside the retriever's."""
    return {f"generator_{name}" if name.startswith("emotion") else name: value for name, value in metrics.items()}
