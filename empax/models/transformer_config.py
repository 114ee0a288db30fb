"""Settings of a Transformer."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

import flax.linen as nn
import jax.numpy as jnp

from empax.core.config import ConfigError, check_numbers
from empax.models.attention_kernels import AttentionKernel
from empax.models.layers import ACTIVATIONS, GATED_ACTIVATIONS, Attention, Norm, Sinusoids, alternating

Remat: TypeAlias = Literal["none", "minimal", "full"]
"""What the backward pass recomputes, see `models.scanned.rematerialized`."""


_SIZES = ("vocab_size", "d_model", "num_heads", "head_dim", "d_ff", "unroll")


def check_layers(config: Any, *more: str) -> None:
    """Raises ConfigError for an unknown activation or dtype, or a size below 1.

    `more` names fields to check in addition to `_SIZES`.
    """
    known = sorted([*ACTIVATIONS, *GATED_ACTIVATIONS])
    if config.activation not in known:
        raise ConfigError(f"activation = {config.activation!r} is unknown; it is one of {', '.join(known)}.")
    if config.dtype not in ("float32", "bfloat16"):  # the states of a T5 overflow float16
        raise ConfigError(f"dtype = {config.dtype!r} must be float32 or bfloat16.")
    check_numbers(config, *_SIZES, *more, least=1)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Settings of an encoder-decoder Transformer.

    Attributes:
      dropout: rate for embeddings and residual branches, and for the other dropout rates where they are None.
      attention_dropout: rate for attention weights; None = `dropout`.
      inner_dropout: whether dropout also follows the activation of the feed-forward (T5).
      activation_dropout: rate of the inner dropout; None = `dropout`.
      feed_forward_kernel: 1 = a position-wise feed-forward, gated if its activation is; more = convolutions over that
        many positions, see `models.feed_forward.ConvFeedForward`.
      memories: names of the memories that every decoder layer attends to between source and feed-forward, see
        `models.memory_attention`.
      memory_gate: "scalar" multiplies a memory's attention output by a sigmoid of the state and that output, one number
        per position; "none" adds the output unscaled.
      single_memories: whether each memory is one state, see `models.memory_attention.SingleMemory`.
      attention_bias: whether attention has biases; None = `use_bias`.
      attention_scale: whether attention logits are scaled by head_dim ** -0.5; T5 does not scale them.
      position: "relative" (T5's bias, shared by all layers of a stack), "sinusoidal" or "learned".
      relative_slopes: whether the bias of "relative" starts as ALiBi's, lower for distant keys; else it starts random.
        Ours; a random bias near 0 takes long to grow (`configs.common.POSITIONS`).
      sinusoids: the rates of "sinusoidal", see `models.layers.sinusoidal_positions`.
      max_positions: number of learned positions; the other kinds have no limit.
      position_offset: unused rows before that of the first position (BART: 2).
      shared_positions: whether encoder and decoder share one table of learned positions; in BART each has its own.
      embedding_norm: whether a norm follows the embeddings, one in each stack (BART).
      embedding_projection: whether a matrix, one per stack, projects the scaled embeddings before positions are added.
      embed_scale: whether embeddings are scaled by sqrt(d_model), as in Vaswani et al. 2017.
      alternating_norm: whether the scale of the decoder's final norm starts as 1, -1, 1, ...; else it starts as 1.
        Ours: with 1 and a tied output layer, the state of a token that was just read is nearest to its own embedding.
        Such a model begins by repeating each token, and unlearns this slowly.
      output_scale: whether output logits are scaled by d_model ** -0.5 (T5 v1.0).
      output_bias: what is added to the logits: "none", a "constant" (BART's `final_logits_bias`), or a "trained" bias.
      init_scale: factor on every initial weight except embeddings.
      embedding_stddev: standard deviation of initial embeddings; None = d_model ** -0.5.
      output_stddev: that of an initial output layer that is not tied; None = d_model ** -0.5.
      start_id: the first token that the decoder reads.
      attention: the program that computes attention, see `models.attention_kernels.AttentionKernel`.
      remat: the parts of the layers that the backward pass recomputes, see `models.scanned.rematerialized`.
      unroll: layers per iteration of the scan. A larger value compiles more slowly; on a CPU it runs up to 1.6 times
        faster, since the backward pass of a loop copies the saved values.
      dtype: type of the computation; parameters, softmax, norms and logits stay float32.
    """

    vocab_size: int
    d_model: int
    num_heads: int
    head_dim: int
    d_ff: int
    num_encoder_layers: int
    num_decoder_layers: int
    dropout: float = 0.1
    attention_dropout: float | None = None
    inner_dropout: bool = True
    activation_dropout: float | None = None
    activation: str = "relu"
    feed_forward_kernel: int = 1
    memories: tuple[str, ...] = ()
    memory_gate: Literal["scalar", "none"] = "scalar"
    single_memories: bool = False
    norm: Literal["rms", "layer"] = "layer"
    pre_norm: bool = True
    use_bias: bool = True
    attention_bias: bool | None = None
    attention_scale: bool = True
    position: Literal["relative", "sinusoidal", "learned"] = "relative"
    relative_slopes: bool = False
    alternating_norm: bool = False
    sinusoids: Sinusoids = "tensor2tensor"
    relative_buckets: int = 32
    relative_max_distance: int = 128
    max_positions: int = 512
    position_offset: int = 0
    shared_positions: bool = True
    embedding_projection: bool = False
    embed_scale: bool = False
    embedding_norm: bool = False
    tie_embeddings: bool = True
    output_scale: bool = False
    output_bias: Literal["none", "constant", "trained"] = "none"
    layer_norm_eps: float = 1e-6
    final_norm: bool = True
    init_scale: float = 1.0
    embedding_stddev: float | None = None
    output_stddev: float | None = None
    start_id: int = 0
    attention: AttentionKernel = "auto"
    remat: Remat = "none"
    unroll: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_layers(self, "num_encoder_layers", "feed_forward_kernel")
        check_numbers(self, "dropout", "attention_dropout", "activation_dropout", least=0, below=1)

    def make_attention(self) -> Attention:
        return Attention(
            self.d_model,
            self.num_heads,
            self.head_dim,
            self.use_bias if self.attention_bias is None else self.attention_bias,
            self.attention_scale,
            self.dropout if self.attention_dropout is None else self.attention_dropout,
            self.init_scale,
            jnp.dtype(self.dtype),
            kernel=self.attention,
        )

    def inner_dropout_rate(self) -> float:
        """Returns the dropout rate after the activation of the feed-forward."""
        rate = self.dropout if self.activation_dropout is None else self.activation_dropout
        return rate if self.inner_dropout else 0.0

    def make_norm(self, *, alternates: bool = False) -> Norm:
        init = alternating if alternates else nn.initializers.ones
        return Norm(self.norm, self.layer_norm_eps, jnp.dtype(self.dtype), init)

    def initial_embedding_stddev(self) -> float:
        """Returns the standard deviation of initial token and position embeddings."""
        return self.d_model**-0.5 if self.embedding_stddev is None else self.embedding_stddev

    def initial_output_stddev(self) -> float:
        """Returns the standard deviation of an initial output layer that is not tied."""
        return self.d_model**-0.5 if self.output_stddev is None else self.output_stddev

    def position_rows(self) -> int:
        """Returns the number of rows of the table of learned positions."""
        return self.max_positions + self.position_offset
