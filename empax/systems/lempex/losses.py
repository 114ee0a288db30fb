"""LEMPEx' four empathetic losses, on the decoder's soft response (Alg. 4) or its first state (Eq. 10)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import LEVELS, MECHANISMS, Mean, Metrics, Params
from empax.models.arithmetic import contract
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import ClassificationHead
from empax.models.layers import apply
from empax.parts.attributes.classifier import Classifier
from empax.parts.attributes.sentiment import SentimentRegressor
from empax.parts.generator.task import target_weights
from empax.systems.lempex.settings import LempexTaskSettings


def level_loss(
    logits: Float[Array, "B 3"], level: Int[Array, " B"], *, binary: bool
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Returns the cross-entropy of each row's level, and whether it is the likeliest; `binary`: low against the rest.

    Results for a level of -1 are meaningless.
    """
    log_probs = jax.nn.log_softmax(logits)
    if binary:
        log_probs = jnp.stack([log_probs[:, 0], jax.nn.logsumexp(log_probs[:, 1:], axis=1)], axis=1)
    label = jnp.clip(level, 0, log_probs.shape[1] - 1)
    nll = -jnp.take_along_axis(log_probs, label[:, None], axis=1)[:, 0]
    return nll, (log_probs.argmax(axis=1) == label).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class EmpathyLosses:
    """The generator's losses besides the likelihood.

    Of the parameters below, `judges` is {"classifiers": {stage: params}, "sentiment": params} or empty, and `head` is
    empty except for Eq. 10.

    Departure: rows are weighted by their target tokens, as in every loss here, so that parts of a batch add up.

    `classifiers` come with the name of their stage; without a `regressor`, judges give no sentiment loss.
    """

    settings: LempexTaskSettings
    classifiers: tuple[tuple[str, Classifier], ...] = ()
    regressor: SentimentRegressor | None = None

    @property
    def trains_judges(self) -> bool:
        return self.settings.losses == "judges" and not self.settings.frozen_judges

    def init(self, rng: jax.Array, batch: Any, width: int) -> Params:
        """Draws what the generator's stage trains: the head on its first state, or the judges, or nothing."""
        if self.settings.losses == "first_state":
            return {"head": _HEAD.init(rng, jnp.zeros((1, width)))["params"]}
        return {"judges": self.init_judges(rng, batch)} if self.trains_judges else {}

    def init_judges(self, rng: jax.Array, batch: Any) -> Params:
        """Draws judges' parameters with the shapes of trained ones."""
        texts = batch.replace(source=batch.judged, source_mask=batch.judged_mask)
        params: Params = {"classifiers": {name: judge.init(rng, texts) for name, judge in self.classifiers}}
        if self.regressor is not None:
            params["sentiment"] = self.regressor.init(rng, texts)
        return params

    def __call__(
        self,
        judges: Params,
        head: Params,
        batch: Any,
        hidden: Float[Array, "B T D"],
        logits: Float[Array, "B T V"],
        rng: jax.Array | None,
    ) -> tuple[list[tuple[float, Mean]], Metrics]:
        """Returns the four losses with their weights, and metrics; `rng` None = no dropout, no sampling."""
        weights = target_weights(batch)
        if self.settings.losses == "first_state":
            levels, sentiment = self._read_first_state(head, hidden[:, 0], rng)
        else:
            levels, sentiment = self._ask_judges(judges, batch, logits, rng)
        parts, metrics = [], {}
        for c, name in enumerate(MECHANISMS):
            if name not in levels:
                continue
            known = batch.valid & (batch.levels[:, c] >= 0)
            nll, hit = level_loss(levels[name], batch.levels[:, c], binary=self.settings.binary)
            parts.append((getattr(self.settings.weights, name), Mean.of(nll, known, weights)))
            metrics |= {f"{name}_loss": Mean.of(nll, known), f"{name}_accuracy": Mean.of(hit, known)}
        if sentiment is not None:
            wrong = sentiment - batch.compound
            parts.append((self.settings.weights.sentiment, Mean.of(wrong**2, batch.valid, weights)))
            metrics["sentiment_loss"] = Mean.of(wrong**2, batch.valid)
            metrics["sentiment_mae"] = Mean.of(jnp.abs(wrong), batch.valid)
        return parts, metrics

    def _read_first_state(
        self, head: Params, state: Float[Array, "B D"], rng: jax.Array | None
    ) -> tuple[dict[str, Float[Array, "B 3"]], Float[Array, " B"]]:
        """Predicts levels and sentiment from the first state (Eq. 10)."""
        found: Array = apply(_HEAD, head, state, rng=rng)
        levels = found[:, :-1].reshape(-1, len(MECHANISMS), len(LEVELS))
        return {name: levels[:, c] for c, name in enumerate(MECHANISMS)}, jnp.tanh(found[:, -1])

    def _ask_judges(
        self, judges: Params, batch: Any, logits: Float[Array, "B T V"], rng: jax.Array | None
    ) -> tuple[dict[str, Float[Array, "B 3"]], Float[Array, " B"] | None]:
        """Predicts levels from context and response, and sentiment from the response (Alg. 4)."""
        settings = self.settings
        sampling, reading = (None, None) if rng is None else jax.random.split(rng)
        reading = reading if self.trains_judges else None
        soft = soft_tokens(
            logits, form=settings.soft, axis=settings.softmax_axis, temperature=settings.temperature, rng=sampling
        )
        count = batch.target_mask.sum(axis=1) - 1  # without the end token, or a truncated target's last
        levels: dict[str, Array] = {}
        for name, judge in self.classifiers:
            start, most = batch.judged_start, batch.judged.shape[1] // 2
            params = judges["classifiers"][name]
            inputs = embed_response(judge.encoder, params, batch.judged, soft, start, jnp.minimum(count, most))
            found = judge.read(params, None, batch.judged_mask, reading, embedded=inputs, start=start)
            wanted = settings.weights.mechanisms()
            levels |= {one: found[:, c] for c, one in enumerate(judge.mechanisms) if one in wanted}
        if self.regressor is None:
            return levels, None
        params, encoder = judges["sentiment"], self.regressor.encoder
        inputs = embed_response(encoder, params, batch.reply, soft, jnp.ones_like(count), count)
        return levels, self.regressor.read(params, None, batch.reply_mask, reading, embedded=inputs)


_HEAD = ClassificationHead(num_classes=len(MECHANISMS) * len(LEVELS) + 1)
"""The levels of each mechanism, and the sentiment."""


def embed_response(
    encoder: DualEncoder,
    judge: Params,
    ids: Int[Array, "B J"],
    soft: Float[Array, "B T V"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Float[Array, "B J E"]:
    """Returns the embeddings of `ids` in a judge's own table; those of the response are expectations under `soft`.

    `ids` are the gold response in its frame: it has `count` tokens there, from the position `start` on. If table and
    `soft` have different numbers of tokens, the last ones of the longer are padding, which no text has.
    """
    table = judge["encoder"]["encoder"]["token_embedding"]
    shared = min(len(table), soft.shape[2])
    soft, table = soft[:, :, :shared], table[:shared]
    dtype = encoder.encoder.config.dtype  # pyright: ignore[reportAttributeAccessIssue]
    expected = contract("BTV,VE->BTE", soft.astype(dtype), table, result=jnp.float32)
    return splice(table[ids], expected, start, count)


def soft_tokens(
    logits: Float[Array, "B T V"],
    *,
    form: str = "expected",
    axis: str = "vocabulary",
    temperature: float = 1.0,
    rng: jax.Array | None = None,
) -> Float[Array, "B T V"]:
    """Returns soft tokens, which are distributions, in place of one-hot tokens; `temperature` divides the logits.

    The form "expected" has probabilities, whose product with an embedding table is its expectation; "straight_through"
    has one-hot samples of a Gumbel-softmax (without an `rng`, the likeliest tokens) with the gradient of its
    probabilities (Jang et al. 2017, Sec. 2.2). The axis "time" is an error of LEMPEx' released code: each word is
    normalized over positions, so the rows are not distributions, and a position sees later ones.
    """
    along = {"vocabulary": 2, "time": 1}[axis]
    logits = logits.astype(jnp.float32)
    if form == "straight_through" and rng is not None:
        logits = logits + jax.random.gumbel(rng, logits.shape)
    soft = jax.nn.softmax(logits / temperature, axis=along)
    if form == "expected":
        return soft
    hard = jax.nn.one_hot(soft.argmax(axis=2), soft.shape[2], dtype=soft.dtype)
    return hard + soft - jax.lax.stop_gradient(soft)


def splice(
    embedded: Float[Array, "B J D"], soft: Float[Array, "B T D"], start: Int[Array, " B"], count: Int[Array, " B"]
) -> Float[Array, "B J D"]:
    """Replaces `count` rows of `embedded`, from `start` on, by the first rows of `soft`."""
    place = jnp.arange(embedded.shape[1])[None] - start[:, None]
    inside: Bool[Array, "B J"] = (place >= 0) & (place < count[:, None])
    chosen = jnp.take_along_axis(soft, jnp.clip(place, 0, soft.shape[1] - 1)[:, :, None], axis=1)
    return jnp.where(inside[:, :, None], chosen, embedded)
