"""Truncated sampling of tokens, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.largest import group_width, grouped, largest


class Draws(NamedTuple):
    """Separate randomness for each example, which then draws the same tokens in any batch.

    `temperature` and `top_p` replace those of the settings, unless they are None.
    """

    keys: jax.Array
    temperature: Float[Array, " B"] | None = None
    top_p: Float[Array, " B"] | None = None


Randomness: TypeAlias = "jax.Array | Draws"
"""One PRNG key for all examples, or one for each."""


def folded(rng: Randomness, number: int | Int[Array, ""]) -> Randomness:
    """Applies `jax.random.fold_in` to every key."""
    if isinstance(rng, Draws):
        return rng._replace(keys=jax.vmap(lambda key: jax.random.fold_in(key, number))(rng.keys))
    return jax.random.fold_in(rng, number)


def noise(
    rng: Randomness, draw: Callable[[jax.Array, tuple[int, ...]], Float[Array, "*B"]], shape: tuple[int, ...]
) -> Float[Array, "*B"]:
    """Draws numbers of `shape` [B, ...] with `draw`, such as `jax.random.gumbel`; `Draws` has a key per example."""
    if isinstance(rng, Draws):
        return jax.vmap(lambda key: draw(key, shape[1:]))(rng.keys)
    return draw(rng, shape)


def sample_tokens(
    rng: jax.Array,
    logits: Float[Array, "B K V"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int = 0,
    top_p: float | Float[Array, ""] = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Int[Array, "B K"]:
    """Draws one token per hypothesis: temperature, top-k, top-p, min-p, typical-p, in Hugging Face's order.

    Source: Fan et al. 2018 (top-k), Holtzman et al. 2020, Sec. 3.1 (top-p); for the others see `at_least`, `typical`.

    The logits are -inf where a token is not allowed; the temperature, above 0, divides them. `top_k` keeps exactly the
    k likeliest tokens, 0 = all; a tie at the border keeps the lowest id. `top_p`, in (0, 1], keeps the smallest set of
    likeliest tokens whose total probability reaches p; 1 = all.
    """
    scaled = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        values, ids = largest(scaled, top_k)
        choice = jax.random.categorical(rng, typical(at_least(_nucleus_of_sorted(values, top_p), min_p), typical_p))
        return jnp.take_along_axis(ids, choice[..., None], axis=-1)[..., 0]
    return _categorical(rng, typical(at_least(nucleus(scaled, top_p), min_p), typical_p))


def truncated(
    logits: Float[Array, "*B V"], *, top_k: int, top_p: float, min_p: float, typical_p: float, at_least_tokens: int
) -> Float[Array, "*B V"]:
    """Sets tokens to -inf that `sample_tokens` would not draw from scaled logits.

    The `at_least_tokens` likeliest tokens are kept; with `typical_p`, the most typical ones.
    """
    stays = logits
    if 0 < top_k < logits.shape[-1]:
        stays = jnp.where(logits >= largest(logits, top_k)[0][..., -1:], logits, -jnp.inf)
    fewest = min(at_least_tokens, logits.shape[-1])
    stays = at_least(nucleus(stays, top_p), min_p)
    stays = jnp.where(logits >= largest(logits, fewest)[0][..., -1:], logits, stays)
    return typical(stays, typical_p, at_least_tokens=fewest)


def nucleus(logits: Float[Array, "*B V"], top_p: float | Float[Array, ""]) -> Float[Array, "*B V"]:
    """Sets a token to -inf if likelier tokens have a total probability of at least `top_p`; ties are kept together."""
    if isinstance(top_p, float | int) and top_p >= 1.0:
        return logits
    probs = jax.nn.softmax(logits, axis=-1)
    # Non-negative floats are ordered like their bits, and 1 is the largest probability.
    stays = _first_mass(_bits(probs), probs, top_p, largest_key=1.0)
    # Keeps the likeliest tokens in any case: probabilities may sum to slightly less than p.
    stays |= probs == jnp.max(probs, axis=-1, keepdims=True)
    return jnp.where(stays, logits, -jnp.inf)


def at_least(logits: Float[Array, "*B V"], min_p: float) -> Float[Array, "*B V"]:
    """Sets a token to -inf if its probability is below `min_p` times the largest probability; 0 = keeps all.

    Source: Nguyen et al. 2024, Sec. 3.
    """
    if min_p <= 0.0:
        return logits
    probs = jax.nn.softmax(logits, axis=-1)
    return jnp.where(probs < min_p * jnp.max(probs, axis=-1, keepdims=True), -jnp.inf, logits)


def typical(logits: Float[Array, "*B V"], typical_p: float, *, at_least_tokens: int = 1) -> Float[Array, "*B V"]:
    """Keeps the tokens with information nearest to its mean, up to a total probability of `typical_p`; ties are kept.

    The `at_least_tokens` nearest are kept in any case.

    Source: Meister et al. 2023, Eq. 10 and 11.
    """
    if typical_p >= 1.0:
        return logits
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    probs = jnp.exp(log_probs)
    entropy = -jnp.sum(jnp.where(probs > 0, log_probs * probs, 0.0), axis=-1, keepdims=True)
    away = jnp.abs(-log_probs - entropy)
    stays = _first_mass(_bits(jnp.float32(jnp.inf)) - _bits(away), probs, typical_p, largest_key=jnp.inf)
    stays |= -away >= largest(-away, at_least_tokens)[0][..., -1:]
    return jnp.where(stays, logits, -jnp.inf)


def _bits(values: Float[Array, "*B"]) -> Int[Array, "*B"]:
    return jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)


def _first_mass(
    keys: Int[Array, "*B V"], probs: Float[Array, "*B V"], mass: float | Float[Array, ""], *, largest_key: float
) -> Bool[Array, "*B V"]:
    """Selects tokens for which all higher keys have a total probability below `mass`; equal keys are kept together.

    That probability falls as the key rises, so the smallest kept key is found by bisection: exact after about 31
    halvings, and ten times faster than a sort. No key exceeds the bits of the float `largest_key`.
    """
    top = int(np.float32(largest_key).view(np.int32))

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the smallest kept key is in (low, high]
        middle = low + (high - low + 1) // 2  # never the low end, which is not a key at first
        stays = jnp.sum(jnp.where(keys > middle[..., None], probs, 0.0), axis=-1) < mass
        return jnp.where(stays, low, middle), jnp.where(stays, middle, high)

    start = jnp.full(keys.shape[:-1], -1, jnp.int32), jnp.full(keys.shape[:-1], top, jnp.int32)
    _, high = jax.lax.fori_loop(0, (top + 1).bit_length(), halve, start)
    return keys >= high[..., None]


def _nucleus_of_sorted(logits: Float[Array, "*B k"], top_p: float | Float[Array, ""]) -> Float[Array, "*B k"]:
    if isinstance(top_p, float | int) and top_p >= 1.0:
        return logits
    probs = jax.nn.softmax(logits, axis=-1)
    above = jnp.cumsum(probs, axis=-1)[..., :-1]
    above = jnp.concatenate([jnp.zeros_like(probs[..., :1]), above], axis=-1)
    return jnp.where(above < top_p, logits, -jnp.inf)


def _categorical(rng: jax.Array, logits: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    # First the group, then the token in it: about V / 32 + 32 random numbers per row instead of V.
    groups = grouped(logits)
    group_rng, token_rng = jax.random.split(rng)
    group = jax.random.categorical(group_rng, jax.nn.logsumexp(groups, axis=-1))
    inside = jnp.take_along_axis(groups, group[..., None, None], axis=-2)[..., 0, :]
    return group * group_width(logits.shape[-1]) + jax.random.categorical(token_rng, inside)
