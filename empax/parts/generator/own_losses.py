"""Users' losses in addition to a generator's likelihood, by "module:name"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from empax.core.config import ConfigError
from empax.core.plugins import blamed, load_function
from empax.core.types import Mean
from empax.parts.generator.settings import LossSettings


def own_loss(settings: LossSettings, logits: Float[Array, "B T V"], batch: Any, weights: Float[Array, " B"]) -> Mean:
    """Returns a user's loss of teacher-forced logits; `weights` are those of the rows, their target tokens."""
    values = load_function(settings.function)(logits.astype(jnp.float32), batch)
    if values.ndim == 1:
        return Mean.of(values, batch.valid, weights)
    return Mean.of(values, batch.target_mask & batch.valid[:, None])


def try_losses(losses: Sequence[LossSettings], batch: Any, vocab_size: int) -> None:
    """Raises ConfigError unless each function, traced on the shapes of a batch, has a number for each row or token."""
    rows, length = batch.target.shape
    logits = jax.ShapeDtypeStruct((rows, length, vocab_size), jnp.float32)
    for one in losses:
        function = load_function(one.function)
        with blamed(f"the loss {one.function}"):
            found = jax.eval_shape(function, logits, batch)
        shape, kind = getattr(found, "shape", None), getattr(found, "dtype", None)
        if shape not in ((rows,), (rows, length)) or kind is None or not jnp.issubdtype(kind, jnp.floating):
            raise ConfigError(
                f"the loss {one.function} returns {found} for {rows} rows of {length} target tokens; it must return an "
                f"array of floats of shape ({rows},) or ({rows}, {length})."
            )
