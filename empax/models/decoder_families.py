"""Decoder-only families: presets, and settings from the `config.json` of each family.

Llama, Qwen2, Qwen3 and Mistral, which share most of their layers, GPT-2 (including DialoGPT) and OPT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from empax.core.config import ConfigError
from empax.models.decoder_only_config import DecoderOnlyConfig
from empax.models.foreign_fields import COMMON, field_or, head_size, one_of, only, preset, required
from empax.models.layers import ACTIVATIONS
from empax.models.rotary import AnyScaling, LinearScaling, RopeScaling, YarnScaling

_Sizes = tuple[int, int, int, int, int]


def _llama_3(
    vocab: int, sizes: _Sizes, positions: int, theta: float, tied: bool, factor: float = 0.0
) -> dict[str, Any]:
    """Returns the fields of a Llama 3; sizes: d_model, heads, key heads, d_ff, layers; `factor`: of RoPE scaling."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")
    fields: dict[str, Any] = dict(zip(names, sizes, strict=True))
    fields |= {"vocab_size": vocab, "max_position_embeddings": positions}
    fields |= {"rms_norm_eps": 1e-5, "rope_theta": theta, "tie_word_embeddings": tied}
    if factor:
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        fields["rope_scaling"] = scaling | {"original_max_position_embeddings": 8192}
    return fields


_LLAMA: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama_3(128256, (4096, 32, 8, 14336, 32), 131072, 500_000.0, False, 8.0),
    "llama-3.2-1b": _llama_3(128256, (2048, 32, 8, 8192, 16), 131072, 500_000.0, True, 32.0),
    "smollm2-135m": _llama_3(49152, (576, 9, 3, 1536, 30), 8192, 100_000.0, True),
    "tiny": _llama_3(64, (32, 4, 2, 64, 2), 512, 10_000.0, True),
}
"""Source: Grattafiori et al. 2024, Table 3 (8B); Ben Allal et al. 2025 (SmolLM2); the released configurations; ours."""

_GPT2: dict[str, dict[str, Any]] = {
    name: {"vocab_size": 50257, "n_positions": 1024, "n_embd": size, "n_head": heads, "n_layer": layers}
    for name, size, heads, layers in (("gpt2", 768, 12, 12), ("dialogpt-small", 768, 12, 12),
                                      ("dialogpt-medium", 1024, 16, 24), ("dialogpt-large", 1280, 20, 36))
}  # fmt: skip
"""Source: Radford et al. 2019, Table 2; Zhang et al. 2020, Sec. 4.1; the released configurations."""


def llama_config(name_or_fields: str | Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Returns the settings of a Llama, from a preset or from the fields of a Hugging Face `config.json`.

    Presets are "llama-3.1-8b", "llama-3.2-1b", "smollm2-135m" and "tiny"; rotary settings may have the format of
    Transformers 4 or 5; `changes` are fields of DecoderOnlyConfig to override.

    Raises:
      ConfigError: if the preset is unknown, or a field is missing or has an unsupported value.
    """
    fields = preset(name_or_fields, "Llama", _LLAMA) if isinstance(name_or_fields, str) else name_or_fields
    only(fields, {"mlp_bias": False, "rope_interleaved": False}, "Llama")
    biases: dict[str, Any] = {"attention_bias": field_or(fields, "attention_bias", False)}
    return DecoderOnlyConfig(**(_llama_like(fields, "Llama", head_dim=None) | biases | changes))


def qwen2_config(fields: Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Returns the settings of a Qwen2 or Qwen2.5 (biases of queries, keys and values alone). As `llama_config`."""
    given, windows = _llama_like(fields, "Qwen2", head_dim=None), _late_windows(fields, "Qwen2")
    own: dict[str, Any] = {"attention_bias": True, "attention_out_bias": False, "windows": windows}
    return DecoderOnlyConfig(**(given | own | changes))


def qwen3_config(fields: Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Returns the settings of a dense Qwen3 (norms of each head's queries and keys). As `llama_config`."""
    given, windows = _llama_like(fields, "Qwen3", head_dim=128), _late_windows(fields, "Qwen3")
    biases = field_or(fields, "attention_bias", False)
    own: dict[str, Any] = {"head_norm": True, "attention_bias": biases, "windows": windows}
    return DecoderOnlyConfig(**(given | own | changes))


def mistral_config(fields: Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Returns the settings of a Mistral (sliding-window attention in every layer). As `llama_config`."""
    if fields.get("layer_types") is not None:
        raise ConfigError(f"layer_types = {fields['layer_types']!r} of a Mistral is not supported here; leave it out.")
    given = _llama_like(fields, "Mistral", head_dim=None)
    # 4096 is Hugging Face's default for an absent field; null means no window.
    window = _window(fields.get("sliding_window", 4096), "Mistral")
    own: dict[str, Any] = {"windows": (window,) * given["num_layers"] if window else ()}
    return DecoderOnlyConfig(**(given | own | changes))


def opt_config(fields: Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Returns the settings of an OPT. As `llama_config`.

    Source: Zhang et al. 2022, "OPT: Open Pre-trained Transformer Language Models"; the released configurations. Only
    that of 350M has post-norm layers and narrower embeddings.
    """
    given = required(fields, COMMON | {"d_ff": "ffn_dim"}, "OPT")
    only(fields, {"layer_norm_elementwise_affine": True}, "OPT")
    size = given["d_model"]
    activations = {name: name for name in ACTIVATIONS}
    activation = one_of(activations, field_or(fields, "activation_function", "relu"), "activation_function of an OPT")
    before, biases = field_or(fields, "do_layer_norm_before", True), field_or(fields, "enable_bias", True)
    embedding = field_or(fields, "word_embed_proj_dim", size)
    defaults = {
        "num_kv_heads": given["num_heads"],
        "head_dim": head_size(fields, "hidden_size", "num_attention_heads", "OPT"),
        "position": "learned",
        "position_offset": 2,
        "activation": activation,
        "norm": "layer",
        "pre_norm": before,
        "final_norm": before and not field_or(fields, "_remove_final_layer_norm", False),
        "attention_bias": biases,
        "feed_forward_bias": biases,
        "embedding_size": 0 if embedding == size else embedding,
        "tie_embeddings": field_or(fields, "tie_word_embeddings", True),
        "dropout": field_or(fields, "dropout", 0.1),
        "attention_dropout": field_or(fields, "attention_dropout", 0.0),
        "embedding_dropout": 0.0,
    }
    return DecoderOnlyConfig(**(given | defaults | changes))


def gpt2_config(name_or_fields: str | Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Returns the settings of a GPT-2 or DialoGPT; presets "gpt2", "dialogpt-medium", …. As `llama_config`."""
    fields = preset(name_or_fields, "GPT-2", _GPT2) if isinstance(name_or_fields, str) else name_or_fields
    names = {"vocab_size": "vocab_size", "d_model": "n_embd", "num_heads": "n_head", "num_layers": "n_layer"}
    given = required(fields, names | {"max_positions": "n_positions"}, "GPT-2")
    demanded = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    only(fields, demanded, "GPT-2")
    activations = {name: name for name in ACTIVATIONS} | {"gelu_pytorch_tanh": "gelu_new"}
    chosen = field_or(fields, "activation_function", "gelu_new")
    defaults = {
        "num_kv_heads": given["num_heads"],
        "head_dim": head_size(fields, "n_embd", "n_head", "GPT-2"),
        "d_ff": field_or(fields, "n_inner", 4 * given["d_model"]),
        "position": "learned",
        "activation": one_of(activations, chosen, "activation_function of a GPT-2"),
        "norm": "layer",
        "attention_bias": True,
        "feed_forward_bias": True,
        "tie_embeddings": field_or(fields, "tie_word_embeddings", True),
        "layer_norm_eps": field_or(fields, "layer_norm_epsilon", 1e-5),
        "dropout": field_or(fields, "resid_pdrop", 0.1),
        "attention_dropout": field_or(fields, "attn_pdrop", 0.1),
        "embedding_dropout": field_or(fields, "embd_pdrop", 0.1),
    }
    return DecoderOnlyConfig(**(given | defaults | changes))


def _llama_like(fields: Mapping[str, Any], model: str, *, head_dim: int | None) -> dict[str, Any]:
    """Returns settings common to Llama-like families; `head_dim`: default of the field (None: d_model / num_heads)."""
    given = required(fields, COMMON | {"layer_norm_eps": "rms_norm_eps"}, model)
    activations = {"silu": "gated-silu", "gelu_new": "gated-gelu", "gelu_pytorch_tanh": "gated-gelu"}
    theta, scaling = _rope(fields, model)
    heads = given["num_heads"]
    return given | {
        "num_kv_heads": field_or(fields, "num_key_value_heads", heads),
        "head_dim": field_or(fields, "head_dim", head_dim or given["d_model"] // heads),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "activation": one_of(activations, field_or(fields, "hidden_act", "silu"), f"hidden_act of a {model}"),
        "tie_embeddings": field_or(fields, "tie_word_embeddings", False),
        "attention_dropout": field_or(fields, "attention_dropout", 0.0),
    }


def _late_windows(fields: Mapping[str, Any], model: str) -> tuple[int, ...]:
    """Returns the windows of a Qwen's layers: by `layer_types`, or from layer `max_window_layers` on."""
    layers = fields["num_hidden_layers"]
    window = _window(fields.get("sliding_window", 4096), model) if field_or(fields, "use_sliding_window", False) else 0
    kinds = field_or(fields, "layer_types", None)
    if kinds is None:
        first = field_or(fields, "max_window_layers", 28)
        kinds = ["full_attention" if place < first else "sliding_attention" for place in range(layers)]
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in list(known) for kind in kinds):
        raise ConfigError(
            f"layer_types of a {model} must name one of {', '.join(known)} for each of {layers} layers, not {kinds!r}."
        )
    windows = tuple(known[kind] for kind in kinds)
    return windows if any(windows) else ()


def _window(value: Any, model: str) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"sliding_window = {value!r} of a {model} must be a whole number of at least 1, or null.")
    return value


_SCALINGS = ("default", "linear", "llama3", "yarn")


def _rope(fields: Mapping[str, Any], model: str) -> tuple[float, AnyScaling | None]:
    """Returns base and scaling. Transformers 5 has both in `rope_parameters`, 4 has the scaling in `rope_scaling`."""
    rope = {**field_or(fields, "rope_scaling", {}), **field_or(fields, "rope_parameters", {})}
    theta = float(field_or(rope, "rope_theta", field_or(fields, "rope_theta", 10_000.0)))
    only(fields, {"partial_rotary_factor": 1.0}, model)
    only(rope, {"partial_rotary_factor": 1.0}, model)
    kind = field_or(rope, "rope_type", field_or(rope, "type", "default"))
    if kind not in _SCALINGS:
        key = "rope_type" if "rope_type" in rope else "type"
        where = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
        raise ConfigError(
            f"{where}.{key} = {kind!r} of a {model} is not supported here; it is one of {', '.join(_SCALINGS)}."
        )
    if kind == "default":
        return theta, None
    title = f"{model} with rope_type = {kind!r}"
    if kind == "linear":
        return theta, LinearScaling(**required(rope, {"factor": "factor"}, title))
    if kind == "yarn":
        return theta, _yarn(rope, fields["max_position_embeddings"], title)
    names = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
    names["original_positions"] = "original_max_position_embeddings"
    return theta, RopeScaling(**required(rope, names, title))


def _yarn(rope: Mapping[str, Any], positions: int, title: str) -> YarnScaling:
    """Returns the scaling; DeepSeek's `mscale` and `mscale_all_dim` are folded into `attention_factor`."""
    factor = required(rope, {"factor": "factor"}, title)["factor"]
    sharper = field_or(rope, "attention_factor", None)
    scales = [field_or(rope, name, 0) for name in ("mscale", "mscale_all_dim")]
    if sharper is None and all(scales) and factor > 1:
        over, under = (0.1 * scale * math.log(factor) + 1.0 for scale in scales)
        sharper = over / under
    return YarnScaling(
        factor=factor,
        original_positions=field_or(rope, "original_max_position_embeddings", positions),
        attention_factor=sharper,
        beta_fast=field_or(rope, "beta_fast", 32.0),
        beta_slow=field_or(rope, "beta_slow", 1.0),
        truncate=field_or(rope, "truncate", True),
    )
