"""Jitted greedy decoding, sampling and beam search with a step function, independent of the model.

A step reads one token of each hypothesis and returns the logits of the next. Its cache is a pytree with a method
`reorder(parents[B, K]) -> cache`, which makes hypothesis k continue from parent `parents[b, k]`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.largest import largest
from empax.core.protocols import StepFn
from empax.core.types import Generated
from empax.decoding.beam import BeamSearch
from empax.decoding.hypotheses import Limits, Progress, Start, choices, column, gather, tokens_before
from empax.decoding.sampling import Draws, Randomness, folded, sample_tokens
from empax.decoding.settings import DecodeSettings, num_hypotheses

Tokens: TypeAlias = tuple[Int[Array, "B S"], Bool[Array, "B S"]]
"""Token ids and the mask of real tokens."""


def generate(step: StepFn, cache: Any, **given: Any) -> Generated:
    """Decodes by `settings.method`; call it under `jax.jit`. Arguments are those of `search_of`.

    The cache must be started for K = `num_hypotheses(settings)` and at least `settings.max_tokens` steps.

    Returns:
      Tokens [B, K, T] with T = `max_tokens`, best hypothesis first, and their log-probabilities under the model, before
      temperature, truncation or renormalisation. Forced tokens (`first_token`, `end_at_limit`) are certain,
      as in Hugging Face's search: they add 0. Log-probabilities of "beam" include penalties (repetition,
      `diversity_penalty`), since it ranks by them, and the temperature of `draw_beams`.

    Raises ConfigError as `search_of` does.
    """
    search = search_of(step, **given)
    return search.found(search.go_on(search.begin(cache)))


def search_of(
    step: StepFn,
    *,
    batch_size: int,
    start_id: int | Int[Array, " B"],
    eos_id: int,
    pad_id: int,
    settings: DecodeSettings,
    rng: Randomness | None = None,
    source: Tokens | None = None,
    prompt: Tokens | None = None,
    limits: Limits | None = None,
) -> Search:
    """Returns the search for `settings.method`.

    Args:
      step: reads `tokens[B, K]` and the cache, returns float32 logits [B, K, V] and the next cache.
      batch_size: B.
      start_id: first token that every hypothesis reads, not part of the result; one per example if prompts end in it.
      eos_id: ends a hypothesis; part of the result.
      pad_id: fills the result after the end.
      settings: static.
      rng: PRNG key, needed only by "sample" and `draw_beams`. `Draws` has one per example.
      source: input of the encoder, for options that read it. Departure: Hugging Face counts its padding as tokens.
      prompt: input of a decoder-only model, ending with `start_id`, if its tokens count for `no_repeat_ngram`,
        `repetition_penalty` and `bad_words`, as in Hugging Face; None = the response may repeat them. It is also the
        default of `source`.
      limits: fewest and most tokens of each response, at most `max_tokens`; `min_tokens` is then ignored.

    Raises ConfigError if an option needs a missing source, or names a token that the vocabulary lacks.
    """
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
        source=None if source is None else jnp.where(source[1], source[0], -1),
        before=None if prompt is None else tokens_before(*prompt),
        limits=limits,
    )
    return (BeamSearch if settings.method == "beam" else WalkSearch)(step, start, settings, rng)


@flax.struct.dataclass
class Walk:
    """State of a search with independent hypotheses: each continues until its end token."""

    index: Int[Array, ""]
    history: Int[Array, "B K T"]  # the start token, the chosen tokens, padding
    log_probs: Float[Array, "B K"]
    finished: Bool[Array, "B K"]
    cache: Any


@dataclasses.dataclass(frozen=True)
class WalkSearch:
    """Greedy decoding and sampling."""

    step: StepFn
    start: Start
    settings: DecodeSettings
    rng: Randomness | None

    def begin(self, cache: Any) -> Walk:
        """Returns the state before the first step; `cache` as in `generate`."""
        shape = (self.start.batch_size, num_hypotheses(self.settings))
        return Walk(
            index=jnp.zeros((), jnp.int32),
            history=self.start.history(shape[1], self.settings.max_tokens),
            log_probs=jnp.zeros(shape, jnp.float32),
            finished=jnp.zeros(shape, bool),
            cache=cache,
        )

    def go_on(self, state: Any, until: Int[Array, ""] | int | None = None) -> Walk:
        """Continues the search up to `until` tokens, or to the end."""
        start, settings = self.start, self.settings
        last = settings.max_tokens if until is None else jnp.minimum(until, settings.max_tokens)

        def body(walk: Walk) -> Walk:
            logits, cache = self.step(column(walk.history, walk.index), walk.cache)
            allowed, logits = choices(logits, walk.history, walk.index, start, settings)
            chosen = self._choose(allowed, walk.index)
            log_probs = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
            log_probs -= jax.nn.logsumexp(logits, axis=-1)
            token = jnp.where(walk.finished, start.pad_id, chosen).astype(jnp.int32)
            return Walk(
                index=walk.index + 1,
                history=walk.history.at[:, :, walk.index + 1].set(token),
                log_probs=walk.log_probs + jnp.where(walk.finished, 0.0, log_probs),
                finished=walk.finished | start.ends(chosen) | (walk.index + 1 >= start.most(settings)),
                cache=cache,
            )

        return jax.lax.while_loop(lambda walk: (walk.index < last) & ~jnp.all(walk.finished), body, state)

    def found(self, state: Any) -> Generated:
        """Returns the responses; samples are sorted by likelihood, or in the order drawn if `rerank` is set."""
        drawn = Generated(tokens=state.history[:, :, 1:], log_probs=state.log_probs)
        if drawn.log_probs.shape[1] == 1 or self.settings.rerank:
            return drawn
        log_probs, order = jax.lax.top_k(drawn.log_probs, drawn.log_probs.shape[1])
        return Generated(tokens=gather(drawn.tokens, order), log_probs=log_probs)

    def progress(self, state: Any) -> Progress:
        """Returns the progress of a search for one response per example, without re-ranking."""
        settled = jnp.broadcast_to(state.index, state.finished.shape[:1])
        return Progress(state.history[:, 0, 1:], settled, state.finished[:, 0])

    def without(self, state: Any, rows: Bool[Array, " B"]) -> Walk:
        """Marks `rows` as finished, so that the search does not wait for them."""
        return state.replace(finished=state.finished | rows[:, None])

    def take(self, state: Any, rows: Int[Array, " R"]) -> Walk:
        """Returns the search state of these rows alone."""
        kept = {name: getattr(state, name)[rows] for name in ("history", "log_probs", "finished")}
        return state.replace(**kept, cache=state.cache.take(rows))

    def _choose(self, logits: Float[Array, "B K V"], index: Int[Array, ""]) -> Int[Array, "B K"]:
        settings, rng = self.settings, self.rng
        if settings.method == "greedy":
            return largest(logits, 1)[1][..., 0]
        kept = {"top_k": settings.top_k, "min_p": settings.min_p, "typical_p": settings.typical_p}
        assert rng is not None
        own, rng = {"temperature": settings.temperature, "top_p": settings.top_p}, folded(rng, index)
        if not isinstance(rng, Draws):
            return sample_tokens(rng, logits, **own, **kept)

        def of_row(row: Draws, logits: Float[Array, "K V"]) -> Int[Array, " K"]:
            told = {name: value for name in own if (value := getattr(row, name)) is not None}
            return sample_tokens(row.keys, logits[None], **{**own, **told}, **kept)[0]

        return jax.vmap(of_row)(rng, logits)


Search: TypeAlias = WalkSearch | BeamSearch
"""A search that can pause: `found(go_on(begin(cache)))`, with the same result for any number of `go_on` calls."""
