"""Mixes a corpus into a generator's token distributions: kNN-LM, and copying from exemplars."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from empax.decoding.neighbours import States, copy_probabilities, interpolated, knn_probabilities
from empax.models.fusion_in_decoder import Around
from empax.parts.generator.settings import NeighbourSettings


def mixing(
    settings: NeighbourSettings, corpus: States | None, exemplars: Callable[[], States]
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which next-token distributions are mixed by `settings`; if these are off, it does nothing.

    `corpus` has the states for `knn_weight`, and `exemplars` returns those for `copy_weight` (`response_states`).
    """
    if not settings.on:
        return contextlib.nullcontext()
    copied = exemplars() if settings.copy_weight else None

    def mixed(hidden: Float[Array, "B W D"], logits: Float[Array, "B W V"]) -> Float[Array, "B W V"]:
        parts, size = [], logits.shape[-1]
        if settings.knn_weight:
            assert corpus is not None
            given = {"num": settings.knn, "temperature": settings.knn_temperature, "vocab_size": size}
            parts.append((settings.knn_weight, knn_probabilities(hidden, corpus, **given)))
        if copied is not None:
            given = {"temperature": settings.copy_temperature, "vocab_size": size}
            parts.append((settings.copy_weight, copy_probabilities(hidden, copied, **given)))
        return interpolated(logits, parts)

    def intercept(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        found = call(*args, **kwargs)
        # A model around another takes the logits of the inner one, which mixes them.
        own = context.method_name == "logits_from" and not isinstance(context.module, Around)
        return mixed(args[0], found) if own else found

    return nn.intercept_methods(intercept)


def response_states(
    ids: Int[Array, "B K T"], mask: Bool[Array, "B K T"], eos_id: int, hidden: Callable[[Array], Array]
) -> States:
    """Returns the states of exemplars' responses; `hidden` gives those before each token of [B, T].

    A response ends with the end token, unless it has T tokens: then it may have been cut, and goes on.
    """
    ends = (jnp.arange(ids.shape[2])[None, None] == mask.sum(axis=2)[..., None]) & mask.any(axis=2, keepdims=True)
    ids, mask = jnp.where(ends, eos_id, ids), mask | ends
    keys = jax.lax.map(hidden, jnp.swapaxes(ids, 0, 1))  # [K, B, T, D]
    flat = (ids.shape[0], -1)
    return States(jnp.swapaxes(keys, 0, 1).reshape(*flat, keys.shape[-1]), ids.reshape(flat), mask.reshape(flat))
