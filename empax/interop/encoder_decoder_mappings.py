"""The tables of encoder-decoders: T5, BART and their kin."""

from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import numpy as np

from empax.interop.mappings import LINEAR, LINEAR_OUT, ROW, SAME, Constant, Mapping, Row, biased_attention, norm_rows
from empax.models.layers import sinusoidal_positions
from empax.models.transformer_config import TransformerConfig

_HEAD = r"lm_head\.weight"


def _attention(ours: str, foreign: str) -> tuple[Row, ...]:
    rows = [Row(f"{ours}/{name}", f"{foreign}.{name[0]}.weight", LINEAR) for name in ("query", "key", "value")]
    return (*rows, Row(f"{ours}/out", f"{foreign}.o.weight", LINEAR_OUT))


def t5_mapping(config: TransformerConfig) -> Mapping:
    """T5, v1.0 (relu, tied) and v1.1 (gated, untied), mT5, and the encoder of either alone, without decoder layers."""
    gated = config.activation.startswith("gated-")
    rows = [Row("token_embedding", "shared.weight", SAME)]
    if not config.tie_embeddings:
        rows.append(Row("output_embedding", "lm_head.weight", SAME))
    for stack in ("encoder", "decoder") if config.num_decoder_layers else ("encoder",):
        block, layers = f"{stack}.block.{{layer}}.layer", f"{stack}/layers"
        relative = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rows.append(Row(f"{stack}/relative_bias", relative, SAME))
        rows.append(Row(f"{stack}/final_norm/scale", f"{stack}.final_layer_norm.weight", SAME))
        rows += _attention(f"{layers}/attention", f"{block}.0.SelfAttention")
        rows.append(Row(f"{layers}/attention_norm/scale", f"{block}.0.layer_norm.weight", SAME))
        last = 1
        if stack == "decoder":
            last = 2
            rows += _attention(f"{layers}/cross_attention", f"{block}.1.EncDecAttention")
            rows.append(Row(f"{layers}/cross_attention_norm/scale", f"{block}.1.layer_norm.weight", SAME))
        feed = f"{block}.{last}.DenseReluDense"
        # Theirs: wi_0 passes through the activation, wi_1 is what it gates.
        names = {"gate": "wi_0", "wi": "wi_1", "wo": "wo"} if gated else {"wi": "wi", "wo": "wo"}
        rows += [Row(f"{layers}/feed_forward/{our}", f"{feed}.{their}.weight", LINEAR) for our, their in names.items()]
        rows.append(Row(f"{layers}/feed_forward_norm/scale", f"{block}.{last}.layer_norm.weight", SAME))
    # A leftover of the original conversion, never used.
    ignored = [r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"]
    tied = [r"(en|de)coder\.embed_tokens\.weight"]
    if not config.num_decoder_layers:
        ignored += [r"decoder\..*", _HEAD]
    elif config.tie_embeddings:
        tied.append(_HEAD)
    return Mapping(rows=tuple(rows), ignored=tuple(ignored), tied=tuple(tied))


def bart_mapping(config: TransformerConfig) -> Mapping:
    """BART and its kin; they differ in their norms and positions.

    Checkpoints without a head lack "model." and the bias.
    """
    shared = "model.shared.weight"
    copies = tuple(f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder"))
    constants = []
    rows = [Row("token_embedding", shared, SAME)]
    tied = [*map(re.escape, copies)]
    ignored = () if config.num_decoder_layers else (r"model\.decoder\..*", "final_logits_bias", _HEAD)
    if config.output_bias:
        rows.append(Row("output_bias", "final_logits_bias", ROW, optional=True))
    if not config.tie_embeddings:
        rows.append(Row("output_embedding", "lm_head.weight", SAME))
    elif config.num_decoder_layers:
        tied.append(_HEAD)
    for stack in ("encoder", "decoder") if config.num_decoder_layers else ("encoder",):
        foreign = f"model.{stack}"
        positions = f"{foreign}.embed_positions.weight"
        if config.position == "learned":
            rows.append(Row(f"{stack}/position_embedding", positions, SAME))
        else:
            constants.append(Constant(positions, functools.partial(_sinusoids, config)))
        norms = {}
        if config.embedding_norm:
            norms[f"{stack}/embedding_norm"] = f"{foreign}.layernorm_embedding"
        if config.final_norm:
            norms[f"{stack}/final_norm"] = f"{foreign}.layer_norm"
        ours, theirs = f"{stack}/layers", f"{foreign}.layers.{{layer}}"
        names = {"attention": "self_attn"} | ({"cross_attention": "encoder_attn"} if stack == "decoder" else {})
        for our, their in names.items():
            rows += biased_attention(f"{ours}/{our}", f"{theirs}.{their}", "{}_proj", "out_proj")
            norms[f"{ours}/{our}_norm"] = f"{theirs}.{their}_layer_norm"
        for our, their in (("wi", "fc1"), ("wo", "fc2")):
            rows.append(Row(f"{ours}/feed_forward/{our}", f"{theirs}.{their}.weight", LINEAR))
            rows.append(Row(f"{ours}/feed_forward/{our}_bias", f"{theirs}.{their}.bias", SAME))
        norms[f"{ours}/feed_forward_norm"] = f"{theirs}.final_layer_norm"
        rows += norm_rows(norms)
    return Mapping(
        rows=tuple(rows),
        constants=tuple(constants),
        # Where the config ties nothing, Transformers 5 makes these up if a file lacks them.
        copies=() if config.tie_embeddings else copies,
        base="model.",
        ignored=ignored,
        tied=tuple(tied),
    )


def _sinusoids(config: TransformerConfig) -> np.ndarray:
    """The table of positions that files of PyTorch hold."""
    positions = jnp.arange(config.max_positions)
    return np.asarray(sinusoidal_positions(positions, config.d_model, config.sinusoids))
