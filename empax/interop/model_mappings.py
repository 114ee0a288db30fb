"""Tables of names and layouts, one per architecture: decoder-only models, encoder-decoders, encoders."""

from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import numpy as np

from empax.interop.mappings import CONV_OUT, FLAT, LINEAR, LINEAR_OUT, ROW, SAME, Layout, Mapping, Row
from empax.models.bert import BertConfig
from empax.models.decoder_only_config import DecoderOnlyConfig
from empax.models.layers import sinusoidal_positions
from empax.models.transformer_config import TransformerConfig

_HEAD = r"lm_head\.weight"


def _rows(ours: str, theirs: str, weight: Layout, bias: Layout | None = SAME) -> list[Row]:
    """Returns the rows of a linear layer: its weight, and its bias if it has one."""
    rows = [Row(ours, f"{theirs}.weight", weight)]
    return rows if bias is None else [*rows, Row(f"{ours}_bias", f"{theirs}.bias", bias)]


def _norm_rows(names: dict[str, str]) -> list[Row]:
    """Returns the rows of layer norms, by our name."""
    pairs = (("scale", "weight"), ("bias", "bias"))
    return [Row(f"{our}/{i}", f"{their}.{j}", SAME) for our, their in names.items() for i, j in pairs]


def _attention(ours: str, foreign: str, inward: str, outward: str, *, bias: bool = True) -> list[Row]:
    """Returns the rows of an attention; `inward` is a pattern: {} takes "q", "k" and "v", {1} our whole names."""
    rows = []
    for name in ("query", "key", "value"):
        rows += _rows(f"{ours}/{name}", f"{foreign}.{inward.format(name[0], name)}", LINEAR, FLAT if bias else None)
    return rows + _rows(f"{ours}/out", f"{foreign}.{outward}", LINEAR_OUT, SAME if bias else None)


def _feed_forward(layers: str, theirs: str, names: tuple[str, str], weight: Layout = LINEAR) -> list[Row]:
    """Returns the rows of a feed-forward layer with biases."""
    pairs = zip(("wi", "wo"), names, strict=True)
    return [row for our, name in pairs for row in _rows(f"{layers}/feed_forward/{our}", f"{theirs}.{name}", weight)]


def _head_rows(tied: bool) -> list[Row]:
    return [] if tied else [Row("output_embedding", "lm_head.weight", SAME)]


def _decoder_only(config: DecoderOnlyConfig, rows: list[Row], base: str, ignored: tuple[str, ...] = ()) -> Mapping:
    """Returns the table of a decoder-only model whose head may be its token embedding."""
    rows = rows + _head_rows(config.tie_embeddings)
    return Mapping(tuple(rows), base=base, ignored=ignored, tied=(_HEAD,) if config.tie_embeddings else ())


def llama_mapping(config: DecoderOnlyConfig) -> Mapping:
    """Returns the table of Llama and Mistral with their head; Qwen has no output bias, and Qwen3 has head norms."""
    layer, layers = "model.layers.{layer}", "layers"
    rows = [Row("token_embedding", "model.embed_tokens.weight", SAME)]
    rows += _attention(f"{layers}/attention", f"{layer}.self_attn", "{}_proj", "o_proj", bias=config.attention_bias)
    if config.attention_out_bias is False:
        rows = [row for row in rows if not row.ours.endswith("/out_bias")]
    for ours, theirs in (("gate", "gate_proj"), ("wi", "up_proj"), ("wo", "down_proj")):
        rows.append(Row(f"{layers}/feed_forward/{ours}", f"{layer}.mlp.{theirs}.weight", LINEAR))
    norms = {
        f"{layers}/attention_norm": f"{layer}.input_layernorm",
        f"{layers}/feed_forward_norm": f"{layer}.post_attention_layernorm",
        "final_norm": "model.norm",
    }
    if config.head_norm:
        norms |= {f"{layers}/attention/{name}_norm": f"{layer}.self_attn.{name[0]}_norm" for name in ("query", "key")}
    rows += [Row(f"{ours}/scale", f"{theirs}.weight", SAME) for ours, theirs in norms.items()]
    return _decoder_only(config, rows, "model.", (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",))


def gpt2_mapping(config: DecoderOnlyConfig) -> Mapping:
    """Returns the table of GPT-2 and DialoGPT with their head, where queries, keys and values are one array."""
    layer, layers = "transformer.h.{layer}", "layers"
    rows = [
        Row("token_embedding", "transformer.wte.weight", SAME),
        Row("position_embedding", "transformer.wpe.weight", SAME),
    ]
    for part, ours in enumerate(("query", "key", "value")):
        weight, bias = Layout(split=1, transpose=False, part=part, parts=3), Layout(flat=True, part=part, parts=3)
        rows += _rows(f"{layers}/attention/{ours}", f"{layer}.attn.c_attn", weight, bias)
    rows += _rows(f"{layers}/attention/out", f"{layer}.attn.c_proj", CONV_OUT)
    rows += _feed_forward(layers, f"{layer}.mlp", ("c_fc", "c_proj"), SAME)
    norms = {f"{layers}/attention_norm": f"{layer}.ln_1", f"{layers}/feed_forward_norm": f"{layer}.ln_2"}
    rows += _norm_rows({**norms, "final_norm": "transformer.ln_f"})
    causal_mask = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"
    return _decoder_only(config, rows, "transformer.", (causal_mask,))


def opt_mapping(config: DecoderOnlyConfig) -> Mapping:
    """Returns the table of OPT with its head; the first checkpoints lack "model."."""
    decoder = "model.decoder"
    layer, layers = f"{decoder}.layers.{{layer}}", "layers"
    rows = [
        Row("token_embedding", f"{decoder}.embed_tokens.weight", SAME),
        Row("position_embedding", f"{decoder}.embed_positions.weight", SAME),
    ]
    if config.embedding_size:
        rows += [Row(f"embedding_{end}", f"{decoder}.project_{end}.weight", LINEAR) for end in ("in", "out")]
    rows += _attention(f"{layers}/attention", f"{layer}.self_attn", "{}_proj", "out_proj")
    rows += _feed_forward(layers, layer, ("fc1", "fc2"))
    if not config.attention_bias:
        rows = [row for row in rows if not row.ours.endswith("_bias")]
    norms = {
        f"{layers}/attention_norm": f"{layer}.self_attn_layer_norm",
        f"{layers}/feed_forward_norm": f"{layer}.final_layer_norm",
    }
    if config.final_norm:
        norms["final_norm"] = f"{decoder}.final_layer_norm"
    return _decoder_only(config, rows + _norm_rows(norms), "model.")


def t5_mapping(config: TransformerConfig) -> Mapping:
    """Returns the table of T5 v1.0 (relu, tied), v1.1 (gated, untied), mT5, and of their encoder alone."""
    gated = config.activation.startswith("gated-")
    rows = [Row("token_embedding", "shared.weight", SAME), *_head_rows(config.tie_embeddings)]
    for stack in ("encoder", "decoder") if config.num_decoder_layers else ("encoder",):
        block, layers = f"{stack}.block.{{layer}}.layer", f"{stack}/layers"
        relative = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rows.append(Row(f"{stack}/relative_bias", relative, SAME))
        rows.append(Row(f"{stack}/final_norm/scale", f"{stack}.final_layer_norm.weight", SAME))
        rows += _attention(f"{layers}/attention", f"{block}.0.SelfAttention", "{}", "o", bias=False)
        rows.append(Row(f"{layers}/attention_norm/scale", f"{block}.0.layer_norm.weight", SAME))
        last = 1
        if stack == "decoder":
            last = 2
            rows += _attention(f"{layers}/cross_attention", f"{block}.1.EncDecAttention", "{}", "o", bias=False)
            rows.append(Row(f"{layers}/cross_attention_norm/scale", f"{block}.1.layer_norm.weight", SAME))
        feed = f"{block}.{last}.DenseReluDense"
        # In T5, the activation of wi_0 gates wi_1.
        names = {"gate": "wi_0", "wi": "wi_1", "wo": "wo"} if gated else {"wi": "wi", "wo": "wo"}
        rows += [Row(f"{layers}/feed_forward/{our}", f"{feed}.{their}.weight", LINEAR) for our, their in names.items()]
        rows.append(Row(f"{layers}/feed_forward_norm/scale", f"{block}.{last}.layer_norm.weight", SAME))
    # An unused leftover of the original conversion.
    ignored = [r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"]
    tied = [r"(en|de)coder\.embed_tokens\.weight"]
    if not config.num_decoder_layers:
        ignored += [r"decoder\..*", _HEAD]
    elif config.tie_embeddings:
        tied.append(_HEAD)
    return Mapping(rows=tuple(rows), ignored=tuple(ignored), tied=tuple(tied))


def bart_mapping(config: TransformerConfig) -> Mapping:
    """Returns the table of the BART family, whose members differ in their norms and positions.

    Checkpoints without a head lack "model." and the bias.
    """
    shared = "model.shared.weight"
    copies = tuple(f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder"))
    constants = []
    rows = [Row("token_embedding", shared, SAME)]
    tied = [*map(re.escape, copies)]
    ignored = () if config.num_decoder_layers else (r"model\.decoder\..*", "final_logits_bias", _HEAD)
    if config.output_bias == "constant":
        rows.append(Row("output_bias", "final_logits_bias", ROW, optional=True))
    rows += _head_rows(config.tie_embeddings)
    if config.tie_embeddings and config.num_decoder_layers:
        tied.append(_HEAD)
    for stack in ("encoder", "decoder") if config.num_decoder_layers else ("encoder",):
        foreign = f"model.{stack}"
        positions = f"{foreign}.embed_positions.weight"
        if config.position == "learned":
            rows.append(Row(f"{stack}/position_embedding", positions, SAME))
        else:
            constants.append((positions, functools.partial(_sinusoids, config)))
        norms = {}
        if config.embedding_norm:
            norms[f"{stack}/embedding_norm"] = f"{foreign}.layernorm_embedding"
        if config.final_norm:
            norms[f"{stack}/final_norm"] = f"{foreign}.layer_norm"
        ours, theirs = f"{stack}/layers", f"{foreign}.layers.{{layer}}"
        names = {"attention": "self_attn"} | ({"cross_attention": "encoder_attn"} if stack == "decoder" else {})
        for our, their in names.items():
            rows += _attention(f"{ours}/{our}", f"{theirs}.{their}", "{}_proj", "out_proj")
            norms[f"{ours}/{our}_norm"] = f"{theirs}.{their}_layer_norm"
        rows += _feed_forward(ours, theirs, ("fc1", "fc2"))
        norms[f"{ours}/feed_forward_norm"] = f"{theirs}.final_layer_norm"
        rows += _norm_rows(norms)
    return Mapping(
        rows=tuple(rows),
        constants=tuple(constants),
        # If the config does not tie them, Transformers 5 initialises these when a file lacks them.
        copies=() if config.tie_embeddings else copies,
        base="model.",
        ignored=ignored,
        tied=tuple(tied),
    )


def _sinusoids(config: TransformerConfig) -> np.ndarray:
    """Returns the table of positions that PyTorch files hold."""
    positions = jnp.arange(config.max_positions)
    return np.asarray(sinusoidal_positions(positions, config.d_model, config.sinusoids))


def distilbert_mapping(config: BertConfig) -> Mapping:
    """Returns the table of DistilBERT's encoder without heads."""
    layer, layers = "transformer.layer.{layer}", "stack/layers"
    rows = [
        Row("token_embedding", "embeddings.word_embeddings.weight", SAME),
        Row("position_embedding", "embeddings.position_embeddings.weight", SAME),
        *_attention(f"{layers}/attention", f"{layer}.attention", "{}_lin", "out_lin"),
        *_feed_forward(layers, f"{layer}.ffn", ("lin1", "lin2")),
        *_norm_rows(
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


def dpr_mapping(config: BertConfig) -> Mapping:
    """Returns the table of the BERT inside a DPR encoder of passages or of questions."""
    sides = {"context": "ctx_encoder", "question": "question_encoder"}
    return bert_mapping(config, f"{sides[config.dpr_side]}.bert_model.")


def bert_mapping(config: BertConfig, base: str = "") -> Mapping:
    """Returns the table of BERT, RoBERTa, XLM-R, ELECTRA or MPNet without pooler and heads; `base`: prefix of names."""
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
        rows += _rows("embedding_projection", f"{base}embeddings_project", LINEAR)
    if config.relative_buckets:  # MPNet, whose names for attention differ too
        rows.append(Row("stack/relative_bias", f"{base}encoder.relative_attention_bias.weight", SAME))
        rows += _attention(f"{layers}/attention", f"{layer}.attention.attn", "{}", "o")
        norms[f"{layers}/attention_norm"] = f"{layer}.attention.LayerNorm"
    else:
        rows += _attention(f"{layers}/attention", f"{layer}.attention", "self.{1}", "output.dense")
        norms[f"{layers}/attention_norm"] = f"{layer}.attention.output.LayerNorm"
    rows += _feed_forward(layers, layer, ("intermediate.dense", "output.dense"))
    base = re.escape(base)
    return Mapping(
        rows=(*rows, *_norm_rows(norms)),
        prefixes=("bert.", "roberta.", "electra.", "mpnet."),
        ignored=(
            rf"{base}embeddings\.(position_ids|token_type_ids)",
            rf"{base}pooler\..*",
            r"(cls|lm_head|(discriminator|generator)_predictions|generator_lm_head)\..*",
        ),
        # Names of the code converted from TensorFlow.
        spellings=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )
