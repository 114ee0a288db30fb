"""The generator of every system that answers: likelihood of the response, emotion head, decoding."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Generated, Mean, Metrics, Params
from empax.decoding.neighbours import States
from empax.decoding.sampling import Randomness
from empax.losses.cross_entropy import cross_entropy, label_losses, token_log_probs
from empax.losses.real_tokens import over_real_tokens
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.heads import ClassificationHead, masked_mean, unit_variance
from empax.models.layers import apply
from empax.models.prompted import FusionInPrompt, PromptedDecoder, pooled_states
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.contrast import Contrast, Read, draw_projection
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.mixing import mixing, response_states
from empax.parts.generator.own_losses import own_loss
from empax.parts.generator.settings import ContrastSettings, LossSettings, NeighbourSettings

Reader: TypeAlias = EncoderDecoder | PromptedDecoder
"""Models of one source."""
Fusion: TypeAlias = FusionInDecoder | FusionInPrompt
"""Models of several passages at once."""
Keys: TypeAlias = Sequence[jax.Array | None]
Losses: TypeAlias = tuple[list[tuple[float, Mean]], Metrics]
"""Parts of a loss with their factors, and metrics."""


def emotion_loss(
    logits: Float[Array, "N C"], emotion: Int[Array, " N"], weights: Float[Array, " N"] | None = None
) -> tuple[Mean, Metrics]:
    """Returns the cross-entropy of the 32-way head where the emotion is known (-1 = unknown), and its accuracy.

    Source: the head on CEM's context encoding; REG reports an accuracy without specifying the head.
    """
    known = emotion >= 0
    nll, hit = label_losses(jax.nn.log_softmax(logits.astype(jnp.float32)), emotion)
    return Mean.of(nll, known, weights), {"emotion_loss": Mean.of(nll, known), "emotion_accuracy": Mean.of(hit, known)}


def combine(parts: Sequence[tuple[float, Mean]], weights: Float[Array, " B"], valid: Bool[Array, " B"]) -> Mean:
    """Returns the sum of factor times loss over the weight of all valid rows.

    Every loss must have used these weights of rows: then the totals add up exactly over micro-batches.
    """
    total = sum((factor * part.total for factor, part in parts), start=jnp.zeros(()))
    return Mean(total=total, weight=jnp.sum(jnp.where(valid, weights, 0.0)))


def target_weights(batch: Any) -> Float[Array, " B"]:
    """Returns each row's loss weight: its number of target tokens, so that the likelihood is the mean over tokens."""
    return real_tokens(batch).sum(axis=1).astype(jnp.float32)


def real_tokens(batch: Any) -> Bool[Array, "B T"]:
    """Returns the mask of the target tokens of valid rows."""
    return batch.target_mask & batch.valid[:, None]


def over_words(
    logits_from: Callable[..., Any],
    losses: Callable[..., tuple[Mean, Metrics]],
    batch: Any,
    states: Sequence[Float[Array, "B T ..."]],
    source: Int[Array, "B S"] | None = None,
) -> tuple[Mean, Metrics]:
    """Returns `losses(logits, target, mask)` of `logits_from(*states, source)`, without computing them for padding.

    See `over_real_tokens`. `source` is left out if None.
    """
    mask = real_tokens(batch)
    known = [] if source is None else [jnp.broadcast_to(source[:, None], (*mask.shape, source.shape[1]))]

    def function(mask: Any, states: Any, target: Any, *known: Any) -> tuple[Mean, Metrics]:
        return losses(logits_from(*states, *(words[:, 0] for words in known)), target, mask)

    return over_real_tokens(function, mask, states, batch.target, *known)


@dataclasses.dataclass(frozen=True)
class ResponseTask:
    """Base of all generators of responses to contexts. Subclasses define further inputs and losses.

    Parameters are the model's under "model", with `contrast` its own under `projection`, and a subclass's.

    Attributes:
      decoder: decodes the answers.
      label_smoothing: label smoothing of the trained likelihood.
      contrast: settings of the loss that ranks responses; None = no such loss.
      heads: the trained emotion heads.
      neighbours: mixing of a corpus into answers and into `read` and `weigh`, never in training. Its states are the
        parameters' "neighbours", `decoding.neighbours.States`, see `with_states`.
    """

    model: Any
    decoder: Decoder
    _: dataclasses.KW_ONLY
    label_smoothing: float = 0.0
    contrast: ContrastSettings | None = None
    heads: tuple[str, ...] = ()
    neighbours: NeighbourSettings = dataclasses.field(default_factory=NeighbourSettings)
    projection: ClassVar[str] = "contrast"
    whole: ClassVar[str] = ""

    @property
    def splits_batches(self) -> bool:
        """False where the responses of a batch are each other's candidates."""
        return self.contrast is None

    def ranking(self, params: Params) -> Contrast:
        """Returns the loss of `contrast`."""
        assert self.contrast is not None
        return Contrast(self.contrast, self.model, params["model"], params[self.projection])

    def init(self, rng: jax.Array, batch: Any) -> Params:
        """Draws the model's parameters; subclasses add their own."""
        return {"model": self.model.init(rng, batch.source, batch.source_mask, batch.target)["params"]}

    def encode(self, params: Params, batch: Any, rng: jax.Array | None) -> Read:
        """Encodes the source, unless the batch has its states; an `rng` turns on dropout."""
        if getattr(batch, "states", None) is not None:
            return Read(batch.states, batch.states_mask)
        states = apply(self.model, params["model"], batch.source, batch.source_mask, method="encode", rng=rng)
        return Read(states, self.model.states_mask(batch.source_mask))

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        first, *rngs = jax.random.split(rng, 3) if train else (None,) * 3
        parts, metrics = self.losses(params, frozen, batch, self.encode(params, batch, first), rngs)
        return combine(parts, self.row_weights(batch), batch.valid), metrics

    def row_weights(self, batch: Any) -> Float[Array, " B"]:
        """Returns the weight of each row, the same in every loss."""
        return target_weights(batch)

    def losses(self, params: Params, frozen: Params, batch: Any, read: Any, rngs: Keys) -> Losses:
        """Returns the losses and metrics: the likelihood of the response, and the contrast.

        A loss must weight the rows by `row_weights`. `rngs` are for the decoder's dropout and for other sampling;
        None = no randomness.
        """
        nll, smoothed = self.likelihood_of(params, batch, self._hidden(params, batch.target, read, rngs[0]))
        parts, metrics = self.ranked(params, batch, read, rngs)
        return [(1.0, smoothed), *parts], {"nll": nll, **metrics}

    def likelihood(self, logits: Float[Array, "B T V"], batch: Any) -> tuple[Mean, Mean]:
        """Returns the negative log-likelihood per real token (REG, Eq. 2 and 6), without and with smoothing."""
        return self._token_losses(logits, batch.target, real_tokens(batch))

    def _token_losses(
        self, logits: Float[Array, "B T V"], target: Int[Array, "B T"], mask: Bool[Array, "B T"]
    ) -> tuple[Mean, Mean]:
        nll = cross_entropy(logits, target, mask)
        if not self.label_smoothing:
            return nll, nll
        return nll, cross_entropy(logits, target, mask, label_smoothing=self.label_smoothing)

    def likelihood_of(
        self,
        params: Params,
        batch: Any,
        *states: Float[Array, "B T ..."],
        source: Int[Array, "B S"] | None = None,
    ) -> tuple[Mean, Mean]:
        """Returns `likelihood` of what the model's `logits_from` makes of states, and of the source's words if given.

        With smoothing, gradients flow through the second alone.
        """

        def logits_from(*given: Any) -> Any:
            return self.model.apply({"params": params["model"]}, *given, method="logits_from")

        def losses(logits: Any, *given: Any) -> tuple[Mean, Metrics]:
            nll, smoothed = self._token_losses(logits, *given)
            return smoothed, {"nll": nll}

        smoothed, found = over_words(logits_from, losses, batch, states, source)
        return (found["nll"] if self.label_smoothing else smoothed), smoothed

    def ranked(self, params: Params, batch: Any, read: Read, rngs: Keys) -> Losses:
        """Returns the contrast, if there is one."""
        if self.contrast is None:
            return [], {}
        found = self.contrasted(params, batch, read, rngs)
        return [self.ranking(params).part(found, target_weights(batch), batch.valid)], {"contrast": found}

    def contrasted(self, params: Params, batch: Any, read: Read, rngs: Keys) -> Mean:
        """Returns L_CL of the batch's responses, with the decoder's dropout key: they differ in their words alone."""
        return self.ranking(params).loss(batch, read, rngs[0])

    def logits(self, params: Params, batch: Any, read: Read, rng: jax.Array | None) -> Float[Array, "B T V"]:
        """Returns the logits of the response, teacher-forced."""
        given = batch.target, read.states, read.mask
        return apply(self.model, params["model"], *given, method="decode", rng=rng, **read.beside)

    def generate(self, params: Params, frozen: Params, batch: Any, rng: Randomness) -> Generated:
        read, more = self.encode(params, batch, None), {}
        if self.contrast is not None:
            more["compared"] = self.ranking(params).compared(read)
        return self.search(self.decoder, params, batch, read, rng, **more)

    def search(
        self, decoder: Decoder, params: Params, batch: Any, read: Read, rng: Randomness, **more: Any
    ) -> Generated:
        """Decodes answers from what has been read; `more` are options of `Decoder.from_states`."""
        with self.with_neighbours(params, batch, read):
            return decoder.from_states(
                self.model,
                params["model"],
                read.states,
                read.mask,
                rng,
                exemplars=shown_responses(batch),
                beside=read.beside,
                **decoder.looked_at(batch.source, batch.source_mask),
                **more,
            )

    def with_neighbours(self, params: Params, batch: Any, read: Read) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which next-token distributions are mixed with those of `neighbours`, if any."""

        def exemplars() -> States:
            shown = shown_responses(batch)
            assert shown is not None
            return response_states(*shown, self.decoder.eos_id, lambda said: self._hidden(params, said, read, None))

        return mixing(self.neighbours, params.get("neighbours"), exemplars)

    def _hidden(
        self, params: Params, target: Int[Array, "B T"], read: Read, rng: jax.Array | None
    ) -> Float[Array, "B T D"]:
        given = target, read.states, read.mask
        return apply(self.model, params["model"], *given, method="decode_hidden", rng=rng, **read.beside)

    def target_states(self, params: Params, batch: Any) -> Float[Array, "B T D"]:
        """Returns the decoder's state before each token of the responses."""
        return self._hidden(params, batch.target, self.encode(params, batch, None), None)

    def with_states(self, params: Params, states: States) -> Params:
        """Returns the parameters with the states for `neighbours.knn_weight`."""
        return {**params, "neighbours": states}

    def read(self, params: Params, batch: Any) -> dict[str, Array]:
        """Returns `nll` and `labels` of each row."""
        read = self.encode(params, batch, None)
        return {**self.nll(params, batch, read), **self.labels(params, batch, read)}

    def labels(self, params: Params, batch: Any, read: Any) -> dict[str, Array]:
        """Returns further results of each row, by name: its emotion by each head (index into EMOTIONS)."""
        return {}

    def nll(self, params: Params, batch: Any, read: Read) -> dict[str, Array]:
        """Returns each response's negative log-likelihood, in nats, and `num_tokens`, including the end token."""
        return _summed(self._log_probs(params, batch, read), batch)

    def weigh(self, params: Params, batch: Any) -> dict[str, Array]:
        """Splits `nll` into the shares of the first token, the end of sequence, and all tokens between them.

        Returns:
          `nll` and `num_tokens` of each row, and `nll_first`, `nll_rest`, `nll_end`, whose sum is `nll`. An empty
          response has the end token alone, a truncated one has none.
        """
        log_probs = self._log_probs(params, batch, self.encode(params, batch, None))
        last = batch.target_mask.sum(axis=1, keepdims=True) - 1
        place = jnp.arange(batch.target.shape[1])[None]
        end = (place == last) & (batch.target == self.decoder.eos_id)
        parts = {"first": (place == 0) & ~end, "rest": (place > 0) & ~end, "end": end}
        return {
            **_summed(log_probs, batch),
            **{f"nll_{name}": -jnp.where(there, log_probs, 0.0).sum(axis=1) for name, there in parts.items()},
        }

    def _log_probs(self, params: Params, batch: Any, read: Read) -> Float[Array, "B T"]:
        """Returns log-probabilities of the responses' tokens, including the end of sequence; 0 after it."""
        with self.with_neighbours(params, batch, read):
            logits = self.logits(params, batch, read, None)
        return jnp.where(batch.target_mask, token_log_probs(logits, batch.target), 0.0)


@dataclasses.dataclass(frozen=True)
class Generator(ResponseTask):
    """A generator with an emotion head: REG's G1 (Eq. 2), or G2 (Eq. 6) if the model reads several passages.

    Attributes:
      heads: empty if the head has never been trained.
      own_losses: users' losses.
    """

    model: Reader | Fusion
    head: ClassificationHead
    emotion_weight: float
    heads: tuple[str, ...] = dataclasses.field(default=("generator",), kw_only=True)
    own_losses: tuple[LossSettings, ...] = ()
    whole: ClassVar[str] = "^emotion/"

    @property
    def untrained(self) -> str:
        return "" if self.emotion_weight else "emotion/"

    def init(self, rng: jax.Array, batch: Any) -> Params:
        return self.drawn(jax.random.split(rng, 3), batch)

    def drawn(self, rngs: jax.Array | Sequence[jax.Array], batch: Any) -> Params:
        """Draws parameters with the keys of model, head and contrast."""
        width = self.model.config.d_model
        made = {**super().init(rngs[0], batch), "emotion": self.head.init(rngs[1], jnp.zeros((1, width)))["params"]}
        return made if self.contrast is None else {**made, self.projection: draw_projection(rngs[2], width)}

    def losses(self, params: Params, frozen: Params, batch: Any, read: Read, rngs: Keys) -> Losses:
        """Returns the likelihood, the loss of the emotion head on the encoding, the contrast, and users' losses."""
        nll, smoothed, own = self._of_response(params, batch, read, rngs[0])
        judged = self.emotions(params, batch, read, rngs[1])
        emotion, told = emotion_loss(judged, batch.emotion, target_weights(batch))
        ranked, more = self.ranked(params, batch, read, rngs)
        parts = [(1.0, smoothed), (self.emotion_weight, emotion), *ranked]
        parts += [(loss.weight, own[loss.function]) for loss in self.own_losses]
        return parts, {"nll": nll, **(told if self.heads else {}), **more, **own}

    def _of_response(
        self, params: Params, batch: Any, read: Read, rng: jax.Array | None
    ) -> tuple[Mean, Mean, dict[str, Mean]]:
        """Returns `likelihood`, and users' losses by name, which read logits of padding too."""
        if not self.own_losses:
            return *self.likelihood_of(params, batch, self._hidden(params, batch.target, read, rng)), {}
        logits = self.logits(params, batch, read, rng)
        given = logits, batch, target_weights(batch)
        return *self.likelihood(logits, batch), {loss.function: own_loss(loss, *given) for loss in self.own_losses}

    def emotions(self, params: Params, batch: Any, read: Read, rng: jax.Array | None) -> Float[Array, "B E"]:
        """Returns the logits of the emotion head, which reads the pooled encoding at unit variance.

        The states of a T5's encoder are small: on them as they are, a new head would learn nothing for hundreds of
        updates.
        """
        pooled = masked_mean(pooled_states(read.states), context_mask(self.model, batch, read.mask))
        return apply(self.head, params["emotion"], unit_variance(pooled), rng=rng)

    def labels(self, params: Params, batch: Any, read: Read) -> dict[str, Array]:
        return {"generator": self.emotions(params, batch, read, None).argmax(axis=-1)}


def context_mask(model: Reader | Fusion, batch: Any, mask: Bool[Array, "B R"]) -> Bool[Array, "B R"]:
    """Returns the mask of a head's inputs: states of the context's own passage, or all of `mask` without one.

    `batch` has the number of such passages (`data.exemplars.LabelledBatch.lead`).
    """
    if getattr(batch, "context_states", None) is not None:
        return batch.context_states
    if not getattr(batch, "lead", 0):
        return mask
    own = jnp.arange(batch.source_mask.shape[1])[None, :, None] < batch.lead
    return model.states_mask(batch.source_mask & own)


def _summed(log_probs: Float[Array, "B T"], batch: Any) -> dict[str, Array]:
    return {"nll": -log_probs.sum(axis=1), "num_tokens": batch.target_mask.sum(axis=1).astype(jnp.float32)}


def shown_responses(batch: Any) -> tuple[Int[Array, "B K T"], Bool[Array, "B K T"]] | None:
    """Returns the exemplars' responses with their mask, if the batch has them; else None."""
    response = getattr(batch, "response", None)
    return None if response is None else (response, batch.response_mask)
