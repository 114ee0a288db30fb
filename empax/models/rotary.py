"""Rotary positions: queries and keys turned by angles that grow with the position."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from empax.core.config import ConfigError

Rotary: TypeAlias = tuple[Float[Array, "B P M"], Float[Array, "B P M"]]
"""Cosines and sines of the angles of P positions, float32; M = head_dim / 2."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of slow rotations, for contexts longer than those of pretraining.

    Source: the released configurations of Llama 3.1, 3.2 and 3.3 ("rope_type": "llama3").

    Attributes:
      factor: by how much rotations slower than `low_freq_factor` are slowed further; at least 1.
      low_freq_factor: full turns within `original_positions` up to which a rotation is slow.
      high_freq_factor: full turns from which it stays as it is; in between the two are mixed.
      original_positions: context length of pretraining, tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ConfigError(f"rope scaling: factor = {self.factor} must be at least 1.")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope scaling: low_freq_factor = {self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor = {self.high_freq_factor}."
            )
        if self.original_positions < 1:
            raise ConfigError(f"rope scaling: original_positions = {self.original_positions} must be at least 1.")


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by one factor, so that a context longer than that of pretraining has known positions.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation", Eq. 4.

    Attributes:
      factor: by how much each rotation is slowed; at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ConfigError(f"rope scaling: factor = {self.factor} must be at least 1.")


def rotation_rates(head_dim: int, theta: float, scaling: RopeScaling | LinearScaling | None) -> Float[np.ndarray, " M"]:
    """Radians by which each pair of features turns from one position to the next.

    Args:
      head_dim: N, even; feature m makes a pair with feature m + N/2.
      theta: the slowest pair turns about 1 / theta.
      scaling: None = as Su et al. 2021, Sec. 3.2.2.
    """
    rates = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if isinstance(scaling, LinearScaling):
        rates = rates / scaling.factor
    elif scaling is not None:
        turns = rates * scaling.original_positions / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        rates = rates * (kept + (1.0 - kept) / scaling.factor)
    return rates.astype(np.float32)


def rotary(positions: Int[Array, "B P"], rates: Float[np.ndarray, " M"]) -> Rotary:
    """Cosines and sines of `positions` times `rates`."""
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(rates)[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(heads: Float[Array, "B H T N"], angles: Rotary) -> Float[Array, "B H T N"]:
    """Turns the pair (m, m + N/2) of each head's features by its angle; computed in float32."""
    cos, sin = (table[:, None, :, :] for table in angles)
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(heads.dtype)
