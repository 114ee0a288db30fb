"""Settings of decoder-only Transformers, and how they are read from the `config.json` of a Llama or a GPT-2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from empax.core.config import ConfigError
from empax.models.layers import ACTIVATIONS, GATED_ACTIVATIONS
from empax.models.rotary import LinearScaling, RopeScaling
from empax.models.transformer_config import Remat


@dataclasses.dataclass(frozen=True)
class DecoderOnlyConfig:
    """Everything that tells one decoder-only Transformer from another; all are pre-norm.

    Attributes:
      num_kv_heads: heads of keys and values; each serves num_heads / num_kv_heads query heads.
      head_dim: of one head; num_heads * head_dim need not be d_model.
      max_positions: length of the table of "learned" positions; "rope" knows no limit.
      position: "rope" (Su et al. 2021) or "learned".
      rope_theta: base of the rotation rates.
      rope_scaling: Llama 3.1's, or one factor for all rotations; None = none.
      dropout: of embeddings, attention weights and residual branches.
      remat, unroll, dtype: see `models.transformer_config.TransformerConfig`.
    """

    vocab_size: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    num_layers: int
    max_positions: int
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | LinearScaling | None = None
    activation: str = "gated-silu"
    norm: Literal["rms", "layer"] = "rms"
    attention_bias: bool = False
    feed_forward_bias: bool = False
    tie_embeddings: bool = False
    layer_norm_eps: float = 1e-5
    dropout: float = 0.0
    remat: Remat = "none"
    unroll: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        known = sorted([*ACTIVATIONS, *GATED_ACTIVATIONS])
        if self.activation not in known:
            raise ConfigError(f"activation = {self.activation!r} is unknown; it is one of {', '.join(known)}.")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype = {self.dtype!r} must be float32, bfloat16 or float16.")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout = {self.dropout} must lie in [0, 1).")
        sizes = ("vocab_size", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "num_layers")
        for name in (*sizes, "max_positions", "unroll"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}.")
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(f"head_dim = {self.head_dim} must be even: rotary positions turn pairs of features.")
        if self.feed_forward_bias and self.activation in GATED_ACTIVATIONS:
            raise ConfigError(f"feed_forward_bias does not go with the gated activation {self.activation!r}.")


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
    names = {
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "max_positions": "max_position_embeddings",
        "layer_norm_eps": "rms_norm_eps",
    }
    given = _required(fields, names, "Llama")
    _only(fields, {"mlp_bias": False, "rope_interleaved": False}, "Llama")
    activations = {"silu": "gated-silu", "gelu_new": "gated-gelu", "gelu_pytorch_tanh": "gated-gelu"}
    theta, scaling = _rope(fields)
    heads = given["num_heads"]
    defaults = {
        "num_kv_heads": _or(fields, "num_key_value_heads", heads),
        "head_dim": _or(fields, "head_dim", given["d_model"] // heads),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "activation": _one_of(activations, _or(fields, "hidden_act", "silu"), "hidden_act of a Llama"),
        "attention_bias": _or(fields, "attention_bias", False),
        "tie_embeddings": _or(fields, "tie_word_embeddings", False),
        "dropout": _or(fields, "attention_dropout", 0.0),
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
    }
    return DecoderOnlyConfig(**(given | defaults | changes))


def _preset(name: str, title: str, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if name not in known:
        raise ConfigError(f"{name!r} is not a {title} preset; it is one of {', '.join(known)}.")
    return known[name]


def _required(fields: Mapping[str, Any], names: Mapping[str, str], model: str) -> dict[str, Any]:
    missing = [theirs for theirs in names.values() if fields.get(theirs) is None]
    if missing:
        raise ConfigError(f"config.json of a {model} lacks {', '.join(missing)}.")
    return {ours: fields[theirs] for ours, theirs in names.items()}


def _or(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field, or what Hugging Face takes where it is absent or null."""
    value = fields.get(name)
    return default if value is None else value


def _only(fields: Mapping[str, Any], allowed: Mapping[str, Any], model: str) -> None:
    for name, value in allowed.items():
        if _or(fields, name, value) != value:
            raise ConfigError(f"{name} = {fields[name]!r} of a {model} is not supported here; it must be {value!r}.")


def _one_of(known: Mapping[str, str], value: str, what: str) -> str:
    if value not in known:
        raise ConfigError(f"{what} = {value!r} is not supported here; it is one of {', '.join(known)}.")
    return known[value]


def _rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | LinearScaling | None]:
    """Base and scaling: Transformers 5 writes both into `rope_parameters`, 4 the latter into `rope_scaling`."""
    rope = {**_or(fields, "rope_scaling", {}), **_or(fields, "rope_parameters", {})}
    theta = float(_or(rope, "rope_theta", _or(fields, "rope_theta", 10_000.0)))
    _only(fields, {"partial_rotary_factor": 1.0}, "Llama")
    _only(rope, {"partial_rotary_factor": 1.0}, "Llama")
    kind = _or(rope, "rope_type", _or(rope, "type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(**_required(rope, {"factor": "factor"}, "Llama with rope_type = 'linear'"))
    if kind != "llama3":
        key = "rope_type" if "rope_type" in rope else "type"
        where = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
        raise ConfigError(
            f"{where}.{key} = {kind!r} of a Llama is not supported here; it is one of default, linear, llama3."
        )
    names = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_positions": "original_max_position_embeddings",
    }
    return theta, RopeScaling(**_required(rope, names, "Llama with rope_type = 'llama3'"))
