"""The measured architectures: fields of a `config.json`, with the sizes of widely used models."""

from __future__ import annotations

from typing import Any

_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 12}

SHAPES: dict[str, dict[str, Any]] = {
    "t5-small": {
        "model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
        "num_heads": 8, "decoder_start_token_id": 0,
    },
    "bart-base": {
        "model_type": "bart", "vocab_size": 50265, "d_model": 768, "max_position_embeddings": 1024,
        "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "scale_embedding": False,
    },
    "minilm": {
        "model_type": "bert", "vocab_size": 30522, "hidden_size": 384, "num_attention_heads": 12,
        "intermediate_size": 1536, "num_hidden_layers": 6,
    },
    "roberta-base": {
        "model_type": "roberta", "vocab_size": 50265, **_BASE, "max_position_embeddings": 514, "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    },
    "mpnet-base": {
        "model_type": "mpnet", "vocab_size": 30527, **_BASE, "max_position_embeddings": 514, "layer_norm_eps": 1e-5,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    },
    "blenderbot": {  # 400M-distill at half the width
        "model_type": "blenderbot", "vocab_size": 8008, "d_model": 640, "max_position_embeddings": 128,
        "encoder_layers": 2, "decoder_layers": 12, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
        "encoder_ffn_dim": 2560, "decoder_ffn_dim": 2560, "scale_embedding": True,
    },
    "t5-base": {
        "model_type": "t5", "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12,
        "num_heads": 12, "decoder_start_token_id": 0,
    },
    "t5-1.5b": {  # half the layers of T5 v1.1 XL
        "model_type": "t5", "vocab_size": 32128, "d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 12,
        "num_heads": 32, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
    },
    "smollm2-360m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560,
        "max_position_embeddings": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    },
}  # fmt: skip

_SMALL = (
    {"vocab_size": 101, "head_dim": 16, "d_kv": 16, "num_key_value_heads": 1}
    | dict.fromkeys(("d_model", "hidden_size", "n_embd"), 32)
    | dict.fromkeys(("d_ff", "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 64)
    | dict.fromkeys(("num_heads", "num_attention_heads", "n_head"), 2)
    | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    | dict.fromkeys(("num_layers", "num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers"), 2)
)


def fields_of(name: str, *, small: bool = False, **changes: Any) -> dict[str, Any]:
    """Returns the fields of a `config.json`; `small` for `--smoke`."""
    fields = SHAPES[name]
    if small:
        fields = fields | {key: _SMALL[key] for key in fields if key in _SMALL}
    return fields | changes


def kind_of(model_type: str) -> str:
    """Returns "encoder-decoder" or "decoder", which output logits, or "encoder", which outputs states."""
    if model_type in ("t5", "bart", "blenderbot"):
        return "encoder-decoder"
    return "decoder" if model_type in ("llama", "gpt2") else "encoder"


def auto_class(model_type: str) -> tuple[str, dict[str, Any]]:
    """Returns the class of `transformers` and its arguments; leaves out the pooler, which is unused."""
    names = {"encoder-decoder": "AutoModelForSeq2SeqLM", "decoder": "AutoModelForCausalLM", "encoder": "AutoModel"}
    kind = kind_of(model_type)
    return names[kind], {"add_pooling_layer": False} if kind == "encoder" else {}
