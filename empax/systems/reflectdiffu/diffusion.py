"""Denoising diffusion of vectors: the schedule, the noisy vector, and the way back.

Times count from 1 to T; time 0 is the vector without noise.

Letters: B examples, D features, T times.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from empax.core.config import check_numbers

PredictNoise: TypeAlias = Callable[[Float[Array, "B D"], Int[Array, " B"]], Float[Array, "B D"]]
"""Predicts the noise in a noisy vector, given its time."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A linear noise schedule. Source: Ho et al. 2020, Sec. 4; the values: ReflectDiffu, Eq. 6.

    Attributes:
      steps: T, the number of steps.
      first, last: betas at time 1 and at time T.
    """

    steps: int = 1000
    first: float = 1e-5
    last: float = 5e-2

    def __post_init__(self) -> None:
        check_numbers(self, "steps", least=1)
        check_numbers(self, "first", "last", above=0, below=1)

    @functools.cached_property
    def betas(self) -> np.ndarray:
        """[T + 1], 0 at time 0."""
        return np.concatenate([[0.0], np.linspace(self.first, self.last, self.steps)])

    @functools.cached_property
    def alpha_bars(self) -> np.ndarray:
        """[T + 1]: the remaining share of the clean vector's variance, 1 at time 0."""
        return np.cumprod(1.0 - self.betas)


def _at(table: np.ndarray, time: Int[Array, " B"]) -> Float[Array, "B 1"]:
    return jnp.asarray(table, jnp.float32)[time][:, None]


def q_sample(
    schedule: Schedule, clean: Float[Array, "B D"], time: Int[Array, " B"], noise: Float[Array, "B D"]
) -> Float[Array, "B D"]:
    r"""Returns the vector after `time` steps of noise, computed in one step.

    .. math:: x_t = \sqrt{\bar\alpha_t} x_0 + \sqrt{1 - \bar\alpha_t} \epsilon

    Source: Ho et al. 2020, Eq. 4; ReflectDiffu, Eq. 6, applied t times.
    """
    return _at(np.sqrt(schedule.alpha_bars), time) * clean + _at(np.sqrt(1.0 - schedule.alpha_bars), time) * noise


def estimate(
    schedule: Schedule, noisy: Float[Array, "B D"], time: Int[Array, " B"], predicted: Float[Array, "B D"]
) -> Float[Array, "B D"]:
    r"""Returns the clean vector, given the predicted noise.

    .. math:: \hat x_0 = (x_t - \sqrt{1 - \bar\alpha_t} \epsilon) / \sqrt{\bar\alpha_t}

    It multiplies an error by 1.3 at time 200 of the default schedule, by 330,000 at 1,000. Source: Ho et al., Eq. 15.
    """
    removed = noisy - _at(np.sqrt(1.0 - schedule.alpha_bars), time) * predicted
    return removed / _at(np.sqrt(schedule.alpha_bars), time)


def printed_steps(
    predict: PredictNoise, schedule: Schedule, noisy: Float[Array, "B D"], *, start: int
) -> Float[Array, "B D"]:
    r"""Restores the clean vector by `start` steps from the time `start`.

    .. math:: x_{t-1} = \frac{1}{\sqrt{1 - \beta_t}} \Big(x_t - \frac{\beta_t}{\sqrt{1 - \sum_s \beta_s}} \epsilon\Big)

    Source: ReflectDiffu, Eq. 7; Ho et al. 2020 divide by sqrt(1 - alpha-bar). With the paper's betas the sum exceeds 1
    at time 201, where the root is undefined; from there on, the last defined value is used.
    """
    betas, left = schedule.betas, 1.0 - np.cumsum(schedule.betas)
    left = np.where(left > 0, left, left[left > 0].min())

    def body(noisy: jax.Array, at: jax.Array) -> tuple[Any, None]:
        time = jnp.full(noisy.shape[0], at)
        less = noisy - _at(betas / np.sqrt(left), time) * predict(noisy, time)
        return less / _at(np.sqrt(1.0 - betas), time), None

    return jax.lax.scan(body, noisy, jnp.arange(start, 0, -1))[0]
