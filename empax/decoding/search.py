"""From a step function to sequences: greedy, sampling and beam search, jitted, with no model in sight.

A step reads one token of each hypothesis and gives the logits of the next. Its cache is a pytree with a method
`reorder(parents[B, K]) -> cache`, which lets hypothesis k go on from parent `parents[b, k]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.protocols import StepFn
from empax.core.types import Generated
from empax.decoding.beam import beam_search
from empax.decoding.hypotheses import Limits, Start, choices, column, gather, tokens_before
from empax.decoding.sampling import Draws, largest, sample_tokens
from empax.decoding.settings import DecodeSettings

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
    rng: jax.Array | Draws | None = None,
    prefix: Int[Array, "B P"] | None = None,
    source: Tokens | None = None,
    prompt: Tokens | None = None,
    limits: Limits | None = None,
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
      rng: PRNG key; needed by "sample" and `draw_beams` only. "sample" takes `Draws`, too: randomness of each example.
      prefix: what every response of an example begins with, the same for all its hypotheses; -1 from where it is free.
        Part of the result and of `max_tokens`, but not of the length that `length_penalty` sees.
      source: what the encoder has read, for `encoder_no_repeat_ngram` and `encoder_repetition_penalty`. Departure:
        Hugging Face's take padding for tokens of the source.
      prompt: what a decoder-only model has read, its last real token being `start_id`, where its tokens shall count
        for `no_repeat_ngram`, `repetition_penalty` and `bad_words`, as they do in Hugging Face's; None = the response
        may repeat them. Where it is given it is also the `source`, unless there is one.
      limits: fewest and most tokens of each response, where they differ: then `min_tokens` does not count, and no limit
        is above `max_tokens`.

    Returns:
      Tokens [B, K, T] with T = `max_tokens`, best hypothesis first, and their log-probabilities under the model:
      neither tempered nor truncated nor renormalised. Forced tokens (`prefix`, `first_token`, `end_at_limit`) are
      certain, as in Hugging Face's search: they add 0. Penalties (of repetition, of `diversity_penalty`) are part of
      what "beam" gives, since it ranks by them, and so is the temperature of `draw_beams`.

    Raises:
      ValueError: "sample" or `draw_beams` without `rng`, or a prefix of more than `max_tokens`.
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
        before=None if prompt is None else tokens_before(*prompt),
        limits=limits,
    )
    if settings.method == "beam":
        return beam_search(step, cache, start, settings, None if isinstance(rng, Draws) else rng)
    if settings.method == "greedy":
        return greedy(step, cache, start, settings)
    if rng is None:
        raise ValueError('rng = None is not allowed with method "sample"; pass a PRNG key.')
    return sample(step, cache, start, settings, rng)


def greedy(step: StepFn, cache: Any, start: Start, settings: DecodeSettings) -> Generated:
    """The likeliest token at every step; K = 1."""
    return _decode(step, cache, start, settings, 1, lambda logits, _: largest(logits, 1)[1][..., 0])


def sample(step: StepFn, cache: Any, start: Start, settings: DecodeSettings, rng: jax.Array | Draws) -> Generated:
    """`num_samples` independent responses of each example, the likeliest first; as drawn if they are to be reranked."""
    kept = {"top_k": settings.top_k, "min_p": settings.min_p, "typical_p": settings.typical_p}

    def choose(logits: Float[Array, "B K V"], index: Int[Array, ""]) -> Int[Array, "B K"]:
        if not isinstance(rng, Draws):
            own = {"temperature": settings.temperature, "top_p": settings.top_p}
            return sample_tokens(jax.random.fold_in(rng, index), logits, **own, **kept)

        def of_row(row: Draws, logits: Float[Array, "K V"]) -> Int[Array, " K"]:
            key = jax.random.fold_in(row.keys, index)
            return sample_tokens(key, logits[None], temperature=row.temperature, top_p=row.top_p, **kept)[0]

        return jax.vmap(of_row)(rng, logits)

    drawn = _decode(step, cache, start, settings, settings.num_samples, choose)
    if settings.num_samples == 1 or settings.rerank:
        return drawn
    log_probs, order = jax.lax.top_k(drawn.log_probs, settings.num_samples)
    return Generated(tokens=gather(drawn.tokens, order), log_probs=log_probs)


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
        logits, cache = step(column(walk.history, walk.index), walk.cache)
        allowed, logits = choices(logits, walk.history, walk.index, start, settings)
        chosen = choose(allowed, walk.index)
        log_probs = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
        token = jnp.where(walk.finished, start.pad_id, chosen).astype(jnp.int32)
        return _Walk(
            index=walk.index + 1,
            history=walk.history.at[:, :, walk.index + 1].set(token),
            log_probs=walk.log_probs + jnp.where(walk.finished, 0.0, log_probs),
            finished=walk.finished | start.ends(chosen) | (walk.index + 1 >= start.most(settings)),
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
