"""Denoising diffusion of vectors: the schedule, the noisy vector, and reverse steps.

Times count from 1 to T; time 0 is the vector without noise.

Letters: B examples, D features, T times.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

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


def ddpm_step(
    schedule: Schedule,
    noisy: Float[Array, "B D"],
    time: Int[Array, " B"],
    predicted: Float[Array, "B D"],
    *,
    form: Literal["ho", "printed"] = "ho",
) -> Float[Array, "B D"]:
    r"""Takes one reverse step, to time - 1, at its mean.

    .. math:: x_{t-1} = \frac{1}{\sqrt{1 - \beta_t}} \Big(x_t - \frac{\beta_t}{\sqrt{1 - \bar\alpha_t}} \epsilon\Big)

    Source: Ho et al. 2020, Algorithm 2. Departure: ReflectDiffu's Eq. 7 ("printed") divides by sqrt(1 - sum of the
    betas). With its own betas the sum exceeds 1 at time 201, where the root is undefined; from there on, the last
    defined value is used.
    """
    betas = schedule.betas
    left = np.maximum(1.0 - schedule.alpha_bars, 1e-12)
    if form == "printed":
        left = 1.0 - np.cumsum(betas)
        left = np.where(left > 0, left, left[left > 0].min())
    return (noisy - _at(betas / np.sqrt(left), time) * predicted) / _at(np.sqrt(1.0 - betas), time)


def ddim(
    predict: PredictNoise, schedule: Schedule, noisy: Float[Array, "B D"], *, start: int, steps: int
) -> Float[Array, "B D"]:
    r"""Restores the clean vector in `steps` steps from the time `start`, without new noise; 1 step estimates x_0.

    .. math:: \hat x_0 = (x_t - \sqrt{1 - \bar\alpha_t} \epsilon) / \sqrt{\bar\alpha_t}

    to which each step adds the same noise for the time that it goes back to. An error of the predicted noise is
    multiplied by sqrt(1 - alpha-bar) / sqrt(alpha-bar): by 1.3 at time 200 of the default schedule, by 330,000 at time
    1,000.

    Source: Song et al. 2021 (DDIM), Eq. 12 with sigma = 0; the estimate: Ho et al. 2020, Eq. 15.
    """
    times = np.round(np.linspace(start, 0, steps + 1)).astype(np.int32)
    rows = noisy.shape[0]

    def body(noisy: jax.Array, pair: jax.Array) -> tuple[Any, None]:
        time, earlier = (jnp.full(rows, pair[i]) for i in range(2))
        predicted = predict(noisy, time)
        removed = noisy - _at(np.sqrt(1.0 - schedule.alpha_bars), time) * predicted
        clean = removed / _at(np.sqrt(schedule.alpha_bars), time)
        return q_sample(schedule, clean, earlier, predicted), None

    return jax.lax.scan(body, noisy, jnp.stack([times[:-1], times[1:]], axis=1))[0]


def ddpm(
    predict: PredictNoise,
    schedule: Schedule,
    noisy: Float[Array, "B D"],
    *,
    start: int,
    form: Literal["ho", "printed"] = "ho",
) -> Float[Array, "B D"]:
    """Restores the clean vector by `start` steps of `ddpm_step` from the time `start`, each at its mean."""
    rows = noisy.shape[0]

    def body(noisy: jax.Array, at: jax.Array) -> tuple[Any, None]:
        time = jnp.full(rows, at)
        return ddpm_step(schedule, noisy, time, predict(noisy, time), form=form), None

    return jax.lax.scan(body, noisy, jnp.arange(start, 0, -1))[0]
