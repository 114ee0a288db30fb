"""How far a policy has moved from its reference: estimators on sampled tokens, and the coefficient that pays for it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.core.types import Mean

Estimator = Literal["k1", "k2", "k3", "abs"]


def kl_penalty(
    log_probs: Float[Array, "B T"],
    reference_log_probs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    estimator: Estimator = "k1",
) -> Float[Array, "B T"]:
    r"""KL(policy || reference) at each token, estimated from the one token that the policy drew; in nats.

    .. math::
      k_1 = \log \frac{\pi}{\rho}, \quad k_2 = \tfrac{1}{2} k_1^2, \quad k_3 = \frac{\rho}{\pi} - 1 + k_1

    Source: EmpRL, Eq. 6 ("k1"); Schulman 2020, "Approximating KL divergence" (all three); "abs" is |k1|, as in TRL.
    k1 and k3 have the right mean; k1 can be negative, k3 cannot, and varies less as long as the two policies are close
    (far apart, more). k2 and "abs" are biased.

    Departure: Eq. 6 prints log pi(.) / rho(.) without a token; here it is the sampled one's.

    Args:
      log_probs: of the sampled tokens under the policy; the gradient flows here, with the estimator's own bias: that of
        k1 has mean 0, so in a loss use k3 (or k2).
      reference_log_probs: of the same tokens under the frozen reference; no gradient flows.
      mask: True at tokens that count.
      estimator: which.

    Returns:
      0 where the mask is False, whatever stands there.
    """
    log_ratio = real(log_probs, mask) - jax.lax.stop_gradient(real(reference_log_probs, mask))
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * jnp.square(log_ratio)
    if estimator == "k3":
        return jnp.expm1(-log_ratio) + log_ratio  # expm1: near 0 the terms cancel, and there KL lives
    if estimator == "abs":
        return jnp.abs(log_ratio)
    raise ValueError(f"estimator = {estimator!r} is not allowed; it takes one of 'k1', 'k2', 'k3', 'abs'.")


def sequence_kl(kl: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Mean:
    """KL of whole responses: the tokens' summed, averaged over the responses that have any. Nats per response."""
    return Mean.of(jnp.sum(real(kl, mask), axis=1), jnp.any(mask, axis=1))


def real(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """`values` as float32, 0 under a False mask: before any arithmetic, so that no NaN can reach a gradient."""
    return jnp.where(mask, values.astype(jnp.float32), 0.0)


# Fields are `Any`: checkpoints, shardings and `jax.eval_shape` put other leaves than arrays into these trees.


@flax.struct.dataclass
class FixedKL:
    """A KL coefficient that stays. `coefficient` is Float[Array, ""]."""

    coefficient: Any

    @classmethod
    def starting_at(cls, coefficient: float) -> FixedKL:
        return cls(coefficient=jnp.asarray(coefficient, jnp.float32))

    def update(self, kl: Mean) -> FixedKL:
        """Itself, whatever the KL."""
        return self


@flax.struct.dataclass
class AdaptiveKL:
    r"""A KL coefficient that steers the KL of whole responses to a target.

    .. math:: e = \mathrm{clip}(\mathrm{KL} / \mathrm{target} - 1, -0.2, 0.2), \quad
      \beta \leftarrow \beta \, \max(0, 1 + e \, n / \mathrm{horizon})

    with n responses in the batch. Source: Ziegler et al. 2019, Sec. 2.2, in the form of their code and TRL's (n /
    horizon where the paper has a constant 0.1).

    Attributes:
      coefficient: beta, Float[Array, ""].
      target: nats per response.
      horizon: responses after which a steady error of 20% has changed beta by about 20%; well above a batch's n, for at
        a fifth of it beta could fall to 0, and stay there.
    """

    coefficient: Any
    target: float = flax.struct.field(pytree_node=False)
    horizon: float = flax.struct.field(pytree_node=False)

    @classmethod
    def starting_at(cls, coefficient: float, *, target: float = 6.0, horizon: float = 10_000.0) -> AdaptiveKL:
        """Defaults are TRL 0.9's, with which EmpRL was run.

        Raises:
          ValueError: a target or a horizon that is not above 0.
        """
        for name, value in (("target", target), ("horizon", horizon)):
            if not value > 0.0:
                raise ValueError(f"{name} = {value} is not allowed; it must be above 0.")
        return cls(coefficient=jnp.asarray(coefficient, jnp.float32), target=target, horizon=horizon)

    def update(self, kl: Mean) -> AdaptiveKL:
        """After a rollout; `kl` is `sequence_kl` of its tokens' estimates (its weight is n; 0 changes nothing)."""
        error = jnp.clip(kl.value() / self.target - 1.0, -0.2, 0.2)
        factor = jnp.maximum(0.0, 1.0 + error * kl.weight / self.horizon)
        return dataclasses.replace(self, coefficient=self.coefficient * factor)
