"""The tables of encoders: BERT and its kin."""

from __future__ import annotations

import re

from empax.interop.mappings import FLAT, LINEAR, LINEAR_OUT, SAME, Mapping, Row, biased_attention, norm_rows
from empax.models.bert import BertConfig


def bert_mapping(config: BertConfig) -> Mapping:
    """BERT's encoder without pooler and heads, RoBERTa's, XLM-R's and ELECTRA's."""
    return _bert_like(config, "", prefixes=("bert.", "roberta.", "electra."))


def distilbert_mapping(config: BertConfig) -> Mapping:
    """DistilBERT's encoder without heads."""
    layer, layers = "transformer.layer.{layer}", "stack/layers"
    rows = [
        Row("token_embedding", "embeddings.word_embeddings.weight", SAME),
        Row("position_embedding", "embeddings.position_embeddings.weight", SAME),
        *biased_attention(f"{layers}/attention", f"{layer}.attention", "{}_lin", "out_lin"),
        *_feed_forward(layers, f"{layer}.ffn", ("lin1", "lin2")),
        *norm_rows(
            {
                "embedding_norm": "embeddings.LayerNorm",
                f"{layers}/attention_norm": f"{layer}.sa_layer_norm",
                f"{layers}/feed_forward_norm": f"{layer}.output_layer_norm",
            }
        ),
    ]
    return Mapping(
        rows=tuple(rows),
        prefixes=("distilbert.",),
        ignored=(r"vocab_(transform|layer_norm|projector)\..*", r"embeddings\.position_ids"),
    )


def mpnet_mapping(config: BertConfig) -> Mapping:
    """MPNet's encoder without pooler and head."""
    return _bert_like(config, "", prefixes=("mpnet.",))


def dpr_mapping(config: BertConfig) -> Mapping:
    """The BERT inside a DPR encoder of passages or of questions."""
    sides = {"context": "ctx_encoder", "question": "question_encoder"}
    return _bert_like(config, f"{sides[config.dpr_side]}.bert_model.")


def _feed_forward(layers: str, theirs: str, names: tuple[str, str]) -> list[Row]:
    rows = []
    for ours, name in zip(("wi", "wo"), names, strict=True):
        rows.append(Row(f"{layers}/feed_forward/{ours}", f"{theirs}.{name}.weight", LINEAR))
        rows.append(Row(f"{layers}/feed_forward/{ours}_bias", f"{theirs}.{name}.bias", SAME))
    return rows


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
    if config.embedding_size:
        rows.append(Row("embedding_projection", f"{base}embeddings_project.weight", LINEAR))
        rows.append(Row("embedding_projection_bias", f"{base}embeddings_project.bias", SAME))
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
    rows += _feed_forward(layers, layer, ("intermediate.dense", "output.dense"))
    base = re.escape(base)
    return Mapping(
        rows=(*rows, *norm_rows(norms)),
        prefixes=prefixes,
        ignored=(
            rf"{base}embeddings\.(position_ids|token_type_ids)",
            rf"{base}pooler\..*",
            r"(cls|lm_head|(discriminator|generator)_predictions|generator_lm_head)\..*",
        ),
        # As the code that came from TensorFlow wrote them.
        spellings=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )
