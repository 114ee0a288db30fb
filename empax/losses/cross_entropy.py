"""Cross-entropy over a vocabulary, plain and fused with the output projection."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import Mean


def token_log_probs(logits: Float[Array, "B T V"], target: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns log p(target) at every position, float32.

    .. math:: \\log p_t = z_{t, y_t} - \\log \\sum_v \\exp z_{t, v}
    """
    logits = logits.astype(jnp.float32)
    return _picked(logits, target) - jax.nn.logsumexp(logits, axis=-1)


def cross_entropy(
    logits: Float[Array, "B T V"], target: Int[Array, "B T"], mask: Bool[Array, "B T"], *, label_smoothing: float = 0.0
) -> Mean:
    """Computes the mean negative log-likelihood of the real target tokens, in nats per token.

    .. math:: L = -(1 - e) \\log p(y) - \\frac{e}{V} \\sum_v \\log p(v)

    Source: Szegedy et al. 2016, Sec. 7 (label smoothing e).

    Args:
      logits: any float type; computed in float32.
      target: ids in [0, V); ids under a False mask may be anything.
      mask: True at tokens that count.
      label_smoothing: e in [0, 1).
    """
    logits = logits.astype(jnp.float32)
    return Mean.of(_token_losses(logits, target, label_smoothing), mask)


def fused_cross_entropy(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    target: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    chunk: int,
    label_smoothing: float = 0.0,
) -> Mean:
    """Computes `cross_entropy(hidden @ embedding.T, ...)`, with the logits of only `chunk` positions in memory.

    The gradient is computed in the forward pass, from the same logits, so nothing is computed twice: three products
    with the embedding, as in the plain loss. Forward-mode and second derivatives are not supported.

    Args:
      hidden: decoder states, `model.decode_hidden`.
      embedding: output weights including all factors, `model.output_weights`.
      target: ids in [0, V); ids under a False mask may be anything.
      mask: True at tokens that count.
      chunk: positions (of T) per step, at least 1; it changes memory and speed, not the result.
      label_smoothing: in [0, 1).
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}.")
    total = _fused_total(hidden, embedding, target, mask, min(chunk, hidden.shape[1]), label_smoothing)
    return Mean(total=total, weight=jnp.sum(mask.astype(jnp.float32)))  # type: ignore[arg-type]


def _picked(logits: Float[Array, "B T V"], target: Int[Array, "B T"]) -> Float[Array, "B T"]:
    # A masked sum instead of a gather: its gradient fuses with that of the softmax; a gather's is a scatter.
    return jnp.sum(jnp.where(_one_hot(logits, target), logits, 0.0), axis=-1)


def _one_hot(logits: Float[Array, "B T V"], target: Int[Array, "B T"]) -> Bool[Array, "B T V"]:
    return jax.lax.broadcasted_iota(target.dtype, logits.shape, 2) == target[:, :, None]


def _token_losses(
    logits: Float[Array, "B T V"], target: Int[Array, "B T"], label_smoothing: float
) -> Float[Array, "B T"]:
    expected = (1.0 - label_smoothing) * _picked(logits, target)
    if label_smoothing:
        expected = expected + label_smoothing * jnp.mean(logits, axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - expected


def _logits(hidden: Float[Array, "B T D"], embedding: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    weights = embedding.astype(hidden.dtype)
    return jnp.einsum("BTD,VD->BTV", hidden, weights, preferred_element_type=jnp.float32)


def _chunked(values: jax.Array, chunk: int) -> jax.Array:
    """Reshapes [B, T, ...] to [T / chunk, B, chunk, ...]: split along T, which keeps the sharding of the batch."""
    batch, length = values.shape[:2]
    count = -(-length // chunk)
    values = jnp.pad(values, ((0, 0), (0, count * chunk - length)) + ((0, 0),) * (values.ndim - 2))
    return jnp.moveaxis(values.reshape(batch, count, chunk, *values.shape[2:]), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _fused_total(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    target: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    chunk: int,
    label_smoothing: float,
) -> Float[Array, ""]:
    def body(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        states, ids, real = part
        losses = _token_losses(_logits(states, embedding), ids, label_smoothing)
        return total + jnp.sum(jnp.where(real, losses, 0.0)), None

    parts = (_chunked(hidden, chunk), _chunked(target, chunk), _chunked(mask, chunk))
    return jax.lax.scan(body, jnp.zeros((), jnp.float32), parts)[0]


def _fused_forward(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    target: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    chunk: int,
    label_smoothing: float,
) -> tuple[Float[Array, ""], tuple[jax.Array, jax.Array]]:
    def body(carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        total, embedding_grad = carry
        states, ids, real = part
        logits = _logits(states, embedding)
        top = jnp.max(logits, axis=-1, keepdims=True)
        exps = jnp.exp(logits - top)
        norm = jnp.sum(exps, axis=-1, keepdims=True)
        expected = (1.0 - label_smoothing) * _picked(logits, ids)
        wanted = jnp.where(_one_hot(logits, ids), 1.0 - label_smoothing, 0.0)
        if label_smoothing:
            expected = expected + label_smoothing * jnp.mean(logits, axis=-1)
            wanted = wanted + label_smoothing / logits.shape[-1]
        losses = jnp.squeeze(top + jnp.log(norm), -1) - expected
        logits_grad = jnp.where(real[:, :, None], exps / norm - wanted, 0.0).astype(states.dtype)
        states_grad = jnp.einsum("BTV,VD->BTD", logits_grad, embedding.astype(states.dtype))
        added = jnp.einsum("BTV,BTD->VD", logits_grad, states, preferred_element_type=jnp.float32)
        return (total + jnp.sum(jnp.where(real, losses, 0.0)), embedding_grad + added), states_grad

    parts = (_chunked(hidden, chunk), _chunked(target, chunk), _chunked(mask, chunk))
    start = (jnp.zeros((), jnp.float32), jnp.zeros(embedding.shape, jnp.float32))
    (total, embedding_grad), states_grads = jax.lax.scan(body, start, parts)
    batch, length, size = hidden.shape
    hidden_grad = jnp.moveaxis(states_grads, 0, 1).reshape(batch, -1, size)[:, :length]
    return total, (hidden_grad, embedding_grad.astype(embedding.dtype))


def _fused_backward(
    chunk: int, label_smoothing: float, grads: tuple[jax.Array, jax.Array], scale: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    del chunk, label_smoothing  # already part of the gradients
    hidden_grad, embedding_grad = grads
    return hidden_grad * scale.astype(hidden_grad.dtype), embedding_grad * scale, None, None


_fused_total.defvjp(_fused_forward, _fused_backward)
