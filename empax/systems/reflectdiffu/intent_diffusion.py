"""The denoiser of ReflectDiffu's Emotion Mimicry Unit: a CVAE that predicts noise, given the first intent."""

from __future__ import annotations

from typing import Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from empax.models.latent import Gaussian, draw
from empax.models.layers import gelu, sinusoidal_positions

Recognition: TypeAlias = Literal["clean", "noisy"]
"""What the latent's posterior reads: the clean vector too, or what the denoiser reads alone."""


class IntentDenoiser(nn.Module):
    """Noise in a vector, by what it is, when it is, which intent it serves, and a latent variable.

    Source: ReflectDiffu, Eq. 7, after Park et al. 2018; the layers are ours, as the paper gives none. The prior of the
    latent is learnt from what the denoiser reads, its posterior also reads the clean vector (Sohn et al. 2015,
    conditional VAE). With recognition = "noisy" the posterior reads the same as the denoiser, and the prior is the
    standard Gaussian: the latent then tells the denoiser nothing that it does not read, and its KL falls to 0.

    Attributes:
      latent: dimensions of the latent.
      hidden: width of the hidden layers.
      recognition: see above.
    """

    latent: int
    hidden: int
    recognition: Recognition = "clean"

    @nn.compact
    def __call__(
        self,
        noisy: Float[Array, "B D"],
        time: Int[Array, " B"],
        intent: Float[Array, "B E"],
        rng: jax.Array | None = None,
        clean: Float[Array, "B D"] | None = None,
    ) -> tuple[Float[Array, "B D"], Gaussian, Gaussian]:
        """The noise, the posterior and the prior.

        Without the `clean` vector the latent is of the prior; without an `rng` it is the mean.
        """
        given = jnp.concatenate([noisy, sinusoidal_positions(time, self.hidden), intent], axis=1)
        if self.recognition == "noisy":
            posterior = self._gaussian("recognise", given)
            prior = jnp.zeros_like(posterior[0]), jnp.zeros_like(posterior[1])
        else:
            prior = self._gaussian("prior", given)
            posterior = prior
            if clean is not None:
                posterior = self._gaussian("recognise", jnp.concatenate([given, clean], axis=1))
        read = jnp.concatenate([given, draw(posterior, rng)], axis=1)
        hidden = gelu(nn.Dense(self.hidden, name="first")(read))
        hidden = gelu(nn.Dense(self.hidden, name="second")(hidden))
        return nn.Dense(noisy.shape[1], name="out")(hidden), posterior, prior

    def _gaussian(self, name: str, given: Float[Array, "B F"]) -> Gaussian:
        seen = gelu(nn.Dense(self.hidden, name=name)(given))
        return nn.Dense(self.latent, name=f"{name}_mean")(seen), nn.Dense(self.latent, name=f"{name}_log_variance")(
            seen
        )
