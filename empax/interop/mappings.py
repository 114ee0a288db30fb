"""Foreign parameter names and layouts against ours: one table per architecture, read in both directions.

`{layer}` in a foreign name stands for the layers that we keep stacked, [L, ...].
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from empax.models.bert import BertConfig
from empax.models.decoder_only import DecoderOnlyConfig
from empax.models.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one array stands on either side.

    Attributes:
      split: how many of our axes are inputs; PyTorch's Linear is [outputs, inputs], each flattened, so the
        foreign array is the transpose. None = no transpose, only flattening.
      flat: whether the untransposed array is one axis there (biases of heads).
      transpose: False = [inputs, outputs] there too (GPT-2's "Conv1D"), each flattened.
      part: which of the `parts` of the foreign array ours is.
      parts: into how many equal parts the last foreign axis is cut; rows that share it stand in the order of the parts.
      row: whether the untransposed array has an axis of length one in front there.
    """

    split: int | None = None
    flat: bool = False
    transpose: bool = True
    part: int = 0
    parts: int = 1
    row: bool = False

    def foreign_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The foreign shape, of all parts together, for our `shape` (of one layer)."""
        *rest, last = self._part_shape(shape)
        return (*rest, last * self.parts)

    def _part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.split is None:
            return (int(np.prod(shape)),) if self.flat else (1, *shape) if self.row else shape
        inputs, outputs = int(np.prod(shape[: self.split])), int(np.prod(shape[self.split :]))
        return (outputs, inputs) if self.transpose else (inputs, outputs)

    def to_ours(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A foreign array, or our part of it, as ours of `shape`."""
        size = array.shape[-1] // self.parts
        array = array[..., self.part * size : (self.part + 1) * size]
        return (array if self.split is None or not self.transpose else array.T).reshape(shape)

    def to_foreign(self, array: np.ndarray) -> np.ndarray:
        """Our array (of one layer) as the foreign one, or as our part of it."""
        foreign = self._part_shape(array.shape)
        if self.split is None or not self.transpose:
            return array.reshape(foreign)
        return np.ascontiguousarray(array.reshape(foreign[::-1]).T)


SAME = Layout()
FLAT = Layout(flat=True)
ROW = Layout(row=True)
LINEAR = Layout(split=1)  # [D, F] and [D, H, N]: one input axis
LINEAR_OUT = Layout(split=2)  # [H, N, D]: two input axes
CONV_OUT = Layout(split=2, transpose=False)


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter: our name, the foreign name, the layout; `optional`: zeros where a checkpoint lacks it."""

    ours: str
    foreign: str
    layout: Layout
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Mapping:
    """The table of one architecture.

    Attributes:
      rows: every parameter once.
      prefixes: what foreign names may begin with, to be taken off.
      base: what foreign names of all but the head begin with, to be put on where a model was saved without its head.
      ignored: regular expressions of foreign names that carry nothing of ours (buffers, tied copies, heads).
      spellings: ends of foreign names as older versions wrote them, and as the rows do.
      may_drop_layers: whether a checkpoint may have more layers than the model, of which the first are taken.
    """

    rows: tuple[Row, ...]
    prefixes: tuple[str, ...] = ()
    base: str = ""
    ignored: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    may_drop_layers: bool = False

    def canonical(self, name: str) -> str:
        """The foreign `name` as the rows spell it."""
        for old, new in self.spellings:
            if name.endswith(old):
                name = name.removesuffix(old) + new
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return name if name.startswith((self.base, "lm_head.", "final_logits_bias")) else self.base + name

    def ignores(self, name: str) -> bool:
        """Whether the foreign `name` carries nothing of ours."""
        if any(re.fullmatch(pattern, name) for pattern in self.ignored):
            return True
        return self.may_drop_layers and any(
            re.fullmatch(re.escape(row.foreign).replace(r"\{layer\}", r"\d+"), name)
            for row in self.rows
            if "{layer}" in row.foreign
        )


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
            rows += _biased_attention(f"{ours}/{our}", f"{theirs}.{their}", "{}_proj", "out_proj")
            norms[f"{ours}/{our}_norm"] = f"{theirs}.{their}_layer_norm"
        for our, their in (("wi", "fc1"), ("wo", "fc2")):
            rows.append(Row(f"{ours}/feed_forward/{our}", f"{theirs}.{their}.weight", LINEAR))
            rows.append(Row(f"{ours}/feed_forward/{our}_bias", f"{theirs}.{their}.bias", SAME))
        norms[f"{ours}/feed_forward_norm"] = f"{theirs}.final_layer_norm"
        rows += _norms(norms)
    ignored = [r"model\.(en|de)coder\.embed_tokens\.weight"]
    if config.tie_embeddings:
        ignored.append(re.escape(head))
    return Mapping(rows=tuple(rows), base="model.", ignored=tuple(ignored))


def _biased_attention(ours: str, foreign: str, inward: str, outward: str) -> list[Row]:
    """Rows of an attention with biases; `inward` is a pattern that takes "q", "k" and "v"."""
    rows = []
    for name in ("query", "key", "value"):
        theirs = f"{foreign}.{inward.format(name[0])}"
        rows += [Row(f"{ours}/{name}", f"{theirs}.weight", LINEAR), Row(f"{ours}/{name}_bias", f"{theirs}.bias", FLAT)]
    rows.append(Row(f"{ours}/out", f"{foreign}.{outward}.weight", LINEAR_OUT))
    rows.append(Row(f"{ours}/out_bias", f"{foreign}.{outward}.bias", SAME))
    return rows


def _norms(names: dict[str, str]) -> list[Row]:
    """Rows of layer norms, by our name."""
    pairs = (("scale", "weight"), ("bias", "bias"))
    return [Row(f"{our}/{i}", f"{their}.{j}", SAME) for our, their in names.items() for i, j in pairs]


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
        rows += _biased_attention(f"{layers}/attention", f"{layer}.attention.attn", "{}", "o")
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
        rows=(*rows, *_norms(norms)),
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


def llama_mapping(config: DecoderOnlyConfig) -> Mapping:
    """Llama with its head."""
    layer, layers = "model.layers.{layer}", "layers"
    rows = [Row("token_embedding", "model.embed_tokens.weight", SAME)]
    ignored = [r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"]
    if config.tie_embeddings:
        ignored.append(r"lm_head\.weight")
    else:
        rows.append(Row("output_embedding", "lm_head.weight", SAME))
    for ours in ("query", "key", "value", "out"):
        theirs = f"{layer}.self_attn.{ours[0]}_proj"
        out = ours == "out"
        rows.append(Row(f"{layers}/attention/{ours}", f"{theirs}.weight", LINEAR_OUT if out else LINEAR))
        if config.attention_bias:
            rows.append(Row(f"{layers}/attention/{ours}_bias", f"{theirs}.bias", SAME if out else FLAT))
    for ours, theirs in (("gate", "gate_proj"), ("wi", "up_proj"), ("wo", "down_proj")):
        rows.append(Row(f"{layers}/feed_forward/{ours}", f"{layer}.mlp.{theirs}.weight", LINEAR))
    rows.append(Row(f"{layers}/attention_norm/scale", f"{layer}.input_layernorm.weight", SAME))
    rows.append(Row(f"{layers}/feed_forward_norm/scale", f"{layer}.post_attention_layernorm.weight", SAME))
    rows.append(Row("final_norm/scale", "model.norm.weight", SAME))
    return Mapping(rows=tuple(rows), base="model.", ignored=tuple(ignored))


def gpt2_mapping(config: DecoderOnlyConfig) -> Mapping:
    """GPT-2 and DialoGPT with their head; queries, keys and values are one array there."""
    layer, layers = "transformer.h.{layer}", "layers"
    rows = [
        Row("token_embedding", "transformer.wte.weight", SAME),
        Row("position_embedding", "transformer.wpe.weight", SAME),
    ]
    ignored = [r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"]  # the causal mask
    if config.tie_embeddings:
        ignored.append(r"lm_head\.weight")
    else:
        rows.append(Row("output_embedding", "lm_head.weight", SAME))
    for part, ours in enumerate(("query", "key", "value")):
        weight = Layout(split=1, transpose=False, part=part, parts=3)
        rows.append(Row(f"{layers}/attention/{ours}", f"{layer}.attn.c_attn.weight", weight))
        bias = Layout(flat=True, part=part, parts=3)
        rows.append(Row(f"{layers}/attention/{ours}_bias", f"{layer}.attn.c_attn.bias", bias))
    rows.append(Row(f"{layers}/attention/out", f"{layer}.attn.c_proj.weight", CONV_OUT))
    rows.append(Row(f"{layers}/attention/out_bias", f"{layer}.attn.c_proj.bias", SAME))
    for ours, theirs in (("wi", "c_fc"), ("wo", "c_proj")):
        rows.append(Row(f"{layers}/feed_forward/{ours}", f"{layer}.mlp.{theirs}.weight", SAME))
        rows.append(Row(f"{layers}/feed_forward/{ours}_bias", f"{layer}.mlp.{theirs}.bias", SAME))
    for ours, theirs in (
        (f"{layers}/attention_norm", f"{layer}.ln_1"),
        (f"{layers}/feed_forward_norm", f"{layer}.ln_2"),
        ("final_norm", "transformer.ln_f"),
    ):
        rows.append(Row(f"{ours}/scale", f"{theirs}.weight", SAME))
        rows.append(Row(f"{ours}/bias", f"{theirs}.bias", SAME))
    return Mapping(rows=tuple(rows), base="transformer.", ignored=tuple(ignored))
