"""Rotary positions: queries and keys turned by angles that grow with the position."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

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
        _check_at_least_1(self, "factor", "original_positions")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope scaling: low_freq_factor = {self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor = {self.high_freq_factor}."
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by one factor, so that a context longer than that of pretraining has known positions.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation", Eq. 4.

    Attributes:
      factor: by how much each rotation is slowed; at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_at_least_1(self, "factor")


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Slow rotations slowed by a factor and fast ones kept, with a ramp between, and sharper attention.

    Source: Peng et al. 2024, "YaRN: Efficient Context Window Extension of Large Language Models", Sec. 3.2 and 3.4; the
    ramp over numbers of features is the released code's.

    Attributes:
      factor: by how much slow rotations are slowed further; at least 1.
      original_positions: context length of pretraining, tokens.
      attention_factor: what queries and keys are multiplied by; None = 0.1 ln(factor) + 1 (Eq. 22).
      beta_fast, beta_slow: full turns within `original_positions` from which a rotation is kept, and up to which it is
        slowed by the whole factor.
      truncate: whether the ramp begins and ends at whole features.
    """

    factor: float
    original_positions: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_at_least_1(self, "factor", "original_positions")
        if not 0.0 < self.beta_slow <= self.beta_fast:
            raise ConfigError(
                f"rope scaling: beta_slow = {self.beta_slow} must be above 0 and at most beta_fast = {self.beta_fast}."
            )
        if self.attention_factor is not None and self.attention_factor <= 0.0:
            raise ConfigError(f"rope scaling: attention_factor = {self.attention_factor} must be above 0.")

    def slowed(self, rates: Float[np.ndarray, " M"], theta: float) -> Float[np.ndarray, " M"]:
        ends = [self._feature(turns, len(rates), theta) for turns in (self.beta_fast, self.beta_slow)]
        if self.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], 2 * len(rates) - 1)
        last = last + 0.001 if first == last else last
        slow = np.clip((np.arange(len(rates)) - first) / (last - first), 0.0, 1.0)
        return rates * (slow / self.factor + 1.0 - slow)

    def _feature(self, turns: float, pairs: int, theta: float) -> float:
        """The pair of features that makes so many full turns within the context of pretraining."""
        return pairs * math.log(self.original_positions / (turns * 2 * math.pi)) / math.log(theta)


def _check_at_least_1(scaling: Any, *names: str) -> None:
    for name in names:
        if getattr(scaling, name) < 1:
            raise ConfigError(f"rope scaling: {name} = {getattr(scaling, name)} must be at least 1.")


AnyScaling: TypeAlias = RopeScaling | LinearScaling | YarnScaling


def rotation_size(scaling: AnyScaling | None) -> float:
    """What `rotary` multiplies cosines and sines by."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.attention_factor is None else scaling.attention_factor


def rotation_rates(head_dim: int, theta: float, scaling: AnyScaling | None) -> Float[np.ndarray, " M"]:
    """Radians by which each pair of features turns from one position to the next.

    Args:
      head_dim: N, even; feature m makes a pair with feature m + N/2.
      theta: the slowest pair turns about 1 / theta.
      scaling: None = as Su et al. 2021, Sec. 3.2.2.
    """
    rates = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if isinstance(scaling, LinearScaling):
        rates = rates / scaling.factor
    elif isinstance(scaling, YarnScaling):
        rates = scaling.slowed(rates, theta)
    elif scaling is not None:
        turns = rates * scaling.original_positions / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        rates = rates * (kept + (1.0 - kept) / scaling.factor)
    return rates.astype(np.float32)


def rotary(positions: Int[Array, "B P"], rates: Float[np.ndarray, " M"], size: float = 1.0) -> Rotary:
    """Cosines and sines of `positions` times `rates`, both times `size`."""
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(rates)[None, None, :]
    return jnp.cos(angles) * size, jnp.sin(angles) * size


def rotate(heads: Float[Array, "B H T N"], angles: Rotary) -> Float[Array, "B H T N"]:
    """Turns the pair (m, m + N/2) of each head's features by its angle; computed in float32."""
    cos, sin = (table[:, None, :, :] for table in angles)
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(heads.dtype)
