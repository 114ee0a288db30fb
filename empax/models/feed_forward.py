"""The feed-forwards of a layer: dense, gated, and convolutions over time."""

from __future__ import annotations

from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from empax.models.arithmetic import add_bias, contract
from empax.models.layers import ACTIVATIONS, GATED_ACTIVATIONS, Dropout, normal, over_last

ConvWindow: TypeAlias = tuple[jax.Array, jax.Array]
"""The past inputs that the two convolutions of a causal `ConvFeedForward` need."""


class FeedForward(nn.Module):
    """Two projections with an activation in between, gated or not.

    Source: Vaswani et al. 2017, Eq. 2; gated: Shazeer 2020, Eq. 6.
    """

    d_ff: int
    activation: str
    use_bias: bool
    dropout: float
    init_scale: float = 1.0
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, states: Float[Array, "B T D"], *, deterministic: bool) -> Float[Array, "B T D"]:
        size = states.shape[-1]
        inward = normal(self.init_scale * size**-0.5)
        hidden = contract("BTD,DF->BTF", states, self.param("wi", inward, (size, self.d_ff)))
        if self.use_bias:
            bias = self.param("wi_bias", nn.initializers.zeros, (self.d_ff,))
            hidden = add_bias(hidden, over_last(bias, 3))
        if self.activation in GATED_ACTIVATIONS:
            gate = contract("BTD,DF->BTF", states, self.param("gate", inward, (size, self.d_ff)))
            hidden = ACTIVATIONS[GATED_ACTIVATIONS[self.activation]](gate) * hidden
        else:
            hidden = ACTIVATIONS[self.activation](hidden)
        hidden = Dropout(self.dropout)(hidden, deterministic=deterministic)
        outward = self.param("wo", normal(self.init_scale * self.d_ff**-0.5), (self.d_ff, size))
        result = contract("BTF,FD->BTD", hidden, outward)
        if self.use_bias:
            bias = self.param("wo_bias", nn.initializers.zeros, (size,))
            result = add_bias(result, over_last(bias, 3))
        return result


class ConvFeedForward(nn.Module):
    """Two convolutions over time, each followed by the activation and dropout.

    Padding is set to 0 before each convolution, so it does not affect real positions (ours).
    Source: Lin et al. 2019 (MoEL), released code.

    Attributes:
      kernel: positions that one convolution reads.
      causal: whether it reads the current and earlier positions only; else it is centred.
    """

    d_model: int
    d_ff: int
    kernel: int
    activation: str
    use_bias: bool
    dropout: float
    causal: bool
    init_scale: float = 1.0

    def setup(self) -> None:
        self.after = Dropout(self.dropout)
        self.convolutions = (
            self._convolution("conv_in", self.d_model, self.d_ff),
            self._convolution("conv_out", self.d_ff, self.d_model),
        )

    def _convolution(self, name: str, inputs: int, outputs: int) -> tuple[jax.Array, jax.Array | None]:
        init = normal(self.init_scale * (self.kernel * inputs) ** -0.5)
        weights = self.param(name, init, (self.kernel, inputs, outputs))
        return weights, self.param(f"{name}_bias", nn.initializers.zeros, (outputs,)) if self.use_bias else None

    def _convolve(
        self, padded: Float[Array, "B P D"], weights: Float[Array, "W D F"], offset: Float[Array, " F"] | None
    ) -> Float[Array, "B T F"]:
        length = padded.shape[1] - self.kernel + 1
        read = jnp.concatenate([padded[:, place : place + length] for place in range(self.kernel)], axis=-1)
        result = contract("BTD,DF->BTF", read, weights.reshape(-1, weights.shape[-1]))
        if offset is not None:
            result = add_bias(result, over_last(offset, 3))
        return ACTIVATIONS[self.activation](result)

    def __call__(
        self, states: Float[Array, "B T D"], mask: Bool[Array, "#B T"], *, deterministic: bool
    ) -> Float[Array, "B T D"]:
        """Applies the layer to whole sequences; `mask` is True at real tokens."""
        before = self.kernel - 1 if self.causal else (self.kernel - 1) // 2
        around = ((0, 0), (before, self.kernel - 1 - before), (0, 0))
        for weights, offset in self.convolutions:
            padded = jnp.pad(jnp.where(mask[..., None], states, 0.0), around)
            states = self.after(self._convolve(padded, weights, offset), deterministic=deterministic)
        return states

    def step(self, states: Float[Array, "B 1 D"], window: ConvWindow) -> tuple[Float[Array, "B 1 D"], ConvWindow]:
        """Applies the layer to one token; `window` holds the last kernel - 1 inputs of each convolution."""
        kept = []
        for (weights, offset), old in zip(self.convolutions, window, strict=True):
            read = jnp.concatenate([old, states.astype(old.dtype)], axis=1)
            kept.append(read[:, 1:])
            states = self._convolve(read.astype(states.dtype), weights, offset)
        return states, (kept[0], kept[1])
