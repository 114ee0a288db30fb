"""LEMPEx' exemplar fusion: one vector of all exemplars, joined to every state of the context."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.models.arithmetic import add_bias, contract
from empax.models.heads import masked_mean
from empax.models.layers import normal, over_last
from empax.models.t5 import T5Encoder, encoder_alone
from empax.models.transformer import TransformerConfig


def _identity_above_noise(rng: jax.Array, shape: Sequence[int], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Draws weights [2D, D]: the identity on the first D inputs, and small random weights on the others."""
    size = shape[1]
    return jnp.concatenate([jnp.eye(size, dtype=dtype), normal((2 * size) ** -0.5)(rng, (size, size), dtype)])


class ExemplarFusion(nn.Module):
    r"""An encoder of exemplars with its own weights, and a layer that fuses its vector into each state.

    .. math:: \chi = \mathrm{mean}_i \mathrm{mean}_t \, \mathrm{Enc}(\Psi_i)_t, \quad
        Z^{fused}_k = [Z_k; \chi] W + b

    Source: Majumder et al. (LEMPEx), Eq. 4 to 6. Ours: W is initialized to the identity on Z, so that a pretrained
    decoder starts with familiar states.

    Attributes:
      config: the generator's config; the encoder of exemplars has the same architecture.
    """

    config: TransformerConfig

    def setup(self) -> None:
        size = self.config.d_model
        self.encoder = T5Encoder(encoder_alone(self.config))
        self.kernel = self.param("kernel", _identity_above_noise, (2 * size, size))
        self.bias = self.param("bias", nn.initializers.zeros, (size,))

    def __call__(
        self,
        states: Float[Array, "B S D"],
        exemplars: Int[Array, "B K P"],
        mask: Bool[Array, "B K P"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B S D"]:
        """Fuses the exemplars into the states of the context; one without tokens does not count, none are zeros."""
        rows, count, length = exemplars.shape
        flat = mask.reshape(rows * count, length)
        read = self.encoder(exemplars.reshape(rows * count, length), flat, deterministic=deterministic)
        found = masked_mean(masked_mean(read, flat).reshape(rows, count, -1), mask.any(axis=2)).astype(states.dtype)
        size = self.config.d_model
        # [Z; x] W is Z W_1 + x W_2, and the second product is the same at every state.
        fused = contract("BSD,DE->BSE", states, self.kernel[:size])
        fused = fused + contract("BD,DE->BE", found, self.kernel[size:])[:, None]
        return add_bias(fused, over_last(self.bias, 3))
