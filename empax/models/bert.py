"""BERT's encoder, used by Contriever, MiniLM and DPR; settings alone turn it into RoBERTa, ELECTRA, MPNet, …."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.models.arithmetic import add_bias, contract, rows_of
from empax.models.attention_kernels import AttentionKernel
from empax.models.foreign_fields import COMMON, preset, required
from empax.models.layers import ACTIVATIONS, Dropout, Norm, normal, over_last
from empax.models.stack import Stack
from empax.models.transformer_config import Remat, TransformerConfig


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Settings of a BERT encoder. `num_layers` may be smaller than a checkpoint's: the first layers are used.

    Attributes:
      max_positions: rows of the table of positions.
      type_vocab_size: rows of the table of token types; 0 = no table (MPNet, DistilBERT).
      padding_position: position of padding; real tokens have the positions after it, wherever the padding is (RoBERTa,
        XLM-R, MPNet). None = positions are column numbers, from 0 (BERT).
      embedding_size: width of the embeddings, which a projection maps to `d_model` (ELECTRA); 0 = `d_model`.
      relative_buckets: buckets of T5's relative bias, in addition to learned positions (MPNet); 0 = none.
      dropout, attention_dropout, attention: see `models.transformer_config.TransformerConfig`.
      dpr_side: the kind of texts that a DPR encoder reads, part of its parameter names in checkpoints.
    """

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
    attention_dropout: float | None = None
    attention: AttentionKernel = "auto"
    remat: Remat = "none"
    unroll: int = 1
    dtype: str = "float32"
    padding_position: int | None = None
    embedding_size: int = 0
    relative_buckets: int = 0
    dpr_side: Literal["context", "question"] = "context"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ConfigError(f"activation = {self.activation!r} is unknown; it is one of {known}.")
        if self.d_model % self.num_heads:
            raise ConfigError(f"d_model = {self.d_model} must be a multiple of num_heads = {self.num_heads} in BERT.")
        if self.max_tokens() < 1:
            raise ConfigError(f"max_positions = {self.max_positions} leaves no position for a token; raise it.")

    def max_tokens(self) -> int:
        """Returns the number of tokens that there are positions for."""
        return self.max_positions - (0 if self.padding_position is None else self.padding_position + 1)

    def transformer(self) -> TransformerConfig:
        """Returns these settings as those of a stack of layers."""
        names = ("vocab_size", "d_model", "num_heads", "d_ff", "dropout", "attention_dropout", "activation",
                 "max_positions", "layer_norm_eps", "attention", "remat", "unroll", "dtype")  # fmt: skip
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        return TransformerConfig(
            **shared,
            head_dim=self.d_model // self.num_heads,
            num_encoder_layers=self.num_layers,
            num_decoder_layers=0,
            inner_dropout=False,
            norm="layer",
            pre_norm=False,
            position="relative" if self.relative_buckets else "learned",
            relative_buckets=self.relative_buckets or 32,
            final_norm=False,
        )


_SIZES: dict[str, tuple[int, int, int, int]] = {  # d_model, d_ff, heads, layers
    "bert-base": (768, 3072, 12, 12),
    "bert-large": (1024, 4096, 16, 24),
    "contriever": (768, 3072, 12, 12),
}
"""Source: Devlin et al. 2019, Sec. 3; Izacard et al. 2022, Sec. 3 (Contriever is a BERT-base)."""


FIELDS = COMMON | {
    "type_vocab_size": "type_vocab_size",
    "activation": "hidden_act",
    "layer_norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
"""Field names in the config.json of a BERT, by ours."""


def bert_config(name_or_fields: str | Mapping[str, Any], **changes: Any) -> BertConfig:
    """Returns the settings of a BERT, from a preset or from the fields of a Hugging Face `config.json`.

    Presets are "bert-base", "bert-large" and "contriever"; `changes` are fields of BertConfig to override.

    Raises:
      ConfigError: if the preset is unknown, or a field is missing or has an unsupported value.
    """
    if not isinstance(name_or_fields, str):
        return _from_fields(name_or_fields, "BERT", changes)
    d_model, d_ff, heads, layers = preset(name_or_fields, "BERT", _SIZES)
    fields: dict[str, Any] = {"vocab_size": 30522, "d_model": d_model, "d_ff": d_ff}
    fields |= {"num_heads": heads, "num_layers": layers, **changes}
    return BertConfig(**fields)


def roberta_config(fields: Mapping[str, Any], **changes: Any) -> BertConfig:
    """Returns the settings of a RoBERTa or XLM-R: a BERT whose positions count real tokens. As `bert_config`."""
    return _from_fields(fields, "RoBERTa", {"padding_position": _padding(fields)} | changes)


def electra_config(fields: Mapping[str, Any], **changes: Any) -> BertConfig:
    """Returns the settings of an ELECTRA: a BERT whose embeddings may be narrower than its layers. As `bert_config`.

    Source: Clark et al. 2020, Sec. 3.2 and Appendix A.
    """
    required(fields, {name: name for name in ("embedding_size", "hidden_size")}, "ELECTRA")
    size = 0 if fields["embedding_size"] == fields["hidden_size"] else fields["embedding_size"]
    return _from_fields(fields, "ELECTRA", {"embedding_size": size} | changes)


def distilbert_config(fields: Mapping[str, Any], **changes: Any) -> BertConfig:
    """Returns the settings of a DistilBERT: no token types. As `bert_config`. Source: Sanh et al. 2019, Sec. 2."""
    own = {"type_vocab_size": 0, "layer_norm_eps": 1e-12}  # the latter is fixed in Hugging Face's model
    return _from_fields(fields, "DistilBERT", own | changes, DISTILBERT)


DISTILBERT = {"d_model": "dim", "num_heads": "n_heads", "d_ff": "hidden_dim", "num_layers": "n_layers"}
DISTILBERT |= {"activation": "activation", "dropout": "dropout", "attention_dropout": "attention_dropout"}
"""Field names in the config.json of a DistilBERT, by our names; all others are as in a BERT."""


def mpnet_config(fields: Mapping[str, Any], **changes: Any) -> BertConfig:
    """Returns the settings of an MPNet: a RoBERTa without token types, with T5's relative bias. As `bert_config`."""
    name = "relative_attention_num_buckets"
    if name in fields and fields[name] != _MPNET_BUCKETS:
        # Hugging Face's model uses 32 as well, whatever this field says.
        raise ConfigError(f"{name} = {fields[name]} of an MPNet must be {_MPNET_BUCKETS}.")
    own = {"padding_position": 1, "type_vocab_size": 0, "relative_buckets": _MPNET_BUCKETS}
    return _from_fields(fields, "MPNet", own | changes)


_MPNET_BUCKETS = 32
_DPR_SIDES: dict[str, Literal["context", "question"]] = {
    "DPRContextEncoder": "context",
    "DPRQuestionEncoder": "question",
}


def dpr_config(fields: Mapping[str, Any], **changes: Any) -> BertConfig:
    """Returns the settings of a DPR encoder: a BERT whose first token's state is the text's vector. As `bert_config`.

    `architectures` says which of the two encoders it is; the default is the passage encoder.
    Source: Karpukhin et al. 2020, Sec. 3.
    """
    if fields.get("projection_dim"):
        raise ConfigError(
            f"projection_dim = {fields['projection_dim']} of a DPR must be 0: projections are not supported here."
        )
    named = fields.get("architectures") or ["DPRContextEncoder"]
    if named[0] not in _DPR_SIDES:
        raise ConfigError(f"architectures = {named!r} of a DPR must name one of {', '.join(_DPR_SIDES)}.")
    return _from_fields(fields, "DPR", {"dpr_side": _DPR_SIDES[named[0]]} | changes)


def _padding(fields: Mapping[str, Any]) -> int:
    padding = fields["pad_token_id"] if "pad_token_id" in fields else 1  # noqa: SIM401
    if type(padding) is not int or padding < 0:
        raise ConfigError(
            f"pad_token_id = {padding}, but positions are counted from it; set it in config.json (usually 1)."
        )
    return padding


def _from_fields(
    fields: Mapping[str, Any], title: str, changes: Mapping[str, Any], renamed: Mapping[str, str] | None = None
) -> BertConfig:
    names = {**FIELDS, **(renamed or {})}
    required(fields, {ours: names[ours] for ours in _REQUIRED}, title)
    if fields.get("is_decoder"):
        raise ConfigError(f"is_decoder = True, but a {title} is an encoder here; set it to False.")
    if "position_embedding_type" in fields and fields["position_embedding_type"] not in (None, "absolute"):
        raise ConfigError(f"position_embedding_type = {fields['position_embedding_type']!r} must be 'absolute'.")
    given: dict[str, Any] = {"attention_dropout": 0.1}
    given |= {ours: fields[theirs] for ours, theirs in names.items() if theirs in fields}
    return BertConfig(**(given | dict(changes)))


_REQUIRED = ("vocab_size", "d_model", "num_heads", "d_ff", "num_layers")


class BertEncoder(nn.Module):
    """Token, position and type embeddings, then post-norm layers.

    Source: Devlin et al. 2019, Sec. 3; RoBERTa: Liu et al. 2019; XLM-R: Conneau et al. 2020; MPNet: Song et al. 2020,
    Sec. 2.
    """

    config: BertConfig

    @nn.compact
    def __call__(
        self,
        ids: Int[Array, "B S"] | None,
        mask: Bool[Array, "B S"],
        *,
        embedded: Float[Array, "B S _"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B S D"]:
        """Returns the states of `ids`, all of token type 0; states of padding are meaningless.

        `embedded` replaces the token embeddings of `ids`, for inputs that are not ids; `ids` is then None.
        """
        c = self.config
        length = mask.shape[1]
        if length > c.max_tokens():
            room = f"max_positions = {c.max_positions}"
            room += "" if c.padding_position is None else f", {c.max_tokens()} of them for tokens"
            raise ConfigError(f"{length} tokens, but this BERT has {room}; shorten them.")
        init, width = normal(0.02), c.embedding_size or c.d_model
        tokens = self.param("token_embedding", init, (c.vocab_size, width))
        positions = self.param("position_embedding", init, (c.max_positions, width))
        if c.padding_position is None:
            places = positions[None, :length]
        else:
            places = rows_of(positions, c.padding_position + jnp.cumsum(mask, axis=1, dtype=jnp.int32) * mask)
        if c.type_vocab_size:
            types = self.param("type_embedding", init, (c.type_vocab_size, width))
            places = places + types[None, :1]
        if embedded is None:
            assert ids is not None
            embedded = rows_of(tokens, ids)
        states = Norm("layer", c.layer_norm_eps, jnp.dtype(c.dtype), name="embedding_norm")(embedded + places)
        states = Dropout(c.dropout)(states, deterministic=deterministic)
        if c.embedding_size:
            states = contract("BSE,ED->BSD", states, self.param("embedding_projection", init, (width, c.d_model)))
            bias = self.param("embedding_projection_bias", nn.initializers.zeros, (c.d_model,))
            states = add_bias(states, over_last(bias, 3))
        stack = Stack(c.transformer(), c.num_layers, decoder=False, name="stack")
        return stack(states, mask[:, None, :], deterministic=deterministic)[0]
