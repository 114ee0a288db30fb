"""Beam search, plain and diverse, as in transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.largest import largest
from empax.core.protocols import StepFn
from empax.core.types import Generated
from empax.decoding.hypotheses import BARRED, Progress, Start, choices, column, gather
from empax.decoding.sampling import Randomness, folded, noise, truncated
from empax.decoding.settings import DecodeSettings, num_returned


@flax.struct.dataclass
class _Pool:
    """Ended hypotheses of each row, best first; `score` is the length-normalised log-probability."""

    tokens: Int[Array, "R N T"]
    log_probs: Float[Array, "R N"]
    scores: Float[Array, "R N"]
    ended: Bool[Array, "R N"]


@flax.struct.dataclass
class Beams:
    """State of a beam search. A row is one group of hypotheses of an example: R = B * G, W = K / G."""

    index: Int[Array, ""]
    history: Int[Array, "R W T"]  # of the running hypotheses, the likeliest first
    log_probs: Float[Array, "R W"]
    pool: _Pool
    improvable: Bool[Array, " R"]  # may a running hypothesis still enter the pool?
    cache: Any


@flax.struct.dataclass
class _Found:
    """The C likeliest continuations of each row, best first, and those that keep running."""

    log_probs: Float[Array, "R C"]
    parents: Int[Array, "R C"]
    tokens: Int[Array, "R C"]
    stops: Bool[Array, "R C"]
    running: Float[Array, "R W"]  # log-probabilities of the hypotheses that keep running
    best: Int[Array, "R W"]  # their indices among the C


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """Beam search, token-identical to Hugging Face's (transformers 5); a `decoding.search.Search`.

    Each step takes the 2K likeliest continuations (K more for each further end token), so that K remain even if K of
    them end. Those among the first K that end (or reach `max_tokens`) compete for the pool of the K best, by
    log-probability / length ** length_penalty.
    An example is done when its pool is full and the best running hypothesis, normalised by its present length, is no
    better than the worst in the pool; with `early_stopping`, as soon as its pool is full; with "never", when the best
    running hypothesis would be no better at any length.

    With `draw_beams`, the continuations of a step are drawn without replacement, with probabilities from their scores
    after temperature and truncation, and hypotheses are ranked by these scores.

    Groups search independently, except for the penalty on tokens that earlier groups have just chosen; at the end,
    their pools are merged. Source: Vijayakumar et al. 2018, Algorithm 1, with the Hamming diversity of Sec. 5.
    """

    step: StepFn
    start: Start
    settings: DecodeSettings
    rng: Randomness | None

    def begin(self, cache: Any) -> Beams:
        """Returns the state before the first step."""
        start, settings = self.start, self.settings
        shape = (start.batch_size * settings.num_beam_groups, settings.num_beams // settings.num_beam_groups)
        history = start.history(settings.num_beams, settings.max_tokens).reshape(*shape, -1)
        # All hypotheses are equal at first: only the first may continue, or all would stay equal.
        log_probs = jnp.zeros(shape, jnp.float32).at[:, 1:].set(BARRED)
        pool = _Pool(
            tokens=history,
            log_probs=jnp.full(shape, -jnp.inf, jnp.float32),
            scores=jnp.full(shape, BARRED, jnp.float32),
            ended=jnp.zeros(shape, bool),
        )
        return Beams(jnp.zeros((), jnp.int32), history, log_probs, pool, jnp.ones(shape[0], bool), cache)

    def go_on(self, state: Any, until: Int[Array, ""] | int | None = None) -> Beams:
        """Continues the search up to `until` tokens, or to the end."""
        start, settings = self.start, self.settings
        last = settings.max_tokens if until is None else jnp.minimum(until, settings.max_tokens)
        groups, width = settings.num_beam_groups, settings.num_beams // settings.num_beam_groups
        norms, most = _norms(settings), start.most(settings)
        if start.limits is not None:
            most = jnp.repeat(most, groups, axis=0)

        def unfinished(beams: Beams) -> Bool[Array, ""]:
            go_on = jnp.any(beams.improvable)
            if settings.early_stopping is True:
                go_on &= ~jnp.all(beams.pool.ended)
            return (beams.index < last) & go_on

        def body(beams: Beams) -> Beams:
            latest = column(beams.history, beams.index).reshape(start.batch_size, -1)
            logits, cache = self.step(latest, beams.cache)
            drawn = None if self.rng is None else folded(self.rng, beams.index)
            found = self._continuations(logits, beams, drawn)
            history = gather(beams.history, found.parents).at[:, :, beams.index + 1].set(found.tokens)
            norm = norms[beams.index]

            enters = found.stops & (jnp.arange(found.stops.shape[1]) < width)[None]
            scores = found.log_probs / norm
            if settings.early_stopping is True:
                scores += jnp.where(jnp.all(beams.pool.ended, axis=1, keepdims=True), BARRED, 0.0)
            scores += jnp.where(beams.improvable[:, None], 0.0, BARRED)
            scores += jnp.where(enters, 0.0, BARRED)
            pool = _merge(beams.pool, _Pool(history, found.log_probs, scores, enters))

            hoped = norm  # log-probabilities are negative: longer is better if length_penalty > 0
            if settings.early_stopping == "never" and settings.length_penalty > 0.0:
                hoped = norms[most - 1]
            worst = jnp.where(pool.ended, jnp.min(pool.scores, axis=1, keepdims=True), BARRED)
            parents = jnp.take_along_axis(found.parents, found.best, axis=1).reshape(start.batch_size, groups, width)
            parents += width * jnp.arange(groups)[None, :, None]
            return Beams(
                index=beams.index + 1,
                history=gather(history, found.best),
                log_probs=found.running,
                pool=pool,
                improvable=beams.improvable
                & (beams.index + 1 < most[:, 0])
                & jnp.any(found.running[:, :1] / hoped > worst, axis=1),
                cache=cache.reorder(parents.reshape(start.batch_size, -1)),
            )

        return jax.lax.while_loop(unfinished, body, state)

    def found(self, state: Any) -> Generated:
        """Returns the best ended hypotheses."""
        groups = self.settings.num_beam_groups
        pool = jax.tree.map(lambda values: values.reshape(-1, groups * values.shape[1], *values.shape[2:]), state.pool)
        if groups > 1:
            pool = _best_of(pool, self.settings.num_beams)
        num = num_returned(self.settings)
        return Generated(tokens=pool.tokens[:, :num, 1:], log_probs=pool.log_probs[:, :num])

    def progress(self, state: Any) -> Progress:
        """Returns the common beginning of all hypotheses that may still win."""
        start, settings = self.start, self.settings
        groups, index = settings.num_beam_groups, state.index
        norms = _norms(settings)
        most = jnp.broadcast_to(start.most(settings), (start.batch_size, 1))
        # Log-probabilities only fall: a hypothesis is at best its present one, at the most favourable length.
        hoped = norms[jnp.clip(most - 1 if settings.length_penalty > 0.0 else index, 0, len(norms) - 1)]
        over = ~state.improvable
        if settings.early_stopping is True:
            over |= jnp.all(state.pool.ended, axis=1)

        def of_example(values: Array) -> Array:
            return values.reshape(start.batch_size, -1, *values.shape[2:])

        pool = _best_of(jax.tree.map(of_example, state.pool), 1)
        running = of_example(jnp.broadcast_to(~over[:, None], state.log_probs.shape))
        running &= ~pool.ended | (of_example(state.log_probs) / hoped >= pool.scores)
        texts = jnp.concatenate([pool.tokens, of_example(state.history)], axis=1)[:, :, 1:]
        counts = jnp.concatenate([pool.ended, running], axis=1)
        first = jnp.take_along_axis(texts, jnp.argmax(counts, axis=1)[:, None, None], axis=1)
        same = jnp.all((texts == first) | ~counts[:, :, None], axis=1)
        settled = jnp.minimum(jnp.sum(jnp.cumprod(same, axis=1), axis=1), index)
        return Progress(first[:, 0], settled.astype(jnp.int32), jnp.all(over.reshape(-1, groups), axis=1))

    def without(self, state: Any, rows: Bool[Array, " B"]) -> Beams:
        """Marks `rows` as finished, so that the search does not wait for them."""
        improvable = state.improvable & ~jnp.repeat(rows, self.settings.num_beam_groups)
        return state.replace(improvable=improvable)

    def take(self, state: Any, rows: Int[Array, " R"]) -> Beams:
        """Returns the search state of these rows alone."""
        groups = self.settings.num_beam_groups
        own = (rows[:, None] * groups + jnp.arange(groups)[None]).reshape(-1)
        names = ("history", "log_probs", "pool", "improvable")
        kept = {name: jax.tree.map(lambda values: values[own], getattr(state, name)) for name in names}
        return state.replace(**kept, cache=state.cache.take(rows))

    def _continuations(self, logits: Float[Array, "B K V"], beams: Beams, rng: Randomness | None) -> _Found:
        """Finds the continuations of all groups; in order, since later groups depend on earlier ones."""
        settings = self.settings
        if settings.num_beam_groups == 1:
            return self._group_continuations(logits, beams.history, beams.log_probs, beams.index, rng=rng)
        batch_size, _, vocab_size = logits.shape
        split = (batch_size, settings.num_beam_groups, -1)
        logits, history = logits.reshape(*split, vocab_size), beams.history.reshape(*split, beams.history.shape[-1])
        log_probs = beams.log_probs.reshape(split)
        taken, found = jnp.zeros((batch_size, vocab_size)), []
        for group in range(settings.num_beam_groups):
            own = (logits[:, group], history[:, group], log_probs[:, group], beams.index)
            found.append(self._group_continuations(*own, settings.diversity_penalty * taken[:, None]))
            tokens = jnp.take_along_axis(found[-1].tokens, found[-1].best, axis=1)
            taken = taken.at[jnp.arange(batch_size)[:, None], tokens].add(1.0)
        return jax.tree.map(lambda *parts: jnp.stack(parts, axis=1).reshape(-1, parts[0].shape[1]), *found)

    def _group_continuations(
        self,
        logits: Float[Array, "B W V"],
        history: Int[Array, "B W T"],
        before: Float[Array, "B W"],
        index: Int[Array, ""],
        less: Float[Array, "B 1 V"] | None = None,
        rng: Randomness | None = None,
    ) -> _Found:
        """Finds the continuations of one group, whose running hypotheses have log-probabilities `before`.

        `less` is the penalty on each token's log-probability, `rng` is for `draw_beams`.
        """
        start, settings = self.start, self.settings
        batch_size, num, vocab_size = logits.shape
        kept = (1 + len(start.eos_ids)) * num
        allowed, logits = choices(logits, history, index, start, settings, less)
        total = jax.nn.logsumexp(logits, axis=-1)[..., None]
        if settings.draw_beams:
            assert rng is not None
            log_probs, places = self._drawn(rng, allowed - total, before, kept)
            parents, tokens = places // vocab_size, places % vocab_size
        else:
            # Two stages: the best of each hypothesis, then the best of those.
            each = min(kept, vocab_size)
            values, tokens = largest(allowed, each)
            log_probs = values - total + before[..., None]
            log_probs, places = jax.lax.top_k(log_probs.reshape(batch_size, num * each), kept)
            parents = places // each
            tokens = jnp.take_along_axis(tokens.reshape(batch_size, num * each), places, axis=1)
        ends = start.ends(tokens)
        running, best = jax.lax.top_k(log_probs + jnp.where(ends, BARRED, 0.0), num)
        stops = ends | (index + 1 >= start.most(settings))
        return _Found(log_probs, parents, tokens, stops, running, best)

    def _drawn(
        self, rng: Randomness, scores: Float[Array, "B W V"], before: Float[Array, "B W"], num: int
    ) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
        """Draws `num` continuations without replacement (Gumbel top-k); returns scores and indices, likeliest first."""
        settings = self.settings
        kept = truncated(
            scores / settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            typical_p=settings.typical_p,
            at_least_tokens=1 + len(self.start.eos_ids),
        )
        whole = (kept + before[..., None]).reshape(len(scores), -1)
        # Tokens that may not be drawn come last, in any order.
        keys = jnp.maximum(whole, 10 * BARRED) + noise(rng, jax.random.gumbel, whole.shape)
        _, places = largest(keys, num)
        log_probs, order = jax.lax.top_k(jnp.take_along_axis(whole, places, axis=1), num)
        return log_probs, jnp.take_along_axis(places, order, axis=1)


def _norms(settings: DecodeSettings) -> Float[Array, " T"]:
    """Returns the divisor of the log-probability at each length, computed in double precision like a Python float."""
    return jnp.asarray(np.power(np.arange(1.0, settings.max_tokens + 1), settings.length_penalty), jnp.float32)


def _merge(pool: _Pool, new: _Pool) -> _Pool:
    """Returns the best of both, as many as `pool` holds."""
    both = jax.tree.map(lambda old, more: jnp.concatenate([old, more], axis=1), pool, new)
    return _best_of(both, pool.scores.shape[1])


def _best_of(pool: _Pool, num: int) -> _Pool:
    _, order = jax.lax.top_k(pool.scores, num)
    return jax.tree.map(lambda values: gather(values, order), pool)
