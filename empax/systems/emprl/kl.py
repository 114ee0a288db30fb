"""How far a policy has moved from its reference: estimators on sampled tokens, and the coefficient that pays for it."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.core.types import Mean

Estimator = Literal["k1", "k3"]

Tokens: TypeAlias = Float[Array, "B T"]
"""A number for each token of each response."""

Mask: TypeAlias = Bool[Array, "B T"]
"""True at the tokens that count. What stands elsewhere (NaN too) changes neither value nor gradient."""


def kl_penalty(log_probs: Tokens, reference_log_probs: Tokens, mask: Mask, *, estimator: Estimator = "k1") -> Tokens:
    r"""KL(policy || reference) at each token, estimated from the one token that the policy drew; in nats.

    .. math::
      k_1 = \log \frac{\pi}{\rho}, \quad k_3 = \frac{\rho}{\pi} - 1 + k_1

    Source: EmpRL, Eq. 6 ("k1"); Schulman 2020, "Approximating KL divergence". Both have the right mean; k1 can be
    negative, k3 cannot, and varies less as long as the two policies are close (far apart, more).

    Departure: Eq. 6 prints log pi(.) / rho(.) without a token; here it is the sampled one's.

    Args:
      log_probs: of the sampled tokens under the policy; the gradient flows here, with the estimator's own bias: that of
        k1 has mean 0, so in a loss use k3.
      reference_log_probs: of the same tokens under the frozen reference; no gradient flows.
      mask: of the tokens that count; elsewhere the KL is 0.
      estimator: which.
    """
    log_ratio = real(log_probs, mask) - jax.lax.stop_gradient(real(reference_log_probs, mask))
    if estimator == "k1":
        return log_ratio
    return jnp.expm1(-log_ratio) + log_ratio  # expm1: near 0 the terms cancel, and there KL lives


def sequence_kl(kl: Tokens, mask: Mask) -> Mean:
    """KL of whole responses: the tokens' summed, averaged over the responses that have any. Nats per response."""
    return Mean.of(jnp.sum(real(kl, mask), axis=1), jnp.any(mask, axis=1))


def real(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """`values` as float32, 0 under a False mask: before any arithmetic, so that no NaN can reach a gradient."""
    return jnp.where(mask, values.astype(jnp.float32), 0.0)


@flax.struct.dataclass
class KlController:
    r"""A KL coefficient that steers the KL of whole responses to a target, or stays.

    .. math:: e = \mathrm{clip}(\mathrm{KL} / \mathrm{target} - 1, -0.2, 0.2), \quad
      \beta \leftarrow \beta \, \max(0, 1 + e \, n / \mathrm{horizon})

    with n responses in the batch. Source: Ziegler et al. 2019, Sec. 2.2, in the form of their code and TRL's (n /
    horizon where the paper has a constant 0.1).

    Attributes:
      coefficient: beta, Float[Array, ""], or what checkpoints, shardings and `jax.eval_shape` put there.
      target: nats per response, above 0; None = the coefficient stays.
      horizon: responses after which a steady error of 20% has changed beta by about 20%; well above a batch's n, for at
        a fifth of it beta could fall to 0, and stay there.
    """

    coefficient: Any
    target: float | None = flax.struct.field(pytree_node=False, default=None)
    horizon: float = flax.struct.field(pytree_node=False, default=10_000.0)

    def update(self, kl: Mean) -> KlController:
        """After a rollout; `kl` is `sequence_kl` of its tokens' estimates (its weight is n; 0 changes nothing)."""
        if self.target is None:
            return self
        error = jnp.clip(kl.value() / self.target - 1.0, -0.2, 0.2)
        factor = jnp.maximum(0.0, 1.0 + error * kl.weight / self.horizon)
        return self.replace(coefficient=self.coefficient * factor)  # type: ignore[attr-defined]
