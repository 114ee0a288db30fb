"""The tables of encoders: BERT, RoBERTa, MPNet, DPR."""

from __future__ import annotations

import re

from empax.interop.mappings import FLAT, LINEAR, LINEAR_OUT, SAME, Mapping, Row, biased_attention, norm_rows
from empax.models.bert import BertConfig


def bert_mapping(config: BertConfig) -> Mapping:
    """BERT's encoder without pooler and heads, and RoBERTa's."""
    return _bert_like(config, "", prefixes=("bert.", "roberta."))


def mpnet_mapping(config: BertConfig) -> Mapping:
    """MPNet's encoder without pooler and head."""
    return _bert_like(config, "", prefixes=("mpnet.",))


def dpr_mapping(config: BertConfig) -> Mapping:
    """The BERT inside a DPR encoder of passages or of questions."""
    sides = {"context": "ctx_encoder", "question": "question_encoder"}
    return _bert_like(config, f"{sides[config.dpr_side]}.bert_model.")


def _bert_like(config: BertConfig, base: str, prefixes: tuple[str, ...] = ()) -> Mapping:
    layer, layers = f"{base}encoder.layer.{{layer}}", "stack/layers"
    embeddings = f"{base}embeddings"
    rows = [
        Row("token_embedding", f"{embeddings}.word_embeddings.weight", SAME),
        Row("position_embedding", f"{embeddings}.position_embeddings.weight", SAME),
    ]
    if config.type_vocab_size:
        rows.append(Row("type_embedding", f"{embeddings}.token_type_embeddings.weight", SAME))
    norms = {"embedding_norm": f"{embeddings}.LayerNorm", f"{layers}/feed_forward_norm": f"{layer}.output.LayerNorm"}
    if config.relative_buckets:  # MPNet, which also names its attention in a way of its own
        rows.append(Row("stack/relative_bias", f"{base}encoder.relative_attention_bias.weight", SAME))
        rows += biased_attention(f"{layers}/attention", f"{layer}.attention.attn", "{}", "o")
        norms[f"{layers}/attention_norm"] = f"{layer}.attention.LayerNorm"
    else:
        for name in ("query", "key", "value"):
            rows.append(Row(f"{layers}/attention/{name}", f"{layer}.attention.self.{name}.weight", LINEAR))
            rows.append(Row(f"{layers}/attention/{name}_bias", f"{layer}.attention.self.{name}.bias", FLAT))
        rows.append(Row(f"{layers}/attention/out", f"{layer}.attention.output.dense.weight", LINEAR_OUT))
        rows.append(Row(f"{layers}/attention/out_bias", f"{layer}.attention.output.dense.bias", SAME))
        norms[f"{layers}/attention_norm"] = f"{layer}.attention.output.LayerNorm"
    for ours, theirs in (("wi", "intermediate.dense"), ("wo", "output.dense")):
        rows.append(Row(f"{layers}/feed_forward/{ours}", f"{layer}.{theirs}.weight", LINEAR))
        rows.append(Row(f"{layers}/feed_forward/{ours}_bias", f"{layer}.{theirs}.bias", SAME))
    base = re.escape(base)
    return Mapping(
        rows=(*rows, *norm_rows(norms)),
        prefixes=prefixes,
        ignored=(
            rf"{base}embeddings\.(position_ids|token_type_ids)",
            rf"{base}pooler\..*",
            r"(cls|lm_head)\..*",
        ),
        # As the code that came from TensorFlow wrote them.
        spellings=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
        may_drop_layers=True,
    )
