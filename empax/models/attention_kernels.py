"""Choice of the program that computes attention: ours, or a fused kernel that does not materialize the logits."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from empax.core.config import ConfigError
from empax.core.machine import backend
from empax.core.sharding import knows_rows, over_rows

AttentionKernel: TypeAlias = Literal["auto", "plain", "fused", "flash"]
"""How attention is computed. "plain": our products and softmax. "fused": `jax.nn.dot_product_attention`, which uses
cuDNN on a GPU in half precision. "flash": JAX's kernel for TPUs, if queries and keys are multiples of 128; "plain"
otherwise, and when texts are embedded on several chips. Neither "fused" nor "flash" supports attention dropout. "auto":
"fused" where it is faster, see `is_fused`."""

_LONG = 256
"""Fewest queries and keys for which "auto" uses cuDNN. In trials on an H200, with padding given as lengths and no
attention dropout, a step took 0.6 of the time at 512 tokens (partly due to unrolled layers) and 0.9 at 144.
cuDNN has not been timed with masks, as it is called here."""

_BLOCKS = (512, 256, 128)  # block sizes of queries and keys in the TPU kernel
_MASKED = -1e9


def is_fused(
    kernel: AttentionKernel, queries: int, keys: int, head_dim: int, dtype: DTypeLike, *, dropped: bool
) -> bool:
    """Whether attention with these sizes uses one fused kernel; `dropped`: attention weights have dropout.

    Raises:
      ConfigError: if "fused" or "flash" is combined with attention dropout.
    """
    if kernel == "auto":
        return not dropped and min(queries, keys) >= _LONG and _by_cudnn(queries, keys, head_dim, dtype)
    if kernel == "plain":
        return False
    if dropped:
        raise ConfigError(
            f"attention = {kernel!r} has no dropout of attention weights; set the rate to 0, or attention to 'auto'."
        )
    fits = queries % _BLOCKS[-1] == keys % _BLOCKS[-1] == 0
    return kernel == "fused" or (fits and backend() == "tpu" and knows_rows())  # XLA cannot split it


def _by_cudnn(queries: int, keys: int, head_dim: int, dtype: DTypeLike) -> bool:
    fits = head_dim % 8 == 0 and head_dim <= 128 and queries % 2 == keys % 2 == 0
    # A GPU that is only planned for has none: a CPU compiles its program.
    return fits and jnp.dtype(dtype).itemsize == 2 and backend() == jax.default_backend() == "gpu" and _card_fits()


def _card_fits() -> bool:
    """Whether cuDNN has attention for the first device: from compute capability 8.0 (A100) on. A T4 has 7.5."""
    major, _, _ = getattr(jax.local_devices()[0], "compute_capability", "8.0").partition(".")
    return major.isdecimal() and int(major) >= 8  # an AMD card has a name there


def fused_attention(
    query: Float[Array, "B H T N"],
    key: Float[Array, "B G S N"],
    value: Float[Array, "B G S N"],
    *,
    mask: Bool[Array, "#B #T S"] | None,
    bias: Float[Array, "#B H T S"] | None,
    dtype: DTypeLike,
) -> Float[Array, "B H T N"]:
    """Returns the attention output per head. Queries are already scaled. Products in `dtype`, softmax in float32."""
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


def flash_attention(
    query: Float[Array, "B H T N"],
    key: Float[Array, "B G S N"],
    value: Float[Array, "B G S N"],
    *,
    mask: Bool[Array, "#B #T S"] | None,
    bias: Float[Array, "#B H T S"] | None,
    dtype: DTypeLike,
    causal: bool,
) -> Float[Array, "B H T N"]:
    """Computes `fused_attention` with the kernel for TPUs, which materializes a bias for all queries and keys.

    A key mask, alone or with `causal`, is not materialized. Source: Dao et al. 2022; `jax.experimental.pallas`.
    """
    from jax.experimental.pallas.ops.tpu import flash_attention as tpu  # slow to import, and only for TPUs

    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    key, value = (jnp.repeat(item, heads // item.shape[1], axis=1) for item in (key, value))
    given = [item.astype(dtype) for item in (query, key, value)]
    if mask is not None and mask.shape[1] > 1 and not causal:
        masked = jnp.where(mask[:, None], 0.0, _MASKED)
        bias, mask = masked if bias is None else bias + masked, None
    real = jnp.ones((1, keys), bool) if mask is None else mask[:, -1]
    given.append(jnp.broadcast_to(real, (batch, keys)).astype(jnp.int32))
    if bias is not None:
        given.append(jnp.broadcast_to(bias.astype(dtype), (batch, heads, queries, keys)))
    of_queries, of_keys = (next(size for size in _BLOCKS if length % size == 0) for length in (queries, keys))
    rows = {f"block_{name}": of_queries for name in ("q", "q_major_dkv", "q_dkv", "q_dq")}
    columns = ("k_major", "k", "k_major_dkv", "k_dkv", "k_major_dq", "k_dq")
    sizes = tpu.BlockSizes(block_b=1, **rows, **{f"block_{name}": of_keys for name in columns})

    def attend(query: Array, key: Array, value: Array, real: Array, bias: Array | None = None) -> Array:
        ids = tpu.SegmentIds(jnp.ones(query.shape[::2], jnp.int32), real)
        return tpu.flash_attention(query, key, value, bias, ids, causal=causal, block_sizes=sizes)

    return over_rows(attend)(*given)
