"""Which program computes attention: ours, or one fused kernel that writes no logits."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from empax.core.config import ConfigError

AttentionKernel: TypeAlias = Literal["auto", "plain", "fused"]
"""How attention is computed: "plain" by our products and softmax; "fused" by `jax.nn.dot_product_attention`, on a GPU
and in half precision by cuDNN, which drops no weights out; "auto" is "fused" where that pays, as `is_fused` says."""

_LONG = 256
"""From how many queries and keys on cuDNN is taken. In trials on an H200, which left padding to lengths and dropped no
weights out, a step took 0.6 of the time at 512 tokens (a part of that is due to unrolled layers) and 0.9 at 144.
As it is asked here, with masks, it has not been timed."""


def is_fused(
    kernel: AttentionKernel, queries: int, keys: int, head_dim: int, dtype: DTypeLike, *, dropped: bool
) -> bool:
    """Whether attention of so many queries to so many keys is one fused kernel; `dropped`: weights are dropped out.

    Raises:
      ConfigError: "fused" shall drop weights out.
    """
    if kernel == "auto":
        return not dropped and min(queries, keys) >= _LONG and _by_cudnn(queries, keys, head_dim, dtype)
    if kernel == "fused" and dropped:
        raise ConfigError(
            "attention = 'fused' drops no weights of attention out; set the rate to 0, or attention to 'auto'."
        )
    return kernel == "fused"


def _by_cudnn(queries: int, keys: int, head_dim: int, dtype: DTypeLike) -> bool:
    fits = head_dim % 8 == 0 and head_dim <= 128 and queries % 2 == keys % 2 == 0
    return fits and jnp.dtype(dtype).itemsize == 2 and jax.default_backend() == "gpu"


def fused_attention(
    query: Float[Array, "B H T N"],
    key: Float[Array, "B G S N"],
    value: Float[Array, "B G S N"],
    *,
    mask: Bool[Array, "#B #T S"] | None,
    bias: Float[Array, "#B H T S"] | None,
    dtype: DTypeLike,
) -> Float[Array, "B H T N"]:
    """What each query reads; a 1 / sqrt(N) is in the queries already. Products are in `dtype`, softmax in float32."""
    turned = tuple(jnp.swapaxes(item, 1, 2).astype(dtype) for item in (query, key, value))
    queries, keys, head_dim = query.shape[2], key.shape[2], query.shape[3]
    by_cudnn = _by_cudnn(queries, keys, head_dim, dtype)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (mask.shape[0], queries, keys))[:, None]
    read = jax.nn.dot_product_attention(
        *turned,
        bias=None if bias is None else bias.astype(dtype if by_cudnn else jnp.float32),
        mask=mask,
        scale=1.0,
        implementation="cudnn" if by_cudnn else "xla",
    )
    return jnp.swapaxes(read, 1, 2)
