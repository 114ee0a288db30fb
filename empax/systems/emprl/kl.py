"""KL divergence of a policy from its reference: estimators on sampled tokens, and the penalty's coefficient."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.core.types import Mean

Tokens: TypeAlias = Float[Array, "B T"]
"""A number for each token of each response."""

Mask: TypeAlias = Bool[Array, "B T"]
"""True at the tokens that count. Values elsewhere (NaN too) affect neither value nor gradient."""


def log_ratios(log_probs: Tokens, other_log_probs: Tokens, mask: Mask) -> Tokens:
    """Returns the logarithm of the ratio of two policies at each token; no gradient flows to the second."""
    return real(log_probs, mask) - jax.lax.stop_gradient(real(other_log_probs, mask))


def kl_penalty(
    log_probs: Tokens, reference_log_probs: Tokens, mask: Mask, *, estimator: Literal["k1", "k3"] = "k1"
) -> Tokens:
    r"""Returns KL(policy || reference) at each token, estimated from the sampled token; in nats.

    .. math::
      k_1 = \log \frac{\pi}{\rho}, \quad k_3 = \frac{\rho}{\pi} - 1 + k_1

    Source: EmpRL, Eq. 6 ("k1"); Schulman 2020, "Approximating KL divergence". Both are unbiased; k3 is never negative,
    and has the lower variance if the policies are close. The gradient flows to `log_probs` alone; that of k1 has mean
    0, so a loss needs k3. Under a False mask the KL is 0.
    Departure: Eq. 6 names no token; ours is the sampled one.
    """
    log_ratio = log_ratios(log_probs, reference_log_probs, mask)
    if estimator == "k1":
        return log_ratio
    return jnp.expm1(-log_ratio) + log_ratio  # expm1, since the terms cancel near 0, where most ratios are


def sequence_kl(kl: Tokens, mask: Mask) -> Mean:
    """Returns the KL in nats per response: summed over tokens, averaged over the responses that have any."""
    return Mean.of(jnp.sum(real(kl, mask), axis=1), jnp.any(mask, axis=1))


def real(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Returns `values` as float32, 0 under a False mask; before any arithmetic, so that no NaN reaches a gradient."""
    return jnp.where(mask, values.astype(jnp.float32), 0.0)


@flax.struct.dataclass
class KlController:
    r"""A KL coefficient that is constant, or adapts to keep the KL of whole responses at a target.

    .. math:: e = \mathrm{clip}(\mathrm{KL} / \mathrm{target} - 1, -0.2, 0.2), \quad
      \beta \leftarrow \beta \, \max(0, 1 + e \, n / \mathrm{horizon})

    with n responses in the batch. Source: Ziegler et al. 2019, Sec. 2.2, in the form of their code and TRL's.

    Attributes:
      coefficient: beta, Float[Array, ""], or a leaf of checkpoints, shardings and `jax.eval_shape`.
      target: nats per response, above 0; None = the coefficient is constant.
      horizon: responses after which a constant error of 20% has changed beta by about 20%; well above n, or beta may
        become 0.
    """

    coefficient: Any
    target: float | None = flax.struct.field(pytree_node=False, default=None)
    horizon: float = flax.struct.field(pytree_node=False, default=10_000.0)

    def update(self, kl: Mean) -> KlController:
        """Updates after a rollout; `kl` is `sequence_kl` of its tokens' estimates (its weight is n; 0 = no change)."""
        if self.target is None:
            return self
        error = jnp.clip(kl.value() / self.target - 1.0, -0.2, 0.2)
        factor = jnp.maximum(0.0, 1.0 + error * kl.weight / self.horizon)
        return self.replace(coefficient=self.coefficient * factor)  # type: ignore[attr-defined]
