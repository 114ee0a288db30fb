"""Names and layouts of the parameters of Qwen2, Qwen3, Mistral and OPT: tables as in `interop.mappings`."""

from __future__ import annotations

import dataclasses

from empax.interop.mappings import FLAT, LINEAR, LINEAR_OUT, SAME, Layout, Mapping, Row, llama_mapping, tied_head
from empax.models.decoder_only_config import DecoderOnlyConfig


def llama_like_mapping(config: DecoderOnlyConfig) -> Mapping:
    """Llama's table without a bias of the output where there is none, and with norms of heads where there are."""
    plain = llama_mapping(config)
    rows = list(plain.rows)
    if config.attention_out_bias is False:
        rows = [row for row in rows if not row.ours.endswith("/out_bias")]
    if config.head_norm:
        rows += [
            Row(f"layers/attention/{name}_norm/scale", f"model.layers.{{layer}}.self_attn.{name[0]}_norm.weight", SAME)
            for name in ("query", "key")
        ]
    return dataclasses.replace(plain, rows=tuple(rows))


def opt_mapping(config: DecoderOnlyConfig) -> Mapping:
    """OPT with its head; first checkpoints lack "model."."""
    decoder = "model.decoder"
    layer, layers = f"{decoder}.layers.{{layer}}", "layers"
    rows = [
        Row("token_embedding", f"{decoder}.embed_tokens.weight", SAME),
        Row("position_embedding", f"{decoder}.embed_positions.weight", SAME),
    ]
    if not config.tie_embeddings:
        rows.append(Row("output_embedding", "lm_head.weight", SAME))
    if config.embedding_size:
        rows += [Row(f"embedding_{end}", f"{decoder}.project_{end}.weight", LINEAR) for end in ("in", "out")]
    products: list[tuple[str, str, Layout, Layout]] = [
        (f"attention/{name}", f"self_attn.{name[0]}_proj", LINEAR, FLAT) for name in ("query", "key", "value")
    ]
    products.append(("attention/out", "self_attn.out_proj", LINEAR_OUT, SAME))
    products += [(f"feed_forward/{ours}", theirs, LINEAR, SAME) for ours, theirs in (("wi", "fc1"), ("wo", "fc2"))]
    for ours, theirs, weight, bias in products:
        rows.append(Row(f"{layers}/{ours}", f"{layer}.{theirs}.weight", weight))
        if config.attention_bias:
            rows.append(Row(f"{layers}/{ours}_bias", f"{layer}.{theirs}.bias", bias))
    norms = {
        f"{layers}/attention_norm": f"{layer}.self_attn_layer_norm",
        f"{layers}/feed_forward_norm": f"{layer}.final_layer_norm",
    }
    if config.final_norm:
        norms["final_norm"] = f"{decoder}.final_layer_norm"
    for ours, theirs in norms.items():
        rows += [Row(f"{ours}/scale", f"{theirs}.weight", SAME), Row(f"{ours}/bias", f"{theirs}.bias", SAME)]
    return Mapping(rows=tuple(rows), base="model.", tied=tied_head(config))
