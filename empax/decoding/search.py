"""From a step function to sequences: greedy, sampling and beam search, jitted, with no model in sight.

A step reads one token of each hypothesis and gives the logits of the next. Its cache is a pytree with a method
`reorder(parents[B, K]) -> cache`, which lets hypothesis k go on from parent `parents[b, k]`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.protocols import StepFn
from empax.core.types import Generated
from empax.decoding.constraints import check_ids, constrain, force, forced_tokens, penalise
from empax.decoding.sampling import largest, sample_tokens
from empax.decoding.settings import DecodeSettings, num_returned

BARRED = -1e9
"""Added to the score of what must not win: finite, as in Hugging Face's search, so that order among barred remains."""

Tokens: TypeAlias = tuple[Int[Array, "B S"], Bool[Array, "B S"]]
"""Token ids, and which of them are real."""


def generate(
    step: StepFn,
    cache: Any,
    *,
    batch_size: int,
    start_id: int | Int[Array, " B"],
    eos_id: int,
    pad_id: int,
    settings: DecodeSettings,
    rng: jax.Array | None = None,
    prefix: Int[Array, "B P"] | None = None,
    source: Tokens | None = None,
    prompt: Tokens | None = None,
) -> Generated:
    """Decodes by `settings.method`; to be called under `jax.jit`.

    Args:
      step: reads `tokens[B, K]` and the cache, gives float32 logits [B, K, V] and the next cache.
      cache: started for K = `num_hypotheses(settings)` and at least `settings.max_tokens` steps.
      batch_size: B.
      start_id: what every hypothesis reads first; not part of the result. One for each example where they differ: after
        a prompt, its last token.
      eos_id: ends a hypothesis; part of the result.
      pad_id: fills the result after the end.
      settings: static.
      rng: PRNG key; needed by "sample" only.
      prefix: what every response of an example begins with, the same for all its hypotheses; -1 from where it is free.
        Part of the result and of `max_tokens`, but not of the length that `length_penalty` sees.
      source: what the encoder has read, for `encoder_no_repeat_ngram` and `encoder_repetition_penalty`. Departure:
        Hugging Face's take padding for tokens of the source.
      prompt: what a decoder-only model has read, its last real token being `start_id`, where its tokens shall count
        for `no_repeat_ngram`, `repetition_penalty` and `bad_words`, as they do in Hugging Face's; None = the response
        may repeat them. Where it is given it is also the `source`, unless there is one.

    Returns:
      Tokens [B, K, T] with T = `max_tokens`, best hypothesis first, and their log-probabilities under the model:
      neither tempered nor truncated nor renormalised. Forced tokens (`prefix`, `first_token`, `end_at_limit`) are
      certain, as in Hugging Face's search: they add 0. Penalties (of repetition, of `diversity_penalty`) are part of
      what "beam" gives, since it ranks by them.

    Raises:
      ValueError: "sample" without `rng`, or a prefix of more than `max_tokens`.
      ConfigError: an option looks at the source and there is none, or names a token that the vocabulary lacks.
    """
    if prefix is not None and prefix.shape[1] > settings.max_tokens:
        raise ValueError(f"a prefix of {prefix.shape[1]} tokens is longer than max_tokens = {settings.max_tokens}.")
    source = source or prompt
    if settings.reads_source and source is None:
        raise ConfigError(
            f"encoder_no_repeat_ngram = {settings.encoder_no_repeat_ngram} and encoder_repetition_penalty = "
            f"{settings.encoder_repetition_penalty} look at the source, which is not known here; set them to 0 and 1."
        )
    start = Start(
        batch_size,
        start_id,
        (eos_id, *settings.more_eos_ids),
        pad_id,
        prefix,
        source=None if source is None else jnp.where(source[1], source[0], -1),
        before=None if prompt is None else _before(*prompt),
    )
    if settings.method == "beam":
        return beam_search(step, cache, start, settings)
    if settings.method == "greedy":
        return greedy(step, cache, start, settings)
    if rng is None:
        raise ValueError('rng = None is not allowed with method "sample"; pass a PRNG key.')
    return sample(step, cache, start, settings, rng)


@dataclasses.dataclass(frozen=True)
class Start:
    """What every search starts from; the arguments of `generate`.

    Attributes:
      source: tokens that options of the source look at; -1 = none.
      before: tokens of the prompt that count with a response, up to that before the start token, last ones last;
        -1 = none.
    """

    batch_size: int
    start_id: int | Int[Array, " B"]
    eos_ids: tuple[int, ...]
    pad_id: int
    prefix: Int[Array, "B P"] | None = None
    source: Int[Array, "B S"] | None = None
    before: Int[Array, "B P"] | None = None

    def ends(self, tokens: Int[Array, "B K"]) -> Bool[Array, "B K"]:
        """Which tokens end a response."""
        return functools.reduce(jnp.logical_or, [tokens == eos_id for eos_id in self.eos_ids])

    def prefix_lengths(self) -> Int[Array, "#B 1"]:
        """How many tokens of each response are given."""
        if self.prefix is None:
            return jnp.zeros((1, 1), jnp.int32)
        return jnp.sum(self.prefix >= 0, axis=1, keepdims=True, dtype=jnp.int32)

    def history(self, num: int, max_tokens: int) -> Int[Array, "B K T"]:
        """Nothing but the start token yet: what each hypothesis has read, [B, K, 1 + max_tokens]."""
        empty = jnp.full((self.batch_size, num, 1 + max_tokens), self.pad_id, jnp.int32)
        first = jnp.asarray(self.start_id, jnp.int32).reshape(-1, 1)
        return empty.at[:, :, 0].set(jnp.broadcast_to(first, empty.shape[:2]))

    def text(self, history: Int[Array, "B K T"]) -> tuple[Int[Array, "B K L"], int]:
        """What a hypothesis has read, with the prompt where that counts, and where `history` begins in it."""
        if self.before is None:
            return history, 0
        before = jnp.broadcast_to(self.before[:, None], (*history.shape[:2], self.before.shape[1]))
        return jnp.concatenate([before, history], axis=2), self.before.shape[1]


def _before(tokens: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Int[Array, "B P"]:
    """The real tokens of each prompt but the last, at the right end; -1 in front of them."""
    order = jnp.argsort(mask, axis=1, stable=True)
    return jnp.take_along_axis(jnp.where(mask, tokens, -1), order, axis=1)[:, :-1].astype(jnp.int32)


def greedy(step: StepFn, cache: Any, start: Start, settings: DecodeSettings) -> Generated:
    """The likeliest token at every step; K = 1."""
    return _decode(step, cache, start, settings, 1, lambda logits, _: largest(logits, 1)[1][..., 0])


def sample(step: StepFn, cache: Any, start: Start, settings: DecodeSettings, rng: jax.Array) -> Generated:
    """`num_samples` independent responses of each example, the likeliest first; as drawn if they are to be reranked."""

    def choose(logits: Float[Array, "B K V"], index: Int[Array, ""]) -> Int[Array, "B K"]:
        return sample_tokens(
            jax.random.fold_in(rng, index),
            logits,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            typical_p=settings.typical_p,
        )

    drawn = _decode(step, cache, start, settings, settings.num_samples, choose)
    if settings.num_samples == 1 or settings.rerank:
        return drawn
    log_probs, order = jax.lax.top_k(drawn.log_probs, settings.num_samples)
    return Generated(tokens=_gather(drawn.tokens, order), log_probs=log_probs)


@flax.struct.dataclass
class _Walk:
    index: Int[Array, ""]
    history: Int[Array, "B K T"]  # the start token, what was chosen, padding
    log_probs: Float[Array, "B K"]
    finished: Bool[Array, "B K"]
    cache: Any


def _decode(
    step: StepFn,
    cache: Any,
    start: Start,
    settings: DecodeSettings,
    num: int,
    choose: Callable[[Float[Array, "B K V"], Int[Array, ""]], Int[Array, "B K"]],
) -> Generated:
    """Hypotheses that do not compete: each goes its own way until its end token."""

    def body(walk: _Walk) -> _Walk:
        logits, cache = step(_column(walk.history, walk.index), walk.cache)
        allowed, logits = _rule(logits, walk.history, walk.index, start, settings)
        chosen = choose(allowed, walk.index)
        log_probs = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
        token = jnp.where(walk.finished, start.pad_id, chosen).astype(jnp.int32)
        return _Walk(
            index=walk.index + 1,
            history=walk.history.at[:, :, walk.index + 1].set(token),
            log_probs=walk.log_probs + jnp.where(walk.finished, 0.0, log_probs),
            finished=walk.finished | start.ends(chosen),
            cache=cache,
        )

    shape = (start.batch_size, num)
    walk = _Walk(
        index=jnp.zeros((), jnp.int32),
        history=start.history(num, settings.max_tokens),
        log_probs=jnp.zeros(shape, jnp.float32),
        finished=jnp.zeros(shape, bool),
        cache=cache,
    )
    walk = jax.lax.while_loop(lambda walk: (walk.index < settings.max_tokens) & ~jnp.all(walk.finished), body, walk)
    return Generated(tokens=walk.history[:, :, 1:], log_probs=walk.log_probs)


@flax.struct.dataclass
class _Pool:
    """Ended hypotheses of each row, best first; `score` is the length-normalised log-probability."""

    tokens: Int[Array, "R N T"]
    log_probs: Float[Array, "R N"]
    scores: Float[Array, "R N"]
    ended: Bool[Array, "R N"]


@flax.struct.dataclass
class _Beams:
    """A row is one group of hypotheses of an example: R = B * G, W = K / G."""

    index: Int[Array, ""]
    history: Int[Array, "R W T"]  # of the running hypotheses, the likeliest first
    log_probs: Float[Array, "R W"]
    pool: _Pool
    improvable: Bool[Array, " R"]  # may a running hypothesis still enter the pool?
    cache: Any


def beam_search(step: StepFn, cache: Any, start: Start, settings: DecodeSettings) -> Generated:
    """Beam search with Hugging Face's conventions; token-identical to theirs (transformers 5).

    Each step takes the 2K likeliest continuations (with several end tokens, one K more for each), so that K remain even
    if K of them end. Those among the first K that end (or reach `max_tokens`) compete for the pool of the K best, by
    log-probability / length ** length_penalty.
    An example is done when its pool is full and the best running hypothesis, normalised by its present length, is no
    better than the worst in the pool; with `early_stopping`, as soon as its pool is full; with "never", when the best
    running one would be no better at any length.

    With groups, each searches so for itself, but for the penalty on what earlier groups have just chosen; in the end
    their pools are one. Source: Vijayakumar et al. 2018, Algorithm 1, with the Hamming diversity of Sec. 5.
    """
    groups, max_tokens = settings.num_beam_groups, settings.max_tokens
    width = settings.num_beams // groups
    # A table in double precision: the divisor rounds as a Python float does.
    norms = jnp.asarray(np.power(np.arange(1.0, max_tokens + 1), settings.length_penalty), jnp.float32)
    given = start.prefix_lengths()
    if start.prefix is not None:
        given = jnp.repeat(given, groups, axis=0)

    def unfinished(beams: _Beams) -> Bool[Array, ""]:
        go_on = jnp.any(beams.improvable)
        if settings.early_stopping is True:
            go_on &= ~jnp.all(beams.pool.ended)
        return (beams.index < max_tokens) & go_on

    def body(beams: _Beams) -> _Beams:
        latest = _column(beams.history, beams.index).reshape(start.batch_size, -1)
        logits, cache = step(latest, beams.cache)
        found = _continuations(logits, beams, start, settings)
        history = _gather(beams.history, found.parents).at[:, :, beams.index + 1].set(found.tokens)
        norm = norms[jnp.maximum(beams.index - given, 0)]

        enters = found.stops & (jnp.arange(found.stops.shape[1]) < width)[None]
        scores = found.log_probs / norm
        if settings.early_stopping is True:
            scores += jnp.where(jnp.all(beams.pool.ended, axis=1, keepdims=True), BARRED, 0.0)
        scores += jnp.where(beams.improvable[:, None], 0.0, BARRED)
        scores += jnp.where(enters, 0.0, BARRED)
        pool = _merge(beams.pool, _Pool(history, found.log_probs, scores, enters))

        hoped = norm  # log-probabilities are negative: the longer, the better, where length_penalty is positive
        if settings.early_stopping == "never" and settings.length_penalty > 0.0:
            hoped = norms[max_tokens - 1 - given]
        worst = jnp.where(pool.ended, jnp.min(pool.scores, axis=1, keepdims=True), BARRED)
        parents = jnp.take_along_axis(found.parents, found.best, axis=1).reshape(start.batch_size, groups, width)
        parents += width * jnp.arange(groups)[None, :, None]
        return _Beams(
            index=beams.index + 1,
            history=_gather(history, found.best),
            log_probs=found.running,
            pool=pool,
            improvable=beams.improvable & jnp.any(found.running[:, :1] / hoped > worst, axis=1),
            cache=cache.reorder(parents.reshape(start.batch_size, -1)),
        )

    beams = jax.lax.while_loop(unfinished, body, _start_beams(cache, start, settings))
    pool = jax.tree.map(lambda values: values.reshape(start.batch_size, -1, *values.shape[2:]), beams.pool)
    if groups > 1:
        pool = _best_of(pool, settings.num_beams)
    num = num_returned(settings)
    return Generated(tokens=pool.tokens[:, :num, 1:], log_probs=pool.log_probs[:, :num])


def _start_beams(cache: Any, start: Start, settings: DecodeSettings) -> _Beams:
    shape = (start.batch_size * settings.num_beam_groups, settings.num_beams // settings.num_beam_groups)
    history = start.history(settings.num_beams, settings.max_tokens).reshape(*shape, -1)
    # All hypotheses are the same at first: only the first may go on, or all would stay the same.
    log_probs = jnp.zeros(shape, jnp.float32).at[:, 1:].set(BARRED)
    pool = _Pool(
        tokens=history,
        log_probs=jnp.full(shape, -jnp.inf, jnp.float32),
        scores=jnp.full(shape, BARRED, jnp.float32),
        ended=jnp.zeros(shape, bool),
    )
    return _Beams(jnp.zeros((), jnp.int32), history, log_probs, pool, jnp.ones(shape[0], bool), cache)


@flax.struct.dataclass
class _Found:
    """The C likeliest continuations of each row, best first, and which of them go on."""

    log_probs: Float[Array, "R C"]
    parents: Int[Array, "R C"]
    tokens: Int[Array, "R C"]
    stops: Bool[Array, "R C"]
    running: Float[Array, "R W"]  # log-probabilities of those that go on
    best: Int[Array, "R W"]  # which they are


def _continuations(logits: Float[Array, "B K V"], beams: _Beams, start: Start, settings: DecodeSettings) -> _Found:
    """The continuations of all groups, one after the other where the later look at the earlier."""
    if settings.num_beam_groups == 1:
        return _group_continuations(logits, beams.history, beams.log_probs, beams.index, start, settings)
    batch_size, _, vocab_size = logits.shape
    split = (batch_size, settings.num_beam_groups, -1)
    logits, history = logits.reshape(*split, vocab_size), beams.history.reshape(*split, beams.history.shape[-1])
    log_probs = beams.log_probs.reshape(split)
    taken, found = jnp.zeros((batch_size, vocab_size)), []
    for group in range(settings.num_beam_groups):
        own = (logits[:, group], history[:, group], log_probs[:, group], beams.index)
        found.append(_group_continuations(*own, start, settings, settings.diversity_penalty * taken[:, None]))
        tokens = jnp.take_along_axis(found[-1].tokens, found[-1].best, axis=1)
        taken = taken.at[jnp.arange(batch_size)[:, None], tokens].add(1.0)
    return jax.tree.map(lambda *parts: jnp.stack(parts, axis=1).reshape(-1, parts[0].shape[1]), *found)


def _group_continuations(
    logits: Float[Array, "B W V"],
    history: Int[Array, "B W T"],
    before: Float[Array, "B W"],
    index: Int[Array, ""],
    start: Start,
    settings: DecodeSettings,
    less: Float[Array, "B 1 V"] | None = None,
) -> _Found:
    """The continuations of one group.

    Args:
      logits: of the next token.
      history: of the running hypotheses.
      before: their log-probabilities.
      index: how many tokens they have.
      start: of the search.
      settings: of the search.
      less: what each token's log-probability loses.
    """
    batch_size, num, vocab_size = logits.shape
    kept = max(2, 1 + len(start.eos_ids)) * num
    allowed, logits = _rule(logits, history, index, start, settings, less)
    # Two stages, each hypothesis's own best and then the best of those: the winners are among them.
    each = min(kept, vocab_size)
    values, tokens = largest(allowed, each)
    log_probs = values - jax.nn.logsumexp(logits, axis=-1)[..., None] + before[..., None]
    log_probs, places = jax.lax.top_k(log_probs.reshape(batch_size, num * each), kept)
    tokens = jnp.take_along_axis(tokens.reshape(batch_size, num * each), places, axis=1)
    ends = start.ends(tokens)
    running, best = jax.lax.top_k(log_probs + jnp.where(ends, BARRED, 0.0), num)
    stops = ends | (index + 1 >= settings.max_tokens)
    return _Found(log_probs, places // each, tokens, stops, running, best)


def _rule(
    logits: Float[Array, "B K V"],
    history: Int[Array, "B K T"],
    index: Int[Array, ""],
    start: Start,
    settings: DecodeSettings,
    less: Float[Array, "B 1 V"] | None = None,
) -> tuple[Float[Array, "B K V"], Float[Array, "B K V"]]:
    """Logits to choose by, and those that give the log-probabilities of what was chosen."""
    check_ids(settings, logits.shape[-1])
    if settings.penalises and settings.method == "beam":
        logits = jax.nn.log_softmax(logits, axis=-1)  # what is divided by a penalty depends on its sign
    text, offset = start.text(history)
    place, scores = index + offset, logits if less is None else logits - less
    if settings.penalises:
        read = jnp.where(jnp.arange(text.shape[2]) <= place, text, -1)
        scores = penalise(scores, read, settings, start.source)
    scores = constrain(scores, text, place, index, start.eos_ids, settings, start.source)
    forced = forced_tokens(
        index,
        start.prefix,
        start.eos_ids[0],
        first_token=settings.first_token,
        end_at=settings.max_tokens - 1 if settings.end_at_limit else None,
    )
    return force(scores, forced), force(logits, forced)


def _merge(pool: _Pool, new: _Pool) -> _Pool:
    """The best of both, as many as `pool` holds."""
    both = jax.tree.map(lambda old, more: jnp.concatenate([old, more], axis=1), pool, new)
    return _best_of(both, pool.scores.shape[1])


def _best_of(pool: _Pool, num: int) -> _Pool:
    _, order = jax.lax.top_k(pool.scores, num)
    return jax.tree.map(lambda values: _gather(values, order), pool)


def _gather(values: Array, order: Int[Array, "B N"]) -> Array:
    """`values[b, order[b, n]]` for values of shape [B, K, ...]."""
    return jnp.take_along_axis(values, order.reshape(order.shape + (1,) * (values.ndim - 2)), axis=1)


def _column(history: Int[Array, "B K T"], index: Int[Array, ""]) -> Int[Array, "B K"]:
    return jax.lax.dynamic_index_in_dim(history, index, axis=2, keepdims=False)
