"""The settings that tell one Transformer from another."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp

from empax.core.config import ConfigError, check_numbers
from empax.models.attention_kernels import AttentionKernel
from empax.models.layers import ACTIVATIONS, GATED_ACTIVATIONS, Attention, Norm, Sinusoids

Remat: TypeAlias = Literal["none", "minimal", "full"]
"""What the backward pass computes again, see `models.scanned.rematerialized`."""


_SIZES = ("vocab_size", "d_model", "num_heads", "head_dim", "d_ff", "unroll")


def check_layers(config: Any, *more: str) -> None:
    """Raises ConfigError for an activation, a type of arithmetic or a size that no Transformer here has.

    `more` are fields beside `_SIZES` that are at least 1.
    """
    known = sorted([*ACTIVATIONS, *GATED_ACTIVATIONS])
    if config.activation not in known:
        raise ConfigError(f"activation = {config.activation!r} is unknown; it is one of {', '.join(known)}.")
    if config.dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype = {config.dtype!r} must be float32, bfloat16 or float16.")
    check_numbers(config, *_SIZES, *more, least=1)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Everything that tells one Transformer from another.

    Attributes:
      dropout: of embeddings and residual branches, and of what the other rates leave to it.
      attention_dropout: of attention weights; None = as `dropout`.
      inner_dropout: whether dropout also follows the activation of the feed-forward (T5).
      activation_dropout: the rate there; None = as `dropout`.
      feed_forward_kernel: 1 = a feed-forward at each position, gated if its activation is; more = convolutions over so
        many positions, see `models.feed_forward.ConvFeedForward`.
      memories: names of what every decoder layer attends to between source and feed-forward, see
        `models.memory_attention`.
      memory_gate: "scalar" multiplies what is read from a memory by a sigmoid of the state and of it, one number for
        each position; "none" adds it as it is.
      single_memories: whether each memory is one state, see `models.memory_attention.SingleMemory`.
      attention_bias: whether attention has biases; None = as `use_bias` says.
      attention_scale: logits times head_dim ** -0.5; T5 has none.
      position: "relative" (T5's bias, shared by all layers of a stack), "sinusoidal" or "learned".
      sinusoids: the rates of "sinusoidal", see `models.layers.sinusoidal_positions`.
      max_positions: how many learned positions there are; the others know no limit.
      position_offset: unused rows before that of the first position (BART: 2).
      shared_positions: whether encoder and decoder read one table of learned positions; BART has one in each.
      embedding_norm: whether a norm follows the embeddings, one in each stack (BART).
      embedding_projection: whether a matrix, one in each stack, turns the scaled embeddings before positions are added.
      embed_scale: embeddings times sqrt(d_model), as in Vaswani et al. 2017.
      output_scale: output logits times d_model ** -0.5 (T5 v1.0).
      output_bias: whether a constant is added to the logits (BART's `final_logits_bias`); it is never trained.
      init_scale: factor on every initial weight but embeddings.
      embedding_stddev: of initial embeddings; None = d_model ** -0.5.
      start_id: what the decoder reads first.
      attention: which program computes it, see `models.attention_kernels.AttentionKernel`.
      remat: which parts of the layers the backward pass computes again: see `models.scanned.rematerialized`.
      unroll: layers per iteration of the scan. More compile slower; on a CPU they run up to 1.6 times faster, since the
        backward pass of a loop copies what it saved.
      dtype: of the arithmetic; parameters, softmax, norms and logits stay float32.
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
    output_bias: bool = False
    layer_norm_eps: float = 1e-6
    final_norm: bool = True
    init_scale: float = 1.0
    embedding_stddev: float | None = None
    start_id: int = 0
    attention: AttentionKernel = "auto"
    remat: Remat = "none"
    unroll: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_layers(self, "num_encoder_layers", "feed_forward_kernel")
        check_numbers(self, "dropout", "attention_dropout", "activation_dropout", least=0, below=1)
        if self.feed_forward_kernel > 1 and self.activation in GATED_ACTIVATIONS:
            allowed = " or ".join(ACTIVATIONS)
            raise ConfigError(f"activation = {self.activation!r} is gated, and convolutions are not; set {allowed}.")
        if taken := sorted(set(self.memories) & {"attention", "cross_attention", "feed_forward", "dropout"}):
            raise ConfigError(f"memories = {self.memories} must not take the name of a part of the layer, {taken[0]}.")

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
        """Of dropout behind the activation of the feed-forward."""
        rate = self.dropout if self.activation_dropout is None else self.activation_dropout
        return rate if self.inner_dropout else 0.0

    def make_norm(self) -> Norm:
        return Norm(self.norm, self.layer_norm_eps, jnp.dtype(self.dtype))

    def initial_embedding_stddev(self) -> float:
        """Of initial embeddings, of tokens as of positions."""
        return self.d_model**-0.5 if self.embedding_stddev is None else self.embedding_stddev

    def position_rows(self) -> int:
        """Rows of a table of learned positions."""
        return self.max_positions + self.position_offset
