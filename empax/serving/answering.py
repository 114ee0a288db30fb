"""Answers to a batch of texts, in as little memory as they take."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jaxtyping import Bool, Int

from empax.core.types import Batch, Generated, Params
from empax.decoding.hypotheses import Limits
from empax.decoding.sampling import Draws
from empax.parts.generator.task import Generator

_ROOM = 256
"""Tokens of the first cache."""


def answers_of(
    task: Generator,
    params: Params,
    batch: Batch,
    rng: jax.Array | Draws,
    limits: tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]],
    real: Bool[np.ndarray, " B"],
) -> Int[np.ndarray, "B K T"]:
    """Hypotheses, from a cache for few tokens, and for twice as many as long as one of a real row has not ended.

    A folder may allow thousands of tokens, which most answers do not take. A beam is searched once, since its end
    depends on how many tokens there may be.
    """
    settings = task.decoder.settings
    room = settings.max_tokens
    if settings.method != "beam":
        room = min(room, max(_ROOM, settings.min_tokens))
    while True:
        decoder = dataclasses.replace(task.decoder, settings=dataclasses.replace(settings, max_tokens=room))
        found = np.asarray(_generate(dataclasses.replace(task, decoder=decoder), params, batch, rng, limits).tokens)
        ended = np.isin(found, (decoder.eos_id, *settings.more_eos_ids)).any(axis=2) | (limits[1] <= room)[:, None]
        if room == settings.max_tokens or ended[real].all():
            return found
        room = min(2 * room, settings.max_tokens)


@functools.partial(jax.jit, static_argnums=0)
def _generate(task: Generator, params: Params, batch: Batch, rng: jax.Array | Draws, limits: Limits) -> Generated:
    return task.decoder(task.model, params["model"], batch.source, batch.source_mask, rng, limits=limits)
