"""The tables of encoder-decoders: T5, BART, BlenderBot."""

from __future__ import annotations

import re

from empax.interop.mappings import LINEAR, LINEAR_OUT, ROW, SAME, Mapping, Row, biased_attention, norm_rows
from empax.models.transformer_config import TransformerConfig


def _attention(ours: str, foreign: str) -> tuple[Row, ...]:
    rows = [Row(f"{ours}/{name}", f"{foreign}.{name[0]}.weight", LINEAR) for name in ("query", "key", "value")]
    return (*rows, Row(f"{ours}/out", f"{foreign}.o.weight", LINEAR_OUT))


def t5_mapping(config: TransformerConfig) -> Mapping:
    """T5, v1.0 (relu, tied) and v1.1 (gated, untied)."""
    gated = config.activation.startswith("gated-")
    rows = [Row("token_embedding", "shared.weight", SAME)]
    if not config.tie_embeddings:
        rows.append(Row("output_embedding", "lm_head.weight", SAME))
    for stack in ("encoder", "decoder"):
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
    # Copies of the embedding; the cross-attention bias is a leftover of the original conversion, never used.
    ignored = [
        r"(en|de)coder\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ]
    if config.tie_embeddings:
        ignored.append(r"lm_head\.weight")
    return Mapping(rows=tuple(rows), ignored=tuple(ignored))


def bart_mapping(config: TransformerConfig) -> Mapping:
    """BART and BlenderBot; they differ in their norms. Checkpoints without a head lack "model." and the bias."""
    shared, head = "model.shared.weight", "lm_head.weight"
    rows = [Row("token_embedding", shared, SAME), Row("output_bias", "final_logits_bias", ROW, optional=True)]
    if not config.tie_embeddings:
        rows.append(Row("output_embedding", head, SAME))
    for stack in ("encoder", "decoder"):
        foreign = f"model.{stack}"
        rows.append(Row(f"{stack}/position_embedding", f"{foreign}.embed_positions.weight", SAME))
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
    ignored = [r"model\.(en|de)coder\.embed_tokens\.weight"]
    if config.tie_embeddings:
        ignored.append(re.escape(head))
    return Mapping(rows=tuple(rows), base="model.", ignored=tuple(ignored))
