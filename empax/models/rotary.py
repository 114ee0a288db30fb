"""Rotary position embeddings: queries and keys are rotated by angles that grow with the position."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from empax.core.config import ConfigError, check_numbers

Rotary: TypeAlias = tuple[Float[Array, "B P M"], Float[Array, "B P M"]]
"""Cosines and sines of the angles of P positions, float32; M = head_dim / 2."""


_HINT = "it is a field of the rope scaling"


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of slow rotations, for contexts longer than in pretraining.

    Source: the released configurations of Llama 3.1, 3.2 and 3.3 ("rope_type": "llama3").

    Attributes:
      factor: divisor of the rates of slow rotations; at least 1.
      low_freq_factor: a rotation with up to this many full turns within `original_positions` is slow.
      high_freq_factor: a rotation with at least this many full turns is unchanged; in between, the rates are mixed.
      original_positions: context length of pretraining, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        check_numbers(self, "factor", "original_positions", least=1, hint=_HINT)
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope scaling: low_freq_factor = {self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor = {self.high_freq_factor}."
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by one factor, so that a longer context maps to the positions of pretraining.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation", Eq. 4.

    Attributes:
      factor: divisor of every rotation rate; at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        check_numbers(self, "factor", least=1, hint=_HINT)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN: slow rotations divided by a factor, fast ones kept, a ramp in between, and sharper attention.

    Source: Peng et al. 2024, "YaRN: Efficient Context Window Extension of Large Language Models", Sec. 3.2 and 3.4; the
    ramp over feature indices is from the released code.

    Attributes:
      factor: divisor of the rates of slow rotations; at least 1.
      original_positions: context length of pretraining, in tokens.
      attention_factor: factor on queries and keys; None = 0.1 ln(factor) + 1 (Eq. 22).
      beta_fast, beta_slow: a rotation with at least `beta_fast` full turns within `original_positions` is kept; one
        with at most `beta_slow` is divided by the whole factor.
      truncate: whether the ramp starts and ends at whole feature indices.
    """

    factor: float
    original_positions: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "factor", "original_positions", least=1, hint=_HINT)
        check_numbers(self, "attention_factor", above=0, hint=_HINT)
        if not 0.0 < self.beta_slow <= self.beta_fast:
            raise ConfigError(
                f"rope scaling: beta_slow = {self.beta_slow} must be above 0 and at most beta_fast = {self.beta_fast}."
            )

    def slowed(self, rates: Float[np.ndarray, " M"], theta: float) -> Float[np.ndarray, " M"]:
        ends = [self._feature(turns, len(rates), theta) for turns in (self.beta_fast, self.beta_slow)]
        if self.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], 2 * len(rates) - 1)
        last = last + 0.001 if first == last else last
        slow = np.clip((np.arange(len(rates)) - first) / (last - first), 0.0, 1.0)
        return rates * (slow / self.factor + 1.0 - slow)

    def _feature(self, turns: float, pairs: int, theta: float) -> float:
        """Returns the index of the feature pair with this many full turns within the context of pretraining."""
        return pairs * math.log(self.original_positions / (turns * 2 * math.pi)) / math.log(theta)


AnyScaling: TypeAlias = RopeScaling | LinearScaling | YarnScaling


def rotation_size(scaling: AnyScaling | None) -> float:
    """Returns the factor that `rotary` applies to cosines and sines."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.attention_factor is None else scaling.attention_factor


def rotation_rates(head_dim: int, theta: float, scaling: AnyScaling | None) -> Float[np.ndarray, " M"]:
    """Returns the rotation of each feature pair from one position to the next, in radians.

    Args:
      head_dim: N, even; features m and m + N/2 form a pair.
      theta: base of the rates; the slowest pair rotates by about 1 / theta.
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
    """Returns cosines and sines of `positions` times `rates`, both times `size`."""
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(rates)[None, None, :]
    return jnp.cos(angles) * size, jnp.sin(angles) * size


def rotate(heads: Float[Array, "B H T N"], angles: Rotary) -> Float[Array, "B H T N"]:
    """Rotates the pair (m, m + N/2) of each head's features by its angle; computed in float32."""
    cos, sin = (table[:, None, :, :] for table in angles)
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(heads.dtype)
