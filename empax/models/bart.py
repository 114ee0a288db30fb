"""BART and BlenderBot: settings from Hugging Face fields, and presets. The module is `transformer.EncoderDecoder`.

Both add `final_logits_bias` to their logits, here the parameter "output_bias". What their decoding forces (BART's first
token `<s>`, the last one `</s>`) is no part of the model but of `decoding.settings.DecodeSettings`: `first_token` and
`end_at_limit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from empax.core.config import ConfigError
from empax.models.layers import ACTIVATIONS
from empax.models.transformer import TransformerConfig

_Sizes = tuple[int, int, int, int, int, int]

_BART: dict[str, _Sizes] = {  # vocabulary, d_model, heads, d_ff, encoder layers, decoder layers
    "bart-base": (50265, 768, 12, 3072, 6, 6),
    "bart-large": (50265, 1024, 16, 4096, 12, 12),
}
"""Source: Lewis et al. 2020, Sec. 2.1 (base: 6 + 6 layers; large: 12 + 12); the released configurations."""

_BLENDERBOT: dict[str, _Sizes] = {
    "blenderbot-400M-distill": (8008, 1280, 32, 5120, 2, 12),
    "blenderbot-1B-distill": (8008, 2560, 32, 10240, 2, 12),
    "blenderbot-3B": (8008, 2560, 32, 10240, 2, 24),
}
"""Source: Roller et al. 2021, Sec. 6.1 (3B); the released configurations."""

_OFFSET = 2
"""Rows of BART's position tables before that of the first position; they are kept, and never read."""


def bart_config(name_or_fields: str | Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Settings of a BART: post-norm, learned positions and a norm of the embeddings in either stack.

    Args:
      name_or_fields: a preset ("bart-base", "bart-large") or the fields of a Hugging Face `config.json`.
      changes: fields of TransformerConfig that shall differ.

    Raises:
      ConfigError: an unknown preset, a field is missing, or asks for something that BART here does not do.
    """
    fields = _preset(name_or_fields, "BART", _BART) if isinstance(name_or_fields, str) else name_or_fields
    # Fine-tuned copies of other models (mBART among them) use BART's fields for what BART does not have.
    for field, only in (("normalize_before", False), ("normalize_embedding", True), ("add_final_layer_norm", False)):
        if field in fields and fields[field] is not only:
            raise ConfigError(f"{field} = {fields[field]!r} in config.json of a BART must be {only}; it is no BART.")
    config = _shared(fields, "BART", {"max_positions": 1024, "start_id": 2})
    config = dataclasses.replace(config, pre_norm=False, final_norm=False, embedding_norm=True, position_offset=_OFFSET)
    return dataclasses.replace(config, **changes)


def blenderbot_config(name_or_fields: str | Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Settings of a BlenderBot: pre-norm, a norm after the last layer, learned positions in either stack.

    Args:
      name_or_fields: a preset ("blenderbot-400M-distill", "blenderbot-3B", …) or the fields of a `config.json`.
      changes: fields of TransformerConfig that shall differ.

    Raises:
      ConfigError: an unknown preset, a field is missing, or asks for something that BlenderBot here does not do.
    """
    fields = name_or_fields
    if isinstance(fields, str):
        fields = _preset(fields, "BlenderBot", _BLENDERBOT) | {"max_position_embeddings": 128, "scale_embedding": True}
    for field, only in (("normalize_before", True), ("normalize_embedding", False), ("add_final_layer_norm", True)):
        if field in fields and fields[field] is not only:
            raise ConfigError(f"{field} = {fields[field]!r} in config.json of a BlenderBot must be {only}.")
    return dataclasses.replace(_shared(fields, "BlenderBot", {"max_positions": 128, "start_id": 1}), **changes)


def _shared(fields: Mapping[str, Any], title: str, defaults: Mapping[str, Any]) -> TransformerConfig:
    """What BART and BlenderBot have in common; pre-norm until the caller says otherwise."""
    fields = {"activation_function": "gelu", "activation_dropout": 0.0, "init_std": 0.02} | dict(fields)
    _check(fields, title)
    names = {
        "max_positions": "max_position_embeddings",
        "start_id": "decoder_start_token_id",
        "dropout": "dropout",
        "activation": "activation_function",
        "embed_scale": "scale_embedding",
        "tie_embeddings": "tie_word_embeddings",
        "embedding_stddev": "init_std",
    }
    given = {ours: fields[theirs] for ours, theirs in names.items() if theirs in fields}
    return TransformerConfig(
        vocab_size=fields["vocab_size"],
        d_model=fields["d_model"],
        num_heads=fields["encoder_attention_heads"],
        head_dim=fields["d_model"] // fields["encoder_attention_heads"],
        d_ff=fields["encoder_ffn_dim"],
        num_encoder_layers=fields["encoder_layers"],
        num_decoder_layers=fields["decoder_layers"],
        inner_dropout=bool(fields["activation_dropout"]),
        position="learned",
        shared_positions=False,
        layer_norm_eps=1e-5,  # PyTorch's default; config.json does not say
        output_bias=True,
        **(dict(defaults) | given),
    )


def _check(fields: Mapping[str, Any], title: str) -> None:
    twice = ("attention_heads", "ffn_dim")
    required = ["vocab_size", "d_model", "encoder_layers", "decoder_layers"]
    required += [f"{stack}_{name}" for name in twice for stack in ("encoder", "decoder")]
    missing = [name for name in required if name not in fields]
    if missing:
        raise ConfigError(f"config.json of a {title} lacks {', '.join(missing)}.")
    for name in twice:
        ours, theirs = fields[f"encoder_{name}"], fields[f"decoder_{name}"]
        if ours != theirs:
            raise ConfigError(f"encoder_{name} = {ours} and decoder_{name} = {theirs} must be equal in a {title} here.")
    size, heads = fields["d_model"], fields["encoder_attention_heads"]
    if size % heads:
        raise ConfigError(f"d_model = {size} must be a multiple of encoder_attention_heads = {heads} in a {title}.")
    activation = fields["activation_function"]
    if activation not in ACTIVATIONS:
        allowed = ", ".join(sorted(ACTIVATIONS))
        raise ConfigError(f"activation_function = {activation!r} of a {title} is unknown; it is one of {allowed}.")
    if fields.get("static_position_embeddings"):
        raise ConfigError(f"static_position_embeddings = True: the positions of a {title} here are learned.")


def _preset(name: str, title: str, sizes: Mapping[str, _Sizes]) -> dict[str, Any]:
    name = name.rsplit("/", maxsplit=1)[-1]
    if name not in sizes:
        raise ConfigError(f"{name!r} is not a {title} preset; it is one of {', '.join(sorted(sizes))}.")
    vocab_size, d_model, heads, d_ff, encoder_layers, decoder_layers = sizes[name]
    each = {f"{stack}_attention_heads": heads for stack in ("encoder", "decoder")}
    each |= {f"{stack}_ffn_dim": d_ff for stack in ("encoder", "decoder")}
    layers = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
    return {"vocab_size": vocab_size, "d_model": d_model} | each | layers
