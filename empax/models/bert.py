"""BERT's encoder: what Contriever and MiniLM are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.models.layers import Dropout, Norm, normal
from empax.models.stack import Stack, TransformerConfig


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Settings of a BERT encoder. `num_layers` may be smaller than a checkpoint's: the first ones are taken."""

    vocab_size: int
    d_model: int
    num_heads: int
    d_ff: int
    num_layers: int
    max_positions: int = 512
    type_vocab_size: int = 2
    activation: str = "gelu"
    layer_norm_eps: float = 1e-12
    dropout: float = 0.1
    remat: bool = False
    unroll: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.d_model % self.num_heads:
            raise ConfigError(f"d_model = {self.d_model} must be a multiple of num_heads = {self.num_heads} in BERT.")

    def transformer(self) -> TransformerConfig:
        """The same settings as those of a stack of layers."""
        return TransformerConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_heads=self.num_heads,
            head_dim=self.d_model // self.num_heads,
            d_ff=self.d_ff,
            num_encoder_layers=self.num_layers,
            num_decoder_layers=0,
            dropout=self.dropout,
            inner_dropout=False,
            activation=self.activation,
            norm="layer",
            pre_norm=False,
            position="learned",
            max_positions=self.max_positions,
            layer_norm_eps=self.layer_norm_eps,
            final_norm=False,
            remat=self.remat,
            unroll=self.unroll,
            dtype=self.dtype,
        )


def bert_config(fields: Mapping[str, Any], **changes: Any) -> BertConfig:
    """Settings from the fields of a Hugging Face `config.json`.

    Args:
      fields: the JSON object.
      changes: fields of BertConfig that shall differ, for example `num_layers`.

    Raises:
      ConfigError: a field is missing, or asks for something that BERT here does not do.
    """
    names = {
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "num_layers": "num_hidden_layers",
    }
    missing = [theirs for theirs in names.values() if theirs not in fields]
    if missing:
        raise ConfigError(f"config.json of a BERT lacks {', '.join(missing)}.")
    if "position_embedding_type" in fields and fields["position_embedding_type"] not in (None, "absolute"):
        raise ConfigError(f"position_embedding_type = {fields['position_embedding_type']!r} must be 'absolute'.")
    optional = {
        "max_positions": "max_position_embeddings",
        "type_vocab_size": "type_vocab_size",
        "activation": "hidden_act",
        "layer_norm_eps": "layer_norm_eps",
        "dropout": "hidden_dropout_prob",
    }
    names |= {ours: theirs for ours, theirs in optional.items() if theirs in fields}
    return BertConfig(**({ours: fields[theirs] for ours, theirs in names.items()} | changes))


class BertEncoder(nn.Module):
    """Token, position and type embeddings, then post-norm layers. Source: Devlin et al. 2019, Sec. 3."""

    config: BertConfig

    @nn.compact
    def __call__(
        self, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> Float[Array, "B S D"]:
        """States of `ids`, all of token type 0; those of padding are numbers without meaning."""
        c = self.config
        length = ids.shape[1]
        if length > c.max_positions:
            raise ConfigError(f"{length} tokens, but this BERT has max_positions = {c.max_positions}; shorten them.")
        init = normal(0.02)
        tokens = self.param("token_embedding", init, (c.vocab_size, c.d_model))
        positions = self.param("position_embedding", init, (c.max_positions, c.d_model))
        types = self.param("type_embedding", init, (c.type_vocab_size, c.d_model))
        states = tokens[ids] + (positions[:length] + jnp.broadcast_to(types[:1], (length, c.d_model)))[None]
        states = Norm("layer", c.layer_norm_eps, jnp.dtype(c.dtype), name="embedding_norm")(states)
        states = Dropout(c.dropout)(states, deterministic=deterministic)
        stack = Stack(c.transformer(), c.num_layers, decoder=False, name="stack")
        return stack(states, mask[:, None, :], deterministic=deterministic)
