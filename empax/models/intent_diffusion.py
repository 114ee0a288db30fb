"""The denoiser of ReflectDiffu's Emotion Mimicry Unit: a CVAE that predicts noise, given the first intent."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from empax.models.latent import Gaussian, draw
from empax.models.layers import gelu, sinusoidal_positions


class IntentDenoiser(nn.Module):
    """Noise in a vector, by what it is, when it is, which intent it serves, and a latent variable.

    The latent's posterior reads the same three; its prior is the standard Gaussian. Source: ReflectDiffu, Eq. 7, after
    Park et al. 2018; the layers are ours, as the paper gives none.

    Attributes:
      latent: dimensions of the latent.
      hidden: width of the hidden layers.
    """

    latent: int
    hidden: int

    @nn.compact
    def __call__(
        self,
        noisy: Float[Array, "B D"],
        time: Int[Array, " B"],
        intent: Float[Array, "B E"],
        rng: jax.Array | None = None,
    ) -> tuple[Float[Array, "B D"], Gaussian]:
        """The noise and the posterior; without an `rng` the latent is its mean."""
        given = jnp.concatenate([noisy, sinusoidal_positions(time, self.hidden), intent], axis=1)
        seen = gelu(nn.Dense(self.hidden, name="recognise")(given))
        posterior = nn.Dense(self.latent, name="mean")(seen), nn.Dense(self.latent, name="log_variance")(seen)
        read = jnp.concatenate([given, draw(posterior, rng)], axis=1)
        hidden = gelu(nn.Dense(self.hidden, name="first")(read))
        hidden = gelu(nn.Dense(self.hidden, name="second")(hidden))
        return nn.Dense(noisy.shape[1], name="out")(hidden), posterior
