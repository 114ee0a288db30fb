"""BART and related models: presets, and settings from Hugging Face fields. The module is `transformer.EncoderDecoder`.

They differ in the placement of norms and in their positions (`_Family`). All add `final_logits_bias` to the logits,
here the parameter "output_bias". Forced tokens (BART's first token `<s>` and last token `</s>`) are not part of the
model but of `decoding.settings.DecodeSettings`: `first_token` and `end_at_limit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from empax.core.config import ConfigError
from empax.models.foreign_fields import head_size, one, one_of, preset, required
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


@dataclasses.dataclass(frozen=True)
class _Family:
    """Properties shared by the models of one family.

    Attributes:
      pre_norm, embedding_norm, final_norm: see `TransformerConfig`; in config.json `normalize_before`,
        `normalize_embedding` and `add_final_layer_norm`.
      learned: whether positions are learned, one table per stack; else they are sinusoidal.
      position_offset: rows of the table before that of the first position; they are kept but never read.
      max_positions, start_id: defaults for fields absent from config.json; with None, the latter is required there.
      start: value that the error about a missing `start_id` recommends.
    """

    title: str
    pre_norm: bool
    embedding_norm: bool
    final_norm: bool
    learned: bool = True
    position_offset: int = 0
    max_positions: int = 1024
    start_id: int | None = None
    start: str = "pad_token_id"


def bart_config(name_or_fields: str | Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Returns the settings of a BART: post-norm, learned positions and a norm of the embeddings in either stack.

    They are those of a preset ("bart-base", "bart-large") or of the fields of a Hugging Face `config.json`; `changes`
    are fields of TransformerConfig to override.

    Raises:
      ConfigError: if the preset is unknown, or a field is missing or has an unsupported value.
    """
    fields = _preset(name_or_fields, "BART", _BART) if isinstance(name_or_fields, str) else name_or_fields
    family = _Family("BART", pre_norm=False, embedding_norm=True, final_norm=False, position_offset=2, start_id=2)
    return _config(fields, family, changes)


def blenderbot_config(name_or_fields: str | Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Returns the settings of a BlenderBot: pre-norm, a norm after the last layer, learned positions in either stack.

    As `bart_config`; presets are "blenderbot-400M-distill", "blenderbot-3B", ….
    """
    fields = name_or_fields
    if isinstance(fields, str):
        fields = _preset(fields, "BlenderBot", _BLENDERBOT) | {"max_position_embeddings": 128, "scale_embedding": True}
    family = _Family("BlenderBot", pre_norm=True, embedding_norm=False, final_norm=True, max_positions=128, start_id=1)
    return _config(fields, family, changes)


def mbart_config(fields: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Returns the settings of an mBART: a BART with pre-norm and a norm after the last layer. As `bart_config`.

    Its decoder starts from the code of the target language; mBART-50's starts from the end-of-sequence token, and its
    first token is the code. So config.json must give `decoder_start_token_id`, or `changes` a `start_id`.
    Source: Liu et al. 2020, Sec. 2.2; Tang et al. 2020 (mBART-50).
    """
    start = "the id of the token that names the language to write ('ro_RO'), or in an mBART-50 to eos_token_id"
    family = _Family("mBART", pre_norm=True, embedding_norm=True, final_norm=True, position_offset=2, start=start)
    return _config(fields, family, changes)


def marian_config(fields: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Returns the settings of a Marian: a BART without embedding norms, with sinusoidal positions. As `bart_config`.

    Its decoder starts from the padding token. Source: Junczys-Dowmunt et al. 2018; the released OPUS-MT configurations.
    """
    if fields.get("share_encoder_decoder_embeddings") is False:
        raise ConfigError(
            "share_encoder_decoder_embeddings = False: this Marian has one vocabulary for each side; only a shared one "
            "is supported here."
        )
    family = _Family("Marian", pre_norm=False, embedding_norm=False, final_norm=False, learned=False)
    return _config(fields, dataclasses.replace(family, start_id=fields.get("pad_token_id")), changes)


def pegasus_config(fields: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Returns the settings of a Pegasus: pre-norm, a norm after the last layer, sinusoidal positions. As `bart_config`.

    Source: Zhang et al. 2020, Sec. 3; the released configurations, whose `extra_pos_embeddings` is ignored.
    """
    family = _Family("Pegasus", pre_norm=True, embedding_norm=False, final_norm=True, learned=False, start_id=0)
    return _config(fields, family, changes)


FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "num_heads": "encoder_attention_heads",
    "d_ff": "encoder_ffn_dim",
    "num_encoder_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "max_positions": "max_position_embeddings",
    "start_id": "decoder_start_token_id",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "activation": "activation_function",
    "embed_scale": "scale_embedding",
    "tie_embeddings": "tie_word_embeddings",
    "embedding_stddev": "init_std",
}
"""Field names in the config.json of a BART, by ours."""


def _config(fields: Mapping[str, Any], family: _Family, changes: Mapping[str, Any]) -> TransformerConfig:
    defaults = {"activation_function": "gelu", "attention_dropout": 0.0, "activation_dropout": 0.0, "init_std": 0.02}
    fields = {**defaults, **fields}
    _check(fields, family)
    given = {"max_positions": family.max_positions, "start_id": family.start_id}
    given |= {ours: fields[theirs] for ours, theirs in FIELDS.items() if theirs in fields}
    given["start_id"] = changes.get("start_id", given["start_id"])
    if given["start_id"] is None:
        raise ConfigError(f"{one(family.title)} lacks decoder_start_token_id: set it to {family.start}.")
    config = TransformerConfig(
        **given,
        head_dim=head_size(fields, "d_model", "encoder_attention_heads", family.title),
        inner_dropout=bool(fields["activation_dropout"]),
        pre_norm=family.pre_norm,
        embedding_norm=family.embedding_norm,
        final_norm=family.final_norm,
        position="learned" if family.learned else "sinusoidal",
        sinusoids="paper",
        position_offset=family.position_offset,
        shared_positions=False,
        layer_norm_eps=1e-5,  # PyTorch's default; config.json does not say
        output_bias="constant",
    )
    return dataclasses.replace(config, **changes)


def _check(fields: Mapping[str, Any], family: _Family) -> None:
    title, twice = one(family.title), ("attention_heads", "ffn_dim")
    names = ["vocab_size", "d_model", "encoder_layers", "decoder_layers"]
    names += [f"{stack}_{name}" for name in twice for stack in ("encoder", "decoder")]
    required(fields, dict(zip(names, names, strict=True)), family.title)
    for name in twice:
        ours, theirs = fields[f"encoder_{name}"], fields[f"decoder_{name}"]
        if ours != theirs:
            raise ConfigError(f"encoder_{name} = {ours} and decoder_{name} = {theirs} must be equal in {title} here.")
    one_of({name: name for name in ACTIVATIONS}, fields["activation_function"], f"activation_function of {title}")
    # Fine-tuned copies of some families name another family, and these fields give the difference.
    said = {
        "normalize_before": family.pre_norm,
        "normalize_embedding": family.embedding_norm,
        "add_final_layer_norm": family.final_norm,
        "static_position_embeddings": not family.learned,
    }
    for name, only in said.items():
        if name in fields and fields[name] is not only:
            raise ConfigError(f"{name} = {fields[name]!r} of {title} must be {only}.")


def _preset(name: str, title: str, sizes: Mapping[str, _Sizes]) -> dict[str, Any]:
    vocab_size, d_model, heads, d_ff, encoder_layers, decoder_layers = preset(name, title, sizes)
    each = {f"{stack}_attention_heads": heads for stack in ("encoder", "decoder")}
    each |= {f"{stack}_ffn_dim": d_ff for stack in ("encoder", "decoder")}
    layers = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
    return {"vocab_size": vocab_size, "d_model": d_model} | each | layers
