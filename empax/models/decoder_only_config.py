"""Settings of decoder-only Transformers."""

from __future__ import annotations

import dataclasses
from typing import Literal

from empax.core.config import ConfigError, check_numbers
from empax.models.attention_kernels import AttentionKernel
from empax.models.rotary import AnyScaling
from empax.models.transformer_config import Remat, check_layers


@dataclasses.dataclass(frozen=True)
class DecoderOnlyConfig:
    """Settings of a decoder-only Transformer.

    Attributes:
      num_kv_heads: heads of keys and values; each serves num_heads / num_kv_heads query heads.
      head_dim: width of one head; num_heads * head_dim need not be d_model.
      max_positions: length of the table of "learned" positions; "rope" has no limit.
      position: "rope" (Su et al. 2021) or "learned".
      rope_theta: base of the rotation rates.
      position_offset: unused rows before that of the first learned position (OPT: 2).
      rope_scaling: Llama 3.1's, linear (one factor for all rotations), or YaRN's; None = none.
      windows: each layer's attention window in tokens, the current token included; 0 = unlimited. () = all unlimited.
      pre_norm: norms before attention and feed-forward; False = after the residual sum.
      final_norm: whether a norm follows the last layer.
      attention_bias: biases of queries, keys and values, and of the output unless `attention_out_bias` says otherwise.
      head_norm: whether each head's queries and keys have an RMS norm (Qwen3).
      embedding_size: width of a token embedding, with projections to and from d_model (OPT-350M); 0 = d_model.
      dropout: rate for residual branches, and for the other two rates where they are None.
      attention_dropout, embedding_dropout: rates for attention weights and for embeddings; None = `dropout`.
      attention, remat, unroll, dtype: see `models.transformer_config.TransformerConfig`.
    """

    vocab_size: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    num_layers: int
    max_positions: int
    position: Literal["rope", "learned"] = "rope"
    position_offset: int = 0
    rope_theta: float = 10_000.0
    rope_scaling: AnyScaling | None = None
    activation: str = "gated-silu"
    windows: tuple[int, ...] = ()
    norm: Literal["rms", "layer"] = "rms"
    pre_norm: bool = True
    final_norm: bool = True
    attention_bias: bool = False
    attention_out_bias: bool | None = None
    head_norm: bool = False
    embedding_size: int = 0
    feed_forward_bias: bool = False
    tie_embeddings: bool = False
    layer_norm_eps: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float | None = None
    embedding_dropout: float | None = None
    attention: AttentionKernel = "auto"
    remat: Remat = "none"
    unroll: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_layers(self, "num_kv_heads", "num_layers", "max_positions")
        check_numbers(self, "dropout", "attention_dropout", "embedding_dropout", least=0, below=1)
        check_numbers(self, "embedding_size", least=0)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}.")
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(f"head_dim = {self.head_dim} must be even: rotary positions turn pairs of features.")
