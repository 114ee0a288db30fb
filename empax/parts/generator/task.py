"""The generator of every system that answers: likelihood of the response, emotion head, decoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Batch, Generated, Mean, Metrics, Params
from empax.decoding.hypotheses import Limits
from empax.decoding.rerank import Hypotheses, make_reranker, rerank
from empax.decoding.search import Tokens, generate
from empax.decoding.settings import DecodeSettings, num_hypotheses
from empax.evaluation.device_metrics import utility
from empax.losses.cross_entropy import cross_entropy, fused_cross_entropy, token_log_probs
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.heads import ClassificationHead, masked_mean
from empax.models.prompted import FusionInPrompt, PromptedDecoder, pooled_states
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.contrast import Contrast, Read
from empax.parts.generator.own_losses import own_loss
from empax.parts.generator.settings import ContrastSettings, LossSettings

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
    logits: Float[Array, "N C"], emotion: Int[Array, " N"], weights: Float[Array, " N"] | None = None
) -> tuple[Mean, Metrics]:
    """Cross-entropy of the 32-way head where the emotion is known (-1 = unknown), and its accuracy.

    Source: the head on the context encoding of CEM; REG prints its accuracy without saying how it is made.
    """
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
    """How a generator turns states into ids: the ids it begins and ends with, the search.

    Attributes:
      start_id: what a response begins behind; None: what the states say, the last token of each prompt.
    """

    settings: DecodeSettings
    start_id: int | None
    eos_id: int
    pad_id: int

    def __call__(
        self,
        model: Any,
        params: Params,
        source: Int[Array, "..."],
        mask: Bool[Array, "..."],
        rng: jax.Array,
        *,
        exemplars: tuple[Int[Array, "B K T"], Bool[Array, "B K T"]] | None = None,
        limits: Limits | None = None,
    ) -> Generated:
        """Decodes from `source` with `model`, a Reader ([B, S]) or a Fusion ([B, K, S]).

        `exemplars` are responses with the mask of their tokens, for `rerank_exemplars`; `limits` as in
        `decoding.search.generate`.
        """
        states = model.apply({"params": params}, source, mask, method="encode", deterministic=True)
        read = (source, mask) if self.settings.reads_source else None
        # A prompt whose last token begins the response is one text with it; an instruction around it would not be.
        prompt = (source, mask) if self.start_id is None else None
        return self.from_states(
            model, params, states, mask, rng, exemplars=exemplars, source=read, prompt=prompt, limits=limits
        )

    def from_states(
        self,
        model: Any,
        params: Params,
        states: Any,
        mask: Bool[Array, "..."],
        rng: jax.Array,
        *,
        exemplars: tuple[Int[Array, "B K T"], Bool[Array, "B K T"]] | None = None,
        source: Tokens | None = None,
        prompt: Tokens | None = None,
        beside: Mapping[str, Any] | None = None,
        compared: tuple[Callable[[], Any], Callable[[Any, Any], Any]] | None = None,
        limits: Limits | None = None,
    ) -> Generated:
        """The same, of what `model` has made of its sources; options that look at texts get `source` and `prompt`.

        `beside` is what else `start_cache` of the model takes: `memories`, `start`. `compared` is what re-ranking by
        similarity compares, `encoding` and `encode` of `Hypotheses`; None = means of encoder states.
        """
        variables = {"params": params}
        cache = model.apply(
            variables,
            states,
            mask,
            num_hypotheses=num_hypotheses(self.settings),
            max_length=self.settings.max_tokens,
            method="start_cache",
            **(beside or {}),
        )
        found = generate(
            lambda tokens, cache: model.apply(variables, tokens, cache, method="step"),
            cache,
            batch_size=mask.shape[0],
            start_id=states.start if self.start_id is None else self.start_id,
            eos_id=self.eos_id,
            pad_id=self.pad_id,
            settings=self.settings,
            rng=rng,
            source=source,
            prompt=prompt,
            limits=limits,
        )
        reranker = make_reranker(self.settings, utility)
        if reranker is None:
            return found

        def encode(ids: Int[Array, "N T"], mask: Bool[Array, "N T"]) -> Float[Array, "N D"]:
            if isinstance(model, (FusionInDecoder, FusionInPrompt)):  # a single passage
                ids, mask = ids[:, None], mask[:, None]
            return pool(model.apply(variables, ids, mask, method="encode", deterministic=True), mask)

        def pool(states: Any, mask: Bool[Array, "..."]) -> Float[Array, "N D"]:
            return masked_mean(pooled_states(states), model.states_mask(mask))

        made = (found.tokens != self.eos_id) & (found.tokens != self.pad_id)
        compared = compared or ((lambda: pool(states, mask)), encode)
        drawn = jax.random.fold_in(rng, self.settings.max_tokens)  # the search has folded in each position before it
        hypotheses = Hypotheses(found.tokens, made, found.log_probs, *compared, drawn, exemplars)
        return rerank(found, reranker(hypotheses))


@dataclasses.dataclass(frozen=True)
class Generator:
    """Context in, response out: REG's G1 (Eq. 2), and G2 (Eq. 6) where the model reads several passages.

    Attributes:
      heads: emotion heads worth asking; empty where the one that there is has never been trained.
      contrast: of the loss that ranks responses, None = there is none; its parameters are under "contrast".
      losses: of users.
    """

    model: Reader | Fusion
    head: ClassificationHead
    decoder: Decoder
    emotion_weight: float
    label_smoothing: float = 0.0
    logits_at_once: int = 0
    heads: tuple[str, ...] = ("generator",)
    contrast: ContrastSettings | None = None
    losses: tuple[LossSettings, ...] = ()
    whole: ClassVar[str] = "^emotion/"

    @property
    def splits_batches(self) -> bool:
        """Not where the responses of a batch are each other's candidates."""
        return self.contrast is None

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        first, second = jax.random.split(rng)
        model = self.model.init(first, batch.source, batch.source_mask, batch.target)["params"]
        encoding = jnp.zeros((1, self.model.config.d_model))
        made = {"model": model, "emotion": self.head.init(second, encoding)["params"]}
        if self.contrast is None:
            return made
        return {**made, "contrast": Contrast(self.contrast, self.model).init(jax.random.fold_in(rng, 2))}

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        first, second, third = jax.random.split(rng, 3) if train else (None,) * 3
        states = apply(self.model, params["model"], batch.source, batch.source_mask, method="encode", rng=first)
        mask = self.model.states_mask(batch.source_mask)
        parts, metrics = generation_losses(self, self.model, params, batch, states, mask, (second, third))
        if not self.heads:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("emotion")}
        return combine(parts, target_weights(batch), batch.valid), metrics

    def generate(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Generated:
        exemplars = shown_responses(batch)
        if self.contrast is None:
            read = batch.source, batch.source_mask
            return self.decoder(self.model, params["model"], *read, rng, exemplars=exemplars)
        states = apply(self.model, params["model"], batch.source, batch.source_mask, method="encode", rng=None)
        read = Read(states, self.model.states_mask(batch.source_mask))
        return self.decoder.from_states(
            self.model,
            params["model"],
            read.states,
            read.mask,
            rng,
            exemplars=exemplars,
            source=(batch.source, batch.source_mask) if self.decoder.settings.reads_source else None,
            compared=Contrast(self.contrast, self.model).compared(params["model"], params["contrast"], read),
        )

    def read(self, params: Params, batch: Any) -> dict[str, Array]:
        """For each row: `nll`, `num_tokens`, and the emotion by each head (index into EMOTIONS)."""
        states = apply(self.model, params["model"], batch.source, batch.source_mask, method="encode", rng=None)
        mask = self.model.states_mask(batch.source_mask)
        nll, num_tokens = row_nll(self.model, params["model"], batch, states, mask)
        pooled = masked_mean(pooled_states(states), context_mask(self.model, batch, mask))
        emotion = apply(self.head, params["emotion"], pooled, rng=None)
        return {"nll": nll, "num_tokens": num_tokens, "generator": emotion.argmax(axis=-1)}

    def weigh(self, params: Params, batch: Any) -> dict[str, Array]:
        """`parted_nll` of each row."""
        states = apply(self.model, params["model"], batch.source, batch.source_mask, method="encode", rng=None)
        return parted_nll(self.model, params["model"], batch, states, self.model.states_mask(batch.source_mask))


def context_mask(model: Reader | Fusion, batch: Any, mask: Bool[Array, "B R"]) -> Bool[Array, "B R"]:
    """Of the states that `mask` marks, what a head reads: those of the context's own passage, or all without one.

    `batch` says which passage that is (`data.exemplars.LabelledBatch.lead`).
    """
    if getattr(batch, "context_states", None) is not None:
        return batch.context_states
    if not getattr(batch, "lead", 0):
        return mask
    own = jnp.arange(batch.source_mask.shape[1])[None, :, None] < batch.lead
    return model.states_mask(batch.source_mask & own)


def generation_losses(
    task: Any,
    model: Reader | Fusion,
    params: Params,
    batch: Any,
    states: Any,
    states_mask: Bool[Array, "B S"],
    rngs: tuple[jax.Array | None, jax.Array | None],
) -> tuple[list[tuple[float, Mean]], Metrics]:
    """Negative log-likelihood of the response (REG, Eq. 2 and 6, per token), and the emotion head over the encoding.

    `task` gives `head`, `emotion_weight`, `label_smoothing`, `logits_at_once`, `contrast` and `losses`, which need all
    logits at once.
    """
    logits: Any = None
    mask = batch.target_mask & batch.valid[:, None]
    if task.logits_at_once:
        hidden = apply(model, params["model"], batch.target, states, states_mask, method="decode_hidden", rng=rngs[0])
        weights: Any = model.apply({"params": params["model"]}, method="output_weights")
        entropy = functools.partial(fused_cross_entropy, hidden, weights, chunk=task.logits_at_once)
    else:
        logits = apply(model, params["model"], batch.target, states, states_mask, method="decode", rng=rngs[0])
        entropy = functools.partial(cross_entropy, logits)
    smoothed = entropy(batch.target, mask, label_smoothing=task.label_smoothing)
    nll = entropy(batch.target, mask) if task.label_smoothing else smoothed
    pooled = masked_mean(pooled_states(states), context_mask(model, batch, states_mask))
    judged = apply(task.head, params["emotion"], pooled, rng=rngs[1])
    emotion, metrics = emotion_loss(judged, batch.emotion, target_weights(batch))
    parts, metrics = [(1.0, smoothed), (task.emotion_weight, emotion)], {"nll": nll, **metrics}
    if task.contrast is not None:
        contrast = Contrast(task.contrast, model)
        # The decoder's dropout once more: candidates differ by their words alone.
        ranked = contrast.loss(params["model"], params["contrast"], batch, Read(states, states_mask), rngs[0])
        metrics["contrast"] = ranked
        parts.append(contrast.part(ranked, target_weights(batch), batch.valid))
    for own in task.losses:
        metrics[own.function] = own_loss(own, logits, batch, target_weights(batch))
        parts.append((own.weight, metrics[own.function]))
    return parts, metrics


def shown_responses(batch: Any) -> tuple[Int[Array, "B K T"], Bool[Array, "B K T"]] | None:
    """The exemplars' responses with their mask, in a batch that carries them; else None."""
    response = getattr(batch, "response", None)
    return None if response is None else (response, batch.response_mask)


def row_nll(
    model: Any, params: Params, batch: Any, states: Any, mask: Bool[Array, "B S"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Each row's negative log-likelihood of its response, in nats, and its tokens (end of sequence included)."""
    log_probs = _log_probs(model, params, batch, states, mask)
    return -log_probs.sum(axis=1), batch.target_mask.sum(axis=1).astype(jnp.float32)


def parted_nll(model: Any, params: Params, batch: Any, states: Any, mask: Bool[Array, "B S"]) -> dict[str, Array]:
    """`row_nll`, and where it comes from: the first token, the end of sequence, and all tokens between them.

    Returns:
      `nll` and `num_tokens` of each row, and `nll_first`, `nll_rest`, `nll_end`, whose sum is `nll`. Of a response
      without a token the end alone counts.
    """
    log_probs = _log_probs(model, params, batch, states, mask)
    last = batch.target_mask.sum(axis=1, keepdims=True) - 1
    place = jnp.arange(batch.target.shape[1])[None]
    parts = {"first": (place == 0) & (place < last), "rest": (place > 0) & (place < last), "end": place == last}
    return {
        "nll": -log_probs.sum(axis=1),
        "num_tokens": batch.target_mask.sum(axis=1).astype(jnp.float32),
        **{f"nll_{name}": -jnp.where(there, log_probs, 0.0).sum(axis=1) for name, there in parts.items()},
    }


def _log_probs(model: Any, params: Params, batch: Any, states: Any, mask: Bool[Array, "B S"]) -> Float[Array, "B T"]:
    """Log-probability of each token of the responses, end of sequence included; 0 behind it."""
    logits = apply(model, params, batch.target, states, mask, method="decode", rng=None)
    return jnp.where(batch.target_mask, token_log_probs(logits, batch.target), 0.0)
