"""T5: presets, and settings from Hugging Face fields. The module is `transformer.EncoderDecoder`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from empax.models.foreign_fields import field_or, preset, required
from empax.models.transformer import EncoderDecoder, TransformerConfig

_SIZES: dict[str, tuple[int, int, int, int, int]] = {  # d_model, d_ff, head_dim, heads, layers
    "t5-tiny": (32, 64, 16, 2, 2),
    "t5-small": (512, 2048, 64, 8, 6),
    "t5-base": (768, 3072, 64, 12, 12),
    "t5-large": (1024, 4096, 64, 16, 24),
    "t5-3b": (1024, 16384, 128, 32, 24),
    "t5-11b": (1024, 65536, 128, 128, 24),
    "flan-t5-small": (512, 1024, 64, 6, 8),
    "flan-t5-base": (768, 2048, 64, 12, 12),
    "flan-t5-large": (1024, 2816, 64, 16, 24),
    "flan-t5-xl": (2048, 5120, 64, 32, 24),
    "flan-t5-xxl": (4096, 10240, 64, 64, 24),
}
"""Source: Raffel et al. 2020, Sec. 3.7 (t5-*); the released T5 v1.1 and Flan configurations (flan-*, t5-v1_1-*);
t5-tiny, for trials: ours."""

_ALIASES = {"t5-xl": "t5-3b"} | {
    name.replace("flan-t5-", "t5-v1_1-"): name for name in _SIZES if name.startswith("flan-")
}


_REQUIRED = {name: name for name in ("vocab_size", "d_model", "d_ff", "num_heads")}
_REQUIRED |= {"head_dim": "d_kv", "num_encoder_layers": "num_layers"}
_OPTIONAL = {
    "dropout": "dropout_rate",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance",
    "layer_norm_eps": "layer_norm_epsilon",
    "start_id": "decoder_start_token_id",
    "num_decoder_layers": "num_decoder_layers",
    "activation": "feed_forward_proj",
}
FIELDS = _REQUIRED | _OPTIONAL
"""Field names in the config.json of a T5, by ours."""


def t5_config(name_or_fields: str | Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Returns the settings of a T5, from a preset or from the fields of a Hugging Face `config.json`.

    Presets are "t5-small", "flan-t5-xl", "t5-v1_1-base", …; `changes` are fields of TransformerConfig to override.
    Fields of a T5EncoderModel give the settings of the encoder alone (`encoder_alone`).

    Raises:
      ConfigError: if the preset is unknown, or a field is missing.

    `tie_word_embeddings` says whether head and embedding share weights, `scale_decoder_outputs` whether logits are
    scaled. If the latter is missing, as in files of transformers 4, the former decides both. Transformers 5 always
    writes true for the former, whatever the weights: `interop.tied_embeddings.t5_head` checks the weights.
    """
    if isinstance(name_or_fields, str):
        name_or_fields = _preset(name_or_fields)
    fields = name_or_fields
    given = required(fields, _REQUIRED, "T5")
    tied = field_or(fields, "tie_word_embeddings", True)
    more = {ours: fields[theirs] for ours, theirs in _OPTIONAL.items() if fields.get(theirs) is not None}
    config = TransformerConfig(
        **given,
        num_decoder_layers=more.pop("num_decoder_layers", fields["num_layers"]),
        norm="rms",
        use_bias=False,
        attention_scale=False,
        tie_embeddings=tied,
        output_scale=field_or(fields, "scale_decoder_outputs", tied),
        embedding_stddev=1.0,
        final_norm=True,
    )
    if any(name.endswith("EncoderModel") for name in fields.get("architectures") or []):
        config = encoder_alone(config)
    return dataclasses.replace(config, **(more | changes))


def t5_from_scratch(vocab_size: int, **changes: Any) -> TransformerConfig:
    """Returns the settings of a T5 v1.0 of any size: pre-norm, no biases, unscaled attention, tied and scaled output.

    Its relative bias starts as ALiBi's (`relative_slopes`); T5's own start near 0 would stay weak for long.
    The signs of its decoder's final norm alternate at first (`alternating_norm`).
    The default is LEMPEx' "GloVe-T5" (Majumder et al., Sec. 3.2), with 27,575,184 parameters for its 21,132 words.
    `changes` are any fields of TransformerConfig.
    """
    fields = {"d_model": 300, "d_kv": 50, "d_ff": 2048, "num_heads": 6, "num_layers": 6, "vocab_size": vocab_size}
    return dataclasses.replace(t5_config(fields, relative_slopes=True, alternating_norm=True), **changes)


def mt5_config(fields: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Returns the settings of an mT5: a T5 v1.1 whose head may be tied and is never scaled. As `t5_config`.

    Source: Xue et al. 2021, Sec. 3.2.
    """
    config = t5_config({"feed_forward_proj": "gated-gelu", **fields})
    if config.num_decoder_layers:
        tied = field_or(fields, "tie_word_embeddings", False)
        config = dataclasses.replace(config, tie_embeddings=tied, output_scale=False)
    return dataclasses.replace(config, **changes)


def encoder_alone(config: TransformerConfig) -> TransformerConfig:
    """Returns the settings of the encoder alone, without decoder layers and head."""
    return dataclasses.replace(config, num_decoder_layers=0, tie_embeddings=True, output_bias="none")


def _preset(name: str) -> dict[str, Any]:
    key = preset(name, "T5", dict(sorted(({known: known for known in _SIZES} | _ALIASES).items())))
    d_model, d_ff, head_dim, heads, layers = _SIZES[key]
    first = not key.startswith("flan-")
    return {
        "vocab_size": 512 if key == "t5-tiny" else 32128,
        "d_model": d_model,
        "d_ff": d_ff,
        "d_kv": head_dim,
        "num_heads": heads,
        "num_layers": layers,
        "feed_forward_proj": "relu" if first else "gated-gelu",
        "tie_word_embeddings": first,
    }


class T5Encoder(nn.Module):
    """The encoder of a T5, as a text encoder (REG's and LEMPEx's classifiers, A.2).

    Parameters are those of the EncoderDecoder without "decoder"; with a config from `encoder_alone`, only these are
    read from a checkpoint.
    """

    config: TransformerConfig

    def setup(self) -> None:
        self.model = EncoderDecoder(self.config)
        nn.share_scope(self, self.model)

    def __call__(
        self,
        ids: Int[Array, "B S"] | None,
        mask: Bool[Array, "B S"],
        *,
        embedded: Float[Array, "B S D"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B S D"]:
        """Returns the states of `ids`, or of `embedded` instead; states of padding are meaningless."""
        return self.model.encode(ids, mask, embedded=embedded, deterministic=deterministic)
