"""Decoder-only families: how their settings are read from the `config.json` of each, and presets.

Llama, Qwen2, Qwen3 and Mistral, which share most of their layers, GPT-2 (DialoGPT is one) and OPT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from empax.core.config import ConfigError
from empax.models.decoder_only_config import DecoderOnlyConfig
from empax.models.layers import ACTIVATIONS
from empax.models.rotary import AnyScaling, LinearScaling, RopeScaling, YarnScaling

_Sizes = tuple[int, int, int, int, int]


def _llama_3(
    vocab: int, sizes: _Sizes, positions: int, theta: float, tied: bool, factor: float = 0.0
) -> dict[str, Any]:
    """Fields of a Llama 3; sizes: d_model, heads, heads of keys, d_ff, layers; `factor` of the scaled rotations."""
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
    """Settings of a Llama from a preset or from the fields of a Hugging Face `config.json`.

    Args:
      name_or_fields: a preset ("llama-3.1-8b", "llama-3.2-1b", "smollm2-135m", "tiny") or the JSON object, with rotary
        settings as Transformers 4 or 5 writes them.
      changes: fields of DecoderOnlyConfig that shall differ, for example `dropout`.

    Raises:
      ConfigError: an unknown preset, a field is missing, or asks for something that is not supported here.
    """
    fields = _preset(name_or_fields, "Llama", _LLAMA) if isinstance(name_or_fields, str) else name_or_fields
    _only(fields, {"mlp_bias": False, "rope_interleaved": False}, "Llama")
    biases: dict[str, Any] = {"attention_bias": _or(fields, "attention_bias", False)}
    return DecoderOnlyConfig(**(_llama_like(fields, "Llama", head_dim=None) | biases | changes))


def qwen2_config(fields: Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Settings of a Qwen2 or Qwen2.5 (biases of queries, keys and values alone); arguments as of `llama_config`.

    Raises:
      ConfigError: a field is missing, or asks for something that is not supported here.
    """
    given = _llama_like(fields, "Qwen2", head_dim=None)
    own: dict[str, Any] = {
        "attention_bias": True,
        "attention_out_bias": False,
        "windows": _late_windows(fields, "Qwen2"),
    }
    return DecoderOnlyConfig(**(given | own | changes))


def qwen3_config(fields: Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Settings of a dense Qwen3 (norms of each head's queries and keys); arguments as of `llama_config`.

    Raises:
      ConfigError: a field is missing, or asks for something that is not supported here.
    """
    given = _llama_like(fields, "Qwen3", head_dim=128)
    own: dict[str, Any] = {
        "head_norm": True,
        "attention_bias": _or(fields, "attention_bias", False),
        "windows": _late_windows(fields, "Qwen3"),
    }
    return DecoderOnlyConfig(**(given | own | changes))


def mistral_config(fields: Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Settings of a Mistral (every layer reads a window); arguments as of `llama_config`.

    Raises:
      ConfigError: a field is missing, or asks for something that is not supported here.
    """
    if fields.get("layer_types") is not None:
        raise ConfigError(f"layer_types = {fields['layer_types']!r} of a Mistral is not supported here; leave it out.")
    given = _llama_like(fields, "Mistral", head_dim=None)
    # 4096 is what Hugging Face takes where the field is absent; null is no window.
    window = _window(fields.get("sliding_window", 4096), "Mistral")
    own: dict[str, Any] = {"windows": (window,) * given["num_layers"] if window else ()}
    return DecoderOnlyConfig(**(given | own | changes))


def opt_config(fields: Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Settings of an OPT from the fields of a Hugging Face `config.json`.

    Source: Zhang et al. 2022, "OPT: Open Pre-trained Transformer Language Models"; the released configurations. That of
    350M alone has norms behind its layers and narrower embeddings.

    Args:
      fields: the JSON object.
      changes: fields of DecoderOnlyConfig that shall differ, for example `dropout`.

    Raises:
      ConfigError: a field is missing, or asks for something that is not supported here.
    """
    names = {
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "d_ff": "ffn_dim",
        "num_layers": "num_hidden_layers",
        "max_positions": "max_position_embeddings",
    }
    given = _required(fields, names, "OPT")
    _only(fields, {"layer_norm_elementwise_affine": True}, "OPT")
    size, heads = given["d_model"], given["num_heads"]
    if size % heads:
        raise ConfigError(f"hidden_size = {size} must be a multiple of num_attention_heads = {heads} in an OPT.")
    activations = {name: name for name in ACTIVATIONS}
    activation = _one_of(activations, _or(fields, "activation_function", "relu"), "activation_function of an OPT")
    before, biases = _or(fields, "do_layer_norm_before", True), _or(fields, "enable_bias", True)
    embedding = _or(fields, "word_embed_proj_dim", size)
    defaults = {
        "num_kv_heads": heads,
        "head_dim": size // heads,
        "position": "learned",
        "position_offset": 2,
        "activation": activation,
        "norm": "layer",
        "pre_norm": before,
        "final_norm": before and not _or(fields, "_remove_final_layer_norm", False),
        "attention_bias": biases,
        "feed_forward_bias": biases,
        "embedding_size": 0 if embedding == size else embedding,
        "tie_embeddings": _or(fields, "tie_word_embeddings", True),
        "dropout": _or(fields, "dropout", 0.1),
        "attention_dropout": _or(fields, "attention_dropout", 0.0),
        "embedding_dropout": 0.0,
    }
    return DecoderOnlyConfig(**(given | defaults | changes))


def gpt2_config(name_or_fields: str | Mapping[str, Any], **changes: Any) -> DecoderOnlyConfig:
    """Settings of a GPT-2 (DialoGPT is one) from a preset or from the fields of a Hugging Face `config.json`.

    Args:
      name_or_fields: a preset ("gpt2", "dialogpt-medium", …) or the JSON object.
      changes: fields of DecoderOnlyConfig that shall differ, for example `dropout`.

    Raises:
      ConfigError: an unknown preset, a field is missing, or asks for something that is not supported here.
    """
    fields = _preset(name_or_fields, "GPT-2", _GPT2) if isinstance(name_or_fields, str) else name_or_fields
    names = {
        "vocab_size": "vocab_size",
        "d_model": "n_embd",
        "num_heads": "n_head",
        "num_layers": "n_layer",
        "max_positions": "n_positions",
    }
    given = _required(fields, names, "GPT-2")
    demanded = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    _only(fields, demanded, "GPT-2")
    if given["d_model"] % given["num_heads"]:
        raise ConfigError(
            f"n_embd = {given['d_model']} must be a multiple of n_head = {given['num_heads']} in a GPT-2."
        )
    activations = {name: name for name in ACTIVATIONS} | {"gelu_pytorch_tanh": "gelu_new"}
    chosen = _or(fields, "activation_function", "gelu_new")
    defaults = {
        "num_kv_heads": given["num_heads"],
        "head_dim": given["d_model"] // given["num_heads"],
        "d_ff": _or(fields, "n_inner", 4 * given["d_model"]),
        "position": "learned",
        "activation": _one_of(activations, chosen, "activation_function of a GPT-2"),
        "norm": "layer",
        "attention_bias": True,
        "feed_forward_bias": True,
        "tie_embeddings": _or(fields, "tie_word_embeddings", True),
        "layer_norm_eps": _or(fields, "layer_norm_epsilon", 1e-5),
        "dropout": _or(fields, "resid_pdrop", 0.1),
        "attention_dropout": _or(fields, "attn_pdrop", 0.1),
        "embedding_dropout": _or(fields, "embd_pdrop", 0.1),
    }
    return DecoderOnlyConfig(**(given | defaults | changes))


def _llama_like(fields: Mapping[str, Any], model: str, *, head_dim: int | None) -> dict[str, Any]:
    """What Llama and its kin have in common; `head_dim`: where the field is absent (None: d_model / num_heads)."""
    names = {
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "max_positions": "max_position_embeddings",
        "layer_norm_eps": "rms_norm_eps",
    }
    given = _required(fields, names, model)
    activations = {"silu": "gated-silu", "gelu_new": "gated-gelu", "gelu_pytorch_tanh": "gated-gelu"}
    theta, scaling = _rope(fields, model)
    heads = given["num_heads"]
    return given | {
        "num_kv_heads": _or(fields, "num_key_value_heads", heads),
        "head_dim": _or(fields, "head_dim", head_dim or given["d_model"] // heads),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "activation": _one_of(activations, _or(fields, "hidden_act", "silu"), f"hidden_act of a {model}"),
        "tie_embeddings": _or(fields, "tie_word_embeddings", False),
        "attention_dropout": _or(fields, "attention_dropout", 0.0),
    }


def _late_windows(fields: Mapping[str, Any], model: str) -> tuple[int, ...]:
    """The windows of a Qwen's layers: by `layer_types`, or from layer `max_window_layers` on."""
    layers = fields["num_hidden_layers"]
    window = _window(_or(fields, "sliding_window", 4096), model) if _or(fields, "use_sliding_window", False) else 0
    kinds = _or(fields, "layer_types", None)
    if kinds is None:
        first = _or(fields, "max_window_layers", 28)
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


def _preset(name: str, title: str, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if name not in known:
        raise ConfigError(f"{name!r} is not a {title} preset; it is one of {', '.join(known)}.")
    return known[name]


def _one(model: str) -> str:
    return f"an {model}" if model[0] in "AEIO" else f"a {model}"


def _required(fields: Mapping[str, Any], names: Mapping[str, str], model: str) -> dict[str, Any]:
    missing = [theirs for theirs in names.values() if fields.get(theirs) is None]
    if missing:
        raise ConfigError(f"{_one(model)} lacks {', '.join(missing)}.")
    return {ours: fields[theirs] for ours, theirs in names.items()}


def _or(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field, or what Hugging Face takes where it is absent or null."""
    value = fields.get(name)
    return default if value is None else value


def _only(fields: Mapping[str, Any], allowed: Mapping[str, Any], model: str) -> None:
    for name, value in allowed.items():
        if _or(fields, name, value) != value:
            raise ConfigError(
                f"{name} = {fields[name]!r} of {_one(model)} is not supported here; it must be {value!r}."
            )


def _one_of(known: Mapping[str, str], value: str, what: str) -> str:
    if value not in known:
        raise ConfigError(f"{what} = {value!r} is not supported here; it is one of {', '.join(known)}.")
    return known[value]


_SCALINGS = ("default", "linear", "llama3", "yarn")


def _rope(fields: Mapping[str, Any], model: str) -> tuple[float, AnyScaling | None]:
    """Base and scaling: Transformers 5 writes both into `rope_parameters`, 4 the latter into `rope_scaling`."""
    rope = {**_or(fields, "rope_scaling", {}), **_or(fields, "rope_parameters", {})}
    theta = float(_or(rope, "rope_theta", _or(fields, "rope_theta", 10_000.0)))
    _only(fields, {"partial_rotary_factor": 1.0}, model)
    _only(rope, {"partial_rotary_factor": 1.0}, model)
    kind = _or(rope, "rope_type", _or(rope, "type", "default"))
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
        return theta, LinearScaling(**_required(rope, {"factor": "factor"}, title))
    if kind == "yarn":
        return theta, _yarn(rope, fields["max_position_embeddings"], title)
    names = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_positions": "original_max_position_embeddings",
    }
    return theta, RopeScaling(**_required(rope, names, title))


def _yarn(rope: Mapping[str, Any], positions: int, title: str) -> YarnScaling:
    """The scaling; DeepSeek's `mscale` and `mscale_all_dim` are taken into the attention's factor."""
    factor = _required(rope, {"factor": "factor"}, title)["factor"]
    sharper = _or(rope, "attention_factor", None)
    scales = [_or(rope, name, 0) for name in ("mscale", "mscale_all_dim")]
    if sharper is None and all(scales) and factor > 1:
        over, under = (0.1 * scale * math.log(factor) + 1.0 for scale in scales)
        sharper = over / under
    return YarnScaling(
        factor=factor,
        original_positions=_or(rope, "original_max_position_embeddings", positions),
        attention_factor=sharper,
        beta_fast=_or(rope, "beta_fast", 32.0),
        beta_slow=_or(rope, "beta_slow", 1.0),
        truncate=_or(rope, "truncate", True),
    )
