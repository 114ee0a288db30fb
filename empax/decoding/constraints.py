"""What a search may not choose, and what it must."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def constrain(
    logits: Float[Array, "B K V"],
    history: Int[Array, "B K T"],
    index: Int[Array, ""],
    eos_id: int,
    *,
    min_tokens: int,
    no_repeat_ngram: int,
) -> Float[Array, "B K V"]:
    """-inf where `min_tokens` or `no_repeat_ngram` forbids a token after `history[..., : index + 1]`."""
    if min_tokens:
        is_end = (jnp.arange(logits.shape[-1]) == eos_id)[None, None]
        logits = jnp.where(is_end & (index < min_tokens), -jnp.inf, logits)
    size = no_repeat_ngram
    if not 0 < size < history.shape[-1]:
        return logits
    num_windows = history.shape[-1] - size
    # An n-gram that starts like the latest n - 1 tokens forbids its own last token.
    last = jax.lax.dynamic_slice_in_dim(history, index + 2 - size, size - 1, axis=2)
    repeats = jnp.broadcast_to(jnp.arange(num_windows) + size <= index + 1, (*history.shape[:2], num_windows))
    for offset in range(size - 1):
        repeats &= history[:, :, offset : offset + num_windows] == last[:, :, offset, None]
    banned = jnp.where(repeats, history[:, :, size - 1 : size - 1 + num_windows], logits.shape[-1])
    rows, columns = jnp.arange(history.shape[0])[:, None, None], jnp.arange(history.shape[1])[None, :, None]
    return logits.at[rows, columns, banned].set(-jnp.inf, mode="drop")


def forced_tokens(
    index: Int[Array, ""],
    prefix: Int[Array, "B P"] | None,
    eos_id: int,
    *,
    first_token: int | None,
    end_at: int | None,
) -> Int[Array, "#B"] | None:
    """What every hypothesis of an example must take at `index`, -1 = it may choose; None = nothing ever is forced.

    Args:
      index: how many tokens a hypothesis has.
      prefix: what the response begins with, -1 = it may choose; goes before the other two.
      eos_id: the token at `end_at`.
      first_token: at index 0.
      end_at: the index at which a response must end.
    """
    if prefix is None and first_token is None and end_at is None:
        return None
    forced = jnp.full((1,), -1, jnp.int32)
    if first_token is not None:
        forced = jnp.where(index == 0, first_token, forced)
    if end_at is not None:
        forced = jnp.where(index == end_at, eos_id, forced)
    if prefix is not None:
        # Past its end there is a last column of -1: nothing.
        padded = jnp.pad(prefix, ((0, 0), (0, 1)), constant_values=-1).astype(jnp.int32)
        given = jax.lax.dynamic_index_in_dim(padded, index, axis=1, keepdims=False)  # out of range: the last
        forced = jnp.where(given >= 0, given, forced)
    return forced


def force(logits: Float[Array, "B K V"], forced: Int[Array, "#B"] | None) -> Float[Array, "B K V"]:
    """Logits under which a forced token is certain: its log-probability is 0, that of all others -inf."""
    if forced is None:
        return logits
    wanted = forced[:, None, None]
    is_wanted = jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2) == wanted
    return jnp.where(wanted >= 0, jnp.where(is_wanted, 0.0, -jnp.inf), logits)
