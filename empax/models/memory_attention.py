"""Attention of a decoder to memories in addition to its source: facts, exemplars, concepts."""

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
    """States that decoder layers attend to in addition to the source: facts, exemplars, concepts.

    An example whose mask is all False has no memory, and its states pass unchanged.
    """

    states: Any  # [B, M, D]
    mask: Any  # [B, M] bool


Memories: TypeAlias = Mapping[str, Memory]
"""Memories by the names in `TransformerConfig.memories`."""


class MemoryAttention(nn.Module):
    r"""Attention to a memory, times a gate.

    .. math:: g a,\quad g = \mathrm{sigmoid}(w [x; a] + b)

    with a the attention output for the state x; `memory_gate="none"` leaves g out.

    Source: NEC, Eq. 8, for the attention. Its released code adds a gate per position; the gate's inputs are ours.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.attention, self.norm = c.make_attention(), c.make_norm()
        if c.memory_gate == "scalar":
            self.gate = self.param("gate", normal(c.init_scale * (2 * c.d_model) ** -0.5), (2 * c.d_model,))
            self.gate_bias = self.param("gate_bias", nn.initializers.zeros, ())

    def keys_values(self, states: Float[Array, "B M D"]) -> tuple[Float[Array, "B H N M"], Float[Array, "B H M N"]]:
        """Returns keys and values in the layout of the cache."""
        return self.attention.cached_keys_values(states)

    def __call__(
        self,
        states: Float[Array, "B T D"],
        key: Float[Array, "B H N M"],
        value: Float[Array, "B H M N"],
        mask: Bool[Array, "B M"],
        *,
        deterministic: bool,
    ) -> Float[Array, "B T D"]:
        """Returns the gated attention output, before dropout and residual."""
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
    """A memory of one state: for any query, the output is that state times a matrix."""

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.out = self.param("out", normal(c.init_scale * c.d_model**-0.5), (c.d_model, c.d_model))

    def norm(self, states: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns `states` unchanged, since no query is computed from them."""
        return states

    def keys_values(self, states: Float[Array, "B 1 D"]) -> tuple[Float[Array, "B 1 D"], Float[Array, "B 1 D"]]:
        """Returns the output twice, since a cache holds pairs."""
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
        """Returns the output for every state; arguments as for `MemoryAttention`."""
        return jnp.broadcast_to(value, states.shape)
