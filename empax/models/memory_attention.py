"""Attention of a decoder to more than its source: facts, exemplars, concepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.models.arithmetic import contract
from empax.models.layers import normal
from empax.models.transformer_config import TransformerConfig


@flax.struct.dataclass
class Memory:
    """Something beside the source that decoder layers attend to: facts, exemplars, concepts.

    An example whose mask is False throughout has no memory, and its states pass unchanged.
    """

    states: Any  # [B, M, D]
    mask: Any  # [B, M] bool


Memories: TypeAlias = Mapping[str, Memory]
"""By the names that `TransformerConfig.memories` gives."""


class MemoryAttention(nn.Module):
    r"""Attention to a memory, times a gate.

    .. math:: g a,\quad g = \mathrm{sigmoid}(w [x; a] + b)

    with a the attention's result for the state x; `memory_gate="none"` leaves g out.

    Source: NEC, Eq. 8, for the attention. Its released code adds a gate for each position; what the gate reads is ours.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.attention, self.norm = c.make_attention(), c.make_norm()
        if c.memory_gate == "scalar":
            self.gate = self.param("gate", normal(c.init_scale * (2 * c.d_model) ** -0.5), (2 * c.d_model,))
            self.gate_bias = self.param("gate_bias", nn.initializers.zeros, ())

    def keys_values(self, states: Float[Array, "B M D"]) -> tuple[Float[Array, "B H N M"], Float[Array, "B H M N"]]:
        """As the cache has them."""
        key, value = self.attention.keys_values(states)
        return jnp.swapaxes(key, -2, -1), value

    def __call__(
        self,
        states: Float[Array, "B T D"],
        key: Float[Array, "B H N M"],
        value: Float[Array, "B H M N"],
        mask: Bool[Array, "B M"],
        *,
        deterministic: bool,
    ) -> Float[Array, "B T D"]:
        """What `states` read, gated; before dropout and residual."""
        read = self.attention.attend(
            self.attention.queries(states),
            key,
            value,
            mask=mask[:, None, :],
            bias=None,
            deterministic=deterministic,
            turned=True,
        )
        if self.config.memory_gate == "none":
            return read
        both = jnp.concatenate([states, read], axis=-1).astype(jnp.float32)
        gate = jax.nn.sigmoid(contract("BTD,D->BT", both, self.gate) + self.gate_bias)
        return gate[..., None].astype(read.dtype) * read


class SingleMemory(nn.Module):
    """A memory of one state: whatever the query, what is read of it is that state times a matrix."""

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.out = self.param("out", normal(c.init_scale * c.d_model**-0.5), (c.d_model, c.d_model))

    def norm(self, states: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """No norm: no query is made of the states."""
        return states

    def keys_values(self, states: Float[Array, "B 1 D"]) -> tuple[Float[Array, "B 1 D"], Float[Array, "B 1 D"]]:
        """What is read, twice, as a cache has pairs."""
        value = contract("BMD,DE->BME", states, self.out)
        return value, value

    def __call__(
        self,
        states: Float[Array, "B T D"],
        key: Float[Array, "B 1 D"],
        value: Float[Array, "B 1 D"],
        mask: Bool[Array, "B 1"],
        *,
        deterministic: bool,
    ) -> Float[Array, "B T D"]:
        """As of `MemoryAttention`."""
        return jnp.broadcast_to(value, states.shape)
