"""From a step function to sequences: greedy, sampling and beam search, jitted, with no model in sight.

A step reads one token of each hypothesis and gives the logits of the next. Its cache is a pytree with a method
`reorder(parents[B, K]) -> cache`, which lets hypothesis k go on from parent `parents[b, k]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError, check_numbers
from empax.core.protocols import StepFn
from empax.core.types import Generated
from empax.decoding.constraints import constrain, force, forced_tokens
from empax.decoding.sampling import largest, sample_tokens

Method = Literal["greedy", "beam", "sample"]

LEAST_TEMPERATURE = 1e-4
"""Lower ones divide logits beyond float32; "greedy" is their limit."""

BARRED = -1e9
"""Added to the score of what must not win: finite, as in Hugging Face's search, so that order among barred remains."""

_MOST_TOKENS, _MOST_HYPOTHESES = 1_000_000, 10_000


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """How to decode. Static: every combination compiles its own program.

    Attributes:
      method: "greedy", "beam" or "sample".
      max_tokens: most tokens of a response, the end-of-sequence token included.
      min_tokens: fewest tokens before the end-of-sequence token.
      num_beams: hypotheses kept by "beam".
      length_penalty: "beam" ranks by log-probability / length ** length_penalty; length counts the end token.
      early_stopping: True: "beam" stops once num_beams hypotheses have ended, even if a better one could still come.
        False: it stops once the best running hypothesis, at its present length, is no better than the worst of them.
        "never": once no running hypothesis can become better at any length.
      num_samples: independent responses drawn by "sample".
      temperature: of "sample", at least LEAST_TEMPERATURE.
      top_k: of "sample": keeps the k likeliest tokens; 0 = all.
      top_p: of "sample": keeps the likeliest tokens that hold p of the probability; 1 = all.
      no_repeat_ngram: no n-gram of this size comes twice in a response; 0 = may repeat. As in Hugging Face's, the start
        token counts as the first token. Departure: theirs counts the whole prompt of a decoder-only model; here a
        response may repeat the prompt.
      first_token: what every response begins with (BART: its `forced_bos_token_id`); None = anything.
      end_at_limit: the last of `max_tokens` must be the end-of-sequence token (BART's `forced_eos_token_id`).
      rerank: which of several hypotheses comes first (`decoding.rerank`; whoever decodes applies it): with "consensus"
        the one that the others agree with most, with "likelihood" the likeliest, with "similarity" a likely one whose
        encoding is near that of the context; "" leaves the order of the search.
      rerank_length: "consensus" ranks by agreement * length ** rerank_length (ours, because agreement alone prefers
        short replies), "likelihood" by log-probability / length ** rerank_length.
      rerank_similarity: of "similarity": how much the cosine counts beside the log-probability.
      rerank_exemplars: how much agreement with the responses of the retrieved exemplars, on average, counts beside
        that with the other hypotheses; 0 = nothing. Ours.
    """

    method: Method = "greedy"
    max_tokens: int = 30
    min_tokens: int = 0
    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_samples: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    no_repeat_ngram: int = 0
    first_token: int | None = None
    end_at_limit: bool = False
    rerank: Literal["", "consensus", "likelihood", "similarity"] = ""
    rerank_length: float = 0.0
    rerank_exemplars: float = 0.0
    rerank_similarity: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            allowed = ", ".join(map(repr, get_args(Method)))
            raise ConfigError(f"method = {self.method!r} is not allowed; it takes one of {allowed}.")
        check_numbers(self, "max_tokens", least=1, most=_MOST_TOKENS)
        check_numbers(self, "min_tokens", least=0, most=self.max_tokens)
        check_numbers(self, "num_beams", "num_samples", least=1, most=_MOST_HYPOTHESES)
        check_numbers(self, "top_k", "no_repeat_ngram", "first_token", "rerank_exemplars", least=0)
        check_numbers(self, "rerank_similarity", least=0)
        check_numbers(self, "length_penalty", "rerank_length", least=-10, most=10)
        check_numbers(self, "temperature", least=LEAST_TEMPERATURE, hint="'greedy' takes the likeliest token")
        check_numbers(self, "top_p", above=0, most=1)
        if self.rerank and num_hypotheses(self) < 2:
            more = {"greedy": "method = 'sample'", "beam": "num_beams", "sample": "num_samples"}[self.method]
            raise ConfigError(f"rerank = {self.rerank!r} is not allowed with one hypothesis; set {more}.")
        if self.rerank_exemplars and self.rerank != "consensus":
            raise ConfigError(
                f"rerank_exemplars = {self.rerank_exemplars} is not allowed without rerank = 'consensus'."
            )


def num_hypotheses(settings: DecodeSettings) -> int:
    """K: how many hypotheses of each example the cache must be started with, and `Generated` will hold."""
    return {"greedy": 1, "beam": settings.num_beams, "sample": settings.num_samples}[settings.method]


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

    Returns:
      Tokens [B, K, T] with T = `max_tokens`, best hypothesis first, and their log-probabilities under the model:
      neither tempered nor truncated nor renormalised. Forced tokens (`prefix`, `first_token`, `end_at_limit`) are
      certain, as in Hugging Face's search: they add 0.

    Raises:
      ValueError: "sample" without `rng`, or a prefix of more than `max_tokens`.
    """
    if prefix is not None and prefix.shape[1] > settings.max_tokens:
        raise ValueError(f"a prefix of {prefix.shape[1]} tokens is longer than max_tokens = {settings.max_tokens}.")
    start = Start(batch_size, start_id, eos_id, pad_id, prefix)
    if settings.method == "beam":
        return beam_search(step, cache, start, settings)
    if settings.method == "greedy":
        return greedy(step, cache, start, settings)
    if rng is None:
        raise ValueError('rng = None is not allowed with method "sample"; pass a PRNG key.')
    return sample(step, cache, start, settings, rng)


@dataclasses.dataclass(frozen=True)
class Start:
    """What every search starts from; the arguments of `generate`."""

    batch_size: int
    start_id: int | Int[Array, " B"]
    eos_id: int
    pad_id: int
    prefix: Int[Array, "B P"] | None = None

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
            finished=walk.finished | (chosen == start.eos_id),
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
    """Ended hypotheses of each example, best first; `score` is the length-normalised log-probability."""

    tokens: Int[Array, "B N T"]
    log_probs: Float[Array, "B N"]
    scores: Float[Array, "B N"]
    ended: Bool[Array, "B N"]


@flax.struct.dataclass
class _Beams:
    index: Int[Array, ""]
    history: Int[Array, "B K T"]  # of the running hypotheses, the likeliest first
    log_probs: Float[Array, "B K"]
    pool: _Pool
    improvable: Bool[Array, " B"]  # may a running hypothesis still enter the pool?
    cache: Any


def beam_search(step: StepFn, cache: Any, start: Start, settings: DecodeSettings) -> Generated:
    """Beam search with Hugging Face's conventions; token-identical to theirs (transformers 5).

    Each step takes the 2K likeliest continuations, so that K remain even if K of them end. Those among the first K that
    end (or reach `max_tokens`) compete for the pool of the K best, by log-probability / length ** length_penalty.
    An example is done when its pool is full and the best running hypothesis, normalised by its present length, is no
    better than the worst in the pool; with `early_stopping`, as soon as its pool is full; with "never", when the best
    running one would be no better at any length.
    """
    num, max_tokens = settings.num_beams, settings.max_tokens
    # A table in double precision: the divisor rounds as a Python float does.
    norms = jnp.asarray(np.power(np.arange(1.0, max_tokens + 1), settings.length_penalty), jnp.float32)

    def unfinished(beams: _Beams) -> Bool[Array, ""]:
        go_on = jnp.any(beams.improvable)
        if settings.early_stopping is True:
            go_on &= ~jnp.all(beams.pool.ended)
        return (beams.index < max_tokens) & go_on

    def body(beams: _Beams) -> _Beams:
        logits, cache = step(_column(beams.history, beams.index), beams.cache)
        log_probs, parents, tokens = _continuations(logits, beams, start, settings)
        history = _gather(beams.history, parents).at[:, :, beams.index + 1].set(tokens)
        stops = (tokens == start.eos_id) | (beams.index + 1 >= max_tokens)
        norm = norms[jnp.maximum(beams.index - start.prefix_lengths(), 0)]

        running, best = jax.lax.top_k(log_probs + jnp.where(stops, BARRED, 0.0), num)
        enters = stops & (jnp.arange(2 * num) < num)[None]
        scores = log_probs / norm
        if settings.early_stopping is True:
            scores += jnp.where(jnp.all(beams.pool.ended, axis=1, keepdims=True), BARRED, 0.0)
        scores += jnp.where(beams.improvable[:, None], 0.0, BARRED)
        scores += jnp.where(enters, 0.0, BARRED)
        pool = _merge(beams.pool, _Pool(history, log_probs, scores, enters))

        hoped = norm  # log-probabilities are negative: the longer, the better, where length_penalty is positive
        if settings.early_stopping == "never" and settings.length_penalty > 0.0:
            hoped = norms[max_tokens - 1 - start.prefix_lengths()]
        worst = jnp.where(pool.ended, jnp.min(pool.scores, axis=1, keepdims=True), BARRED)
        return _Beams(
            index=beams.index + 1,
            history=_gather(history, best),
            log_probs=running,
            pool=pool,
            improvable=beams.improvable & jnp.any(running[:, :1] / hoped > worst, axis=1),
            cache=cache.reorder(jnp.take_along_axis(parents, best, axis=1)),
        )

    beams = jax.lax.while_loop(unfinished, body, _start_beams(cache, start, settings))
    return Generated(tokens=beams.pool.tokens[:, :, 1:], log_probs=beams.pool.log_probs)


def _start_beams(cache: Any, start: Start, settings: DecodeSettings) -> _Beams:
    shape = (start.batch_size, settings.num_beams)
    history = start.history(settings.num_beams, settings.max_tokens)
    # All hypotheses are the same at first: only the first may go on, or all would stay the same.
    log_probs = jnp.zeros(shape, jnp.float32).at[:, 1:].set(BARRED)
    pool = _Pool(
        tokens=history,
        log_probs=jnp.full(shape, -jnp.inf, jnp.float32),
        scores=jnp.full(shape, BARRED, jnp.float32),
        ended=jnp.zeros(shape, bool),
    )
    improvable = jnp.ones(start.batch_size, bool)
    return _Beams(jnp.zeros((), jnp.int32), history, log_probs, pool, improvable, cache)


def _continuations(
    logits: Float[Array, "B K V"], beams: _Beams, start: Start, settings: DecodeSettings
) -> tuple[Float[Array, "B C"], Int[Array, "B C"], Int[Array, "B C"]]:
    """The C = 2K likeliest continuations, best first: log-probability of the whole, parent, token."""
    batch_size, num, vocab_size = logits.shape
    # Two stages, each hypothesis's own best and then the best of those: the 2K winners are among them.
    each = min(2 * num, vocab_size)
    allowed, logits = _rule(logits, beams.history, beams.index, start, settings)
    values, tokens = largest(allowed, each)
    log_probs = values - jax.nn.logsumexp(logits, axis=-1)[..., None] + beams.log_probs[..., None]
    best, places = jax.lax.top_k(log_probs.reshape(batch_size, num * each), 2 * num)
    tokens = jnp.take_along_axis(tokens.reshape(batch_size, num * each), places, axis=1)
    return best, places // each, tokens


def _rule(
    logits: Float[Array, "B K V"],
    history: Int[Array, "B K T"],
    index: Int[Array, ""],
    start: Start,
    settings: DecodeSettings,
) -> tuple[Float[Array, "B K V"], Float[Array, "B K V"]]:
    """Logits to choose by, and those that give the log-probabilities of what was chosen."""
    bans = {"min_tokens": settings.min_tokens, "no_repeat_ngram": settings.no_repeat_ngram}
    end_at = settings.max_tokens - 1 if settings.end_at_limit else None
    forced = forced_tokens(index, start.prefix, start.eos_id, first_token=settings.first_token, end_at=end_at)
    return force(constrain(logits, history, index, start.eos_id, **bans), forced), force(logits, forced)


def _merge(pool: _Pool, new: _Pool) -> _Pool:
    """The best of both, as many as `pool` holds."""
    both = jax.tree.map(lambda old, more: jnp.concatenate([old, more], axis=1), pool, new)
    _, order = jax.lax.top_k(both.scores, pool.scores.shape[1])
    return jax.tree.map(lambda values: _gather(values, order), both)


def _gather(values: Array, order: Int[Array, "B N"]) -> Array:
    """`values[b, order[b, n]]` for values of shape [B, K, ...]."""
    return jnp.take_along_axis(values, order.reshape(order.shape + (1,) * (values.ndim - 2)), axis=1)


def _column(history: Int[Array, "B K T"], index: Int[Array, ""]) -> Int[Array, "B K"]:
    return jax.lax.dynamic_index_in_dim(history, index, axis=2, keepdims=False)
